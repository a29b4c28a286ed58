"""Processes that run on between commands: streams, terminals, and no leftovers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from etude.core.errors import RolloutFailure
from etude.core.sandbox import CommandResult, Process, SandboxPool, SandboxSpec
from etude.sandbox.fake import FakeSandboxPool
from etude.sandbox.namespaces import NamespaceSandboxPool
from etude.sandbox.pool import open_sandbox_pool
from tests.namespaces import need_namespaces
from tests.sandbox.test_isolation import LONG_S, alive, descendants, until

_numbers = itertools.count(os.getpid() * 1000)


def unique_sleep() -> str:
    """Seconds of a sleep that no other process has on its command line."""
    return f"9{next(_numbers)}"


def running(word: str) -> set[int]:
    """The processes on this machine with this word in their command line."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in path.read_bytes().split(b"\0") and alive(int(path.parent.name)):
                found.add(int(path.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def need_processes_in_sight(pool: SandboxPool) -> None:
    if pool.tier in ("gvisor", "vm"):
        pytest.skip("what runs on a kernel of its own is no process of this machine")


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def read_all(process: Process) -> bytes:
    async with asyncio.timeout(LONG_S):
        output = b""
        while data := await process.read():
            output += data
        return output


async def read_until(process: Process, end: bytes) -> bytes:
    async with asyncio.timeout(LONG_S):
        output = b""
        while end not in output:
            data = await process.read()
            assert data, f"it ended after {output!r}"
            output += data
        return output


async def test_output_comes_before_the_end_and_input_goes_in(pool: SandboxPool) -> None:
    script = "print('name?', flush=True)\nprint('hello', input())\nraise SystemExit(3)"
    async with pool.open(SandboxSpec(files={"s.py": script})) as sandbox:
        process = await sandbox.start(["python", "-u", "s.py"])
        assert await read_until(process, b"\n") == b"name?\n"
        await process.write(b"you\n")
        assert await read_all(process) == b"hello you\n"
        assert await process.wait() == await process.wait() == 3
        assert await process.read() == b""
        await process.kill()
        await process.write(b"nobody reads this")


async def test_a_reader_that_gives_up_loses_nothing(pool: SandboxPool) -> None:
    script = "import time\nfor n in range(300):\n    print(n, flush=True); time.sleep(0.001)"
    async with pool.open(SandboxSpec(files={"s.py": script})) as sandbox:
        process = await sandbox.start(["python", "s.py"])
        output, data = b"", None
        while data != b"":
            data = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.0015):
                    data = await process.read()
            output += data or b""
        assert output.split() == [str(n).encode() for n in range(300)]


async def test_two_readers_share_the_output(pool: SandboxPool) -> None:
    async with pool.open(SandboxSpec()) as sandbox:
        process = await sandbox.start(["cat"])
        readers = [asyncio.create_task(process.read()) for _ in range(2)]
        await asyncio.sleep(0.05)
        await process.write(b"x")
        await process.write(b"")
        async with asyncio.timeout(LONG_S):
            assert sorted([await each for each in readers]) == [b"", b"x"]


async def test_bytes_pass_as_they_are_and_input_has_an_end(pool: SandboxPool) -> None:
    data = bytes(range(256)) * 2000  # more than a pipe holds
    async with pool.open(SandboxSpec()) as sandbox:
        process = await sandbox.start(["cat"])

        async def feed() -> None:
            await process.write(data)
            await process.write(b"")

        output, _ = await asyncio.gather(read_all(process), feed())
        assert output == data and await process.wait() == 0


async def test_it_goes_on_beside_other_commands_also_when_it_is_killed(pool: SandboxPool) -> None:
    script = "import time\nwhile True:\n    open('beat', 'w').write('x'); time.sleep(0.01)"
    async with pool.open(SandboxSpec(files={"s.py": script})) as sandbox:
        beats, sleeps = await sandbox.start(["python", "s.py"]), await sandbox.start(["cat"])
        wait = "while [ ! -e beat ]; do sleep 0.01; done; rm beat"
        for _ in range(2):
            ran = await sandbox.run(["sh", "-c", wait], timeout_s=LONG_S)
            assert ran.exit_code == 0
        running = asyncio.create_task(sandbox.run(["sleep", "1"], timeout_s=LONG_S))
        await asyncio.sleep(0.05)
        await beats.kill()
        assert not running.done() and await beats.wait() == -9
        assert (await running).exit_code == 0
        await sleeps.kill()


async def test_working_directory_environment_and_a_program_that_is_not_there(
    pool: SandboxPool,
) -> None:
    spec = SandboxSpec(files={"d/s.sh": "pwd; echo $A $B"}, env={"A": "1", "B": "2"})
    async with pool.open(spec) as sandbox:
        process = await sandbox.start(["sh", "s.sh"], cwd="d", env={"B": "3"})
        where, values = (await read_all(process)).decode().splitlines()
        assert where.endswith("/d") and values == "1 3"
        missing = await sandbox.start(["no-such-program"])
        assert b"no-such-program: No such file" in await read_all(missing)
        assert await missing.wait() == 127
        for cwd in ("nothing", "../..", "/", "d/s.sh"):
            with pytest.raises(ValueError):
                await sandbox.start(["true"], cwd=cwd)


@pytest.mark.parametrize("isolation", ["namespaces", "process"])
async def test_the_hosts_environment_stays_outside(
    isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isolation == "namespaces":
        need_namespaces()
    monkeypatch.setenv("ETUDE_TOKEN", "hunter2")
    pool = open_sandbox_pool(isolation)
    async with pool.open(SandboxSpec(env={"MINE": "1"})) as sandbox:
        process = await sandbox.start(["env"])
        lines = (await read_all(process)).decode().splitlines()
        assert {line.partition("=")[0] for line in lines} == {"HOME", "LANG", "MINE", "PATH"}
    await pool.close()


async def test_what_nobody_reads_holds_the_process_and_fills_no_memory(pool: SandboxPool) -> None:
    script = """
import os
written = 0
while written < 1 << 26:
    written += os.write(1, bytes(4096))
    with open("written", "w") as file: file.write(str(written))
"""

    async with pool.open(SandboxSpec(files={"s.py": script})) as sandbox:
        process = await sandbox.start(["python", "s.py"])

        async def settled() -> int:
            seen = -1
            while (now := int(await sandbox.read("written") or 0)) != seen or now == 0:
                seen = now
                await asyncio.sleep(0.3)
            return seen

        async with asyncio.timeout(LONG_S):
            while True:
                try:
                    await sandbox.read("written")
                    break
                except FileNotFoundError:
                    await asyncio.sleep(0.01)
            held = await settled()
            assert 0 < held <= 1 << 20
            for _ in range(10):
                assert await process.read()
            assert await settled() > held
        await process.kill()


async def test_kill_kills_the_whole_tree(pool: SandboxPool) -> None:
    need_processes_in_sight(pool)
    seconds = unique_sleep()
    script = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "{seconds}"])
    os.wait()
