"""Weight versions in the store: the trainer publishes them as lossless deltas, and every region
follows. `docs/weights.md` documents the format; `publish` and `follow` are the two ends, and
`codec` is the core."""
