"""Requirements of learning from users on the rest of a run's config."""

from __future__ import annotations

import pytest

from etude.core.config import parse
from etude.core.errors import EtudeError

RUN = 'name = "r"\n{top}\n[[stage]]\nkind = "rl"\nsteps = 1\n[realtime]\nproduction = "p.toml"\n'


def test_a_run_may_learn_from_users() -> None:
    config = parse(RUN.format(top=""))
    assert config.realtime is not None and config.realtime.production == "p.toml"


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["tasks.heldout=0"], "needs tasks.heldout"),
        (["trainer.ranks=2"], "trains on one rank"),
        (['engine.vllm_urls={east = "http://h:1"}'], "its own engine"),
        (["tasks.environment=http://h:1"], "environments that run elsewhere"),
    ],
)
def test_what_does_not_go_with_it_is_told(overrides: list[str], why: str) -> None:
    with pytest.raises(EtudeError, match=why):
        parse(RUN.format(top=""), overrides)


def test_signals_are_those_that_are_known_or_ones_own() -> None:
    config = parse(RUN.format(top=""), ["realtime.signals={accepted = 1.0, 'custom:mine' = -1.0}"])
    assert config.realtime is not None
    assert config.realtime.signals == {"accepted": 1.0, "custom:mine": -1.0}
    for unknown in ("typo", "custom:", "xcustom:mine"):
        with pytest.raises(EtudeError, match=f"{unknown}: write one of .*, or custom:NAME"):
            parse(RUN.format(top=""), [f"realtime.signals={{'{unknown}' = 1.0}}"])


def test_it_trains_in_the_last_stage() -> None:
    last = '[[stage]]\nkind = "sft"\ndemonstrations = 2\n'
    with pytest.raises(EtudeError, match=r"\[realtime\] trains in the last stage"):
        parse(RUN.format(top="") + last)
    parse(RUN.format(top=last))


def test_half_a_confidence_is_enough_for_the_gate_alone() -> None:
    """A sequence that may be looked at at any time has no width there."""
    parse(RUN.format(top=""), ["realtime.gate.confidence=0.5"])
    with pytest.raises(EtudeError, match="confidence"):
        parse(RUN.format(top=""), ["realtime.canary.confidence=0.5"])


@pytest.mark.parametrize("ramp", ["[0.2, 0.5]", "[0.5, 0.2, 1.0]", "[0.2, 0.2, 1.0]", "[0.0, 1.0]"])
def test_a_canary_grows_until_it_is_everybody(ramp: str) -> None:
    with pytest.raises(EtudeError, match="growing shares that end with 1"):
        parse(RUN.format(top=""), [f"realtime.canary.ramp={ramp}"])
    parse(RUN.format(top=""), ["realtime.canary.ramp=[0.2, 1.0]"])
