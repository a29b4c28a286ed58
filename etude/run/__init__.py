"""The controller of a run: the rollout loop, evaluation, and the audit of what they leave in the
store."""
