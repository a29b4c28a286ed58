"""Starting, watching and stopping processes, which are real and small."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.core.alarms import Alarms
from etude.core.clock import AwakeClock, ManualClock
from etude.core.config import EngineConfig
from etude.core.errors import EtudeError
from etude.core.events import Event, ProcessHeard, ProcessRestarted, ProcessSilent
from etude.core.placement import LESS_MEMORY
from etude.launch.endings import LAST_LINES, exit_message
from etude.launch.launcher import (
    RESTARTS,
    LocalLauncher,
    Program,
    Restarts,
    check_port,
    free_ports,
    locked,
    server_programs,
    trainer_programs,
)
from etude.run.process import AwakeLoop, error_message
from etude.serve import heartbeat
from etude.serve.tokens import Scope

FOREVER = "import time\nwhile True: time.sleep(1)"


def noting_its_pid(directory: Path) -> str:
    """The beginning of a program that writes its process id to a file."""
    return f"import os\nopen({str(directory / 'pid')!r}, 'w').write(str(os.getpid()))\n"


def noted(directory: Path) -> int | None:
    path = directory / "pid"
    return int(path.read_text()) if path.exists() and path.read_text() else None


def program(name: str, code: str, **options: object) -> Program:
    return Program(name, (sys.executable, "-c", code), **options)  # type: ignore[arg-type]


def alive(pid: int | None) -> bool:
    assert pid is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[LocalLauncher]:
    with locked(tmp_path) as lock:
        yield LocalLauncher(tmp_path, threads=1, resume="etude run x.toml", lock=lock)


async def test_the_end_of_one_is_the_end_of_all(launcher: LocalLauncher, tmp_path: Path) -> None:
    note = noting_its_pid(tmp_path)
    await launcher.run_all(
        [
            program("server", note + FOREVER, serves=True),
            program(
                "main", f"import os\nwhile not os.path.exists({str(tmp_path / 'pid')!r}): pass"
            ),
        ],
        until="main",
    )
    assert not alive(noted(tmp_path))


async def test_a_death_is_told_with_its_last_words(launcher: LocalLauncher) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await launcher.run_all(
            [
                program("server", FOREVER),
                program("main", "import sys; print('no more paper'); sys.exit(3)"),
            ],
            until="main",
        )
    told = error_message(caught.value) or ""
    assert "the main ended with exit code 3" in told and "| no more paper" in told
    assert told.endswith("\nResume with: etude run x.toml")


async def test_after_a_mistake_of_the_users_the_same_command_is_not_enough(
    launcher: LocalLauncher,
) -> None:
    with pytest.raises(EtudeError) as caught:
        await launcher.run_to_end(program("preparation", "import sys; sys.exit(2)"))
    again = "\nAfter fixing this, resume with: etude run x.toml\nor start over with --fresh"
    assert str(caught.value).endswith(again)


@pytest.mark.parametrize("command", ["etude realtime x.toml", "etude eval runs/x"])
def test_fresh_is_not_advised_to_commands_without_it(command: str) -> None:
    told = exit_message("loop", 2, ["no"], "loop.log", command, how="ended", restarts=None)
    assert told.endswith(f"\nAfter fixing this, resume with: {command}")


async def test_last_words_are_those_of_the_last_life(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    (tmp_path / "logs" / "main.log").write_text("of yesterday\n")
    with pytest.raises(EtudeError) as caught:
        await launcher.run_to_end(program("main", "print('of today'); raise SystemExit(1)"))
    assert "| of today" in str(caught.value) and "of yesterday" not in str(caught.value)
    assert (tmp_path / "logs" / "main.log").read_text() == "of yesterday\nof today\n"


async def test_the_long_words_of_the_dead_are_cut_to_their_end(launcher: LocalLauncher) -> None:
    code = "for n in range(1000): print(f'line {n}.')\nraise SystemExit(1)"
    with pytest.raises(EtudeError) as caught:
        await launcher.run_to_end(program("main", code))
    told = str(caught.value)
    assert "| line 999." in told and told.count("|") == LAST_LINES


async def test_a_death_by_a_signal_is_named(launcher: LocalLauncher) -> None:
    code = "import os; print('alas', flush=True); os.kill(os.getpid(), 15)"
    with pytest.raises(EtudeError, match="the main was killed by SIGTERM. The end of") as caught:
        await launcher.run_to_end(program("main", code))
    assert "memory" not in str(caught.value)


async def test_who_is_killed_most_likely_had_too_little_memory(launcher: LocalLauncher) -> None:
    heartbeat_sent = f"os.write(int(os.environ[{heartbeat.HEARTBEAT_VARIABLE!r}]), b'.')"
    code = f"import os, signal\n{heartbeat_sent}\nsignal.pause()"
    told: list[Event] = []
    watching = asyncio.create_task(launcher.watch(told.append))
    running = asyncio.create_task(launcher.run_to_end(program("trainer", code)))
    while "trainer" not in launcher._memory:
        await asyncio.sleep(0.01)
    os.kill(launcher._alive["trainer"].pid, signal.SIGKILL)
    with pytest.raises(EtudeError) as caught:
        await running
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    how = r"the trainer was killed by SIGKILL \(it held \d+ MB of memory\)"
    assert re.match(how + r"\. .*trainer\.log is empty\.", str(caught.value))
    assert "ran out of memory" in str(caught.value) and LESS_MEMORY in str(caught.value)
    (alarm,) = Alarms().apply(told[-1])
    assert re.match(how, alarm.what) and LESS_MEMORY in alarm.advice


async def test_a_program_sees_what_it_needs_and_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import os, sys\n"
        "print(*(os.environ[name] for name in sys.argv[1:]), sys.stdin.read())\n"
        "print(os.getsid(0) == os.getpid(), file=sys.stderr)"
    )
    names = ("OMP_NUM_THREADS", "PYTHONUNBUFFERED", "GOMP_SPINCOUNT")
    shown = Program("main", (sys.executable, "-c", code, *names))
    for told, expected in ((None, "10000"), ("7", "7")):
        monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
        if told is not None:
            monkeypatch.setenv("GOMP_SPINCOUNT", told)
        with locked(tmp_path) as lock:
            launcher = LocalLauncher(tmp_path, threads=3, resume="", lock=lock)
            before = len(os.listdir("/proc/self/fd"))
            await launcher.run_to_end(shown)
            assert len(os.listdir("/proc/self/fd")) == before
        said = (tmp_path / "logs" / "main.log").read_text().split()
        assert said[-4:] == ["3", "1", expected, "True"]


def test_servers_and_trainers_are_told_where_everything_is(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    (gateway, *workers), url = server_programs(
        "S", EngineConfig(regions=("here", "there"), port=port)
    )
    assert url == f"http://127.0.0.1:{port}"
    # no file in the run's folder is taken for a module of ours
    assert gateway.argv[:4] == (sys.executable, "-P", "-m", "etude.serve.gateway")
    # no worker is asked before the controller has named the permitted weights
    assert gateway.argv[4:] == ("--store", "S", "--port", str(port), "--await-load")
    assert gateway.serves and gateway.restarts == RESTARTS
    assert [worker.name for worker in workers] == ["worker-here", "worker-there"]
    ports = {port}
    for worker, region in zip(workers, ("here", "there"), strict=True):
        assert worker.serves and worker.restarts == RESTARTS
        assert worker.argv[4:8] == ("--store", "S", "--region", region)
        assert worker.argv[8] == "--port" and worker.argv[10:] == ("--gateway", url)
        ports.add(int(worker.argv[9]))
    assert len(ports) == 3
    _, chosen = server_programs("S", EngineConfig(regions=("here",)))
    assert int(chosen.rpartition(":")[2]) > 0

    meeting = tmp_path / "rendezvous"
    meeting.write_text("of yesterday")
    (alone,) = trainer_programs("S", 1, meeting)
    assert alone.name == "trainer" and alone.argv[4:] == ("--store", "S")
    ranks = trainer_programs("S", 2, meeting)
    assert [rank.name for rank in ranks] == ["trainer-0", "trainer-1"]
    assert ranks[1].argv[4:] == (
        *("--store", "S", "--ranks", "2", "--rendezvous", str(meeting), "--rank", "1"),
    )
    assert not meeting.exists() and not any(rank.serves or rank.restarts for rank in ranks)


async def test_a_server_that_ends_well_has_died_too(launcher: LocalLauncher) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await launcher.run_all(
            [program("server", "", serves=True), program("main", FOREVER)], until="main"
        )
    assert "the server ended with exit code 0" in (error_message(caught.value) or "")


async def test_a_worker_is_started_again_but_not_for_ever(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await launcher.run_all(
            [
                program("worker", "print('hello'); raise SystemExit(1)", serves=True, restarts=2),
                program("main", FOREVER),
            ],
            until="main",
        )
    assert "after 2 restarts within a minute" in (error_message(caught.value) or "")
    assert (tmp_path / "logs" / "worker.log").read_text().count("hello") == 3


async def test_after_a_final_exit_code_nobody_is_started_again(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    """A killed process is restarted: the loop of real-time RL, so that users do not notice."""
    marker = tmp_path / "killed"
    code = (
        f"import os, pathlib; print('hello', flush=True); marker = pathlib.Path({str(marker)!r})\n"
        "if marker.exists(): raise SystemExit(2)\n"
        "marker.touch(); os.kill(os.getpid(), 9)"
    )
    with pytest.raises(EtudeError) as caught:
        await launcher.run_to_end(program("loop", code, restarts=3, final=(2,)))
    assert "the loop ended with exit code 2. The end of" in str(caught.value)
    assert (tmp_path / "logs" / "loop.log").read_text().count("hello") == 2


async def test_who_is_started_again_is_named_until_it_is_heard(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    """It dies once, then sends a heartbeat, and the run goes on."""
    mark, heard = tmp_path / "died", tmp_path / "heard"
    server = f"""
