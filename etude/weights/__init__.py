"""Weight versions in the store: the trainer publishes them, every region follows. Whole snapshots for now; a manifest
already has the `base` that a chain of differences needs."""
