"""The local launcher: starts every process of a run, watches them, and leaves none behind.

A worker or a gateway that dies is restarted: everything that it acknowledged is in the store, and
clients repeat all other requests. If any other process dies, or one of these too often, the run
stops with one message, and the next `etude run` resumes from the store. Children die with the
launcher, even if it is killed: the kernel sees to that. The lock on the run's directory is held by
the children too, so a second launcher cannot start before the last process of the first is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import os
import secrets
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from etude.core.clock import AwakeClock, Clock, SystemClock
from etude.core.config import EngineConfig
from etude.core.errors import EtudeError
from etude.core.events import Event, ProcessDied, ProcessHeard, ProcessRestarted
from etude.core.liveness import Liveness
from etude.core.placement_config import PlacementConfig
from etude.launch.endings import advice_for, exit_message, how_ended, stop_message
from etude.run.process import die_with_parent
from etude.serve import heartbeat
from etude.serve.process import TOKEN_VARIABLE
from etude.serve.tokens import MAX_LIFETIME_S, SECRET_VARIABLE, Scope, TokenAuthority, read_secret

STOP_S = 5.0
"""Time from SIGTERM to SIGKILL."""
START_S = 60.0
"""Time from the start of a process to its first heartbeat, which comes after its imports."""
RESTARTS = 3
"""Restarts of a gateway or a worker within a minute."""
LOOK_EVERY_S = 0.5
ALL_SHARED = PlacementConfig()
CREDENTIALS = (SECRET_VARIABLE, TOKEN_VARIABLE)


@dataclass(frozen=True, slots=True)
class Needs:
    """The resources that a program needs in a cluster. On one machine all programs share the
    resources."""

    cpus: int = 1
    gpus: int = 0
    region: str = ""
    """The region that its node must be in, if the cluster has nodes there."""
    group: str = ""
    """Programs of one group are placed together."""
    rank: int | None = None
    """Its rank in this group; the ranks of a group start, and restart, together."""


@dataclass(frozen=True, slots=True)
class Program:
    name: str
    argv: tuple[str, ...]
    serves: bool = False
    """True for a server, which is not meant to end by itself."""
    restarts: int = 0
    """Restarts allowed within a minute."""
    final: tuple[int, ...] = ()
    """Exit codes that rule out a restart: the mistake that it reported would be there next time,
    too."""
    scope: Scope | None = None
    """The scope of the token that it gets."""
    makes_tokens: bool = False
    """True if it gets the secret that tokens are signed with."""
    gpus: tuple[int, ...] = ()
    """The GPUs that it sees; none: all."""
    cpus: tuple[int, ...] = ()
    """The CPUs that it and its children run on; none: all."""
    needs: Needs = Needs()


class Launcher(Protocol):
    """Starts programs, watches them, and leaves none behind. The results of programs are in the
    store alone."""

    resume: str
    """The command that resumes the run."""

    async def run_to_end(self, program: Program) -> None:
        """Run one program alone; raise an error if it fails."""

    async def run_all(self, programs: Sequence[Program], *, until: str) -> None:
        """Run all programs together, until the one named `until` has ended successfully."""

    async def watch(self, tell: Callable[[Event], None]) -> None:
        """Report programs that are silent or were restarted, until cancelled."""


class Restarts:
    """Decides whether a process may be restarted. Pure."""

    def __init__(self, limit: int, clock: Clock, window_s: float = 60.0) -> None:
        self._times: deque[float] = deque(maxlen=limit)
        self._limit = limit
        self._clock = clock
        self._window_s = window_s

    def allow(self) -> bool:
        now = self._clock.now()
        if self._limit == 0 or (
            len(self._times) == self._limit and now - self._times[0] < self._window_s
        ):
            return False
        self._times.append(now)
        return True


class Credentials:
    """The tokens of one launch, and the secret that they are signed with."""

    def __init__(self) -> None:
        self._secret = read_secret() or secrets.token_urlsafe(32)
        self._tokens = TokenAuthority(self._secret)

    def of(self, program: Program) -> dict[str, str]:
        """The environment variables with a program's credentials."""
        given = {SECRET_VARIABLE: self._secret} if program.makes_tokens else {}
        if program.scope is not None:
            token = self._tokens.mint(program.scope, program.name, MAX_LIFETIME_S)
            given[TOKEN_VARIABLE] = token
        return given


def common_environment(threads: int) -> dict[str, str]:
    """Environment variables of every program."""
    return {
        "OMP_NUM_THREADS": str(threads),
        # A thread that waits for the others spins for some microseconds and then sleeps, since
        # other processes of the run need the core. The default spins for milliseconds.
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "10000"),
        "PYTHONFAULTHANDLER": "1",  # a crash of native code shows its place
        "PYTHONUNBUFFERED": "1",
    }