import os, pathlib, signal, time
if not os.path.exists({str(mark)!r}):
    pathlib.Path({str(mark)!r}).touch()
    os.kill(os.getpid(), signal.SIGKILL)
os.write(int(os.environ[{heartbeat.HEARTBEAT_VARIABLE!r}]), b"x")
pathlib.Path({str(heard)!r}).touch()
time.sleep(600)
"""
    told: list[Event] = []
    alarms = Alarms()
    watching = asyncio.create_task(launcher.watch(told.append))
    main = f"import os, time\nwhile not os.path.exists({str(heard)!r}): time.sleep(0.01)"
    programs = [program("gateway", server, serves=True, restarts=3), program("main", main)]
    await launcher.run_all(programs, until="main")
    while len(told) < 2:
        await asyncio.sleep(0.01)
    watching.cancel()
    died, back = told
    assert died == ProcessRestarted(process="gateway", how="was killed by SIGKILL", limit=3)
    assert isinstance(back, ProcessHeard) and back.process == "gateway"
    (alarm,) = alarms.apply(died)
    assert "the gateway was killed by SIGKILL and is being restarted" in str(alarm)
    assert "more than 3 times within a minute" in str(alarm)
    assert alarms.apply(back) == [] and not alarms.active


async def test_a_process_that_does_not_listen_is_killed(
    launcher: LocalLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.launch.launcher.STOP_S", 0.2)
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + noting_its_pid(
        tmp_path
    )
    running = asyncio.create_task(launcher.run_all([program("main", deaf + FOREVER)], until="main"))
    while noted(tmp_path) is None:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not alive(noted(tmp_path))


async def test_what_a_process_has_left_behind_goes_with_it(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    """Its own child ignores the signal that ends it, and is in its group."""
    parent = "import os, signal\nif os.fork(): signal.pause()\n"
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + noting_its_pid(tmp_path)
    running = asyncio.create_task(
        launcher.run_all([program("main", parent + deaf + FOREVER)], until="main")
    )
    while noted(tmp_path) is None:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    status = Path(f"/proc/{noted(tmp_path)}/stat")
    async with asyncio.timeout(60):  # until the process that adopted it has noticed
        while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
            await asyncio.sleep(0.01)


def test_children_die_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    note = noting_its_pid(tmp_path)
    code = f"""
