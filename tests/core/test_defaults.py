"""Fields that a record lacks have a neutral default: today's code, which has more fields, reads
logs of older runs."""

from __future__ import annotations

import dataclasses
import inspect
import math
from types import ModuleType

import pytest

from etude.core import (
    consent,
    contamination,
    events,
    exports,
    feedback,
    fleet,
    ledger,
    lending,
    placement,
    recorded,
    remote,
    sampling,
    sandbox,
    traffic,
    types,
    updates,
)
from etude.core import protocols as seams
from etude.core.advantage import AdvantageEstimator, dr_grpo
from etude.core.effort import Effort

# Fields whose absence means something specific.
MEANT = {
    ("EvalDone", "samples"): 1,
    ("MismatchStats", "k1_p99"): math.nan,  # unknown, and not small
    ("Segment", "kind"): "turns",
    ("SamplingParams", "temperature"): 1.0,  # the policy's own distribution
    ("SamplingParams", "top_p"): 1.0,
    ("SamplingParams", "repetition_penalty"): 1.0,
    ("Request", "params"): sampling.SamplingParams(),
    ("Request", "priority"): "standard",
    ("RateLimit", "max_users"): 100_000,
    ("Worker", "stalled"): -math.inf,  # never
    ("ModelSize", "weight_bytes"): 2.0,  # bf16
    ("RecordedTurn", "arm_propensity"): 1.0,  # every user had this arm
    ("RemoteTask", "split"): "train",
    ("RolloutRequest", "model"): "etude",
    ("RolloutRequest", "temperature"): 1.0,
    ("RolloutRequest", "max_tokens"): 64,
    ("ServiceHealth", "status"): "ok",
    ("Service", "ready_s"): 30.0,
}


def defaults(module: ModuleType) -> dict[tuple[str, str], object]:
    found: dict[tuple[str, str], object] = {}
    for name, kind in inspect.getmembers(module, inspect.isclass):
        for field in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
            if field.default is not dataclasses.MISSING:
                found[name, field.name] = field.default
            elif field.default_factory is not dataclasses.MISSING:
                found[name, field.name] = field.default_factory()
    return found


def is_nothing(value: object) -> bool:
    """True for an empty value, or for a record whose fields are all empty."""
    if not dataclasses.is_dataclass(value):
        return not value
    return all(is_nothing(getattr(value, field.name)) for field in dataclasses.fields(value))


LATER = {
    ("Launched", "command"),
    ("Launched", "folder"),
    ("Launched", "store"),
    ("StageStarted", "done"),
    ("StageStarted", "repeated"),
    ("StageStarted", "groups_per_step"),
    ("BatchReady", "lag"),
    ("FitStep", "metrics"),
    ("MismatchStats", "k1_p99"),
    ("GroupDone", "malformed"),
    ("GroupDone", "untrainable"),
    ("GroupDone", "quarantined"),
    ("GroupDone", "jump"),
    ("EvalDone", "samples"),
    ("FleetStatus", "sessions"),
    ("FleetStatus", "held"),
    ("RegionStatus", "quarantined"),
    *(
        ("StepDone", name)
        for name in (
            "reward",
            "lr",
            "k1_p99",
            "corrected_frac",
            "zero_grad_frac",
            "lags",
            "router_mismatch_frac",
            "experts_replaced_frac",
            "tokens_per_s",
            "mfu",
            "repeated_rows",
            "teacher_kl",
        )
    ),
}
"""Fields added to events since the first logs were written."""


def test_older_logs_can_be_read() -> None:
    assert defaults(events).keys() == LATER


@pytest.mark.parametrize(
    "module",
    [
        *(consent, contamination, events, exports, feedback, fleet, ledger, lending, placement),
        *(recorded, remote, sampling, sandbox, seams, traffic, types, updates),
    ],
)
def test_what_is_left_out_is_nothing(module: ModuleType) -> None:
    for place, default in defaults(module).items():
        if place in MEANT:
            assert repr(default) == repr(MEANT[place]), place
        else:
            assert is_nothing(default), place


def test_effort_is_free_and_advantages_are_plain_unless_told_otherwise() -> None:
    free = Effort(scale=1.0)
    assert (free.k, free.q, free.tokens, free.calls, free.turns) == (1.0, 0.5, 0.0, 0.0, 0.0)
    plain = AdvantageEstimator()
    assert (
        plain.per_group is dr_grpo
        and plain.batch_scale([3.0, -4.0]) == 1.0
        and plain.effort is None
    )
    assert not plain.keep_zero_std and plain.max_tokens is None and plain.max_lag is None
    assert plain.use_credit, "what an environment credits counts, unless a stage says otherwise"
