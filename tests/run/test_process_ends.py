"""The end of a run's process: with one line, with its parent, or as it was told."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from etude.core.errors import EtudeError
from etude.run import process
from etude.run.process import error_message, run_process


def test_the_users_error_is_found_in_any_depth() -> None:
    group = ExceptionGroup(
        "outer", [ValueError("noise"), ExceptionGroup("inner", [EtudeError("the disk is full")])]
    )
    assert (
        error_message(EtudeError("plain")) == "plain" and error_message(group) == "the disk is full"
    )
    assert (
        error_message(ExceptionGroup("outer", [ValueError("a bug")])) is None
        and error_message(ValueError()) is None
    )


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_users_error_is_one_line_and_code_2(
    wrapped: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    async def program() -> None:
        error = EtudeError("the disk is full")
        raise ExceptionGroup("", [error]) if wrapped else error

    assert run_process(program) == 2
    assert capsys.readouterr().err == "error: the disk is full\n"


def test_a_bug_keeps_its_traceback_and_an_end_is_0() -> None:
    async def bug() -> None:
        raise ExceptionGroup("", [ValueError("a bug")])

    async def end() -> None: ...

    with pytest.raises(ExceptionGroup):
        run_process(bug)
    assert run_process(end) == 0


def test_a_process_that_is_told_to_stop_says_so_in_its_code() -> None:
    async def waits() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    assert run_process(waits) == 128 + signal.SIGTERM


CHILD = "import time; print('begun', flush=True); time.sleep(60); print('outlived it')"
PARENT = f"""
import os, subprocess, sys
from etude.run.process import die_with_parent
parent = os.getpid()
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], preexec_fn=lambda: die_with_parent(parent))
child.wait()
"""  # noqa: E501


def test_a_child_ends_with_a_parent_that_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "begun\n"
    parent.kill()
    parent.wait()
    assert parent.stdout.read() == "", "the pipe has no other end than the child's"


ORPHAN = """
import os
from etude.run.process import die_with_parent
die_with_parent(os.getppid() + 1)
print("still here")
"""


def test_a_child_whose_parent_is_gone_already_does_not_begin() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ORPHAN], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")


def test_a_process_whose_parent_died_before_it_could_ask_ends_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, ...]] = []
    ended: list[int] = []
    libc = SimpleNamespace(prctl=lambda *told: asked.append(told))
    monkeypatch.setattr(process, "_libc", libc)
    monkeypatch.setattr(process.os, "_exit", ended.append)
    process.die_with_parent(os.getppid())
    assert asked == [(1, signal.SIGKILL)] and ended == []  # 1: PR_SET_PDEATHSIG
    process.die_with_parent(os.getppid() + 1)
    assert ended == [1]


def test_memory_that_is_freed_stays_where_the_library_can_keep_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: dict[int, int] = {}
    monkeypatch.setattr(process, "_libc", SimpleNamespace(mallopt=told.__setitem__))
    process.keep_freed_memory()
    assert told == {-4: 0, -1: -1}  # no separate mapping from the kernel, and no memory returned
    monkeypatch.setattr(process, "_libc", SimpleNamespace())
    process.keep_freed_memory()
