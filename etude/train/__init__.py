"""Learning: packing of rows into microbatches, losses, the learner, its checkpoints, and the
supervised stages. It runs the same `model/` as the engine, on exactly the values that the engine
serves."""
