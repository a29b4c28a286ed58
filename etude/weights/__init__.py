"""Weight versions in the store: the trainer publishes them as lossless differences, every region
follows. `docs/weights.md` has the format; `publish` and `follow` are the two ends, `codec` is the
heart."""
