"""Harbor's format: a task is a directory with `task.toml`, `instruction.md`, `environment/`,
`tests/` and `solution/`.

Our own settings are under `[metadata.etude]`, which other programs ignore. A directory gets its
name last, so one with a name is complete.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import shlex
import shutil
import sys
import tarfile
import tomllib
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from etude.core.errors import EtudeError
from etude.factory.task import GRADING_S, LIMITS, PYTEST, Files, RepositoryTask, python_env

_ARCHIVE = "repository.tar.gz"
_AGENT_S = 1800.0


def write_task(folder: Path, task: RepositoryTask, archives: Path) -> Path:
    """Write a task below `folder`. Files that tasks share are stored once, in `archives`."""
    final, half = folder / task.id, folder / f".{task.id}.part"
    shutil.rmtree(half, ignore_errors=True)
    _write(half / "task.toml", _settings(task).encode())
    _write(half / "instruction.md", task.instruction.encode())
    _write(half / "environment" / "Dockerfile", _dockerfile(task).encode())
    os.link(_archived(archives, task.base), half / "environment" / _ARCHIVE)
    for part, files in (
        ("environment/changes", task.changes),
        ("solution/files", task.solution),
        ("tests/files", task.tests),
    ):
        (half / part).mkdir(parents=True)
        for path, content in files.items():
            _write(half / part / path, content)
    _write(half / "solution" / "solve.sh", _script("cp -R /solution/files/. /work/"))
    _write(half / "tests" / "test.sh", _script(*_verifier(task)))
    for script in ("solution/solve.sh", "tests/test.sh"):
        (half / script).chmod(0o755)
    shutil.rmtree(final, ignore_errors=True)
    half.rename(final)
    return final


def read_task(folder: Path) -> RepositoryTask:
    """Read a directory. EtudeError if it is not a task, or one that others made."""
    check_links(folder)
    own = _own_settings(folder)
    if not isinstance(own, dict):
        raise EtudeError(
            f"{folder}: this is a Harbor task for a container, without [metadata.etude]: use it "
            f'in a run with environment = "etude.run.harbor_tasks:HarborTasks"'
        )
    return RepositoryTask(
        id=folder.name,
        kind=own["kind"],
        repository=own["repository"],
        origin=own["origin"],
        instruction=(folder / "instruction.md").read_text(),
        base=_shared(folder / "environment" / _ARCHIVE, own["archive"]),
        changes=_files(folder / "environment" / "changes"),
        solution=_files(folder / "solution" / "files"),
        tests=_files(folder / "tests" / "files"),
        fail_to_pass=tuple(own["fail_to_pass"]),
        pass_to_pass=tuple(own["pass_to_pass"]),
        sources=tuple(own["sources"]),
        venv=own["venv"],
        requirements=tuple(own["requirements"]),
        pythonpath=tuple(own["pythonpath"]),
        processor_s=own.get("processor_s"),
        solve_rate=own.get("solve_rate"),
        facts=own.get("facts", {}),
    )


def is_ours(folder: Path) -> bool:
    """True if a directory has our settings for running it without a container."""
    return _own_settings(folder) is not None


def _own_settings(folder: Path) -> Any:
    metadata = read_settings(folder).get("metadata")
    return metadata.get("etude") if isinstance(metadata, dict) else None


def read_settings(folder: Path) -> dict[str, Any]:
    """The content of `task.toml`."""
    try:
        return tomllib.loads((folder / "task.toml").read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise EtudeError(f"{folder}: task.toml cannot be read ({e}): is this a Harbor task?") from e


def check_links(folder: Path) -> None:
    """EtudeError if a directory, which need not be trusted, has a link to anything but a file of
    its own: agents are shown its content."""
    whole = folder.resolve()
    for path in folder.rglob("*"):
        if path.is_symlink() and not (path.is_file() and path.resolve().is_relative_to(whole)):
            raise EtudeError(
                f"{folder}: {path.relative_to(folder)} is a link that does not lead to a file "
                f"of the task: replace it with the file"
            )


def write_solve_rate(folder: Path, rate: float) -> None:
    """Store how often a policy solved a task."""
    path = folder / "task.toml"
    lines = [line for line in path.read_text().splitlines() if not line.startswith("solve_rate = ")]
    place = lines.index("[metadata.etude]") + 1
    half = path.with_suffix(".part")
    half.write_text("\n".join([*lines[:place], f"solve_rate = {rate}", *lines[place:], ""]))
    half.rename(path)


def _settings(task: RepositoryTask) -> str:
    assert LIMITS.memory_bytes and LIMITS.disk_bytes
    own: dict[str, Any] = {
        "kind": task.kind,
        "repository": task.repository,
        "origin": task.origin,
        "archive": digest_of(task.base),
        "venv": task.venv,
        "pythonpath": task.pythonpath,
        "sources": task.sources,
        "fail_to_pass": task.fail_to_pass,
        "pass_to_pass": task.pass_to_pass,
        "requirements": task.requirements,
    }
    for name in ("processor_s", "solve_rate"):
        if (value := getattr(task, name)) is not None:
            own[name] = value
    told: dict[str, Mapping[str, Any]] = {
        "task": {
            "name": f"etude/{task.id}",
            "description": f"{task.kind} in {task.repository}",
            "keywords": ["python", task.kind],
        },
        "metadata": {"category": "software-engineering"},
        "metadata.etude": own,
        "metadata.etude.facts": task.facts,
        "verifier": {"timeout_sec": GRADING_S},
        "agent": {"timeout_sec": _AGENT_S},
        "environment": {
            "cpus": 1,
            "memory_mb": LIMITS.memory_bytes >> 20,
            "storage_mb": LIMITS.disk_bytes >> 20,
            "network_mode": "no-network",
        },
    }
    return 'schema_version = "1.1"\n' + "".join(
        f"\n[{table}]\n" + "".join(f"{key} = {_value(value)}\n" for key, value in values.items())
        for table, values in told.items()
    )


def _value(value: object) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(_value, value)) + "]"
    return str(value)


def _dockerfile(task: RepositoryTask) -> str:
    """A Dockerfile for users of Docker; our sandboxes read the same files directly."""
    installed = shlex.join(task.requirements)
    env = python_env(task.pythonpath, task.requirements)
    return (
        f"FROM python:{sys.version_info[0]}.{sys.version_info[1]}-slim\n"
        f"RUN pip install --no-cache-dir {installed or 'pytest'}\n"
        "WORKDIR /work\n"
        f"ENV {' '.join(f'{name}={value}' for name, value in env.items())}\n"
        f"ADD {_ARCHIVE} /work/\n"
        "COPY changes/ /work/\n"
    )


def _verifier(task: RepositoryTask) -> list[str]:
    tests = shlex.join((*task.fail_to_pass, *task.pass_to_pass))
    return [
        "cp -R /tests/files/. /work/",
        "cd /work",
        f"if {PYTEST} {tests}; then reward=1; else reward=0; fi",
        "mkdir -p /logs/verifier",
        "echo $reward > /logs/verifier/reward.txt",
    ]


def _script(*lines: str) -> bytes:
    return "\n".join(["#!/bin/sh", *lines, ""]).encode()


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _files(folder: Path) -> dict[str, bytes]:
    return {
        each.relative_to(folder).as_posix(): each.read_bytes()
        for each in sorted(folder.rglob("*"))
        if each.is_file()
    }


_DIGESTS: dict[int, tuple[Files, str]] = {}


def digest_of(files: Files) -> str:
    """The identity of a tree of files."""
    if id(files) not in _DIGESTS:
        if len(_DIGESTS) > 64:
            _DIGESTS.clear()
        digest = blake2b(digest_size=12)
        for path in sorted(files):
            digest.update(f"{path}\0{len(files[path])}\0".encode() + files[path])
        _DIGESTS[id(files)] = (files, digest.hexdigest())
    return _DIGESTS[id(files)][1]


def _archived(archives: Path, files: Files) -> Path:
    place = archives / f"{digest_of(files)}.tar.gz"
    if not place.exists():
        archives.mkdir(parents=True, exist_ok=True)
        pack(place, files)
    return place


def pack(place: Path, files: Files) -> None:
    """Write files as an archive. Tasks that share them may be written at the same time."""
    half = place.with_suffix(f".{secrets.token_hex(8)}.part")
    with tarfile.open(half, "w:gz", compresslevel=3) as archive:
        for path, content in sorted(files.items()):
            info = tarfile.TarInfo(path)
            info.size = len(content)
            info.mode = 0o644
            archive.addfile(info, io.BytesIO(content))
    half.rename(place)


def unpack(place: Path) -> dict[str, bytes]:
    """Read an archive."""
    found: dict[str, bytes] = {}
    with tarfile.open(place) as archive:
        for member in archive:
            if member.isfile() and (content := archive.extractfile(member)) is not None:
                found[member.name] = content.read()
    return found


def _shared(place: Path, digest: str) -> Files:
    """The files of an archive, read once for all tasks that share it."""
    if digest not in _TREES:
        _TREES[digest] = unpack(place)
    return _TREES[digest]


_TREES: dict[str, Files] = {}
