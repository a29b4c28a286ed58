"""A run under virtual time: the same decisions as in a real one, with seeded faults."""
