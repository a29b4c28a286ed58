"""The trainer's process: its stages, the data that they read, and publication of the weights."""
