"""Boot files of a virtual machine: a kernel, the first file system (initramfs), and a disk with the
programs of this machine.

The kernel is one that Debian installed, with the few modules that a machine needs. The disk is a
squashfs of the directories that sandboxes show. It is made once for each state of those directories
and kept, since it is as large as they are.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import gzip
import hashlib
import io
import lzma
import os
import py_compile
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.core.errors import EtudeError
from etude.sandbox.bundle import copy_program
from etude.sandbox.mounts import Mount

PROBE = "etude.probe"
"""On the kernel's command line: only report that the machine is up, and power off."""
UP = "etude is up"
SYSTEM, MOUNTS = "system", "mounts"
"""The disks of a machine, by their serial numbers."""
MOUNTED = "/mnt"
"""Mount point of the second disk in a machine."""
_PROGRAM = "/run/program"
_PYTHON = ("-B", "-s", "-S", "-P", "-X", "utf8", "-c")
_START = (
    "import sys; sys.path.append(sys.argv[1]); from etude.sandbox.vm_guest import main; "
    "main(sys.argv[2:])"
)
_MODULES = ("virtio_mmio", "virtio_blk", "virtio_console", "squashfs", "overlay")
_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC = ("etc/ld.so.cache", "etc/alternatives", "etc/ssl/certs")
_PLACES = ("dev", "proc", "sys", "tmp", "run", "etc", "mnt", "work")
_LEFT_OUT = ("usr/lib/modules", "usr/lib/debug", "usr/share/doc", "usr/share/man", "usr/src")
"""Nothing that runs in a sandbox needs these."""
_INIT = f"""#!/bin/busybox sh
export PATH=/bin
mount -t proc proc /proc
case " $(cat /proc/cmdline) " in *" {PROBE} "*) echo {UP} > /dev/console; poweroff -f;; esac
for module in $(cat /modules/order); do insmod /modules/$module; done
mount -t devtmpfs devtmpfs /dev
mount -t sysfs sysfs /sys
show() {{
    while :; do
        for disk in /sys/block/vd*; do
            [ "$(cat $disk/serial)" = $1 ] &&
                mount -t squashfs -o ro /dev/${{disk##*/}} $2 && return
        done
        usleep 20000
    done
}}
until port=$(echo /dev/vport*p1) && [ -c $port ]; do usleep 20000; done
show {SYSTEM} /root
SHOW_MOUNTS
mount -t tmpfs -o mode=0755 tmpfs /root/run && cp -r /program /root{_PROGRAM} &&
    mount -o move /sys /root/sys && mount -t cgroup2 cgroup2 /root/sys/fs/cgroup &&
    mount -o move /dev /root/dev && mount -o move /proc /root/proc || poweroff -f
ip link set lo up
exec 2> /root/dev/console 0<> /root$port 1>&0
exec switch_root /root COMMAND
"""


