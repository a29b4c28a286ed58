"""Launching a run: start, watch and stop its processes, and show it to a person meanwhile."""
