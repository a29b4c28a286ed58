"""A run resumes with the tasks that it began with, or not at all."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.core.ledger import Issued
from etude.core.sandbox import Limits, Repository, SandboxSpec
from etude.core.types import Task
from etude.run.controller import Controller
from etude.run.task_record import keep_record, recorded_counts
from etude.store.runs import Run

OLD, NEW = "a" * 40, "b" * 40


def task(id: str, commit: str = OLD, url: str = "/here", **fields: Any) -> Task:
    spec = SandboxSpec(
        repository=Repository(url=url, commit=commit), files={"b": "1", "a": b"\xff"}
    )
    return replace(Task(id=id, prompt="fix it", sandbox=spec, meta={"x": [1]}), **fields)


def began(*tasks: Task) -> Run:
    """A run that has attempted one of the tasks."""
    run = Run.open("memory:")
    keep_record(run, "train", tasks)
    run.ledger.append(Issued(group="g000000", task="a", samples=("g000000.0",), version=0, epoch=0))
    run.ledger.flush()
    return run


def test_a_run_knows_how_many_tasks_it_began_with() -> None:
    assert recorded_counts(Run.open("memory:")) == {}
    run = began(task("a"), task("b"))
    assert recorded_counts(run) == {"train": 2}


def test_the_same_tasks_are_taken_wherever_they_lie() -> None:
    run = began(task("a"), task("b"))
    spec = task("a").sandbox
    elsewhere = replace(
        spec,
        repository=Repository(url="/there", commit=OLD),
        files={"a": b"\xff", "b": "1"},
        limits=Limits(cpus=2.0),
    )
    meta = MappingProxyType({"x": [1]})
    keep_record(run, "train", [task("b"), task("a", sandbox=elsewhere, meta=meta)])
    keep_record(run, "heldout", [task("c")])


@pytest.mark.parametrize(
    "changed",
    [
        {"prompt": "mend it"},
        {"meta": {"x": [2]}},
        {"prompt": "", "messages": ({"role": "user", "content": "fix it"},)},
        {"sandbox": replace(task("a").sandbox, files={"a": "2", "b": "1"})},
        {"sandbox": replace(task("a").sandbox, env={"A": "1"})},
    ],
)
def test_a_changed_task_is_refused_with_its_id(changed: dict[str, Any]) -> None:
    run = began(task("a"), task("b"))
    with pytest.raises(EtudeError, match=r"1 changed \(a\).* restore the environment .* --fresh"):
        keep_record(run, "train", [replace(task("a"), **changed), task("b")])


def test_another_commit_is_refused_with_the_old_one() -> None:
    run = began(task("a"), task("b"), task("c"), task("d"), task("e"))
    moved = [task(id, NEW) for id in "bcdef"]
    with pytest.raises(EtudeError) as refused:
        keep_record(run, "train", moved)
    assert "1 new (f); 1 gone (a); 4 changed (b, c, d, ...)" in str(refused.value)
    assert f"was at commit {OLD}, and is at {NEW}" in str(refused.value)


def test_until_the_first_attempt_tasks_may_change() -> None:
    run = Run.open("memory:")
    keep_record(run, "train", [task("a")])
    keep_record(run, "train", [task("b")])
    run.put_eval("000000.heldout", {})
    with pytest.raises(EtudeError, match=r"1 new \(a\); 1 gone \(b\)"):
        keep_record(run, "train", [task("a")])


@pytest.mark.parametrize("version", [None, 1])
def test_a_start_and_an_evaluation_both_look(version: int | None) -> None:
    run = Run.open("memory:")
    config = parse('name = "a"\n[[stage]]\nkind = "rl"\nsteps = 1')

    def start(*tasks: Task) -> None:
        class Gateway:
            async def load(self, version: int) -> None: ...

        environment: Any = SimpleNamespace(tasks=lambda split: tasks)
        gateway: Any = Gateway()
        made = Controller(run, config, gateway, environment, lambda event: None)
        asyncio.run(made.check_tasks() if version is None else made.evaluate(version, "heldout"))

    keep_record(run, "train", [task("a")])
    keep_record(run, "heldout", [task("b")])
    run.put_eval("000000.heldout", {})
    with pytest.raises(EtudeError, match="differ from those that the run started with"):
        start(task("c"))
