"""The evaluator during a loop: the versions that it takes, and that it pins each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.core.events import EvalDone, EvalProgress, Event
from etude.core.lineage import periodic_versions
from etude.core.realtime_config import GateConfig
from etude.core.seeds import derive
from etude.core.types import Manifest, Trajectory
from etude.model.config import ModelConfig
from etude.model.files import hf_state_dict
from etude.run.evaluate import Report
from etude.run.evaluator import evaluating, follow, only_results, run_evaluator
from etude.run.realtime_probes import probe_splits
from etude.run.realtime_simulated import simulate
from etude.serve import worker
from etude.store.runs import Run
from etude.weights.publish import publish
from tests.run.fake_stage import manifest
from tests.small_model import sharp, small_files

RUN = """
name = "a"
[eval]
every_steps = 3
[[stage]]
kind = "midtrain"
steps = 5
[[stage]]
kind = "rl"
steps = 8
[[stage]]
kind = "rl"
name = "more"
steps = 3
"""


def test_versions_within_loops_are_due_and_their_ends_are_not() -> None:
    """The loops make versions 2 to 9 and 10 to 12."""
    stages = parse(RUN).stage
    assert periodic_versions(stages, 3) == [4, 7]
    assert periodic_versions(stages, 4) == [5]
    assert periodic_versions(stages, 2) == [3, 5, 7, 11]


class Published:
    """Versions that appear while the consumer is busy."""

    def __init__(self, newest: Sequence[int]) -> None:
        self.newest = list(newest)

    async def wait(self, after: int) -> Manifest:
        version = self.newest.pop(0)
        assert version > after
        return manifest(version)

    async def publish(self, *args: Any) -> Any: ...

    async def fetch(self, *args: Any) -> Any: ...


@pytest.mark.parametrize(
    ("newest", "taken"),
    [
        ([1, 2, 3, 4, 5, 6, 7], [4, 7]),
        ([3, 6, 8], [4, 7]),
        ([8], [7]),  # it fell behind, or was started late
        ([4, 12], [4, 7]),
    ],
)
async def test_the_newest_version_that_is_due_is_evaluated(
    newest: list[int], taken: list[int]
) -> None:
    evaluated: list[int] = []

    async def evaluate(version: int) -> None:
        evaluated.append(version)

    published: Any = Published(newest)
    await follow([4, 7], published, evaluate)
    assert evaluated == taken


async def test_a_run_that_wants_none_ends_at_once() -> None:
    nobody: Any = None
    await follow([], nobody, nobody)


def test_only_the_result_is_told() -> None:
    events: list[Event] = []
    emit = only_results(events.append)
    emit(EvalProgress(stage="rl", split="heldout", done=1, total=2, solved=0))
    done = EvalDone(stage="rl", split="heldout", version=4, solved=1, total=2, low=0.1, high=0.9)
    emit(done)
    assert events == [done]


@pytest.mark.parametrize(
    "elsewhere",
    [
        '[tasks]\nenvironment = "http://127.0.0.1:1"',
        '[engine]\nregions = ["east"]\nvllm_urls = {east = "http://127.0.0.1:1"}',
    ],
)
def test_it_is_refused_where_sessions_or_models_are_elsewhere(elsewhere: str) -> None:
    with pytest.raises(EtudeError, match=r"eval\.every_steps evaluates beside the run"):
        parse(RUN + elsewhere)


MINE = """
from etude.core.sandbox import SandboxSpec
from etude.core.types import Score, Task, Transcript


class Environment:
    def __init__(self, pool, *, counts, seed):
        self.pool, self.counts = pool, counts

    def tasks(self, split):
        return [Task(id=f"{split}-{n}", prompt=f"say {n}", sandbox=SandboxSpec())
                for n in range(self.counts[split])]

    def open(self, task):
        return self.pool.open(task.sandbox)

    async def score(self, task, sandbox, attempt):
        return Score(float(task.id.endswith("1")) - 1)


class Agent:
    def __init__(self, http, *, temperature, **settings):
        self.http, self.temperature = http, temperature

    async def run(self, task, sandbox, *, base_url, api_key, seed):
        headers = {"Authorization": f"Bearer {api_key}"}
        told = f"{seed} at {self.temperature}"
        asked = [*task.opening, {"role": "user", "content": told}]
        body = {"model": "etude", "messages": asked, "max_tokens": 4, "seed": seed,
                "temperature": self.temperature}
        async with self.http.post(f"{base_url}/chat/completions", json=body, headers=headers) as r:
            answer = (await r.json())["choices"][0]["message"]
        return Transcript(messages=[*asked, answer], finished=True)
