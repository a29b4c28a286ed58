"""A build from end to end: a small repository becomes proven tasks that a run can use."""

from __future__ import annotations

import difflib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from rich.console import Console

from etude.cli import main
from etude.commands.tasks import print_build
from etude.core.errors import RolloutFailure
from etude.core.harness_config import CodeConfig
from etude.core.types import Attempt, Transcript
from etude.factory import check as checking
from etude.factory import grade as grading
from etude.factory.build import Options, Status, open_workshop
from etude.factory.check import Checked, check, task_folders
from etude.factory.grade import grade
from etude.factory.harbor import read_task
from etude.factory.task import GRADING_S, RepositoryTask
from etude.harness.code.agent import CodeAgent
from etude.run.task_folder import TaskFolder
from tests.factory.tiny import build_tiny, make_repository
from tests.harness.test_agent import model, says

LIMIT = 5
NOTHING = Attempt(transcript=Transcript(messages=[], finished=True), segments=())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Status]:
    place = tmp_path_factory.mktemp("factory")
    place.chmod(0o755)
    source = make_repository(place / "shop")
    return place / "out", build_tiny(source, place / "out", LIMIT)


def tasks_of(folder: Path) -> list[RepositoryTask]:
    return [read_task(place) for place in task_folders(folder)]


def test_tasks_of_many_kinds_are_kept(built: tuple[Path, Status]) -> None:
    folder, status = built
    kinds = {task.kind for task in tasks_of(folder)}
    assert {"bug", "bugs", "history"} <= kinds
    assert status.kept == len(tasks_of(folder)) == sum(status.summary()["kinds"].values())


def test_a_flaky_test_is_in_no_task(built: tuple[Path, Status]) -> None:
    for task in tasks_of(built[0]):
        assert not any("flaky" in test for test in (*task.fail_to_pass, *task.pass_to_pass))


def test_the_grader_waits_for_what_the_tests_take_and_not_for_minutes(
    built: tuple[Path, Status],
) -> None:
    for task in tasks_of(built[0]):
        assert task.processor_s is not None and 4 < task.processor_s < GRADING_S


async def test_a_machine_that_is_too_slow_for_the_solution_gives_no_verdict(
    built: tuple[Path, Status], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grading, "GRADING_S", 0.001)
    task = tasks_of(built[0])[0]
    async with (
        open_workshop(built[0], Options()) as workshop,
        workshop.pool.open(task.as_task().sandbox) as sandbox,
    ):
        with pytest.raises(RolloutFailure, match="too busy to grade"):
            await grade(task, sandbox, workshop.pool)


def test_what_shows_the_bug_is_not_in_the_working_copy(built: tuple[Path, Status]) -> None:
    for task in tasks_of(built[0]):
        shown = task.opening["tests/test_cart.py"].decode()
        for test in task.fail_to_pass:
            assert f"def {test.rpartition('::')[2]}(" not in shown
        for path, content in task.solution.items():
            assert task.opening[path] != content
        assert not any(path.startswith(".git") for path in task.opening)


def test_the_package_itself_is_not_installed(built: tuple[Path, Status]) -> None:
    assert not list((built[0] / "venvs").rglob("shop/cart.py"))


def test_the_same_command_goes_on(built: tuple[Path, Status]) -> None:
    folder, status = built
    log = folder / "build.jsonl"
    lines = log.read_text()
    log.write_text(lines + '{"task": "torn')  # killed in the middle of a line
    try:
        again = build_tiny(folder.parent / "shop", folder, LIMIT)
        assert again.summary() == status.summary()
        assert len(task_folders(folder)) == status.kept
    finally:
        log.write_text(lines)


def test_rows_are_written_and_read(built: tuple[Path, Status], tmp_path: Path) -> None:
    folder, status = built
    rows = [json.loads(line) for line in (folder / "swe-bench.jsonl").read_text().splitlines()]
    assert len(rows) == status.kept
    row = next(row for row in rows if "-history-" in row["instance_id"])
    assert json.loads(row["FAIL_TO_PASS"]) and row["test_patch"] and len(row["base_commit"]) == 40
    (tmp_path / "rows.jsonl").write_text(json.dumps(row | {"repo": str(folder.parent / "shop")}))
    tmp_path.chmod(0o755)
    out = tmp_path / "out"
    for part in ("venvs", "repositories"):  # prepared before
        shutil.copytree(folder / part, out / part, symlinks=True)
    assert build_tiny(str(tmp_path / "rows.jsonl"), out, 3).kinds == {"row": 1}
    (again,) = tasks_of(out)
    (before,) = [task for task in tasks_of(folder) if task.id == row["instance_id"]]
    assert again.fail_to_pass == before.fail_to_pass
    assert (again.opening, again.solution) == (before.opening, before.solution)