os.execvp("sleep", ["sleep", "{seconds}"])
"""
    async with pool.open(SandboxSpec(files={"s.py": script})) as sandbox:
        process = await sandbox.start(["python", "s.py"])
        await until(lambda: len(running(seconds)) == 2)
        await process.kill()
        await until(lambda: not running(seconds))
        await process.kill()
        assert await process.wait() == -9
        assert (await sandbox.run(["echo", "alive"], timeout_s=LONG_S)).output == "alive\n"


AWAY = """
import os, signal, time
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.chdir("/")
        os.execvp("sleep", ["sleep", "{seconds}"])
    os._exit(0)
os.wait()
time.sleep({main_s})
"""


@pytest.mark.parametrize("main_s", [1000, 0])
async def test_a_process_that_forked_away_is_dead_after_close(
    pool: SandboxPool, main_s: int
) -> None:
    need_processes_in_sight(pool)
    seconds = unique_sleep()
    script = AWAY.format(seconds=seconds, main_s=main_s)
    async with pool.open(SandboxSpec(files={"s.py": script})) as sandbox:
        process = await sandbox.start(["python", "s.py"])
        if main_s:
            await until(lambda: len(running(seconds)) == 1)
        else:
            await process.wait()
    await until(lambda: not running(seconds))


async def test_closing_ends_all_and_tells_whoever_waits(pool: SandboxPool) -> None:
    need_processes_in_sight(pool)
    seconds = unique_sleep()
    async with pool.open(SandboxSpec()) as sandbox:
        processes = [await sandbox.start(["sleep", seconds]) for _ in range(3)]
        await until(lambda: len(running(seconds)) == 3)
        waiting = [asyncio.create_task(processes[0].read())]
        waiting += [asyncio.create_task(processes[1].wait())]  # type: ignore[list-item]
        await asyncio.sleep(0.05)
    assert not running(seconds)
    for each in waiting:
        with pytest.raises(RolloutFailure):
            await each
    with pytest.raises(RolloutFailure):
        await processes[2].read()
    with pytest.raises(RolloutFailure):
        await processes[2].write(b"x")
    for process in processes:
        await process.kill()


async def test_a_fork_has_the_files_and_none_of_the_processes(pool: SandboxPool) -> None:
    need_processes_in_sight(pool)
    seconds = unique_sleep()
    script = f"echo 1 > state; mkfifo pipe; exec sleep {seconds}"
    async with pool.open(SandboxSpec()) as sandbox:
        await sandbox.start(["sh", "-c", script])
        await until(lambda: len(running(seconds)) == 1)
        fork = await sandbox.fork()
        assert await fork.read("state") == "1\n" and len(running(seconds)) == 1
    await until(lambda: not running(seconds))
    assert (await fork.run(["test", "-p", "pipe"], timeout_s=LONG_S)).exit_code == 0
    await fork.close()


async def test_a_fork_while_files_come_and_go(pool: SandboxPool) -> None:
    script = """