def cache() -> Path:
    """Directory of disks, templates, and the results of probing this machine."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    place = Path(base) / "etude" / "vm"
    place.mkdir(parents=True, exist_ok=True)
    return place


@dataclass(frozen=True, slots=True)
class Kernel:
    """An installed kernel, and its modules."""

    path: str
    modules: str

    def module_files(self) -> list[str]:
        """The modules to load, in order. FileNotFoundError if one is neither there nor built in."""
        built_in = {_module_name(line) for line in _lines(f"{self.modules}/modules.builtin")}
        needs: dict[str, list[str]] = {}
        for line in _lines(f"{self.modules}/modules.dep"):
            file, _, others = line.partition(":")
            needs[_module_name(file)] = [*reversed(others.split()), file]
        order: list[str] = []
        for name in _MODULES:
            if name not in built_in:
                if name not in needs:
                    raise FileNotFoundError(name)
                order += [each for each in needs[name] if each not in order]
        return [f"{self.modules}/{each}" for each in order]


def find_kernel() -> Kernel | None:
    """The newest installed kernel that is readable and has what a machine needs; kernels for
    virtual machines come first."""
    found = []
    for path in glob.glob("/boot/vmlinuz-*"):
        version = path.removeprefix("/boot/vmlinuz-")
        kernel = Kernel(path, f"/lib/modules/{version}")
        with contextlib.suppress(OSError):
            kernel.module_files()
            if os.access(path, os.R_OK):
                found.append(("cloud" in version, os.stat(path).st_mtime, kernel))
    return max(found, key=lambda each: each[:2])[2] if found else None


def write_initramfs(target: Path, kernel: Kernel, mounts: Sequence[Mount]) -> None:
    """Write the guest's program, busybox and modules into an initramfs."""
    python = getattr(sys, "_base_executable", sys.executable)
    places = [word for source, target in mounts for word in (MOUNTED + source, target)]
    argv = [python, *_PYTHON, _START, _PROGRAM, *places]
    command = " ".join("'" + word.replace("'", "'\\''") + "'" for word in argv)
    init = _INIT.replace("COMMAND", command)
    init = init.replace("SHOW_MOUNTS", f"show {MOUNTS} /root{MOUNTED}" if mounts else "")
    with target.open("wb") as file, tempfile.TemporaryDirectory() as directory:
        for name in ("bin", "dev", "proc", "sys", "root", "modules"):
            _add(file, name, stat.S_IFDIR | 0o755)
        # the kernel itself opens this before anything is mounted
        _add(file, "dev/console", stat.S_IFCHR | 0o600, device=(5, 1))
        _add(file, "init", stat.S_IFREG | 0o755, init.encode())
        busybox = shutil.which("busybox")
        assert busybox is not None
        _add(file, "bin/busybox", stat.S_IFREG | 0o755, Path(busybox).read_bytes())
        for name in _APPLETS:
            _add(file, f"bin/{name}", stat.S_IFLNK | 0o777, b"busybox")
        files = kernel.module_files()
        for path in files:
            _add(file, f"modules/{_module_name(path)}", stat.S_IFREG | 0o644, _module(path))
        order = "\n".join(_module_name(path) for path in files)
        _add(file, "modules/order", stat.S_IFREG | 0o644, order.encode())
        copy_program(Path(directory, "program"))
        for source in list(Path(directory).rglob("*.py")):  # in the guest it would take seconds
            unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
            named = f"/run/{source.relative_to(directory)}"
            py_compile.compile(str(source), dfile=named, invalidation_mode=unchecked)
        for inner in sorted(Path(directory).rglob("*")):
            kind = stat.S_IFDIR | 0o755 if inner.is_dir() else stat.S_IFREG | 0o644
            content = b"" if inner.is_dir() else inner.read_bytes()
            _add(file, str(inner.relative_to(directory)), kind, content)
        _add(file, "TRAILER!!!", 0)


_APPLETS = ("sh", "cat", "cp", "insmod", "ip", "mount", "poweroff", "switch_root", "usleep")


def _add(
    file: io.BufferedWriter,
    name: str,
    mode: int,
    content: bytes = b"",
    device: tuple[int, int] = (0, 0),
) -> None:
    """Add an entry in the format that the kernel reads (cpio, "newc")."""
    path = name.encode() + b"\0"
    fields = (0, mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(path), 0)
    head = b"070701" + b"".join(b"%08X" % value for value in fields) + path
    for part in (head, content):
        file.write(part + bytes(-len(part) % 4))


def _module(path: str) -> bytes:
    data = Path(path).read_bytes()
    if path.endswith(".xz"):
        return lzma.decompress(data)
    return gzip.decompress(data) if path.endswith(".gz") else data


def _module_name(path: str) -> str:
    return Path(path.strip()).name.partition(".")[0].replace("-", "_")


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def build_disks(mounts: Sequence[Mount]) -> dict[str, Path]:
    """Disks by name: the programs of this machine, and the mounts if there are any. A disk is
    reused if none of its files has changed; the newest few are kept."""
    sources = [name for name in (*_SYSTEM, *_ETC) if os.path.lexists(f"/{name}")]
    prefix = sys.base_prefix
    if not f"{prefix}/".startswith("/usr/"):
        sources.append(prefix.strip("/"))
    disks = {SYSTEM: _disk(sources, [path.strip("/") for path in _hidden()])}
    if mounts:
        disks[MOUNTS] = _disk(sorted({mount.source.strip("/") for mount in mounts}), [])
    return disks


