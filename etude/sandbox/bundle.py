"""OCI runtime spec of a sandbox: its root directory, its mounts and its limits."""

from __future__ import annotations

import glob
import os
import resource
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etude.core.sandbox import Limits
from etude.sandbox.limits import COPY_BYTES, LIMITS, largest_file, memory_for
from etude.sandbox.mounts import Mount, search_path
from etude.sandbox.places import LINKS, WORK

SOURCE = "/mnt"
"""Path at which the first process finds its program, until it has loaded it."""
_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_PLACES = ("dev", "proc", "tmp", "run", "etc", "mnt", WORK.strip("/"))
_HOST_THREADS = 512
"""Threads on the host that all processes of a sandbox and their kernel may have together."""
_KERNEL_BYTES = 96 << 20
"""Memory for gVisor's kernel itself, on top of what the processes in the sandbox use."""
_NAMES = {
    resource.RLIMIT_AS: "RLIMIT_AS",
    resource.RLIMIT_FSIZE: "RLIMIT_FSIZE",
    resource.RLIMIT_NOFILE: "RLIMIT_NOFILE",
    resource.RLIMIT_CORE: "RLIMIT_CORE",
}
_RIGHTS = ["CAP_SYS_ADMIN", "CAP_DAC_OVERRIDE"]
"""Capabilities of the first process: to unmount its program, and to read files that commands have
made unreadable."""
_START = (
    "import sys; sys.path.append(sys.argv[1]); from etude.sandbox.machine import main; "
    "main(sys.argv[1], sys.argv[2:])"
)


def build_root(root: Path) -> None:
    """Create the parts of the root that are not mounted: empty directories, links, and a few files
    of /etc."""
    for name in _PLACES:
        (root / name).mkdir(parents=True)
    for name, target in system_links().items():
        (root / name).symlink_to(target)
    for name, target in LINKS.items():
        (root / name.strip("/")).symlink_to(target)
    (root / "etc/passwd").write_text("user:x:1000:1000::/tmp:/bin/sh\n")
    (root / "etc/group").write_text("user:x:1000:\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
    (root / "etc/nsswitch.conf").write_text("hosts: files\n")
    if os.path.exists("/etc/ld.so.cache"):
        shutil.copy("/etc/ld.so.cache", root / "etc")
    if os.path.isdir("/etc/alternatives"):
        shutil.copytree("/etc/alternatives", root / "etc/alternatives", symlinks=True)


def system_links() -> dict[str, str]:
    """Names in the root of this machine that lead to directories of its programs."""
    names = [name for name in _SYSTEM if os.path.islink(f"/{name}")]
    return {name: os.readlink(f"/{name}") for name in names}


def system_directories() -> list[str]:
    """Directories of this machine with programs and libraries, and with its Python."""
    shown = [f"/{name}" for name in _SYSTEM if os.path.isdir(f"/{name}")]
    shown = [path for path in shown if not os.path.islink(path)]
    outside = not f"{sys.base_prefix}/".startswith("/usr/")
    return [*shown, sys.base_prefix] if outside else shown


def base_python() -> str:
    """The Python below the current virtual environment, or this Python if there is none."""
    return str(getattr(sys, "_base_executable", sys.executable))


def copy_program(target: Path) -> None:
    """Copy the modules that the first process needs, and nothing else of this installation."""
    package = Path(__file__).resolve().parents[1]
    for pattern in ("__init__.py", "core/__init__.py", "core/errors.py", "core/sandbox.py"):
        _copy(package, package / pattern, target)
    for file in (package / "sandbox").glob("*.py"):
        _copy(package, file, target)


def _copy(package: Path, file: Path, target: Path) -> None:
    place = target / "etude" / file.relative_to(package)
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, place)


def oci_spec(
    root: Path, program: Path, mounts: Sequence[Mount], limits: Limits, *, cgroup: str
) -> dict[str, Any]:
    """OCI runtime spec, as `config.json` has it. `cgroup`: path of a cgroup to create for the
    sandbox; empty: none."""
    argv = [base_python(), "-B", "-s", "-S", "-P", "-X", "utf8", "-c", _START, SOURCE]
    disk = limits.disk_bytes or COPY_BYTES
    memory = limits.memory_bytes or memory_for(disk)
    process_limits = LIMITS | {
        resource.RLIMIT_AS: max(memory, LIMITS[resource.RLIMIT_AS]),
        resource.RLIMIT_FSIZE: largest_file(disk),
    }
    linux: dict[str, Any] = {
        "namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]
    }
    if cgroup:
        linux["cgroupsPath"] = cgroup
        linux["resources"] = {
            "memory": {"limit": memory + _KERNEL_BYTES},
            "pids": {"limit": _HOST_THREADS},
        }
        if limits.cpus is not None:
            quota = {"quota": int(limits.cpus * 100_000), "period": 100_000}
            linux["resources"]["cpu"] = quota
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": [*argv, *search_path(mounts)],
            "env": ["PYTHONHASHSEED=0"],
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), _RIGHTS),
            "rlimits": [
                {"type": _NAMES[kind], "soft": value, "hard": value}
                for kind, value in process_limits.items()
                if kind in _NAMES
            ],
        },
        "root": {"path": str(root), "readonly": True},
        "hostname": "localhost",
        "mounts": [
            *_mounts(mounts, limits.disk_bytes or COPY_BYTES),
            _bind(Mount(str(program), SOURCE)),
        ],
        "linux": linux,
    }


def _mounts(mounts: Sequence[Mount], disk_bytes: int) -> list[dict[str, Any]]:
    size = ["nosuid", "nodev", f"size={disk_bytes}", "mode=0755"]
    found: list[dict[str, Any]] = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid"]},
        {"destination": "/dev/pts", "type": "devpts", "source": "devpts"},
        {"destination": "/run", "type": "tmpfs", "source": "tmpfs", "options": ["size=1m"]},
        {"destination": WORK, "type": "tmpfs", "source": "tmpfs", "options": size},
        {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": size},
    ]
    found += [_bind(Mount(path, path)) for path in system_directories()]
    for prefix in sorted({"/usr", "/usr/local", sys.base_prefix}):
        for path in glob.glob(f"{prefix}/lib*/python*/*-packages"):
            if os.path.isdir(path) and not os.path.islink(path):
                empty = {"destination": path, "type": "tmpfs", "source": "tmpfs"}
                found.append({**empty, "options": ["ro", "size=4k"]})
    return found + [_bind(each) for each in mounts]


def _bind(mount: Mount) -> dict[str, Any]:
    return {
        "destination": mount.target,
        "type": "bind",
        "source": mount.source,
        "options": ["rbind", "ro", "nosuid", "nodev"],
    }