class LocalLauncher:
    """Runs programs in a run's directory; their output goes to `logs/`. Each gets only the token
    that it needs, so that nobody else on this machine can use their ports, and no program can do
    what only another one may."""

    def __init__(
        self,
        directory: Path,
        *,
        threads: int,
        resume: str,
        lock: int,
        heartbeat_timeout_s: float = math.inf,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`say`: reports to the person who stops the run what the stop is waiting for."""
        self.logs = directory / "logs"
        self.resume = resume
        self.lock = lock
        self._say = say
        self._clock = AwakeClock(SystemClock())
        self._liveness = Liveness(heartbeat_timeout_s)
        with _writing(self.logs):
            self.logs.mkdir(parents=True, exist_ok=True)
        kept = {name: value for name, value in os.environ.items() if name not in CREDENTIALS}
        self._environment = kept | common_environment(threads)
        self._credentials = Credentials()
        self._alive: dict[str, asyncio.subprocess.Process] = {}
        # restarted programs -> time of death, until they are heard again
        self._died: dict[str, float] = {}
        self._untold: list[Event] = []
        self._memory: dict[str, int] = {}
        # program -> the start of its current process in its log
        self._log_starts: dict[str, int] = {}

    async def run_to_end(self, program: Program) -> None:
        """Run one program alone; raise an error if it fails."""
        async with self._stopping_all():
            await self._keep(program)

    async def run_all(self, programs: Sequence[Program], *, until: str) -> None:
        """Run all programs together, until the one named `until` has ended successfully."""
        async with self._stopping_all(), asyncio.TaskGroup() as group:
            kept = {program.name: group.create_task(self._keep(program)) for program in programs}
            await kept[until]
            for task in kept.values():
                task.cancel()

    async def watch(self, tell: Callable[[Event], None]) -> None:
        """Report programs that are silent, were restarted or have died, until cancelled."""
        try:
            while True:
                self._untold += self._liveness.look(self._clock.now())
                while self._untold:
                    tell(self._untold.pop(0))
                await asyncio.sleep(LOOK_EVERY_S)
        finally:  # the cause of the run's end
            for event in self._untold:
                tell(event)

    async def _keep(self, program: Program) -> None:
        restarts = Restarts(program.restarts, SystemClock())
        while (code := await self._once(program)) != 0 or program.serves:
            how = how_ended(code, self._memory.get(program.name))
            if code in program.final or not restarts.allow():
                advice = advice_for(program.name, code)
                self._untold.append(ProcessDied(process=program.name, how=how, advice=advice))
                raise EtudeError(self._exit_message(program, code, how))
            self._died[program.name] = self._clock.now()
            self._untold.append(
                ProcessRestarted(process=program.name, how=how, limit=program.restarts)
            )

    async def _once(self, program: Program) -> int:
        parent = os.getpid()
        path = self.logs / f"{program.name}.log"
        with _writing(path):
            log = path.open("ab")
        with log, self._listening(program) as pipe:
            self._log_starts[program.name] = log.tell()
            self._memory.pop(program.name, None)
            process = await asyncio.create_subprocess_exec(
                *program.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(self.lock, pipe),
                preexec_fn=lambda: _begin(parent, program),
                env=self._environment
                | self._credentials.of(program)
                | _visible(program)
                | {heartbeat.HEARTBEAT_VARIABLE: str(pipe)},
            )
            self._alive[program.name] = process
            return await process.wait()

    @contextlib.contextmanager
    def _listening(self, program: Program) -> Iterator[int]:
        """A pipe for the program's heartbeats, which are heard while the block runs. We keep the
        write end open too: a pipe without any writer would wake us again and again."""
        loop, (ours, theirs) = asyncio.get_running_loop(), os.pipe()

        def hear() -> None:
            os.read(ours, 1 << 16)
            now = self._clock.now()
            self._liveness.heard(program.name, now)
            if (process := self._alive.get(program.name)) is not None:
                self._memory[program.name] = _resident_bytes(process.pid)
            if (died := self._died.pop(program.name, None)) is not None:
                self._untold.append(ProcessHeard(process=program.name, seconds=now - died))

        os.set_blocking(theirs, False)
        loop.add_reader(ours, hear)
        self._liveness.heard(program.name, self._clock.now() + START_S)
        try:
            yield theirs
        finally:
            loop.remove_reader(ours)
            self._liveness.forget(program.name)
            os.close(ours)
            os.close(theirs)

    @contextlib.asynccontextmanager
    async def _stopping_all(self) -> AsyncIterator[None]:
        """Stop every process when the block ends, however it ends, and report the progress."""
        try:
            yield
        except asyncio.CancelledError:
            living = [name for name, each in self._alive.items() if each.returncode is None]
            if living:
                self._say(stop_message(living[::-1], STOP_S))
            raise
        finally:
            await asyncio.shield(self._stop())

    async def _stop(self) -> None:
        """Stop the processes in reverse order of their start: then no process sees one that it
        needs disappear, and takes that for a failure."""
        for process in reversed(self._alive.values()):
            _signal_group(process, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await process.wait()
            _signal_group(process, signal.SIGKILL)  # including processes left behind in its group
            await process.wait()
        self._alive.clear()

    def _exit_message(self, program: Program, code: int, how: str) -> str:
        path = self.logs / f"{program.name}.log"
        said = path.read_bytes()[self._log_starts[program.name] :].decode(errors="replace")
        return exit_message(
            program.name,
            code,
            said.splitlines(),
            str(path),
            self.resume,
            how=how,
            restarts=None if code in program.final else program.restarts,
        )


def _begin(parent: int, program: Program) -> None:
    die_with_parent(parent)
    if program.cpus:
        os.sched_setaffinity(0, program.cpus)


def _visible(program: Program) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, program.gpus))} if program.gpus else {}


def _resident_bytes(process: int) -> int:
    """The memory that a process holds; 0 if it is gone."""
    try:
        pages = Path(f"/proc/{process}/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _signal_group(process: asyncio.subprocess.Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@contextlib.contextmanager
def locked(directory: Path, wait_s: float = 5.0) -> Iterator[int]:
    """The exclusive right to run in this directory, as a file descriptor that children may
    share."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as e:
        raise EtudeError(
            f"cannot create a run in {directory} ({e.strerror}): choose another place with --dir"
        ) from e
    try:
        # The children of a killed launcher hold the lock for a moment longer than it did.
        deadline = time.monotonic() + wait_s
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
                raise EtudeError(
                    f"{directory} is in use by process {holder or '(unknown)'}: wait until it "
                    "ends, or stop it first"
                )
            time.sleep(0.05)
        with _writing(directory / "lock"):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def is_stopped(directory: Path) -> bool:
    """True if the run in this directory was started here and is not running any more."""
    try:
        descriptor = os.open(directory / "lock", os.O_RDONLY)
    except OSError:  # it was copied from elsewhere
        return False
    try:
        return _try_lock(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise EtudeError(
            f"cannot write {path} ({e.strerror}): free some space there, or choose another place "
            f"with --dir"
        ) from e


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that are free now; all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as e:
            raise EtudeError(
                f"engine.port = {port} cannot be used ({e.strerror}): stop the program that "
                "listens there, choose another port, or remove the key to use a free one"
            ) from e


def python(module: str, *arguments: object) -> tuple[str, ...]:
    # -P: a file in the folder that the run is started in must not replace a module of Python or of
    # ours.
    return (sys.executable, "-P", "-m", module, *map(str, arguments))


def server_programs(
    store: str, engine: EngineConfig, placement: PlacementConfig = ALL_SHARED
) -> tuple[list[Program], str]:
    """The gateway and one worker for each region, and the gateway's URL. They read their other
    settings from the store."""
    if engine.port:
        check_port(engine.port)
    *ports, free = free_ports(len(engine.regions) + 1)
    gateway_port = engine.port or free
    url = f"http://127.0.0.1:{gateway_port}"
    listening = ("--store", store, "--port", gateway_port, "--await-load")
    gateway = Program(
        "gateway",
        python("etude.serve.gateway", *listening),
        serves=True,
        restarts=RESTARTS,
        makes_tokens=True,
    )
    workers = [
        Program(
            f"worker-{region}",
            python(
                "etude.serve.worker",
                *("--store", store, "--region", region, "--port", port, "--gateway", url),
            ),
            serves=True,
            restarts=RESTARTS,
            scope=Scope.WORKER,
            gpus=placement.engines.get(region, ()),
        )
        for region, port in zip(engine.regions, ports, strict=True)
    ]
    return [gateway, *workers], url


def evaluator_programs(
    store: str, every_steps: int, placement: PlacementConfig = ALL_SHARED
) -> list[Program]:
    """The program that evaluates versions while a loop runs, if one is wanted."""
    if not every_steps:
        return []
    return [
        Program(
            "evaluator",
            python("etude.run.evaluator", "--store", store),
            restarts=RESTARTS,
            gpus=placement.evaluator,
            cpus=placement.sandbox_cpus,
        )
    ]


def trainer_programs(
    store: str, ranks: int, rendezvous_file: Path, gpus: tuple[int, ...] = ()
) -> list[Program]:
    """The trainer, or one process for each of its ranks; these meet in a file that must not exist
    before."""
    if ranks == 1:
        return [Program("trainer", python("etude.trainer.trainer", "--store", store), gpus=gpus)]
    rendezvous_file.unlink(missing_ok=True)
    arguments = ("--store", store, "--ranks", ranks, "--rendezvous", rendezvous_file)
    return [
        Program(
            f"trainer-{rank}",
            python("etude.trainer.trainer", *arguments, "--rank", rank),
            gpus=gpus,
        )
        for rank in range(ranks)
    ]
