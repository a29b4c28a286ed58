"""What gVisor is told of a sandbox, and the lines to what runs in it; without runsc."""

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
from etude.core.sandbox import Limits
from etude.sandbox.bundle import SOURCE, build_root, copy_program, oci_spec
from etude.sandbox.lines import Lines
from etude.sandbox.mounts import Mount

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
    copy_program(tmp_path / "program")
    argv = [sys.executable, "-I", "-S", "-c"]
    argv += [f"import sys; sys.path.append({str(tmp_path / 'program')!r}); "
             "import etude.sandbox.machine as m; print(m.__file__)"]  # fmt: skip
    ran = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert ran.stdout.startswith(str(tmp_path)), ran.stderr


class Other:
    """The other end of the lines."""

    def __init__(self) -> None:
        self.asked, ours = os.pipe()
        theirs, self.says = os.pipe()
        self._ends = (theirs, ours)

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
        """So many calls, however the pipe cuts them."""
        data = b""
        while data.count(b"\n") < number:
            data += await asyncio.to_thread(os.read, self.asked, 1 << 16)
        return [json.loads(line) for line in data.splitlines()]

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
    # the end of another's answer, and the whole of one, come first
    other.say(b'"}', {"id": 99, "ok": 1}, {"id": second["id"], "ok": "b"})
    other.say({"id": first["id"], "error": ["FileNotFoundError", "a"]})
    assert await calls[1] == "b"
    with pytest.raises(FileNotFoundError, match="a"):
        await calls[0]
    lines.close()
    with pytest.raises(RolloutFailure, match="closed"):
        await lines.call("x", {}, LONG_S)


async def test_what_nobody_waits_for_is_cancelled_there(other: Other) -> None:
    lines = await other.lines()
    call = asyncio.ensure_future(lines.call("run", {}, LONG_S))
    (asked,) = await other.hear()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await other.hear() == [{"cancel": asked["id"]}]
    with pytest.raises(RolloutFailure, match="no answer in 0 s"):
        await lines.call("x", {}, 0.01)
    lines.close()
