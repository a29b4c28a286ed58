"""Permitted and refused changes of a config between two launches of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.core.changes import refused_changes
from etude.core.config import RunConfig, parse
from tests.core.test_config import EVERY_KIND, GOOD

OTHERS = {
    "engine.port": 8000, "engine.threads": 7, "engine.max_num_seqs": 3, "engine.device": "auto",
    "tasks.timeout_s": 9.0, "harness.concurrency": 5, "harness.timeout_s": 9.0,
    "trainer.device": "auto", "trainer.ranks": 2, "trainer.timeout_s": 9.0,
    "sandbox.isolation": "process", "stage.midtrain.threads": 5,
    "stage.distill.microbatch_tokens": 9000,
}  # fmt: skip


@pytest.mark.parametrize("key", OTHERS)
def test_how_the_work_is_done_may_change_between_two_lives(key: str) -> None:
    there, here = parse(EVERY_KIND), parse(EVERY_KIND, [f"{key}={OTHERS[key]}"])
    assert there != here and refused_changes(there, here, version=99) == []


def test_trackers_may_change() -> None:
    here = parse('trackers = ["wandb"]\n' + EVERY_KIND)
    assert refused_changes(parse(EVERY_KIND), here, version=99) == []


JUDGE = """
[rewards.judge]
url = "http://a/v1"
model = "m"
rubrics = {style = "It is good."}
"""


def test_a_judge_may_move() -> None:
    there = parse(EVERY_KIND + JUDGE)
    moved = ["rewards.judge.url=http://b/v1", "rewards.judge.timeout_s=9"]
    assert refused_changes(there, parse(EVERY_KIND + JUDGE, moved), version=99) == []
    other = parse(EVERY_KIND + JUDGE, ["rewards.judge.model=n"])
    assert refused_changes(there, other, version=99) == ['rewards.judge.model: "m" -> "n"']
    assert refused_changes(parse(EVERY_KIND), there, version=99) != []


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("seed=1", "seed: 0 -> 1"),
        ("batch_invariant=true", "batch_invariant: false -> true"),
        ("model.num_layers=2", "model.num_layers: 4 -> 2"),
        ("tasks.train=9", "tasks.train: 4096 -> 9"),
        ("harness.max_turns=9", "harness.max_turns: 8 -> 9"),
        ("engine.dtype=float32", 'engine.dtype: "auto" -> "float32"'),
        ("engine.regions=['a']", 'engine.regions: ["east", "west"] -> ["a"]'),
        ("trainer.optimizer=muon", 'trainer.optimizer: "adamw" -> "muon"'),
        ("trainer.published_dtype=float32", 'trainer.published_dtype: "bfloat16" -> "float32"'),
        ("trainer.compute_dtype=bfloat16", 'trainer.compute_dtype: "auto" -> "bfloat16"'),
        ("eval.temperature=1", "eval.temperature: 0.0 -> 1.0"),
        ("stage.midtrain.lr=1", "stage.midtrain.lr: 0.003 -> 1.0"),
        ("stage.distill.teacher=other", 'stage.distill.teacher: "large" -> "other"'),
    ],
)
def test_what_the_work_is_may_not(override: str, told: str) -> None:
    there, here = parse(EVERY_KIND), parse(EVERY_KIND, [override])
    assert refused_changes(there, here, version=0) == [told]


def test_a_project_may_be_moved_with_its_runs() -> None:
    def seen(folder: str, agent: str = "mine.py:A") -> RunConfig:
        config = parse(EVERY_KIND, [f"folder={folder}", f"harness.agent={agent}"])
        return config.seen_from(Path(folder))

    there = seen("/home/me")
    assert refused_changes(there, seen("/home/you"), version=9) == []
    (told,) = refused_changes(there, seen("/home/you", "/home/me/mine.py:A"), version=9)
    assert told == 'harness.agent: "mine.py:A" -> "/home/me/mine.py:A"'


def test_another_order_is_another_experiment() -> None:
    config = parse(GOOD)
    turned = config.model_copy(update={"stage": config.stage[::-1]})
    assert refused_changes(config, turned, version=0) == [
        'stages: ["midtrain", "sft", "rl"] -> ["rl", "sft", "midtrain"]'
    ]


STEPS = """
name = "a"
[[stage]]
kind = "midtrain"
steps = 10
[[stage]]
kind = "rl"
steps = 5
[[stage]]
name = "more"
kind = "rl"
steps = 4
"""


@pytest.mark.parametrize(
    ("override", "version", "fine"),
    [
        ("stage.midtrain.steps=20", 0, True),
        ("stage.midtrain.steps=20", 1, False),
        ("stage.rl.steps=9", 1, True),
        ("stage.rl.steps=9", 5, True),
        ("stage.rl.steps=9", 6, False),  # the next stage starts from version 6
        ("stage.rl.steps=4", 5, True),
        ("stage.rl.steps=3", 5, False),  # version 5 is the fourth
        ("stage.more.steps=9", 1, True),
        ("stage.more.steps=9", 10, True),
        ("stage.more.steps=3", 10, False),
    ],
)
def test_steps_that_are_to_come_may_change(override: str, version: int, fine: bool) -> None:
    refused = refused_changes(parse(STEPS), parse(STEPS, [override]), version=version)
    assert (refused == []) == fine
    assert fine or refused[0].startswith(override.partition("=")[0] + ": ")


def test_steps_that_are_done_are_counted() -> None:
    refused = refused_changes(parse(STEPS), parse(STEPS, ["stage.more.steps=1"]), version=9)
    assert refused == ["stage.more.steps: 4 -> 1 (3 done or begun)"]
