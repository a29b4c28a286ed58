"""Values that one part of a run passes to the next arrive intact: settings, figures, seeds, the
outcome of every task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields, replace

import pytest
import torch

from etude.core.advantage import GroupOutcome
from etude.core.errors import EtudeError
from etude.core.events import (
    BatchReady,
    EvalDone,
    EvalProgress,
    Event,
    GroupDone,
    MismatchStats,
    WeightsLive,
)
from etude.core.ledger import Issued
from etude.core.sampling import VersionSpan
from etude.core.trainer_config import TrainerConfig
from etude.core.types import Group, Score, Segment, Task, Trajectory
from etude.model.transformer import init_from_scratch
from etude.run import loop as controller
from etude.run.evaluate import evaluate, report_name
from etude.run.loop import FailureMonitor, SignalMonitor
from etude.store.objects import Objects
from etude.store.runs import Run
from etude.train.learner import Learner
from etude.train.loss import Clip, predicting_states
from etude.train.packing import TokenSequence, pack_batch
from etude.train.stats import RlStats
from etude.trainer.state import computed_in
from etude.trainer.step import StepReporter, objective_of
from tests.run.fake_stage import FIRST, stage
from tests.small_model import config
from tests.trainer.test_step import BATCH, rl


def test_an_objective_has_every_setting_of_the_stage() -> None:
    told = objective_of(
        rl('loss = "ppo_clip"', "clip_low = 0.1", "correction_cap = 3.0", "kl_coef = 0.25")
    )
    assert (told.clip.low, told.correction_cap, told.kl_coef) == (0.1, 3.0, 0.25)
    assert told.clip == Clip(0.1, objective_of(rl('loss = "ppo_clip"')).clip.high)
    assert objective_of(rl('loss = "dapo"', "clip_low = 0.0", "clip_high = 0.0")).clip == Clip(
        0.0, 0.0
    ), "0 is not nothing"
    plain = objective_of(rl())
    assert (plain.correction_cap, plain.kl_coef, plain.distills) == (2.0, 0.0, False)


def test_an_event_of_a_step_has_each_figure_in_its_place() -> None:
    numbers = iter(range(100, 200))
    mismatch = MismatchStats(**{field.name: next(numbers) for field in fields(MismatchStats)})
    stats = RlStats(
        **{
            f.name: next(numbers)
            for f in fields(RlStats)
            if f.name not in ("mismatch", "recomputed")
        },
        mismatch=mismatch,
    )
    reporter = StepReporter(Learner(init_from_scratch(config(), 0)))
    event = asdict(reporter.report(reporter.check(BATCH, "here"), stats, teacher_kl=0.5))
    same = (
        *("loss", "lr", "corrected_frac", "zero_grad_frac"),
        *("router_mismatch_frac", "entropy", "grad_norm"),
    )
    assert {name: event[name] for name in same} == {name: getattr(stats, name) for name in same}
    assert event["tokens"] == stats.num_loss_tokens and event["teacher_kl"] == 0.5
    assert (event["k1"], event["k1_p99"]) == (mismatch.k1, mismatch.k1_p99)
    assert (event["k3_mean"], event["k3_p99"]) == (mismatch.k3, mismatch.k3_p99)
    assert event["wait_s"] >= 0 and event["seconds"] > 0


def test_a_learner_computes_in_what_the_trainer_says() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    bf16, fp32 = torch.bfloat16, torch.float32
    assert [computed_in(TrainerConfig(), device) for device in (cpu, cuda)] == [fp32, bf16]
    assert computed_in(TrainerConfig(published_dtype="float32"), cuda) == fp32
    assert computed_in(TrainerConfig(compute_dtype="bfloat16"), cpu) == bf16
    assert computed_in(TrainerConfig(compute_dtype="float32"), cuda) == fp32
    for dtype in (fp32, bf16):
        learner = Learner(init_from_scratch(config(), 0), compute_dtype=dtype)
        text = pack_batch([TokenSequence((1, 2, 3), (False, True, True))])
        before, _ = predicting_states(learner.model, text)
        learner.supervised_step([TokenSequence((1, 2, 3), (False, True, True))], lr=0.1)
        after, _ = predicting_states(learner.model, text)
        assert before.dtype == after.dtype == dtype and not torch.equal(before, after)


TASKS = [Task(id=name, prompt="go") for name in "cab"]
SEGMENT = Segment(
    prompt=(1,), tokens=(2,), mask=(True,), logprobs=(-1.0,), versions=(VersionSpan(3, 1),)
)


class Exam:
    """Attempts with the given rewards, in the order of the requests; None has failed."""

    def __init__(self, rewards: Sequence[float | None], version: int = 3) -> None:
        self.rewards = list(rewards)
        self.segment = replace(SEGMENT, versions=(VersionSpan(version, 1),))
        self.asked: list[tuple[str, str, int]] = []

    async def attempt(self, task: Task, sample: str, seed: int) -> Trajectory:
        self.asked.append((task.id, sample, seed))
        reward = self.rewards.pop(0)
        return Trajectory(
            id=sample, task=task.id, group="", segments=(self.segment,),
            status="done" if reward is not None else "failed",
            score=None if reward is None else Score(reward),
            error="gone" if reward is None else None,
            messages=[{"role": "user", "content": task.id}] * len(self.asked),
        )  # fmt: skip


async def test_several_attempts_at_each_task() -> None:
    exam, events = Exam([1.0, 0.0, 1.0, 1.0, 0.0, 0.5]), list[Event]()
    report = await evaluate(
        TASKS, exam.attempt, stage="rl", split="novel", version=3, seed=7, samples=2,
        emit=events.append,
    )  # fmt: skip
    done = events[-1]
    assert isinstance(done, EvalDone) and (done.solved, done.total) == (3, 6)
    assert events[0] == EvalProgress(stage="rl", split="novel", done=0, total=6, solved=0)
    assert (report.solved, report.total, report.samples) == (3, 6, 2)
    assert [*report.solved_by_task.items()] == [("a", 0), ("b", 1), ("c", 2)]  # in task order
    assert report.rewards == {"a": 0.0, "b": 0.75, "c": 1.0}
    assert report.pass_at(1) == 0.5 and report.pass_at(2) == pytest.approx(2 / 3)
    assert report.name == "000003.novel_x2"
    assert [(task, sample) for task, sample, _ in exam.asked] == [
        (task, f"eval-3-novel_x2.{number}") for number, task in enumerate("cabcab")
    ]
    assert len({seed for *_, seed in exam.asked}) == 6


async def test_an_evaluation_tells_each_task_apart() -> None:
    exam, events = Exam([1.0, 0.9, 1.0]), list[Event]()
    report = await evaluate(
        TASKS, exam.attempt, stage="rl", split="novel", version=3, seed=7, emit=events.append
    )
    assert (report.solved, report.total, report.rate, report.version) == (2, 3, 2 / 3, 3), (
        "0.9 is not solved"
    )
    assert list(report.rewards.items()) == [("a", 0.9), ("b", 1.0), ("c", 1.0)]
    assert len(report.example) == 3, "of those that were solved, the longest"
    assert (report.name, report_name(12, "heldout")) == ("000003.novel", "000012.heldout")
    assert [sample for _, sample, _ in exam.asked] == [f"eval-3-novel.{n}" for n in range(3)]
    seeds = {task: seed for task, _, seed in exam.asked}
    assert len(set(seeds.values())) == 3
    again, other = Exam([0.0] * 3, version=4), Exam([0.0] * 3)
    none = await evaluate(TASKS[::-1], again.attempt, stage="rl", split="novel", version=4, seed=7)
    await evaluate(TASKS, other.attempt, stage="rl", split="novel", version=3, seed=8)
    assert {task: seed for task, _, seed in again.asked} == seeds, (
        "the same questions to every version"
    )
    assert {task: seed for task, _, seed in other.asked} != seeds
    assert (none.solved, none.example) == (0, [])
    done = events[-1]
    assert isinstance(done, EvalDone) and (done.stage, done.split, done.version) == (
        "rl",
        "novel",
        3,
    )
    assert (done.solved, done.total, done.low, done.high) == (2, 3, report.low, report.high)
    assert events[0] == EvalProgress(stage="rl", split="novel", done=0, total=3, solved=0)


async def test_the_sessions_of_an_evaluation_have_names_for_a_url() -> None:
    exam = Exam([1.0, 0.0])
    tasks = [Task(id=id, prompt="go") for id in ("src/cart.py:total", "tests/x.py::t[a b?#%2F]")]
    report = await evaluate(tasks, exam.attempt, stage="rl", split="heldout", version=3, seed=7)
    assert [sample for _, sample, _ in exam.asked] == ["eval-3-heldout.0", "eval-3-heldout.1"]
    assert report.rewards == {"src/cart.py:total": 1.0, "tests/x.py::t[a b?#%2F]": 0.0}


async def test_an_evaluation_shows_how_far_it_is() -> None:
    events: list[Event] = []
    await evaluate(
        TASKS[:1] * 45,
        Exam([1.0] * 45).attempt,
        stage="rl",
        split="novel",
        version=3,
        seed=0,
        emit=events.append,
    )
    shown = [
        (event.done, event.solved, event.total)
        for event in events
        if isinstance(event, EvalProgress)
    ]
    assert shown == [(0, 0, 45), (20, 20, 45), (40, 40, 45)]


async def test_a_task_that_fails_three_times_ends_an_evaluation() -> None:
    report = await evaluate(
        TASKS[:1], Exam([None, None, 1.0]).attempt, stage="rl", split="novel", version=3, seed=0
    )  # fmt: skip
    assert report.solved == 1
    with pytest.raises(ExceptionGroup) as caught:
        await evaluate(
            TASKS[:1], Exam([None] * 3).attempt, stage="rl", split="novel", version=3, seed=0
        )
    assert caught.group_contains(
        EtudeError, match="task c failed 3 times, most recently with: gone"
    )


async def test_no_two_attempts_share_their_randomness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither within a group nor when a task is repeated in the next epoch; there is an event for
    every group."""
    events: list[Event] = []
    start = controller.RolloutLoop.__init__

    def listening(self: controller.RolloutLoop, **told: object) -> None:
        start(self, **told | {"emit": events.append})  # type: ignore[arg-type]

    monkeypatch.setattr(controller.RolloutLoop, "__init__", listening)
    objects = Objects.open("memory:")
    engine = await stage(objects, seed=4, last=FIRST + 6, max_lag=1)
    assert len(set(engine.seeds)) == len(engine.seeds) > 3 * 7
    assert [event.version for event in events if isinstance(event, WeightsLive)] == list(
        range(FIRST + 1, FIRST + 7)
    )
    run = Run(objects)
    ready = [(event.step, event.lag) for event in events if isinstance(event, BatchReady)]
    assert ready == [(step, run.batch(step).lag) for step in run.batches()]
    assert max(lag for _, lag in ready) == 1
    kept = {row.sample.rpartition(".")[0] for step in run.batches() for row in run.batch(step).rows}
    told = {event.group: event for event in events if isinstance(event, GroupDone)}
    assert {group for group, event in told.items() if event.kept} >= kept
    for name, event in told.items():
        group = run.group(name)
        assert (event.task, event.admitted) == (group.task, group.admitted) and event.seconds >= 0
        assert event.rewards == tuple(t.reward for t in group.trajectories if t.reward is not None)
        assert event.failed == sum(t.status == "failed" for t in group.trajectories)
    issued = [entry for entry in run.ledger.records() if isinstance(entry, Issued)]
    assert {entry.epoch for entry in issued} == set(range(-(-len(issued) // 7)))


def failed(number: int) -> Trajectory:
    return Trajectory(
        id="a",
        task="t",
        group="g",
        segments=(),
        score=None,
        status="failed",
        error=f"error {number}",
    )


def test_a_run_stops_when_half_of_forty_sessions_failed() -> None:
    good = Trajectory(id="a", task="t", group="g", segments=(), score=Score(0.0), status="done")
    health = FailureMonitor()
    for number in range(39):
        health.add(failed(number) if number % 2 else good)
    with pytest.raises(
        EtudeError, match="20 of the last 40 sessions failed, most recently with: error 99"
    ):
        health.add(failed(99))
    health = FailureMonitor()
    for number in range(200):
        health.add(failed(number) if number % 40 < 19 else good)


NOTHING = GroupOutcome(advantages={})


def group(*rewards: float | None) -> Group:
    attempts = [
        Trajectory(
            id="a",
            task="t",
            group="g",
            segments=(),
            status="done" if r is not None else "failed",
            score=None if r is None else Score(r),
        )
        for r in rewards
    ]
    return Group(id="g", task="t", slot=0, admitted=0, trajectories=tuple(attempts))


@pytest.mark.parametrize(
    ("rewards", "told"),
    [((0.0, None), "all 0: the tasks are too hard"), ((1.0,), "all 1: the tasks are solved"),
     ((0.5,), "all 0.5: try a higher")],
)  # fmt: skip
def test_a_run_that_learns_nothing_says_what_may_help(
    rewards: tuple[float | None, ...], told: str
) -> None:
    signal = SignalMonitor(groups_per_step=1)
    for _ in range(99):
        signal.add(group(*rewards), NOTHING)
    with pytest.raises(EtudeError, match=f"100 groups in a row .*{told}"):
        signal.add(group(*rewards), NOTHING)


def test_a_run_whose_harness_cannot_be_trained_on_says_so() -> None:
    signal = SignalMonitor(groups_per_step=1)
    with pytest.raises(EtudeError, match="100 groups .* sampled with top_p, which the trainer"):
        for _ in range(100):
            signal.add(group(1.0, 0.0), replace(NOTHING, untrainable={"a": "top_p"}))


def test_rewards_from_before_a_group_with_signal_are_forgotten() -> None:
    signal = SignalMonitor(groups_per_step=5)
    signal.add(group(1.0), NOTHING)
    signal.add(group(1.0, 0.0), GroupOutcome(advantages={"a": 1.0}))
    with pytest.raises(EtudeError, match="all 0: "):
        for _ in range(100):
            signal.add(group(0.0), NOTHING)


def test_what_a_group_lost_is_told_with_its_reasons() -> None:
    made = GroupOutcome(
        advantages={}, failed=(), no_signal=(), malformed={"g.0": "odd"},
        untrainable={"g.1": "top_p"}, quarantined={"g.2": "bytecode"},
    )  # fmt: skip
    group = Group(id="g", task="t", slot=0, admitted=3, trajectories=())
    told = controller._done(group, made, 2.5)
    assert (told.malformed, told.untrainable) == ({"g.0": "odd"}, {"g.1": "top_p"})
    assert told.quarantined == {"g.2": "bytecode"}
    assert (told.group, told.task, told.admitted, told.seconds) == ("g", "t", 3, 2.5)
    assert not told.kept and told.rewards == () and told.failed == 0
