"""One cgroup per sandbox, which bounds what all of its processes use together.

The cgroups are created below the one that this process is in, if that is writable: as root, or
because it was delegated. Both versions of the interface are supported. Standard library only: this
runs in the zygote.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator

from etude.sandbox.owners import is_abandoned, owner_mark

_PREFIX = "etude-"
_TRY_ABOVE = {errno.EBUSY: "it has processes of its own", errno.ENOENT: "it cannot count memory"}
_ENTRY = "cgroup.procs"
_PERIOD_US = 100_000
_LOOKS, _LOOK_S = 150, 0.01
"""Number of times, and seconds between them, that `close` checks whether all cgroups are empty."""


class Cgroups:
    """The cgroups of one zygote, held by descriptors that stay valid after it has moved into its
    root."""

    def __init__(self) -> None:
        """Raises OSError with the reason why cgroups cannot be used."""
        self.version, places = find(_read("/proc/self/cgroup"), _read("/proc/self/mountinfo"))
        self._names: set[str] = set()
        self.leaving: set[str] = set()
        """Cgroups of sandboxes that are gone or about to go."""
        self._base = f"{_PREFIX}{owner_mark()}"
        self._parents: dict[str, int] = {}
        self._bases: dict[str, int] = {}
        try:
            for controller, place in places.items():
                self._open(controller, place)
        except OSError:
            self.close()
            raise

    def _open(self, controller: str, place: str) -> None:
        if self.version == "v2":
            place = _enable(controller, place)
        with _saying(place):
            _sweep(place)
            with contextlib.suppress(FileExistsError):
                os.mkdir(f"{place}/{self._base}")
            self._parents[controller] = os.open(place, os.O_PATH | os.O_DIRECTORY)
            base = os.open(f"{place}/{self._base}", os.O_PATH | os.O_DIRECTORY)
            self._bases[controller] = base
            if self.version == "v2":
                _write(base, "cgroup.subtree_control", f"+{controller}")

    def enter(self, name: str) -> None:
        """Move this process into the cgroup that counts its memory. Call it in the fork that
        becomes the sandbox."""
        self._make("memory", name)
        _write(self._bases["memory"], f"{name}/{_ENTRY}", "0")
        for descriptor in {*self._parents.values(), *self._bases.values()}:
            os.close(descriptor)

    def bound(self, name: str, memory_bytes: int, cpus: float | None) -> list[int]:
        """Limit what the processes of a sandbox use together. Returns descriptors of the cgroups
        that it has yet to enter, by writing a 0. The first version limits processors in a separate
        cgroup, in which the niceness of processes has no effect outside; so only sandboxes with
        such a limit enter one."""
        self._make("memory", name)
        self._limit("memory", name, limits(self.version, memory_bytes, None))
        if cpus is None:
            return []
        self._make("cpu", name)
        self._limit("cpu", name, limits(self.version, None, cpus))
        if self.version == "v2":
            return []
        return [os.open(f"{name}/{_ENTRY}", os.O_WRONLY, dir_fd=self._bases["cpu"])]

    def _make(self, controller: str, name: str) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=self._bases[controller])

    def _limit(self, controller: str, name: str, values: dict[str, str]) -> None:
        for file, value in values.items():
            try:
                _write(self._bases[controller], f"{name}/{file}", value)
            except FileNotFoundError:
                if "sw" not in file:  # a kernel that does not count swap
                    raise

    def expect(self, name: str) -> None:
        """Note that a fork is about to enter this cgroup."""
        self._names.add(name)

    def leave(self, name: str) -> None:
        """Remove the cgroup now, or once its last process has ended: `tidy` retries until then."""
        self.leaving.add(name)
        self.tidy()

    def tidy(self) -> None:
        self.leaving = {each for each in self.leaving if not self._removed(each)}

    def _removed(self, name: str) -> bool:
        busy = False
        for base in set(self._bases.values()):
            try:
                os.rmdir(name, dir_fd=base)
            except FileNotFoundError:
                pass
            except OSError:
                busy = True
        if not busy:
            self._names.discard(name)
        return not busy

    def close(self) -> None:
        """Remove all cgroups once the sandboxes are gone. The next zygote sweeps any that are still
        busy."""
        for _ in range(_LOOKS):
            for name in list(self._names):
                self._removed(name)
            if not self._names:
                break
            time.sleep(_LOOK_S)
        for parent in set(self._parents.values()):
            _sweep(f"/proc/self/fd/{parent}")
            with contextlib.suppress(OSError):
                os.rmdir(self._base, dir_fd=parent)


def limits(version: str, memory_bytes: int | None, cpus: float | None) -> dict[str, str]:
    """Files of a cgroup and the values to write to them, in this order."""
    values: dict[str, str] = {}
    if memory_bytes is not None and version == "v1":
        values["memory.limit_in_bytes"] = str(memory_bytes)
        values["memory.memsw.limit_in_bytes"] = str(memory_bytes)
    elif memory_bytes is not None:
        values["memory.max"] = str(memory_bytes)
        values["memory.swap.max"] = "0"
    if cpus is not None and version == "v1":
        values["cpu.cfs_period_us"] = str(_PERIOD_US)
        values["cpu.cfs_quota_us"] = str(round(cpus * _PERIOD_US))
    elif cpus is not None:
        values["cpu.max"] = f"{round(cpus * _PERIOD_US)} {_PERIOD_US}"
    return values


def find(own: str, mounts: str) -> tuple[str, dict[str, str]]:
    """The version of the interface that counts memory here, and the directory of our own cgroup by
    controller. From /proc/self/cgroup and mountinfo."""
    paths = {}
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    first: dict[str, str] = {}
    second = ""
    for line in mounts.splitlines():
        head, _, tail = line.partition(" - ")
        root, point = head.split()[3:5]
        kind, _, options = tail.split()[:3]
        if kind == "cgroup2" and "" in paths:
            second = _below(point, root, paths[""])
        elif kind == "cgroup":
            for name in {"memory", "cpu"} & set(options.split(",")) & paths.keys():
                first[name] = _below(point, root, paths[name])
    if first.keys() >= {"memory", "cpu"}:
        return "v1", first
    if second:
        return "v2", {"memory": second, "cpu": second}
    raise OSError(
        errno.ENOENT, "no cgroup file system with the controllers memory and cpu is mounted"
    )


def _below(point: str, root: str, path: str) -> str:
    """Path of a cgroup, through a mount that shows the hierarchy from `root` on."""
    inner = path.removeprefix(root) if root != "/" else path
    return f"{point}/{inner.strip('/')}".rstrip("/")


def _enable(controller: str, own: str) -> str:
    """The cgroup below which cgroups with this controller can be made: our own or its parent, since
    in the second version such a cgroup must not contain processes."""
    above = os.path.dirname(own)
    for place in (own, above):
        try:
            with _saying(place):
                _write(place, "cgroup.subtree_control", f"+{controller}")
            return place
        except OSError as e:
            if e.errno not in _TRY_ABOVE or place == above:
                raise
    raise AssertionError("one of the two has raised")


def _sweep(place: str) -> None:
    """Remove the cgroups of killed zygotes. A cgroup with a process in it stays."""
    for name in os.listdir(place):
        if not (name.startswith(_PREFIX) and is_abandoned(name.removeprefix(_PREFIX))):
            continue
        with contextlib.suppress(OSError):
            for inner in os.scandir(f"{place}/{name}"):
                if inner.is_dir():
                    os.rmdir(inner.path)
            os.rmdir(f"{place}/{name}")


@contextlib.contextmanager
def _saying(place: str) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        why = _TRY_ABOVE.get(e.errno or 0, e.strerror)
        raise OSError(e.errno, f"{place}: {why}") from e


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _write(place: str | int, name: str, value: str) -> None:
    directory = None if isinstance(place, str) else place
    path = f"{place}/{name}" if isinstance(place, str) else name
    descriptor = os.open(path, os.O_WRONLY, dir_fd=directory)
    try:
        os.write(descriptor, value.encode())
    finally:
        os.close(descriptor)
