"""Tasks that a user's environment must not return, and the settings that a loop gets from its
stage."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from etude.core.config import TasksConfig, parse
from etude.core.errors import EtudeError
from etude.core.events import (
    AttemptsInterrupted,
    Event,
    FewTasks,
    FleetStatus,
    ProcessSilent,
    RegionStatus,
    RunDone,
    StoreUsed,
)
from etude.core.ledger import Dropped, Issued, Trained
from etude.core.lineage import StageSpan, estimator_of, stage_spans
from etude.core.sandbox import Limits, SandboxSpec
from etude.core.stages import RolloutStageConfig
from etude.core.types import Score, Task, Trajectory
from etude.rewards.review import Review
from etude.run import controller as controller
from etude.run.controller import Controller, read_tasks
from etude.run.evaluate import Report
from etude.run.loop import RolloutLoop
from etude.sandbox.fake import FakeSandboxPool
from etude.store.rollouts import RolloutLog
from etude.store.runs import Run

TASK = Task(id="t", prompt="fix it")


def tasks(given: Any) -> Any:
    config = parse(
        'name = "a"\n[[stage]]\nkind = "rl"\nsteps = 1\n[tasks]\nenvironment = "mine.py:A"\ntrain '
        "= 7"
    )
    run = Run.open("memory:")
    environment: Any = SimpleNamespace(tasks=lambda split: given())
    gateway: Any = None
    return asyncio.run(
        Controller(run, config, gateway, environment, lambda event: None).tasks("train")
    )


def checked(
    text: str, given: Sequence[Task], check: Callable[[SandboxSpec], None] = lambda spec: None
) -> list[Event]:
    """The events of a controller that checks these tasks in every split before it starts."""
    events: list[Event] = []
    nobody: Any = None
    environment: Any = SimpleNamespace(tasks=lambda split: given)
    config = parse(f'name = "a"\n{text}')
    run = Run.open("memory:")
    made = Controller(run, config, nobody, environment, events.append, check_spec=check)
    asyncio.run(made.check_tasks())
    return events


RL = '[[stage]]\nkind = "rl"\nsteps = 1\n[tasks]\n'


def test_an_environment_that_has_fewer_tasks_than_asked_for_is_told() -> None:
    enough = [replace(TASK, id=str(number)) for number in range(3)]
    assert checked(RL + "train = 2\nheldout = 3\nnovel = 0", enough) == []
    assert checked(RL + "train = 9\nheldout = 3\nnovel = 4", enough) == [
        FewTasks(split="train", wanted=9, given=3),
        FewTasks(split="novel", wanted=4, given=3),
    ]


def test_a_run_without_rollouts_needs_no_tasks_to_train_on() -> None:
    text = '[[stage]]\nkind = "midtrain"\nsteps = 1\n[tasks]\ntrain = 9\nheldout = 1\nnovel = 0'
    assert checked(text, [TASK]) == []


def test_splits_without_tasks_are_told_before_the_first_stage() -> None:
    with pytest.raises(EtudeError, match=r"split 'train', .* give it more tasks$"):
        checked(RL + "novel = 2", [])
    for split in ("heldout", "novel"):
        with pytest.raises(EtudeError, match=rf"'{split}', .* or set tasks.{split} = 0$"):
            asyncio.run(
                read_tasks(SimpleNamespace(tasks=lambda split: []), TasksConfig(), split)  # type: ignore[arg-type]
            )


def test_a_sandbox_that_cannot_be_had_is_told_with_its_task() -> None:
    fine = replace(TASK, id="fine")
    wants = replace(TASK, id="greedy", sandbox=SandboxSpec(network=("pypi.org",)))
    with pytest.raises(EtudeError, match="task 'greedy' of the split 'train': .* network"):
        checked(RL + "train = 2", [fine, wants], FakeSandboxPool().check)
    with pytest.raises(
        EtudeError, match="task 't' of the split 'train': 'A=B' is not a valid name"
    ):
        env = replace(TASK, sandbox=SandboxSpec(env={"A=B": "1"}))
        checked(RL + "train = 1", [env], FakeSandboxPool().check)


def test_tasks_are_there_and_have_names_of_their_own() -> None:
    assert tasks(lambda: [TASK]) == [TASK]
    with pytest.raises(
        EtudeError,
        match=r"'mine.py:A' returns no tasks .* 'train', .* wants 7: check its tasks\(\)$",
    ):
        tasks(list)
    with pytest.raises(
        EtudeError, match="returns several tasks of the split 'train' with the id 't'"
    ):
        tasks(lambda: [TASK, replace(TASK, prompt="another")])
    with pytest.raises(
        EtudeError, match=r"'mine.py:A': ZeroDivisionError in .*line \d+: division by zero"
    ):
        tasks(lambda: 1 / 0)


class Gateway:
    """Records the versions that it was asked to load."""

    def __init__(self) -> None:
        self.http = object()
        self.loaded: list[int] = []
        self.store_used: list[StoreUsed] = []
        self.quarantined: list[str] = []

    async def load(self, version: int) -> None:
        self.loaded.append(version)

    async def ready(self) -> None: ...

    async def regions(self) -> tuple[dict[str, RegionStatus], list[str]]:
        return {"here": RegionStatus(version=0, busy=0.5, running=1, waiting=0)}, []


class Bench:
    """A controller whose loop is recorded instead of run, and whose trainer has reached
    `newest`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, text: str, newest: int = 0) -> None:
        self.told: dict[str, Any] = {}
        self.agent: dict[str, Any] = {}
        self.rollouts: dict[str, Any] = {}
        self.events: list[Event] = []
        self.gateway: Any = Gateway()
        self.run = Run.open("memory:")
        environment: Any = SimpleNamespace(tasks=lambda split: [TASK])
        config = parse(f'name = "a"\n{text}')
        self.spans = stage_spans(config.stage)
        self.controller = Controller(
            self.run, config, self.gateway, environment, self.events.append
        )

        async def newest_version(version: int) -> int:
            return max(version, newest)

        bench = self

        class Watched:
            def __init__(self, **options: Any) -> None:
                inspect.signature(RolloutLoop).bind(**options)  # no argument is missing
                bench.told.update(options)
                bench.told["loaded"] = list(bench.gateway.loaded)

            async def run(self) -> None: ...

        def runner(*parts: Any, **told: Any) -> Any:
            self.rollouts.update(told)
            return SimpleNamespace(attempt=self.attempt, running=5)

        monkeypatch.setattr(controller, "RolloutLoop", Watched)
        monkeypatch.setattr(controller, "RolloutRunner", runner)
        monkeypatch.setattr(controller, "build", lambda *names, **told: self.agent.update(told))
        monkeypatch.setattr(self.controller, "wait_for_version", newest_version)

    async def attempt(self) -> None: ...

    async def run_loop(self) -> None:
        (span,) = [span for span in self.spans if isinstance(span.stage, RolloutStageConfig)]
        assert isinstance(span.stage, RolloutStageConfig)
        await self.controller.run_loop(span, span.stage)


