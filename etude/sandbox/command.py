"""A command in a sandbox: from a fork of the sandbox's first process to the program it becomes.

Each command is process 1 of a PID namespace below its keeper's. It has a /proc of its own, no
capabilities, no access to the system calls that `syscalls` refuses, the rules of `landlock`, and no
descriptors but its three. It has no name for its keeper, so it cannot signal, trace or starve it;
and when it ends, the kernel kills all that it left running.

`python FILE ...` does not start a Python: the fork already is one. Standard library only.
"""

from __future__ import annotations

import atexit
import builtins
import fcntl
import os
import resource
import signal
import sys
import termios
import traceback
import types
from typing import NamedTuple, NoReturn

from etude.sandbox import kernel, landlock
from etude.sandbox.limits import NICENESS

PROGRAMS: list[str] = []
"""Directories of mounts that are searched before all others; the zygote fills the list once. If one
of them has a `python`, commands run that one."""
PLAIN = {"HOME": "/tmp", "LANG": "C.UTF-8"}
"""Variables of every command in addition to PATH; an image may override them."""
_ALWAYS_LOADED = frozenset(sys.builtin_module_names) | {
    "_collections_abc", "_frozen_importlib", "_frozen_importlib_external", "_sitebuiltins", "abc",
    "codecs", "encodings", "genericpath", "io", "os", "posixpath", "site", "stat", "zipimport",
}  # fmt: skip
"""Modules that a Python has loaded before the first line of a script."""
_REPORT = 3
REPORT_PATH = f"/dev/fd/{_REPORT}"
HIDDEN = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
READ_ONLY = HIDDEN | kernel.MS_RDONLY


class Command(NamedTuple):
    """A command to run, by descriptors that are open in the fork that becomes it."""

    argv: list[str]
    env: dict[str, str]
    """Variables in addition to those of `environment()`."""
    directory: int
    source: int
    output: int
    terminal: bool
    limits: dict[int, int]
    rules: int | None
    """A ruleset of `landlock`."""
    report: int | None
    """A pipe for a report, separate from the output."""


def environment() -> dict[str, str]:
    """Environment variables of every command."""
    places = [*PROGRAMS, f"{sys.base_prefix}/bin", "/usr/local/bin", "/usr/bin", "/bin"]
    there = [place for place in dict.fromkeys(places) if os.path.isdir(place)]
    plain = {"PATH": ":".join(there), **PLAIN}
    # a Python of a mount writes no __pycache__ into the working copy, as ours does not
    return plain | ({"PYTHONDONTWRITEBYTECODE": "1"} if PROGRAMS else {})


def spawn(command: Command, own_pids: int) -> tuple[int, int]:
    """The new process, and a pipe with the reason if it could not become the command. `own_pids`:
    the PID namespace of the caller, since that of its last child may be gone."""
    kernel.join_pid_namespace(own_pids)
    kernel.unshare(kernel.CLONE_NEWPID)
    broken, breaks = os.pipe()
    try:
        child = os.fork()
        if child == 0:
            try:
                _become(command, breaks)
            finally:
                os._exit(127)
    except OSError:
        os.close(broken)
        raise
    finally:
        os.close(breaks)
    return child, broken


def _become(command: Command, breaks: int) -> NoReturn:
    """Turn this fork into the command."""
    argv, env = command.argv, command.env
    try:
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("proc", "/proc", "proc", HIDDEN)
        kernel.put("/proc/self/oom_score_adj", "1000")  # when memory runs out, this goes first
        # /proc is read-only from here on: otherwise the command could reset that score
        kernel.mount("none", "/proc", None, kernel.MS_REMOUNT | kernel.MS_BIND | READ_ONLY)
        for limit, value in command.limits.items():
            resource.setrlimit(limit, (value, value))
        os.nice(NICENESS)
        kernel.drop_capabilities()
        os.fchdir(command.directory)
        os.dup2(command.source, 0)
        os.dup2(command.output, 1)
        os.dup2(command.output, 2)
        if command.terminal:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        if command.rules is not None:
            landlock.restrict(command.rules)
        kernel.filter_calls()
    except OSError as e:
        os.write(breaks, str(e).encode())
        os._exit(1)
    if command.report is not None:
        os.dup2(command.report, _REPORT)
        os.set_inheritable(_REPORT, True)
    os.closerange(_REPORT if command.report is None else _REPORT + 1, 1 << 20)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    if argv[0] in ("python", "python3") and not PROGRAMS:
        # Variables may change how a Python starts, and this one has already started.
        if len(argv) > 1 and not argv[1].startswith("-") and not env:
            _run_script(argv[1:])
        argv = [sys.executable, "-B", *argv[1:]]
    try:
        os.execvpe(argv[0], argv, {**environment(), **env})
    except OSError as e:
        os.write(2, f"{argv[0]}: {e.strerror}\n".encode())
    os._exit(127)


def _run_script(argv: list[str]) -> NoReturn:
    """Do what `python SCRIPT ...` does, from the first line of the script to the exit status."""
    script = argv[0]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    sys.argv = argv
    beside = os.path.dirname(os.path.abspath(script))
    _forget_shadowed(beside)
    sys.path[:] = [beside, *sys.path]
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=os.path.abspath(script), __builtins__=builtins)
    sys.modules["__main__"] = main
    code = 0
    try:
        with open(script, "rb") as file:
            program = compile(file.read(), script, "exec")
        exec(program, main.__dict__)
    except SystemExit as e:
        code = _exit_status(e.code)
    # stands in for the interpreter's own handling of uncaught exceptions
    except BaseException as e:
        frame = e.__traceback__
        while frame and frame.tb_frame.f_code.co_filename == __file__:
            frame = frame.tb_next
        traceback.print_exception(e.with_traceback(frame))
        code = 1
    if threading := sys.modules.get("threading"):
        threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code)


def _forget_shadowed(directory: str) -> None:
    """Unload modules that this process has loaded for its own purposes and that a file beside the
    script shadows, so that the script, and the modules that import it, get that file."""
    try:
        beside = {name.partition(".")[0] for name in os.listdir(directory)}
    except OSError:
        return
    loaded = {name: name.partition(".")[0] for name in sys.modules}
    if not beside & (set(loaded.values()) - _ALWAYS_LOADED):
        return
    for name, top in loaded.items():
        written_in_python = getattr(sys.modules[name], "__file__", "").endswith(".py")
        if top not in _ALWAYS_LOADED and (written_in_python or top in beside):
            del sys.modules[name]


def _exit_status(code: object) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1
