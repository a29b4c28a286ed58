"""Learning: rows into padded microbatches, losses, the learner, its checkpoints, and the supervised
stages. It runs the same `model/` as the engine, on the very values that the engine serves."""