import asyncio, sys
from pathlib import Path
from etude.launch.launcher import LocalLauncher, Program, locked
with locked(Path({str(tmp_path)!r})) as lock:
    launcher = LocalLauncher(Path({str(tmp_path)!r}), threads=1, resume="", lock=lock)
    asyncio.run(launcher.run_to_end(Program("child", (sys.executable, "-c", {note + FOREVER!r}))))
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    while noted(tmp_path) is None:
        assert parent.poll() is None
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    # The child holds the lock as long as it lives: getting the lock proves that the child is gone.
    with locked(tmp_path, wait_s=60):
        pass


def test_a_run_is_locked_against_a_second_launcher(tmp_path: Path) -> None:
    with (
        locked(tmp_path),
        pytest.raises(EtudeError, match=f"is in use by process {os.getpid()}"),
        locked(tmp_path, 0),
    ):
        pass
    with locked(tmp_path, 0):
        pass


def test_a_lock_that_is_about_to_be_let_go_is_waited_for(tmp_path: Path) -> None:
    place = tmp_path / "not" / "there"
    with locked(place):
        pass
    (place / "lock").write_text("123456789012, which is gone\n")
    held = os.open(place / "lock", os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    letting_go = threading.Timer(0.2, os.close, [held])
    letting_go.start()
    with locked(place, wait_s=60):
        assert (place / "lock").read_text() == f"{os.getpid()}\n"
    letting_go.join()


def test_others_may_see_who_runs_there_and_not_change_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with locked(tmp_path):
            assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == 0o644
    finally:
        os.umask(before)


async def test_logs_that_cannot_be_written(launcher: LocalLauncher, tmp_path: Path) -> None:
    (tmp_path / "logs" / "main.log").mkdir()
    with pytest.raises(EtudeError, match=r"cannot write .*main\.log"):
        await launcher.run_to_end(program("main", ""))
    (tmp_path / "file").write_text("")
    with pytest.raises(EtudeError, match=r"cannot write .*logs"):
        LocalLauncher(tmp_path / "file", threads=1, resume="", lock=0)


async def test_a_gateway_makes_tokens_and_its_workers_have_one() -> None:
    (gateway, worker), _ = server_programs("file:/nowhere", EngineConfig(regions=("east",)))
    assert (gateway.makes_tokens, gateway.scope) == (True, None)
    assert (worker.makes_tokens, worker.scope) == (False, Scope.WORKER)


async def test_a_program_that_gives_no_sign_of_life_is_named(tmp_path: Path) -> None:
    beating = (
        "from etude.serve import heartbeat\n"
        "heartbeat.HEARTBEAT_S = 0.05\n"
        "heartbeat.send_heartbeats_from_thread()\n"
    )
    told: list[Event] = []

    async def until(kind: type[Event], process: str) -> None:
        while not any(isinstance(event, kind) and event.process == process for event in told):
            await asyncio.sleep(0.01)

    with locked(tmp_path) as lock:
        launcher = LocalLauncher(tmp_path, threads=1, resume="", lock=lock, heartbeat_timeout_s=1.0)
        programs = [
            program("mute", FOREVER),
            program("main", beating + noting_its_pid(tmp_path) + FOREVER),
        ]
        running = asyncio.create_task(launcher.run_all(programs, until="main"))
        watching = asyncio.create_task(launcher.watch(told.append))
        while noted(tmp_path) is None:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # until its first heartbeat: before that it would have a minute
        os.kill(noted(tmp_path) or 0, signal.SIGSTOP)
        await until(ProcessSilent, "main")
        os.kill(noted(tmp_path) or 0, signal.SIGCONT)
        await until(ProcessHeard, "main")
        assert not any(event.process == "mute" for event in told), "it may be starting"
        running.cancel()
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


def test_a_heartbeat_needs_nobody_who_listens() -> None:
    """Without a launcher, with one that does not read, and with one that is gone."""
    code = """
import os, sys
ours, theirs = os.pipe()
os.set_blocking(theirs, False)
if sys.argv[1] != "alone":
    os.environ["ETUDE_HEARTBEAT"] = str(theirs)
if sys.argv[1] == "gone":
    os.close(ours)
from etude.serve import heartbeat
for _ in range(1 << 17):
    heartbeat.send_heartbeat()
print("ETUDE_HEARTBEAT" in os.environ)
"""
    for how in ("alone", "deaf", "gone"):
        assert subprocess.check_output([sys.executable, "-c", code, how], text=True) == "False\n"


def test_time_stands_still_for_a_loop_whose_process_does() -> None:
    loop, clock = AwakeLoop(), ManualClock()
    loop.clock = AwakeClock(clock)

    async def passes(*steps: float) -> bool:
        """True if a deadline of a minute has passed after these steps of the clock."""
        try:
            async with asyncio.timeout(60.0):
                for step in steps:
                    clock.move(step)
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
        except TimeoutError:
            return True
        return False

    with contextlib.closing(loop):
        assert not loop.run_until_complete(passes(90.0, 90.0, 90.0))
        assert loop.run_until_complete(passes(*[1.0] * 61))


def test_restarts_are_counted_within_a_minute() -> None:
    clock = ManualClock()
    restarts = Restarts(2, clock)
    assert [restarts.allow(), restarts.allow(), restarts.allow()] == [True, True, False]
    clock.move(59)
    assert not restarts.allow()
    clock.move(1)
    assert restarts.allow()
    assert not Restarts(0, clock).allow()


def test_ports() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
    check_port(ports[0])
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        taken.bind(("127.0.0.1", ports[0]))
        taken.listen()
        with pytest.raises(EtudeError, match=f"engine.port = {ports[0]} cannot be used"):
            check_port(ports[0])
        with socket.create_connection(("127.0.0.1", ports[0])) as client:
            served, _ = taken.accept()
            served.close()
            client.recv(1)
    check_port(ports[0])  # although the kernel remembers the connection for a while