@pytest.mark.parametrize("replay", [True, False])
async def test_a_loop_runs_as_its_stage_says(replay: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(
        monkeypatch,
        'seed = 5\n[[stage]]\nkind = "rl"\nname = "fix"\nsteps = 3\ntemperature = 0.7\n'
        "groups_per_step = 5\ngroup_size = 6\nmax_lag = 2\nreorder_window = 4\n"
        f"router_replay = {str(replay).lower()}\n"
        "[harness]\nmax_turns = 9\nmax_tokens = 77\ntimeout_s = 12.0\nconcurrency = 3\n"
        "tool_delay_s = 0.5\n[tasks]\ntimeout_s = 21.0",
    )
    await bench.run_loop()
    told, window = bench.told, bench.told["window"]
    assert (told["group_size"], told["stage"], told["seed"], told["last"]) == (6, "fix", 5, 3)
    assert (window.per_step, window.max_lag, window.reorder_window, window.live) == (5, 2, 4, 0)
    assert window is bench.controller.window
    assert told["estimator"] == estimator_of(bench.spans[0].stage, 512, quarantine=True)
    assert told["load"] == bench.controller.load
    assert told["attempt"] == bench.attempt
    assert bench.rollouts == {
        "agent_timeout_s": 12.0 + controller.AGENT_GRACE_S,  # the agent ends its session by itself
        "concurrency": 3,
        "source": "etude.run.environment:CodeRepair",
        "policy": "a",
        "experts": replay,
        "sandbox_timeout_s": 21.0,
        "review": Review(detector=True),
    }
    assert bench.agent == {
        "max_turns": 9,
        "max_tokens": 77,
        "timeout_s": 12.0,
        "temperature": 0.7,
        "tool_delay_s": 0.5,
    }


@pytest.mark.parametrize("jumps", ["quarantine", "flag", "off"])
async def test_rewards_that_jump_become_what_the_run_says(
    jumps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(monkeypatch, f'{RL}train = 1\n[rewards]\njumps = "{jumps}"')
    await bench.run_loop()
    assert (bench.told["jumps"] is not None) == (jumps != "off")
    assert bench.told["quarantine_jumps"] == (jumps == "quarantine")


async def test_only_sessions_to_train_on_may_go_without_the_system_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, f"{RL}train = 1\n[harness.code.prompt]\ndropout = 0.5")
    made, nobody = bench.controller, object()
    await bench.run_loop()
    assert bench.agent["code"].prompt.dropout == 0.5
    made.rollouts(temperature=1.0)  # for an evaluation
    assert bench.agent["code"].prompt.dropout == 0.0
    await bench.run_loop()
    beside: Any = (made.config, nobody, nobody, nobody)
    controller.build_runner(*beside, desk=None, temperature=1.0)  # for an evaluation beside the run
    assert bench.agent["code"].prompt.dropout == 0.0


@pytest.mark.parametrize(("newest", "live"), [(1, 1), (2, 2), (9, 4)])
async def test_a_loop_starts_from_what_the_trainer_has_done_of_it(
    newest: int, live: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        '[[stage]]\nkind = "sft"\ndemonstrations = 1\n[[stage]]\nkind = "rl"\nsteps = 3\n'
        '[[stage]]\nkind = "sft"\nname = "last"\ndemonstrations = 1'
    )
    bench = Bench(monkeypatch, text, newest)
    await bench.run_loop()
    assert bench.told["loaded"] == [live]  # before the first rollout
    assert bench.told["window"].live == live
    stands = [Trained(step=live)] if live > 1 else []
    assert bench.run.ledger.records() == stands
    await bench.run_loop()
    assert bench.run.ledger.records() == stands  # reported once


async def test_a_loop_tells_what_a_stop_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, '[[stage]]\nkind = "rl"\nsteps = 3')
    await bench.run_loop()
    assert bench.events == []
    samples = ("g000000.0", "g000000.1")
    bench.run.ledger.append(Issued(group="g000000", task="t", epoch=0, version=0, samples=samples))
    for _ in range(2):
        await bench.run_loop()
        assert bench.events == [AttemptsInterrupted(samples=samples)], "once"
    assert bench.run.ledger.records()[-1] == Dropped(samples=samples, reason="interrupted")


