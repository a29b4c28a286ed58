"""`etude try`: what doing nothing, a solution and a session earn, and its advice."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from etude.cli import main
from etude.commands.trial import GIVEN, REFERENCE, SESSION, UNTOUCHED, Trial, findings, show
from etude.core.sampling import SamplingParams, SamplingSpan, VersionSpan
from etude.core.types import Part, Score, Segment, Trajectory
from etude.serve.alone import parse_script
from tests.serve.serving import write_model

ENVIRONMENT = """
from etude.core.sandbox import SandboxSpec
from etude.core.types import Part, Score, Task, Transcript


class Environment:
    def __init__(self, pool, *, counts, seed):
        self.pool = pool

    def tasks(self, split):
        spec = SandboxSpec(files={"a.txt": "no\\n"})
        return [Task(id=f"{split}-{n}", prompt="say yes", sandbox=spec) for n in range(2)]

    def open(self, task):
        return self.pool.open(task.sandbox)

    async def score(self, task, sandbox, attempt):
        ran = await sandbox.run(["cat", "a.txt"], timeout_s=60)
        said = ran.output.strip()
        if said == "crash":
            raise OSError("out of cats")
        parts = (Part("calls", len(attempt.segments), evidence=f"it says {said}"),)
        return Score(float(said == "yes"), parts)


class Helpful(Environment):
    def solution(self, task):
        return {"a.txt": "yes\\n"}


class Small(Helpful):
    def tasks(self, split):
        return super().tasks(split) if split == "train" else []


class Mistaken(Environment):
    def solution(self, task):
        return {"a.txt": "perhaps\\n"}


class Agent:
    def __init__(self, http, *, temperature, **settings):
        self.http = http
        self.temperature = temperature

    async def run(self, task, sandbox, *, base_url, api_key, seed):
        headers = {"Authorization": f"Bearer {api_key}"}
        body = {"model": "etude", "messages": task.opening, "max_tokens": 4}
        body["temperature"] = self.temperature
        url = f"{base_url}/chat/completions"
        async with self.http.post(url, json=body, headers=headers) as response:
            if response.status != 200:
                raise RuntimeError(await response.text())
            answer = (await response.json())["choices"][0]["message"]
        await sandbox.write("a.txt", answer["content"] or "")
        return Transcript(messages=[*task.opening, answer], finished=True)


class Insistent(Agent):
    async def run(self, *about, **access):
        await super().run(*about, **access)
        return await super().run(*about, **access)
