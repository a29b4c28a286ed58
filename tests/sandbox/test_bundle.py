"""The OCI bundle of a gVisor sandbox, and the lines to its first process; without runsc."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from etude.core.errors import RolloutFailure
from etude.core.sandbox import Limits, SandboxSpec
from etude.sandbox import machine
from etude.sandbox.bundle import SOURCE, build_root, copy_program, oci_spec
from etude.sandbox.gvisor import GvisorSandboxPool
from etude.sandbox.lines import Lines
from etude.sandbox.mounts import Mount
from tests.namespaces import need_namespaces

LONG_S = 60.0


def spec(tmp_path: Path, limits: Limits, cgroup: str = "/here") -> dict[str, Any]:
    return oci_spec(tmp_path, tmp_path / "p", [Mount("/opt", "/opt/x")], limits, cgroup=cgroup)


def test_nothing_of_the_host_can_be_written(tmp_path: Path) -> None:
    told = spec(tmp_path, Limits())
    assert told["root"]["readonly"] and told["process"]["noNewPrivileges"]
    binds = [each for each in told["mounts"] if each["type"] == "bind"]
    assert all("ro" in each["options"] for each in binds)
    assert {each["destination"] for each in binds} >= {"/usr", "/opt/x", SOURCE}
    assert not {"/", "/etc", "/home", "/var", "/sys"} & {each["source"] for each in binds}
    kinds = {each["type"] for each in told["linux"]["namespaces"]}
    assert {"network", "pid", "mount", "ipc"} <= kinds


def test_mounts_are_written_as_a_runtime_reads_them(tmp_path: Path) -> None:
    for each in spec(tmp_path, Limits())["mounts"]:
        assert each.keys() - {"options"} == {"destination", "type", "source"}
        assert all(isinstance(option, str) for option in each.get("options", []))


def test_limits_are_those_of_the_task(tmp_path: Path) -> None:
    limits = Limits(cpus=0.5, memory_bytes=1 << 30, disk_bytes=7 << 20)
    told = spec(tmp_path, limits)
    resources = told["linux"]["resources"]
    assert resources["cpu"] == {"quota": 50_000, "period": 100_000}
    assert resources["memory"]["limit"] >= 1 << 30 and resources["pids"]["limit"] > 0
    work = next(each for each in told["mounts"] if each["destination"] == "/work")
    assert f"size={7 << 20}" in work["options"]
    assert "resources" not in spec(tmp_path, limits, cgroup="")["linux"]


def test_the_program_inside_needs_nothing_else_of_ours(tmp_path: Path) -> None:
    build_root(tmp_path / "root")
    assert (tmp_path / "root/app").readlink() == Path("/work")
    etc = {file.name: file.read_text() for file in (tmp_path / "root/etc").glob("[ghnp]*")}
    assert etc["passwd"].split(":")[:4] == ["user", "x", "1000", "1000"]
    assert etc["group"].startswith("user:x:1000:")
    # names come from the file, and no name server is asked for others
    assert "127.0.0.1 localhost" in etc["hosts"] and etc["nsswitch.conf"] == "hosts: files\n"
    copy_program(tmp_path / "program")
    argv = [sys.executable, "-I", "-S", "-c"]
    argv += [f"import sys; sys.path.append({str(tmp_path / 'program')!r}); "
             "import etude.sandbox.machine as m; print(m.__file__)"]  # fmt: skip
    ran = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert ran.stdout.startswith(str(tmp_path)), ran.stderr


@pytest.mark.parametrize("pty", [True, False])
def test_a_process_beside_has_a_terminal_if_it_is_given_one(pty: bool) -> None:
    need_namespaces()
    keyboard, terminal = os.openpty()
    said = "echo on > /dev/tty" if pty else "echo on"
    ran = subprocess.run(
        machine.MachineSandbox({}, {})._launched_beside(["sh", "-c", said], pty),
        stdin=terminal if pty else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    os.set_blocking(keyboard, False)
    heard = os.read(keyboard, 100) if pty else b""
    os.close(keyboard)
    os.close(terminal)
    assert ran.returncode == 0, ran.stdout
    assert (ran.stdout, heard) == ((b"", b"on\r\n") if pty else (b"on\n", b""))


RUNSC = """#!/bin/sh
echo "$*" >> "$0.log"
case "$*" in
*" checkpoint "*) exit 0 ;;
*" restore "*) if [ -e "$0.says" ]; then cat "$0.says" >&2; exit 1; fi ;;
esac
exec sed -un 's/^{"id": \\([0-9]*\\),.*/{"id": \\1, "ok": null}/p'
"""
"""Agrees to everything, and records its arguments."""


@pytest.fixture
def runsc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "runsc"
    place.write_text(RUNSC)
    place.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return place


async def test_every_sandbox_is_restored_from_one_checkpoint(runsc: Path) -> None:
    pool = GvisorSandboxPool()
    async with pool.open(SandboxSpec()), pool.open(SandboxSpec()):
        pass
    await pool.close()
    called = [line.split() for line in Path(f"{runsc}.log").read_text().splitlines()]
    flags = [word for line in called for word in line if word.startswith("--image-path=")]
    words = [[word for word in line if not word.startswith("--")] for line in called]
    assert [line[0] for line in words] == ["run", "run", "checkpoint", "restore", "restore"]
    _, template, checkpoint, *restored = [line[1] for line in words]
    assert checkpoint == template and len({template, *restored}) == 3
    assert len(flags) == 3 and len(set(flags)) == 1


async def test_what_runsc_said_is_told_with_the_failure(runsc: Path) -> None:
    pool = GvisorSandboxPool()
    for says, told in (("\n no image\n", "no image"), ("\n", "nothing")):
        Path(f"{runsc}.says").write_text(says)
        with pytest.raises(RolloutFailure, match=f"^sandbox: it .*; runsc said: {told}$"):
            async with pool.open(SandboxSpec()):
                pass
    await pool.close()


class Other:
    """The other end of the lines."""

    def __init__(self) -> None:
        self.asked, self.requests = os.pipe()
        theirs, self.says = os.pipe()
        self._ends = (theirs, self.requests)

    async def lines(self) -> Lines:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(self._ends[0], "rb")
        )
        protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader())
        transport, _ = await loop.connect_write_pipe(
            lambda: protocol, os.fdopen(self._ends[1], "wb")
        )
        return Lines(reader, asyncio.StreamWriter(transport, protocol, None, loop))

    async def hear(self, number: int = 1) -> list[Any]:
        """`number` requests, however the pipe splits them."""
        data = b""
        while data.lstrip().count(b"\n") < number:
            data += await asyncio.to_thread(os.read, self.asked, 1 << 16)
        return [json.loads(line) for line in data.lstrip().splitlines()]

    def say(self, *answers: object) -> None:
        for each in answers:
            line = each if isinstance(each, bytes) else json.dumps(each).encode()
            os.write(self.says, line + b"\n")


@pytest.fixture
async def other() -> AsyncIterator[Other]:
    made = Other()
    yield made
    os.close(made.asked)
    os.close(made.says)


async def test_answers_come_in_any_order_also_after_a_restoration(other: Other) -> None:
    lines = await other.lines()
    calls = [asyncio.ensure_future(lines.call("x", {"n": n}, LONG_S)) for n in range(2)]
    first, second = await other.hear(2)
    # the end of a line of the origin, and an answer to the origin, come first
    other.say(b'"}', {"id": 99, "ok": 1}, {"id": second["id"], "ok": "b"})
    other.say({"id": first["id"], "error": ["FileNotFoundError", "a"]})
    assert await calls[1] == "b"
    with pytest.raises(FileNotFoundError, match="a"):
        await calls[0]
    lines.close()
    with pytest.raises(RolloutFailure, match="closed"):
        await lines.call("x", {}, LONG_S)


async def test_what_the_origin_asked_is_no_answer_to_a_fork(other: Other) -> None:
    origin = Other()
    asking = [await origin.lines(), await other.lines()]
    calls = [asyncio.ensure_future(lines.call("x", {}, LONG_S)) for lines in asking]
    (before,), (after,) = await origin.hear(), await other.hear()
    other.say({"id": before["id"], "ok": "the origin's"}, {"id": after["id"], "ok": "the fork's"})
    assert await calls[1] == "the fork's"
    for lines in asking:
        lines.close()
    with pytest.raises(RolloutFailure):
        await calls[0]
    os.close(origin.asked)
    os.close(origin.says)


async def test_a_request_that_a_checkpoint_cut_off_is_left_out(
    other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: asyncio.Queue[object] = asyncio.Queue()
    monkeypatch.setattr(machine, "_say", said.put_nowait)
    monkeypatch.setattr("sys.stdin", os.fdopen(os.dup(other.asked), "rb"))
    os.write(other.requests, b'{"id": 7, "operation": "wri')
    serving = asyncio.create_task(machine.Machine().serve())
    lines = await other.lines()
    call = asyncio.ensure_future(lines.call("hello", {}, LONG_S))
    async with asyncio.timeout(LONG_S):
        answer = await said.get()
        other.say(answer)
        assert await call is None
        lines.close()
        await serving


async def test_what_nobody_waits_for_is_cancelled_there(other: Other) -> None:
    lines = await other.lines()
    call = asyncio.ensure_future(lines.call("run", {}, LONG_S))
    (asked,) = await other.hear()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await other.hear() == [{"cancel": asked["id"]}]
    with pytest.raises(RolloutFailure, match="no answer within 0 s"):
        await lines.call("x", {}, 0.01)
    lines.close()
