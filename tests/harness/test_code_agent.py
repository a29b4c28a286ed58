"""The coding harness as an agent: its prompt, the stored prompt parts, and whole sessions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.core.harness_config import CodeConfig, PromptConfig
from etude.core.memo import Memo
from etude.core.sandbox import CommandResult, SandboxSpec, Service
from etude.core.types import PromptPart, Task
from etude.harness.code.agent import CodeAgent, is_dropped
from etude.harness.code.diagnostics import Diagnostics, FakeDiagnostics
from etude.harness.code.prompt import collect_parts, counter, render, system_text
from etude.harness.code.tool import TestCache, Workspace
from etude.run.controller import build_agent, server_mounts
from etude.sandbox.fake import FakeSandbox, Files
from etude.sandbox.pool import open_sandbox_pool
from tests.harness.test_agent import model, says

RUN = 'name = "r"\n[[stage]]\nkind = "rl"\nsteps = 1\n[harness.code]\n'
TASK = Task(id="t", prompt="mend it", sandbox=SandboxSpec(files={"a.py": "x = 1\n"}))


def answers(files: Files, argv: Any) -> CommandResult:
    return CommandResult(0, '[["a.py"], ["b/c.py"]]' if argv[0] == "python" else "")


async def session(script: list[Any], task: Task = TASK, **prompt: Any) -> Any:
    said = iter(script)
    config = CodeConfig(diagnostics={}, prompt=PromptConfig(**prompt))
    sandbox = FakeSandbox({"a.py": "x = 1\n", "AGENTS.md": "Use tabs."}, answers)
    async with (
        model(lambda request: next(said)) as (url, requests),
        aiohttp.ClientSession() as http,
    ):
        agent = CodeAgent(http, code=config, max_turns=4, max_tokens=9, timeout_s=600.0)
        transcript = await agent.run(task, sandbox, base_url=url, api_key="key", seed=7)
    return transcript, requests, sandbox


async def test_a_session_edits_and_submits() -> None:
    edit = ("edit", '{"path": "a.py", "old": "x = 1", "new": "x = 2"}')
    transcript, requests, sandbox = await session([says(edit), says(("submit", "{}"))])
    assert transcript.finished and sandbox.files["a.py"] == "x = 2\n"
    assert transcript.messages[-3]["content"] == "ok: line 1"
    # Every request continues the previous one, with the same tools: one unbroken context.
    assert [request["messages"] for request in requests] == [
        transcript.messages[:n] for n in (2, 4)
    ]
    assert requests[0]["tools"] == requests[1]["tools"]


@pytest.mark.parametrize("remember", [True, False])
async def test_tests_over_the_same_working_copy_run_once_if_they_are_remembered(
    remember: bool,
) -> None:
    ran: list[tuple[str, str]] = []

    def tests(files: Files, argv: Any) -> CommandResult:
        if "pytest" not in argv:
            return CommandResult(1, "")
        ran.append((str(files["a.py"]).strip(), argv[-1]))
        return CommandResult(1, f"run {len(ran)}")

    config = CodeConfig(
        tools=("edit", "undo", "run_tests", "submit"), diagnostics={}, remember_tests=remember
    )

    async def answers_to(task: Task, script: list[tuple[str, str]]) -> list[str]:
        said = iter(script)
        sandbox = FakeSandbox({"a.py": "x = 1\n"}, tests)
        async with model(lambda request: says(next(said))) as (url, _):
            transcript = await agent.run(task, sandbox, base_url=url, api_key="key", seed=7)
        told = [m["content"] for m in transcript.messages if m["role"] == "tool"]
        return [text.splitlines()[0] for text in told if text.startswith("run")]

    edit = ("edit", '{"path": "a.py", "old": "x = 1", "new": "x = 2"}')
    all_tests, one = ("run_tests", "{}"), ("run_tests", '{"tests": ["one"]}')
    script = [all_tests, edit, all_tests, one, ("undo", "{}"), all_tests, ("submit", "{}")]
    async with aiohttp.ClientSession() as http:
        agent = CodeAgent(http, code=config, max_turns=9, max_tokens=9, timeout_s=600.0)
        first = await answers_to(TASK, script)
        again = await answers_to(TASK, script)
        other = await answers_to(replace(TASK, id="other"), script)
    if not remember:
        assert len(ran) == len({*first, *again, *other}) == 12
        return
    assert first == again == ["run 1", "run 2", "run 3", "run 1"]
    assert other == ["run 4", "run 5", "run 6", "run 4"]
    assert ran[:3] == [("x = 1", "--tb=short"), ("x = 2", "--tb=short"), ("x = 2", "one")]


async def test_tests_that_are_remembered_leave_nothing_behind_and_kills_are_forgotten() -> None:
    ran: list[int | None] = []

    def tests(files: Files, argv: Any) -> CommandResult:
        if "pytest" not in argv:
            return CommandResult(1, "")
        files["left.txt"] = "x"
        ran.append(None if not ran else 1)
        return CommandResult(ran[-1], "")

    sandbox = FakeSandbox({"a.py": "x = 1\n"}, tests)
    cache = TestCache("t", "s", Memo(8))
    config = CodeConfig(tools=("run_tests", "submit"), diagnostics={}, remember_tests=True)
    workspace = Workspace(sandbox, config, Diagnostics(FakeDiagnostics()), cache)
    codes = [(await workspace.run_tests(["pytest"])).exit_code for _ in range(3)]
    assert codes == [None, 1, 1] and ran == [None, 1]
    assert "left.txt" not in sandbox.files


async def test_agents_that_share_results_run_the_tests_once() -> None:
    config = CodeConfig(tools=("run_tests", "submit"), diagnostics={}, remember_tests=True)
    limits = {"max_turns": 9, "max_tokens": 9, "timeout_s": 600.0}
    results, told = Memo[CommandResult](8), []

    async def run(output: str) -> CommandResult:
        return CommandResult(0, output)

    async with aiohttp.ClientSession() as http:
        for sandbox in (TASK.sandbox, TASK.sandbox, replace(TASK.sandbox, env={"A": "1"})):
            agent = CodeAgent(http, code=config, test_results=results, **limits)
            cache = agent._test_cache(replace(TASK, sandbox=sandbox))
            assert cache is not None
            ran = await cache.run(["pytest"], {}, partial(run, str(len(told))))
            told.append(ran.output)
    assert told == ["0", "0", "2"]


async def test_tasks_whose_tests_depend_on_more_than_files_are_not_remembered() -> None:
    config = CodeConfig(tools=("run_tests", "submit"), diagnostics={}, remember_tests=True)
    async with aiohttp.ClientSession() as http:
        agent = CodeAgent(http, code=config, max_turns=9, max_tokens=9, timeout_s=600.0)
        specs = [
            SandboxSpec(),
            SandboxSpec(network=("example.org",)),
            SandboxSpec(services=(Service(name="db", argv=("db",), port=1),)),
        ]
        found = [agent._test_cache(replace(TASK, sandbox=spec)) for spec in specs]
    assert [cache is None for cache in found] == [False, True, True]


async def test_the_prompt_goes_from_what_all_share_to_the_task_and_is_kept_in_parts() -> None:
    transcript, _, _ = await session([says(("submit", "{}"))])
    system, user = transcript.messages[:2]
    assert system["content"] == system_text(CodeConfig())
    assert user["content"] == (
        "AGENTS.md says:\n\nUse tabs.\n\nFiles, level 1: a.py\n\nFiles, level 2: b/c.py\n\nmend it"
    )
    # parts that were left out are stored, to be tried again
    short, _, _ = await session([says(("submit", "{}"))], max_tokens=20)
    assert short.messages[0] == {"role": "user", "content": "mend it"}
    assert short.prompt_parts == transcript.prompt_parts
    assert render(short.prompt_parts, 4096, counter(3.0)) == transcript.messages[:2]


async def test_prompt_dropout_leaves_the_system_prompt_out() -> None:
    transcript, _, _ = await session([says(("submit", "{}"))], dropout=1.0)
    assert [message["role"] for message in transcript.messages[:2]] == ["user", "assistant"]
    assert [part.name for part in transcript.prompt_parts][0] == "system"
    dropped = sum(is_dropped(seed, 0.25) for seed in range(2000))
    assert 400 < dropped < 600
    assert not any(is_dropped(seed, 0.0) for seed in range(100))


async def test_a_conversation_of_the_task_stays_as_it_is() -> None:
    told = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"})
    task = replace(TASK, prompt="", messages=told)
    transcript, _, _ = await session([says(("submit", "{}"))], task)
    assert [m["role"] for m in transcript.messages[:3]] == ["system", "user", "assistant"]
    own = replace(task, messages=({"role": "system", "content": "mine"}, *told))
    transcript, _, _ = await session([says(("submit", "{}"))], own)
    assert transcript.messages[:3] == [*own.messages]


PARTS = st.lists(
    st.builds(
        PromptPart,
        name=st.sampled_from("abcdef"),
        text=st.text("xy", min_size=1, max_size=9),
        role=st.sampled_from(["system", "user"]),
        priority=st.integers(0, 4),
    ),
    max_size=8,
)


@settings(max_examples=100, deadline=None)
@given(parts=PARTS, room=st.integers(0, 60))
def test_the_smallest_priority_that_fits_decides(parts: list[PromptPart], room: int) -> None:
    shown = "\n\n".join(message["content"] for message in render(parts, room, len))
    kept = next(
        each
        for lowest in [*range(1, 5), 9]
        for each in [[p for p in parts if p.priority == 0 or p.priority >= lowest]]
        if lowest == 9 or sum(len(p.text) for p in each) <= room
    )
    assert shown == "\n\n".join(part.text for part in kept)


def test_the_system_prompt_names_tools_as_the_model_knows_them(tmp_path: Path) -> None:
    own = tmp_path / "system.txt"
    own.write_text("Use {edit} and {x}.")
    config = CodeConfig(
        tool={"edit": {"name": "str_replace"}},  # type: ignore[dict-item]
        prompt=PromptConfig(system=str(own)),
    )
    assert system_text(config) == "Use str_replace and {x}."
    with pytest.raises(EtudeError, match=r"harness\.code\.prompt\.system"):
        system_text(CodeConfig(prompt=PromptConfig(system=str(tmp_path / "none"))))


async def test_the_table_chooses_the_harness() -> None:
    config = parse(RUN, ["harness.code.prompt.dropout=0.5"])
    async with aiohttp.ClientSession() as http:

        def build(**more: Any) -> Any:
            return build_agent(config.harness, object(), http, desk=None, temperature=1.0, **more)  # type: ignore[arg-type]

        agent = build(is_training=True)
        assert isinstance(agent, CodeAgent)
        assert agent._code.prompt.dropout == 0.5
        assert build()._code.prompt.dropout == 0.0


def test_sandboxes_show_the_servers_that_are_installed() -> None:
    [mount] = server_mounts(parse(RUN, ['harness.code.diagnostics={py=["python","server"]}']))
    assert mount.endswith(":/opt/servers")
    assert server_mounts(parse(RUN, ['harness.code.diagnostics={no=["no-such"]}'])) == ()
    assert server_mounts(parse(RUN, ["sandbox.isolation=process"])) == ()
    assert server_mounts(parse(RUN.replace("[harness.code]\n", ""))) == ()


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("harness.code.tools=['read']", "tools has no submit"),
        ("harness.code.tool={read={name='edit'}}", "two tools are called edit"),
        ("harness.code.user_replies={'('='x'}", "is not a regular expression"),
        ("harness.code.tools=['fly']", "harness.code.tools"),
        ("harness.command=['x']", "two agents: leave out one"),
        ("tasks.environment=http://h", r"leave out .*harness\.code"),
    ],
)
def test_mistakes_in_the_table_are_told(override: str, told: str) -> None:
    with pytest.raises(EtudeError, match=told):
        parse(RUN, [override])


async def test_parts_of_a_working_copy_without_anything() -> None:
    sandbox = FakeSandbox({}, lambda files, argv: CommandResult(127, "python: not found"))
    parts = await collect_parts(TASK, sandbox, CodeConfig())
    assert [part.name for part in parts] == ["system", "task"]


async def test_levels_of_the_tree_are_told_as_far_as_an_output_is_kept() -> None:
    folders = "/".join(f"level{n}-{'x' * 30}" for n in range(5))
    files = {f"{folders}/module_{n}.py": "" for n in range(100)} | {"a.py": ""}
    pool = open_sandbox_pool("process")
    async with pool.open(SandboxSpec(files=files)) as sandbox:
        parts = await collect_parts(TASK, sandbox, CodeConfig(prompt=PromptConfig(depth=6)))
    await pool.close()
    told = [part.name for part in parts if part.name.startswith("files")]
    assert told == [f"files {n}" for n in range(1, 6)], "but for the one that is too much"