"""
RUN = """
name = "a"
[tasks]
environment = "mine.py:Environment"
train = 2
[harness]
agent = "mine.py:Agent"
[sandbox]
isolation = "process"
[[stage]]
kind = "rl"
steps = 1
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(ENVIRONMENT)
    (tmp_path / "run.toml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tried(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> dict[str, Any]:
    assert main(["try", "run.toml", "--json", *argv]) == code
    said = capsys.readouterr()
    found: dict[str, Any] = json.loads(said.out)
    return found | {"screen": said.err, "by_name": {t["name"]: t for t in found["trials"]}}


def rewards(found: dict[str, Any]) -> dict[str, float]:
    return {t["name"]: t["score"]["reward"] for t in found["trials"] if t["score"]}


def test_nothing_the_reference_a_solution_and_a_script(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "answer").mkdir()
    (project / "answer" / "a.txt").write_text("yes\n")
    (project / "script.txt").write_text("maybe")
    helpful = ("--set", "tasks.environment=mine.py:Helpful")
    found = tried(capsys, *helpful, "--solution", "answer", "--script", "script.txt")
    assert rewards(found) == {UNTOUCHED: 0.0, REFERENCE: 1.0, GIVEN: 1.0, SESSION: 0.0}
    assert found["task"] == "train-0" and found["look"] == []
    session = found["by_name"][SESSION]
    assert [m["content"] for m in session["messages"]] == ["say yes", "maybe"]
    assert "+maybe" in session["diff"] and session["seconds"]["all"] > 0
    for text in (
        "a script of 1 answer ...",
        "reward 1",
        "it says no",
        "assistant:",
        "no problems found",
    ):
        assert text in found["screen"]
    left = {path.name for path in project.iterdir()} - {"__pycache__"}
    assert left == {"answer", "mine.py", "run.toml", "script.txt"}, "nothing was written"


def test_a_reference_that_earns_nothing_is_an_error(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mistaken = ("--no-model", "--set", "tasks.environment=mine.py:Mistaken")
    found = tried(capsys, *mistaken, code=1)
    assert rewards(found)[REFERENCE] == 0.0 and not found["ok"]
    assert (
        "warning: reference solution earns 0, so a correct answer earns nothing: fix"
        in found["screen"]
    )


def test_a_split_without_tasks_is_told_of(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--no-model", "--set", "tasks.environment=mine.py:Small")
    found = tried(capsys, *small)
    assert rewards(found) == {UNTOUCHED: 0.0, REFERENCE: 1.0}
    for split, line in zip(("heldout", "novel"), found["look"], strict=True):
        assert "returns no tasks" in line and f"set tasks.{split} = 0" in line
    assert main(["try", "run.toml", *small, "--task", "nope"]) == 2
    assert "there is no task nope: the closest of 2 are " in capsys.readouterr().err


def test_patches_and_single_files(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    patch = "--- a/a.txt\n+++ b/a.txt\n@@ -1 +1 @@\n-no\n+yes\n"
    (project / "it.patch").write_text(patch)
    (project / "other.txt").write_text("yes")
    for solution in ("it.patch", "other.txt:a.txt"):
        assert rewards(tried(capsys, "--no-model", "--solution", solution))[GIVEN] == 1.0
    found = tried(capsys, "--no-model", "--solution", "other.txt", "--task", "heldout-1")
    assert rewards(found)[GIVEN] == 0.0 and found["task"] == "heldout-1"
    (project / "it.patch").write_text(patch.replace("-no", "-never"))
    found = tried(capsys, "--no-model", "--solution", "it.patch", code=1)
    assert "git apply" in found["by_name"][GIVEN]["error"]


def test_a_session_with_a_model_is_recorded(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(project / "model")
    found = tried(capsys, "--set", f"model.path={model}", "--set", "model.max_context=64")
    session = found["by_name"][SESSION]
    assert session["status"] == "done" and session["calls"] == 1
    assert session["score"]["parts"][0]["value"] == 1.0  # one segment
    assert re.search(r"answer 1: [1-4] tokens in ", found["screen"])
    found = tried(capsys, "--set", f"model.path={model}", "--set", "model.max_context=4", code=1)
    assert "context of 4" in found["by_name"][SESSION]["error"]
    (project / "run.toml").write_text(RUN.replace('kind = "rl"', 'kind = "midtrain"'))
    found = tried(capsys, "--set", f"model.path={model}", "--set", "model.max_context=64")
    assert not any("temperature" in line for line in found["look"]), "the agent has set none"


def test_what_breaks_is_told(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "over.jsonl").write_text('"no"\n')
    (project / "crash.jsonl").write_text('{"content": "crash"}\n')
    insistent = ("--set", "harness.agent=mine.py:Insistent")
    for script, more, why in (
        ("crash.jsonl", (), "score: OSError in .*mine.py, line .*: out of cats"),
        ("over.jsonl", insistent, "agent: RuntimeError .*script has only 1 answers"),
    ):
        found = tried(capsys, "--script", script, *more, code=1)
        assert re.search(why, found["by_name"][SESSION]["error"])
        assert "session failed" in found["look"][0]


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--task", "train-9"], "there is no task train-9: the closest of 6 are train-"),
        (["--solution", "nowhere"], "--solution nowhere: No such file"),
        (["--script", "nowhere"], "--script nowhere: No such file"),
        (
            ["--script", "run.jsonl"],
            "--script run.jsonl: line 3 is not valid JSON (Expecting value at c",
        ),
        (["--script", "empty.jsonl"], "--script empty.jsonl: it has no answers; give a text"),
        (["--script", "empty.txt"], "--script empty.txt: it has no answers; give a text"),
        (["--set", "sandbox.mounts=['gone']"], "does not exist"),
    ],
)
def test_what_cannot_be_tried(
    argv: list[str], why: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "run.jsonl").write_text('"yes"\n\nnot json')
    (project / "empty.jsonl").write_text("\n")
    (project / "empty.txt").write_text("")
    assert main(["try", "run.toml", "--no-model", *argv]) == 2
    assert why in capsys.readouterr().err


GREEDY = Segment(
    prompt=(1,),
    tokens=(2,),
    mask=(True,),
    logprobs=(0.0,),
    versions=(VersionSpan(0, 1),),
    sampling=(SamplingSpan(SamplingParams(temperature=0.0), 1),),
)


def trial(name: str, reward: float | None, **more: Any) -> Trial:
    trajectory = Trajectory(
        id="t.0",
        task="t",
        group="t",
        segments=more.get("segments", ()),
        score=None if reward is None else Score(reward, flags=more.get("flags", ())),
        status="failed" if reward is None else more.get("status", "done"),
        messages=[{"role": role} for role in more.get("roles", ("user", "assistant"))],
    )
    return Trial(
        name=name, trajectory=trajectory, diff=more.get("diff", "+"), open_s=0.0, score_s=0.0
    )


@pytest.mark.parametrize(
    ("trials", "words"),
    [
        ([trial(UNTOUCHED, 0.0), trial(REFERENCE, 1.0), trial(SESSION, 0.5)], []),
        ([trial(UNTOUCHED, 0.0)], ["no correct answer"]),
        ([trial(UNTOUCHED, 0.25), trial(GIVEN, 1.0)], ["doing nothing earns 0.25"]),
        ([trial(UNTOUCHED, 0.0), trial(GIVEN, 0.5)], ["your solution earns 0.5"]),
        (
            [trial(UNTOUCHED, 0.0), trial(REFERENCE, 0.0)],
            ["reference solution earns 0,", "everything earns 0:"],
        ),
        (
            [trial(UNTOUCHED, None), trial(REFERENCE, 1.0), trial(GIVEN, 1.0)],
            ["untouched failed"],
        ),
        (
            [trial(UNTOUCHED, None), trial(REFERENCE, None)],
            ["untouched failed", "reference solution failed"],
        ),
        (
            [
                trial(UNTOUCHED, 0.0),
                trial(GIVEN, 1.0),
                trial(SESSION, 0.0, status="timeout", roles=("user",), diff=""),
            ],
            ["no answer of the model", "did not finish", "changed no file"],
        ),
        (
            [trial(UNTOUCHED, 0.0), trial(GIVEN, 1.0), trial(SESSION, 0.0, segments=(GREEDY,))],
            ["sampled with temperature 0, which the trainer cannot recompute"],
        ),
        (
            [
                trial(UNTOUCHED, 0.0),
                trial(GIVEN, 1.0, flags=("cheat:early-exit", "slow")),
                trial(SESSION, 1.0, flags=("cheat:edited-tests",)),
            ],
            [
                "your solution is suspected of a trick (early-exit)",
                "session is suspected of a trick (edited-tests)",
            ],
        ),
    ],
)
def test_findings(trials: list[Trial], words: list[str]) -> None:
    found = findings(trials)
    assert len(found) == len(words), found
    assert all(word in line for word, line in zip(words, found, strict=True))


def test_scripts() -> None:
    assert parse_script("a\nb\n---\nc", lines_of_json=False) == [
        {"content": "a\nb\n"},
        {"content": "c"},
    ]
    lines = '"a\u2028b"\n\n{"content": null, "tool_calls": []}\n'
    assert parse_script(lines, lines_of_json=True) == [
        {"content": "a\u2028b"},
        {"content": None, "tool_calls": []},
    ]
    with pytest.raises(ValueError, match="line 1 must be a string or a message"):
        parse_script("[1]", lines_of_json=True)


def test_long_evidence_keeps_the_line_that_sums_it_up() -> None:
    evidence = "\n".join(["11 of 12 tests passed; exit code 1", *map(str, range(40))])
    scored = Score(0.0, parts=(Part("tests", 11 / 12, evidence=evidence),))
    attempted = Trajectory(
        id="try.0", task="t", group="try", segments=(), score=scored, status="done"
    )
    console = Console(record=True, width=100)
    trial = Trial(name=UNTOUCHED, trajectory=attempted, diff="", open_s=0.0, score_s=0.0)
    show(trial, console)
    _, part, *lines = console.export_text().splitlines()
    assert part == "  tests = 0.916667" and lines[0] == "    11 of 12 tests passed; exit code 1"
    assert lines[1] == "    ..." and lines[-1] == "    39" and len(lines) < 20
