"""The controller of a run: the rollout loop, evaluation, and the audit of their records in the
store."""
