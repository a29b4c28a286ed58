"""Etude trains a coding model on your own product. Importing this package imports nothing else."""

__version__ = "0.1.0"