"""
WHOLE = """
name = "a"
seed = 5
[model]
max_context = 1024
[tasks]
environment = "mine.py:Environment"
train = 3
heldout = 2
novel = 0
[harness]
agent = "mine.py:Agent"
[sandbox]
isolation = "process"
[engine]
threads = 1
[rewards]
reward = "1 + environment"
[eval]
every_steps = 2
[realtime]
production = "production.toml"
[[stage]]
kind = "rl"
steps = 7
temperature = 0.75
groups_per_step = 2
group_size = 2
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run with a model, at version 4 of 7."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(worker, "exit_on_engine_failure", lambda: None)
    run = Run.open(str(tmp_path / "store"))
    run.put_config(parse(WHOLE))
    for name, data in (files := small_files(context=2048)).items():
        run.put_model_file(name, data)
    model = sharp(ModelConfig.from_json(files["config.json"]), seed=0)
    publish(run.objects, 4, hf_state_dict(model), stage="rl", step=4)
    return run


def told(session: Trajectory) -> str:
    """The seed and the temperature of a session."""
    assert session.messages is not None
    return str(session.messages[1]["content"])


async def test_versions_that_are_due_and_have_no_report_are_evaluated(run: Run) -> None:
    before = Report(
        stage="rl", split="heldout", version=2, solved=0, total=1, low=0, high=1, rewards={},
        example=[],
    )  # fmt: skip
    assert periodic_versions(run.config().stage, 2) == [2, 4, 6]
    for version in (2, 6):
        run.put_eval((done := replace(before, version=version)).name, done)
    await run_evaluator(run.objects.url)
    assert run.evals() == ["000002.heldout", "000004.heldout", "000006.heldout"]
    report = run.eval("000004.heldout", Report)
    assert report.rewards == {"heldout-0": 0.0, "heldout-1": 1.0}
    assert (report.stage, report.split, report.version, report.samples) == ("rl", "heldout", 4, 1)
    sessions = run.sessions("evals/000004.heldout.sessions")
    assert {session.task: told(session) for session in sessions} == {
        task: f"{derive(5, 'eval', task)} at 0.0" for task in report.rewards
    }
    (event,) = run.events("evaluator", [EvalDone]).records()
    assert (event.version, event.solved, event.total) == (4, 1, 2)
    # now there is nothing to do, and no model is requested
    run.objects.delete("model/config.json")
    await run_evaluator(run.objects.url)


async def test_a_version_that_was_never_published_is_left_out(run: Run) -> None:
    """A trainer was killed when 7 was saved and 6 was not published yet; only 7 is by now. A
    request for 6 would end the evaluator, and the run with it, at every start."""
    model = sharp(ModelConfig.from_json(run.model_files()["config.json"]), seed=1)
    publish(run.objects, 7, hf_state_dict(model), stage="rl", step=7)
    await run_evaluator(run.objects.url)
    assert run.evals() == []


async def test_probes_are_asked_by_themselves_and_other_splits_several_times(run: Run) -> None:
    config = run.config()
    assert config.realtime is not None
    gate = GateConfig(safety=2, cheats=0)
    config = config.model_copy(
        update={"realtime": config.realtime.model_copy(update={"gate": gate})}
    )
    (split,) = probe_splits(gate, 5)
    events: list[Event] = []
    async with evaluating(run, config, events.append) as evaluate:
        await evaluate(4, "heldout", 3)
        await evaluate(4, split)
    assert run.evals() == ["000004.heldout_x3", f"000004.{split}"]
    several, probes = (run.eval(name, Report) for name in run.evals())
    assert several.solved_by_task == {"heldout-0": 0, "heldout-1": 3}
    assert (probes.split, probes.solved, probes.total) == (split, 2, 2)
    assert all(task.startswith("safety-") for task in probes.rewards)
    sessions = run.sessions("evals/000004.heldout_x3.sessions")
    assert len(sessions) == 6 and all(told(each).endswith(" at 1.0") for each in sessions)
    assert [type(event) for event in events] == [EvalDone, EvalDone]


@pytest.mark.parametrize(("wanted", "made"), [(2, 2), (5, 3)])
async def test_a_version_attempts_tasks_for_an_update(run: Run, wanted: int, made: int) -> None:
    (stage,) = run.config().stage
    stage = stage.model_copy(update={"groups_per_step": wanted})
    config = run.config().model_copy(update={"stage": (stage,)})
    found = await simulate(run, config, 4, 9)
    assert [group.id for group in found.groups] == [f"s000009-{n:04d}" for n in range(made)]
    drawn = Random(derive(5, "simulated", 9)).sample(range(3), made)
    assert [group.task for group in found.groups] == [f"train-{n}" for n in drawn]
    for number, group in enumerate(found.groups):
        assert (group.slot, group.admitted, group.stage) == (number, 4, "rl")
        assert [each.id for each in group.trajectories] == [f"{group.id}.0", f"{group.id}.1"]
        seeds = [derive(5, "simulated", 9, group.task, n) for n in range(2)]
        assert list(map(told, group.trajectories)) == [f"{seed} at 0.75" for seed in seeds]
        for each in group.trajectories:
            assert each.status == "done" and each.reward == group.task.endswith("1")
            assert [span.version for span in each.segments[0].versions] == [4]
    # all attempts at a task earn the same, so they teach nothing
    assert found.batch is None and sum(len(drop.samples) for drop in found.dropped) == 2 * made