import os
while True:
    for n in range(50):
        os.makedirs(f"d{n}", exist_ok=True); open(f"d{n}/f", "w").write("x" * n)
    for n in range(50):
        os.remove(f"d{n}/f"); os.rmdir(f"d{n}")
"""
    async with pool.open(SandboxSpec(files={"s.py": script})) as sandbox:
        process = await sandbox.start(["python", "s.py"])
        for _ in range(10):
            fork = await sandbox.fork()
            assert await fork.read("s.py") == script
            await fork.close()
            await sandbox.diff()
        await process.kill()


async def test_closing_a_pool_closes_what_is_open(pool: SandboxPool) -> None:
    need_processes_in_sight(pool)
    seconds = unique_sleep()
    async with pool.open(SandboxSpec()) as sandbox:
        fork = await sandbox.fork()
        for box in (sandbox, fork):
            await box.start(["sleep", seconds])
        await until(lambda: len(running(seconds)) == 2)
        await pool.close()
        assert not running(seconds)


async def test_many_starts_leave_nothing_behind(pool: SandboxPool) -> None:
    def held() -> int:
        return len(os.listdir("/proc/self/fd"))

    async with pool.open(SandboxSpec()) as sandbox:
        process = await sandbox.start(["true"])
        await process.wait()
        before = held()
        for _ in range(60 if isinstance(pool, NamespaceSandboxPool) else 10):
            some = [await sandbox.start(["echo", "unread"]) for _ in range(5)]
            assert [await each.wait() for each in some] == [0] * 5
        assert held() <= before + 2
        assert await read_all(some[0]) == b"unread\n"  # type: ignore[arg-type]
        if isinstance(pool, NamespaceSandboxPool):
            await sandbox.diff()  # each request reaps processes that have ended
            assert len(descendants(pool._zygote.pid)) == 1  # the first process of the sandbox


async def test_a_cancelled_start_leaves_nothing_behind(pool: SandboxPool) -> None:
    seconds = unique_sleep()
    async with pool.open(SandboxSpec(files={"a": "1"})) as sandbox:
        for delay in (0.0, 0.001, 0.01):
            starting = asyncio.create_task(sandbox.start(["sleep", seconds]))
            await asyncio.sleep(delay)
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await starting).kill()
        assert await sandbox.read("a") == "1"
        process = await sandbox.start(["echo", "fine"])
        assert await read_all(process) == b"fine\n"
    await until(lambda: not running(seconds))


async def test_a_start_right_after_a_large_request_that_was_cancelled(pool: SandboxPool) -> None:
    async with pool.open(SandboxSpec()) as sandbox:
        for _ in range(3):
            writing = asyncio.create_task(sandbox.write("big", bytes(8 << 20)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            writing.cancel()
            process = await sandbox.start(["echo", "fine"])
            assert await read_all(process) == b"fine\n"
            with contextlib.suppress(asyncio.CancelledError):
                await writing


async def test_a_terminal(pool: SandboxPool) -> None:
    seconds = unique_sleep()
    script = "test -t 0 && test -t 1 && test -t 2 && tty && stty size && echo $TERM && "
    script += f"sleep {seconds}"
    async with pool.open(SandboxSpec()) as sandbox:
        process = await sandbox.start(["sh", "-c", script], pty=True)
        output = (await read_until(process, b"xterm")).decode().split()
        assert output[0].startswith("/dev/") and output[1:] == ["24", "80", "xterm"]
        if pool.tier not in ("gvisor", "vm"):  # their processes are invisible to this machine
            await until(lambda: len(running(seconds)) == 1)
        await process.write(b"\x03")  # the interrupt character reaches the foreground
        assert await process.wait() != 0
        typed = await sandbox.start(["cat"], pty=True)
        await typed.write(b"line\n")
        await read_until(typed, b"line\r\nline\r\n")
        await typed.write(b"")
        assert await typed.wait() == 0
        piped = await sandbox.start(["sh", "-c", "test -t 0 || echo no terminal"])
        assert await read_all(piped) == b"no terminal\n"


async def test_the_fake_has_processes_too() -> None:
    def respond(files: object, argv: object) -> CommandResult:
        return CommandResult(None if "server" in str(argv) else 4, "said\n")

    async with FakeSandboxPool(respond).open(SandboxSpec(files={"d/a": ""})) as sandbox:
        process = await sandbox.start(["x"], cwd="d")
        assert await read_all(process) == b"said\n" and await process.wait() == 4
        server = await sandbox.start(["server"], pty=True)
        await server.write(b"in")
        assert server.written == b"in" and await server.read() == b"said\n"
        waiting = asyncio.create_task(server.read())
        await asyncio.sleep(0)
        await server.kill()
        assert await waiting == b"" and await server.wait() == -9
        other = await sandbox.start(["server"])
        with pytest.raises(ValueError):
            await sandbox.start(["x"], cwd="nothing")
    with pytest.raises(RolloutFailure):
        await other.wait()


# Behaviour of namespaces alone.


async def test_terminals_of_one_sandbox_are_not_in_another(walled: NamespaceSandboxPool) -> None:
    look = """
