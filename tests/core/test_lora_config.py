"""The stages that train an adapter, and the settings that it excludes."""

from __future__ import annotations

import pytest

from etude.core.config import RunConfig, parse
from etude.core.errors import EtudeError
from etude.core.lineage import adapted_spans, stage_of

STAGES = (
    '[[stage]]\nkind = "sft"\ndemonstrations = 2\n'
    '[[stage]]\nkind = "rl"\nsteps = 3\n'
    '[[stage]]\nname = "more"\nkind = "rl"\nsteps = 2\n'
)


def run(*overrides: str) -> RunConfig:
    return parse(f'name = "r"\n{STAGES}', list(overrides))


def test_from_a_stage_on_all_train_it() -> None:
    def adapted(*overrides: str) -> list[tuple[str, int, int]]:
        return [(span.name, span.start, span.end) for span in adapted_spans(run(*overrides))]

    assert adapted() == []
    assert adapted("trainer.lora.from_stage=rl") == [("rl", 1, 4), ("more", 4, 6)]
    assert adapted("trainer.lora.from_stage=more") == [("more", 4, 6)]
    assert len(adapted("model.path=/models/m", "trainer.lora.rank=8")) == 3


def test_the_stage_that_made_a_version() -> None:
    made = [stage_of(version, run().stage) for version in range(8)]
    assert made == ["start", "sft", "rl", "rl", "rl", "more", "more", "start"]


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["trainer.lora.from_stage=distill"], "is not one of the stages: sft, rl, more"),
        (["trainer.lora.rank=8"], "would adapt untrained weights"),
        (["trainer.lora.from_stage=sft"], "would adapt untrained weights"),
        (["trainer.lora.from_stage=rl", "trainer.optimizer=muon"], "only works with adamw"),
        (
            ["trainer.lora.from_stage=rl", "stage.more.router_balance=true"],
            "stage.more.router_balance changes the routers",
        ),
    ],
)
def test_what_does_not_go_together_is_told(overrides: list[str], why: str) -> None:
    with pytest.raises(EtudeError, match=why):
        run(*overrides)


def test_what_comes_before_the_adapter_may_move_the_routers() -> None:
    run("trainer.lora.from_stage=more", "stage.rl.router_balance=true")
