"""`[eval]`: evaluations of a run's weights."""

from __future__ import annotations

from etude.core.schema import Config, CountOrZero, NonNegative


class EvalConfig(Config):
    """Evaluations: sampling, and how often beside rl."""

    every_steps: CountOrZero = 0
    """Steps of rl or distill between two evaluations of the held-out tasks, which a process of
    their own makes while the stage goes on. 0: only when a stage is over."""
    before: bool = True
    """Evaluate the model that the run was given before it is trained, to have something to compare
    with. Seeds that begin with the same model need it once."""
    temperature: NonNegative = 0.0
    """Sampling temperature; 0 is greedy, and the same at every evaluation of a version. Several
    attempts at a task (`etude eval --samples`) would be one then: they are sampled at 1."""

    def temperature_of(self, samples: int) -> float:
        return self.temperature if self.temperature or samples == 1 else 1.0