async def test_only_the_package_is_taken_over(built: tuple[Path, Status]) -> None:
    task = tasks_of(built[0])[0]
    cheats = {
        "shop/conftest.py": "import os; os._exit(0)\n",
        "conftest.py": "import os; os._exit(0)\n",
        "tests/test_cart.py": "def test_total():\n    pass\n",
        "pytest.py": "raise SystemExit(0)\n",
        "sitecustomize.py": "import os; os._exit(0)\n",
    }
    async with (
        open_workshop(built[0], Options()) as workshop,
        workshop.pool.open(task.as_task().sandbox) as sandbox,
    ):
        for path, text in cheats.items():
            await sandbox.write(path, text)
        score = await grade(task, sandbox, workshop.pool)
    # none of the agent's changes had an effect: passing tests still pass, failing ones still fail
    share = len(task.pass_to_pass) / len(task.expected)
    assert (score.reward, score.parts[0].value) == (0.0, share)


async def test_a_check_finds_what_does_not_hold(built: tuple[Path, Status], tmp_path: Path) -> None:
    wrong = task_folders(built[0])[0]
    shutil.copytree(wrong, tmp_path / wrong.name)
    for file in (tmp_path / wrong.name / "solution" / "files").rglob("*.py"):
        file.write_bytes(b"raise ImportError\n")
    async with open_workshop(built[0], Options()) as workshop:
        found = await check(
            tmp_path, workshop.pool, repetitions=1, jobs=2, changed=lambda found: None
        )
    assert found.broken == {wrong.name: "the solution fails"}
    assert (found.tasks, found.ok, found.flaky) == (1, 0, 0)