import os
print(sorted(os.listdir('/dev/pts')))
for name in ('/dev/pts/0', '/dev/ptmx'):
    try: os.open(name, os.O_RDWR | os.O_NOCTTY); print('open')
    except OSError: print('refused')
"""
    async with (
        walled.open(SandboxSpec()) as one,
        walled.open(SandboxSpec(files={"s.py": look})) as two,
    ):
        first = await one.start(["sh", "-c", "tty; sleep 1000"], pty=True)
        assert await read_until(first, b"\n") == b"/dev/pts/0\r\n"
        ran = await two.run(["python", "s.py"], timeout_s=LONG_S)
        assert ran.output.splitlines() == ["[]", "refused", "refused"]
        second = await two.start(["tty"], pty=True)
        assert await read_all(second) == b"/dev/pts/0\r\n"  # the first of its own
        assert await second.wait() == 0


async def test_a_background_process_has_the_same_walls(walled: NamespaceSandboxPool) -> None:
    script = """
import os, resource, socket
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
print([p for p in os.listdir("/proc") if p.isdigit()], status["CapEff"].strip("0") or 0, status["NoNewPrivs"])
print(status["Seccomp"], status["Uid"].split()[0], resource.getrlimit(resource.RLIMIT_NPROC)[1])
for fd in range(3, 256):
    try: os.fstat(fd); print("open", fd)
    except OSError: pass
try: socket.create_connection(("1.1.1.1", 53), 1); print("out")
except OSError: print("no way out")
"""  # noqa: E501
    async with walled.open(SandboxSpec(files={"s.py": script})) as sandbox:
        await sandbox.start(["sleep", "1000"])
        for pty in (False, True):
            process = await sandbox.start(["python", "s.py"], pty=pty)
            lines = (await read_all(process)).decode().split("\n")
            assert [line.rstrip("\r") for line in lines] == [
                "['1'] 0 1",
                "2 1000 16",
                "no way out",
                "",
            ]


async def test_processes_of_a_sandbox_together_keep_to_its_limit(
    walled: NamespaceSandboxPool,
) -> None:
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    async with walled.open(SandboxSpec(files={"bomb.py": bomb})) as sandbox:
        processes = [await sandbox.start(["python", "bomb.py"]) for _ in range(3)]
        await asyncio.sleep(0.5)
        assert len(descendants(walled._zygote.pid)) <= 1 + 16 + 3 * 2
        for process in processes:
            await process.kill()
        assert (await sandbox.run(["echo", "alive"], timeout_s=LONG_S)).output == "alive\n"


async def test_a_server_is_reached_from_its_own_sandbox_only(walled: NamespaceSandboxPool) -> None:
    server = """