async def test_a_loop_that_a_later_one_has_followed_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, '[[stage]]\nkind = "rl"\nsteps = 3', newest=9)
    issued = Issued(group="g000000", task="t", epoch=0, version=3, samples=("g000000.0",))
    bench.run.ledger.append(issued)
    await bench.run_loop()
    assert bench.told == {} and bench.gateway.loaded == []
    assert bench.run.ledger.records() == [issued]


@pytest.mark.parametrize(("given", "before"), [(True, True), (True, False), (False, True)])
async def test_a_run_goes_through_its_stages_and_evaluates_each(
    given: bool, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It also evaluates the model that it was given, before all stages, unless told not to."""
    text = '[[stage]]\nkind = "sft"\ndemonstrations = 1\n[[stage]]\nkind = "rl"\nsteps = 3\n'
    text += "" if before else "[eval]\nbefore = false\n"
    bench = Bench(monkeypatch, text + ('[model]\npath = "base"\n' if given else ""))
    happened: list[object] = []

    async def evaluate(version: int, split: str) -> None:
        happened.append((version, split))

    async def wait(version: int) -> int:
        happened.append(version)
        return version

    async def run_loop(span: StageSpan, stage: RolloutStageConfig) -> None:
        happened.append(span.name)

    for name, fake in {
        "evaluate": evaluate,
        "wait_for_version": wait,
        "run_loop": run_loop,
    }.items():
        monkeypatch.setattr(bench.controller, name, fake)
    async with asyncio.timeout(30):
        await bench.controller.run_stages()
    start = [0, (0, "heldout"), (0, "novel")] if given and before else []
    assert happened == [
        *start, 1, (1, "heldout"), (1, "novel"), "rl", (4, "heldout"), (4, "novel"),
    ]  # fmt: skip
    assert RunDone(version=4) in bench.events


async def test_the_fleet_is_reported_with_what_is_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, '[[stage]]\nkind = "rl"\nsteps = 3\ngroups_per_step = 2')
    monkeypatch.setattr(controller, "FLEET_REPORT_S", 0.0)

    async def next_report() -> FleetStatus:
        seen = len(bench.events)
        reporting = asyncio.create_task(bench.controller.report_fleet())
        while len(bench.events) == seen:
            await asyncio.sleep(0)
        reporting.cancel()
        event = bench.events[seen]
        assert isinstance(event, FleetStatus)
        return event

    async with asyncio.timeout(30):
        before = await next_report()
        await bench.run_loop()
        window = bench.told["window"]
        window.admit()
        during = await next_report()
    assert (before.active, before.capacity) == (0, 0)
    assert (during.active, during.capacity) == (1, window.capacity)
    assert (before.sessions, during.sessions) == (0, 5)
    assert list(during.regions) == ["here"]


async def test_a_worker_that_is_silent_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, '[[stage]]\nkind = "rl"\nsteps = 3')
    monkeypatch.setattr(controller, "FLEET_REPORT_S", 0.0)
    told = ProcessSilent(process="west", seconds=9.0)
    looks: list[list[str]] = []

    def look(now: float, owing: object, silent: list[str]) -> list[Event]:
        looks.append(silent)
        return [told]

    monkeypatch.setattr(bench.controller.trouble, "look", look)
    async with asyncio.timeout(30):
        reporting = asyncio.create_task(bench.controller.report_fleet())
        while not bench.events:
            await asyncio.sleep(0)
        reporting.cancel()
    assert bench.events[0] == told and looks[0] == []


@pytest.mark.parametrize("version", [None, 7])
def test_the_program_runs_the_stages_or_evaluates_one_version(
    version: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[object] = []

    class Asked:
        async def run_stages(self) -> None:
            happened.append("stages")

        async def evaluate(self, version: int, split: str, samples: int) -> None:
            happened.append((version, split, samples))

    @contextlib.asynccontextmanager
    async def opened(*told: str) -> AsyncIterator[Asked]:
        happened.append(told)
        yield Asked()

    monkeypatch.setattr(controller, "open_controller", opened)
    told = ["--version", "7", "--split", "novel", "--samples", "4"]
    asked = [] if version is None else told
    monkeypatch.setattr("sys.argv", ["controller", "--store", "S", "--gateway", "G", *asked])
    assert controller.main() == 0
    if version is None:
        assert happened == [("S", "G", "controller"), "stages"]
    else:
        assert happened == [("S", "G", "evaluation"), (7, "novel", 4)]


async def test_an_evaluation_leaves_one_row_for_each_task(monkeypatch: pytest.MonkeyPatch) -> None:
    async def attempt(task: Task, sample: str, seed: int) -> Trajectory:
        group = sample.rpartition(".")[0]
        score = Score(float(task.id == "b"))
        return Trajectory(
            id=sample, task=task.id, group=group, segments=(), score=score, status="done"
        )

    temperatures = []

    def rollouts(self: Controller, *, temperature: float) -> Any:
        temperatures.append(temperature)
        return attempt

    monkeypatch.setattr(Controller, "rollouts", rollouts)
    config = parse(
        'name = "a"\n[[stage]]\nkind = "rl"\nsteps = 1\ntemperature = 0.7\n'
        "[tasks]\nheldout = 1\nnovel = 2\n[eval]\ntemperature = 0.3"
    )
    environment: Any = SimpleNamespace(
        tasks=lambda split: [replace(TASK, id=id) for id in ("b", "a")]
    )
    gateway: Any = Gateway()
    run = Run.open("memory:")
    evaluated = Controller(run, config, gateway, environment, lambda event: None)
    await evaluated.evaluate(1, "novel")
    assert gateway.loaded == [1]
    rows = RolloutLog(run.objects).rows()
    assert [(row.task, row.kind, row.stage, row.reward) for row in rows] == [
        ("a", "novel", "rl", 0.0),
        ("b", "novel", "rl", 1.0),
    ]
    assert run.evals() == ["000001.novel"]
    assert temperatures == [0.3]
    await evaluated.evaluate(1, "novel")
    assert gateway.loaded == [1]  # not a second time
    await evaluated.evaluate(1, "novel", samples=3)
    assert run.evals() == ["000001.novel", "000001.novel_x3"]
    report = run.eval("000001.novel_x3", Report)
    assert (report.samples, report.total, report.solved) == (3, 6, 3)


async def test_a_split_without_tasks_is_not_evaluated() -> None:
    config = parse('name = "a"\n[[stage]]\nkind = "rl"\nsteps = 1\n[tasks]\nnovel = 0')
    gateway: Any = Gateway()
    environment: Any = SimpleNamespace(tasks=lambda split: [])
    run = Run.open("memory:")
    await Controller(run, config, gateway, environment, lambda event: None).evaluate(1, "novel")
    assert gateway.loaded == [] and run.evals() == []


@pytest.mark.parametrize("broken", [False, True])
async def test_a_controller_has_what_it_needs_and_leaves_nothing_open(
    broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[object] = []
    run = Run.open("memory:")
    run.put_config(
        parse(
            'name = "a"\nseed = 5\nheartbeat_timeout_s = 33.0\n[[stage]]\nkind = "rl"\nsteps = 1\n'
            '[sandbox]\nisolation = "process"\nmounts = ["/opt/data"]\nmax_processes = 8\n'
            "disk_mib = 64\n[tasks]\ntrain = 7\nheldout = 3\nnovel = 2"
        )
    )

    class Pool:
        tier = "process"

        def owing(self) -> dict[str, float]:
            return {"zygote": 1.0}

        def check(self, spec: SandboxSpec) -> None: ...

        async def close(self) -> None:
            happened.append("closed")

    class Ready(Gateway):
        def __init__(self, url: str, public_url: str | None = None) -> None:
            super().__init__()
            happened.append(url)

        async def __aenter__(self) -> Ready:
            return self

        async def __aexit__(self, *how: object) -> None:
            happened.append("left")

        async def ready(self) -> None:
            happened.append("ready")
            if broken:
                raise EtudeError("no gateway")

        async def regions(self) -> tuple[dict[str, RegionStatus], list[str]]:
            looks.append(1)
            return await super().regions()

    def opened(store: str, *, create: bool) -> Run:
        assert store == "S" and not create
        return run

    made: list[Pool] = []

    def pool(
        isolation: str,
        reply_timeout_s: float,
        *,
        mounts: Sequence[str],
        limits: Limits,
        hosts: Sequence[str],
        image: str,
        budget: object,
        outside: object,
    ) -> Pool:
        assert (isolation, reply_timeout_s) == ("process", 33.0)
        assert mounts == ["/opt/data"] and limits == Limits(processes=8, disk_bytes=64 << 20)
        assert not hosts and not image and budget is None
        made.append(Pool())
        return made[-1]

    looks: list[int] = []
    built: list[dict[str, Any]] = []
    loaded: list[str] = []
    monkeypatch.setattr(controller.Run, "open", opened)
    monkeypatch.setattr(controller, "open_sandbox_pool", pool)
    monkeypatch.setattr(controller, "GatewayClient", Ready)
    monkeypatch.setattr(controller, "build", lambda *named, **told: built.append(told))
    monkeypatch.setattr(controller, "load", lambda reference, key: loaded.append(key))
    monkeypatch.setattr(controller, "FLEET_REPORT_S", 0.0)
    with pytest.raises(EtudeError) if broken else contextlib.nullcontext():
        async with controller.open_controller("S", "G", "controller") as opened_one:
            assert opened_one.owing() == {"zygote": 1.0}
            opened_one.emit(RunDone(version=1))
            assert happened == ["G", "ready"]
            async with asyncio.timeout(30):
                while len(looks) < 2:  # regardless of its other work
                    await asyncio.sleep(0)
    assert happened == ["G", "ready", "left", "closed"]
    assert built == [{"counts": {"train": 7, "heldout": 3, "novel": 2}, "seed": 5}]
    assert loaded == ["harness.agent"]  # a typing error is found before the first stage
    assert run.processes() == ([] if broken else ["controller"])


async def test_a_version_is_reached_by_it_or_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    async def wait(after: int) -> Any:
        asked.append(after)
        return SimpleNamespace(version=after + 3)

    run = Run.open("memory:")
    nobody: Any = None
    config = parse('name = "a"\n[[stage]]\nkind = "rl"\nsteps = 1')
    waiting = Controller(run, config, nobody, nobody, lambda event: None)
    monkeypatch.setattr(waiting.versions, "wait", wait)
    assert await waiting.wait_for_version(4) == 6 and asked == [3]