@pytest.mark.parametrize(("flaky", "said"), [(0, "0 are"), (1, "1 is"), (2, "2 are")])
def test_a_check_says_how_many_are_flaky(
    flaky: int,
    said: str,
    built: tuple[Path, Status],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def found(*_: object, **__: object) -> Checked:
        broken = {f"[/{n}]": "flaky" for n in range(flaky)}
        return Checked(tasks=5, ok=5 - flaky, flaky=flaky, broken=broken)

    monkeypatch.setattr(checking, "check", found)
    assert main(["tasks", "check", str(built[0])]) == (1 if flaky else 0)
    assert f"{5 - flaky} of 5 tasks pass; {said} flaky" in capsys.readouterr().out
    main(["tasks", "check", str(built[0]), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert list(told["broken"]) == [f"[/{n}]" for n in range(flaky)]


async def test_a_run_can_be_made_of_it(built: tuple[Path, Status]) -> None:
    counts = {"train": 100, "heldout": 100, "novel": 0}
    async with open_workshop(built[0], Options()) as workshop:
        environment = TaskFolder(workshop.pool, counts=counts, seed=0, path=str(built[0]))
        splits = [environment.tasks("train"), environment.tasks("heldout")]
        assert all(splits) and not environment.tasks("novel")  # of a single file
        tasks = [*splits[0], *splits[1]]
        assert len(tasks) == len(tasks_of(built[0]))
        assert {task.id for task in tasks} == {task.id for task in tasks_of(built[0])}
        task = tasks[0]
        async with environment.open(task) as sandbox:
            assert (await environment.score(task, sandbox, NOTHING)).reward == 0.0
            for path, text in environment.solution(task).items():
                await sandbox.write(path, text)
            assert (await environment.score(task, sandbox, NOTHING)).reward == 1.0


async def test_runs_that_share_results_grade_a_change_once(
    built: tuple[Path, Status], tmp_path: Path
) -> None:
    counts = {"train": 100, "heldout": 100, "novel": 0}
    path, results, verdicts = str(built[0]), tmp_path / "results", []
    async with open_workshop(built[0], Options()) as workshop:
        for number in range(2):
            own = TaskFolder(workshop.pool, counts=counts, seed=0, path=path, results=str(results))
            task = own.tasks("train")[0]
            async with own.open(task) as sandbox:
                for name, text in own.solution(task).items():
                    await sandbox.write(name, text)
                verdicts.append(await own.score(task, sandbox, NOTHING))
            [kept] = (results / "verdicts").iterdir()
            if number == 0:  # a changed verdict in another run can only come from there
                kept.write_bytes(kept.read_bytes().replace(b"tests", b"taken"))
    assert [each.reward for each in verdicts] == [1.0, 1.0]
    assert [each.parts[0].name for each in verdicts] == ["tests", "taken"]


async def test_a_session_of_the_coding_harness_earns_its_reward(built: tuple[Path, Status]) -> None:
    counts = {"train": 100, "heldout": 100, "novel": 0}
    async with open_workshop(built[0], Options()) as workshop:
        environment = TaskFolder(workshop.pool, counts=counts, seed=0, path=str(built[0]))
        task = next(each for each in tasks_of(built[0]) if each.kind == "bug").as_task()
        [(path, good)] = environment.solution(task).items()
        bad = bytes(task.sandbox.files[path]).decode()  # type: ignore[arg-type]
        names = {"fromfile": f"a/{path}", "tofile": f"b/{path}", "lineterm": ""}
        diff = "\n".join(difflib.unified_diff(bad.splitlines(), good.splitlines(), **names))
        script = iter(
            [
                says(("read", json.dumps({"path": path})), ("run_tests", "{}")),
                says(("apply_patch", json.dumps({"patch": diff})), ("run_tests", "{}")),
                says(("submit", "{}")),
            ]
        )
        limits = {"max_turns": 9, "max_tokens": 9, "timeout_s": 1800.0}
        async with (
            model(lambda request: next(script)) as (url, _),
            aiohttp.ClientSession() as http,
            environment.open(task) as sandbox,
        ):
            agent = CodeAgent(http, code=CodeConfig(diagnostics={}), **limits)
            transcript = await agent.run(task, sandbox, base_url=url, api_key="key", seed=0)
            attempt = Attempt(transcript=transcript, segments=())
            score = await environment.score(task, sandbox, attempt)
    assert transcript.finished and score.reward == 1.0
    told = [message["content"] for message in transcript.messages if message["role"] == "tool"]
    assert "passed" in told[1] and told[2] == f"ok\nchanged {path}"  # its own tests are hidden


def test_the_commands_say_what_there_is(
    built: tuple[Path, Status], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = built[0]
    assert main(["tasks", "stats", str(folder), "--json"]) == 0
    told = capsys.readouterr()
    found = json.loads(told.out.splitlines()[-1])
    assert found["kinds"] == dict(built[1].kinds)
    splits = found["splits"]
    assert f"{splits['train']} for training, {splits['heldout']} held out" in told.err
    assert splits["train"] and splits["heldout"] and not splits["novel"]
    assert sum(splits.values()) == built[1].kept
    one = task_folders(folder)[0]
    assert main(["tasks", "show", str(folder), one.name]) == 0
    said = capsys.readouterr().out
    assert one.name in said and "+++ b/" in said
    assert main(["tasks", "show", str(folder), "nothing-of-the-kind"]) == 2
    assert main(["tasks", "show", str(folder), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [each["id"] for each in listed] == [each.name for each in task_folders(folder)]
    assert listed[0]["instruction"] == read_task(one).instruction


def test_a_build_that_falls_short_says_so(
    built: tuple[Path, Status], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, status = built
    console = Console(width=200)
    print_build(status, folder, console)
    assert "all drafts" not in capsys.readouterr().out
    print_build(replace(status, limit=status.kept + 3), folder, console)
    assert f"{status.kept} of {status.kept + 3}: all drafts are" in capsys.readouterr().out


def test_a_source_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    tmp_path.chmod(0o755)
    status = build_tiny(tmp_path / "empty", tmp_path / "out", 1)
    assert status.kept == 0
    assert "no package with tests" in status.discarded[str(tmp_path / "empty")]