def _disk(sources: Sequence[str], hidden: Sequence[str]) -> Path:
    digest = _digest([f"/{name}" for name in sources], hidden)
    disk = cache() / f"disk-{digest[:32]}.squashfs"
    with _only_one(cache() / "lock"):
        if not disk.exists():
            _write_disk(disk, sources, hidden)
            _keep_newest("disk-*.squashfs", 8)
    os.utime(disk)
    return disk


def _hidden() -> list[str]:
    """The packages of every Python, which no sandbox shows, and other directories to leave out."""
    prefixes = sorted({"/usr", "/usr/local", sys.base_prefix})
    found = [path for each in prefixes for path in glob.glob(f"{each}/lib*/python*/*-packages")]
    return [*(path for path in found if not os.path.islink(path)), *_LEFT_OUT]


def _digest(roots: Sequence[str], hidden: Sequence[str]) -> str:
    """Digest of names, sizes, modes and times: reading gigabytes of contents would take too
    long."""
    pruned = [word for path in hidden for word in ("-path", f"/{path}", "-prune", "-o")]
    argv = ["find", *roots, *pruned, "-printf", "%p %s %T@ %m %l\\n"]
    found = subprocess.run(argv, capture_output=True, check=False).stdout
    # sorted, since the order of directories changes when they are copied
    told = "\n".join([*roots, *hidden]).encode() + b"\n".join(sorted(found.splitlines()))
    return hashlib.sha256(told).hexdigest()


def _write_disk(disk: Path, sources: Sequence[str], hidden: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as skeleton, _written_whole(disk) as unfinished:
        os.chmod(skeleton, 0o755)
        for name in _PLACES:
            Path(skeleton, name).mkdir(parents=True)
        argv = ["tar", "--create", "--numeric-owner", "--owner=0", "--group=0", "--sparse"]
        argv += ["--ignore-failed-read", "--warning=none", "--anchored", "--no-wildcards"]
        argv += [f"--exclude={name}" for name in hidden]
        argv += [f"--directory={skeleton}", ".", "--directory=/", *sources]
        packing = ["sqfstar", "-comp", "lz4", "-quiet", "-no-progress", str(unfinished)]
        with (
            tempfile.TemporaryFile() as errors,
            subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=errors) as reading,
        ):
            packed = subprocess.run(packing, stdin=reading.stdout, capture_output=True, check=False)
            assert reading.stdout is not None
            reading.stdout.close()
            reading.wait()
            errors.seek(0)
            # 1: a file that changed while it was read
            if packed.returncode or reading.returncode not in (0, 1):
                said = (errors.read() + packed.stderr).decode(errors="replace")[-500:]
                raise EtudeError(f"could not build the disk of the virtual machines: {said}")


@contextlib.contextmanager
def _written_whole(path: Path) -> Iterator[Path]:
    """A path that is renamed to `path` once complete. Only one process writes at a time, so an
    existing file was left by one that was killed."""
    unfinished = path.with_name("unfinished")
    unfinished.unlink(missing_ok=True)
    try:
        yield unfinished
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def keep_template(new: Path, place: Path) -> None:
    """Move a saved machine to the place where later pools find it."""
    with _only_one(cache() / "lock"):
        if not place.exists():
            unfinished = place.with_name("unfinished-template")
            shutil.rmtree(unfinished, ignore_errors=True)
            # memory is mostly holes, which a copy must keep
            subprocess.run(["cp", "-r", "--sparse=always", str(new), str(unfinished)], check=True)
            unfinished.rename(place)
            _keep_newest("template-*", 8)


def _keep_newest(pattern: str, number: int) -> None:
    """Remove all but the newest. A machine that has one of the others open can still use it."""
    found = sorted(cache().glob(pattern), key=lambda path: path.stat().st_mtime)
    for old in found[:-number]:
        shutil.rmtree(old) if old.is_dir() else old.unlink()