import socket
with socket.create_server(("127.0.0.1", 8000)) as server:
    print("up", flush=True)
    while True:
        client, _ = server.accept()
        client.sendall(b"hello"); client.close()
"""
    client = """
import socket
try: print(socket.create_connection(("localhost", 8000), 5).recv(9))
except OSError as e: print(type(e).__name__)
"""
    files = {"server.py": server, "client.py": client}
    spec = SandboxSpec(files=files)
    async with walled.open(spec) as one, walled.open(spec) as two:
        process = await one.start(["python", "server.py"])
        await read_until(process, b"up\n")
        results = [(await box.run(["python", "client.py"], timeout_s=LONG_S)) for box in (one, two)]
        assert [ran.output for ran in results] == ["b'hello'\n", "ConnectionRefusedError\n"]


async def test_a_process_of_a_sandbox_that_was_killed_says_so(walled: NamespaceSandboxPool) -> None:
    async with walled.open(SandboxSpec()) as sandbox:
        process = await sandbox.start(["sh", "-c", "echo first; sleep 1000"])
        assert await read_until(process, b"\n") == b"first\n"
        pending = [asyncio.create_task(process.read())]
        await asyncio.sleep(0.05)
        zygote = walled._zygote.pid
        for pid in descendants(zygote):  # its first process; the kernel ends the others
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if parent(pid) == zygote:
                    os.kill(pid, signal.SIGKILL)
        for each in (*pending, process.wait(), process.read(), process.write(b"x")):
            with pytest.raises(RolloutFailure, match="sandbox: "):
                await each
        await process.kill()


async def test_a_keeper_that_is_stopped_owes_an_answer_and_then_has_failed() -> None:
    need_namespaces()
    walled = NamespaceSandboxPool(reply_timeout_s=1.0)
    try:
        async with walled.open(SandboxSpec(files={"a": "1"})) as sandbox:
            process = await sandbox.start(["sh", "-c", "echo up; sleep 1000"])
            await read_until(process, b"\n")
            stopped = descendants(walled._zygote.pid)
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            reading = asyncio.create_task(process.read())
            name = f"sandbox {sandbox.number} process 1"
            await until(lambda: walled.owing().get(name, 0.0) > 0.2)
            with pytest.raises(RolloutFailure, match="sandbox: no sign of life in [0-9]+ s"):
                await reading
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
            with pytest.raises(RolloutFailure, match="sandbox: its answer came [0-9]+ s late"):
                await sandbox.read("a")
    finally:
        await walled.close()


async def test_a_silent_process_is_not_a_silent_keeper() -> None:
    need_namespaces()
    walled = NamespaceSandboxPool(reply_timeout_s=0.5)
    try:
        async with walled.open(SandboxSpec()) as sandbox:
            process = await sandbox.start(["sh", "-c", "sleep 2; echo late"])
            assert await read_all(process) == b"late\n"
    finally:
        await walled.close()


@pytest.mark.parametrize("isolation", ["namespaces", "process"])
async def test_all_vanish_with_a_killed_host(isolation: str) -> None:
    if isolation == "namespaces":
        need_namespaces()
    seconds = unique_sleep()
    host = f"""
import asyncio
from etude.core.sandbox import SandboxSpec
from etude.sandbox.pool import open_sandbox_pool
async def main():
    pool = open_sandbox_pool("{isolation}")
    async with pool.open(SandboxSpec()) as sandbox:
        for pty in (False, True):
            await sandbox.start(["sleep", "{seconds}"], pty=pty)
        print("up", flush=True)
        await asyncio.sleep(1000)
asyncio.run(main())
"""
    with subprocess.Popen(
        [sys.executable, "-c", host], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        await until(lambda: len(running(seconds)) == 2)
        below = descendants(process.pid)
        process.kill()
        await until(lambda: not running(seconds) and not any(map(alive, below)))
