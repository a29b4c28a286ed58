"""`[eval]`: evaluations of a run's weights."""

from __future__ import annotations

from etude.core.schema import Config, CountOrZero, NonNegative


class EvalConfig(Config):
    """Evaluations: sampling, and how often they run during rl."""

    every_steps: CountOrZero = 0
    """Steps of rl or distill between two evaluations of the held-out tasks, which a separate
    process runs while the stage continues. 0: only when a stage is finished."""
    before: bool = True
    """Evaluate the model that the run was given before training it, for comparison. Runs with other
    seeds that start from the same model need this only once."""
    temperature: NonNegative = 0.0
    """Sampling temperature; 0 is greedy, and the same at every evaluation of a version. Several
    attempts at a task (`etude eval --samples`) would then be identical: they are sampled at 1."""

    def temperature_of(self, samples: int) -> float:
        return self.temperature if self.temperature or samples == 1 else 1.0
