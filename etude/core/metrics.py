"""Metrics: events as named numbers on one axis, for programs that draw curves. The axis is the
version for rl, and the step for a supervised stage."""

from __future__ import annotations

from dataclasses import asdict

from etude.core.events import EvalDone, Event, FitStep, GroupDone, StepDone


def metrics(event: Event) -> tuple[int, dict[str, float]]:
    """(position on the axis, name -> value); an empty mapping for an event that is not on a
    curve."""
    match event:
        case StepDone():
            whole = sum(event.lags)
            lags = {f"rl/lag_{lag}": count / whole for lag, count in enumerate(event.lags) if count}
            return event.step, {
                f"rl/{name}": value for name, value in _numbers(event) if name != "step"
            } | lags
        case FitStep():
            numbers = {
                f"{event.stage}/{name}": value
                for name, value in _numbers(event)
                if name[:4] != "step"
            }
            return event.step, numbers
        case GroupDone():
            return event.admitted, {"rl/group_has_signal": float(event.kept)}
        case EvalDone():
            name = event.name.replace(" ×", "_x")
            return event.version, {f"eval/{name}": event.solved / event.total}
        case _:
            return 0, {}


def _numbers(event: Event) -> list[tuple[str, float]]:
    return [
        (name, float(value))
        for name, value in asdict(event).items()
        if isinstance(value, int | float)
    ]
