"""Bytecode of the files that a task starts from, compiled once and put into each of its sandboxes.

A working copy is fresh, so every command in it would compile package and tests again; rewriting the
assertions of tests, as pytest does, takes longest. This module compiles them in a separate sandbox,
in which nothing of the repository runs, with the Python and the pytest that the task's commands
find.

Each file of bytecode holds the hash of its source (PEP 552, "checked"), so an edited file is
compiled again even if its time and size are unchanged. The bytecode is part of the initial working
copy: no diff and no patch shows it. Since graders take over no bytecode, their tests can reach only
bytecode that was compiled here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import replace
from pathlib import PurePosixPath

from etude.core.sandbox import VENVS, Sandbox, SandboxPool, SandboxSpec, Tier
from etude.sandbox.files import inside, to_bytes
from etude.sandbox.limits import COPY_BYTES, PATCH_BYTES, files_in

_WORTH_BYTES = 16 << 10
"""Total size of the sources from which on compiling is worthwhile. For less, a command compiles
them itself in the time that starting a command here would take."""
_BATCH_BYTES = PATCH_BYTES // 8
"""Largest total size of the sources in one batch: rewritten tests are several times as large."""
_HELD_BYTES = 512 << 20
"""Largest total size of all cached bytecode. Beyond it the cache is cleared, and refilled later."""
_TIMEOUT_S = 120.0
_PROGRAM = r"""
import importlib.util, io, json, os, py_compile, re, sys, warnings
from pathlib import Path

# a command that compiles for itself says what there is to warn of
warnings.simplefilter("error")
REWRITTEN = re.compile(r"(test_\w+|\w+_tests?|tests?|conftest)\.py")

def compile_plain(path):
    # the name of the file is told by whoever loads it
    mode = py_compile.PycInvalidationMode.CHECKED_HASH
    py_compile.compile(path, doraise=True, invalidation_mode=mode, quiet=2)

def compile_rewritten(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from _pytest.assertion import rewrite
    told, code = rewrite._rewrite_test(Path(path), None)
    packed = io.BytesIO()
    rewrite._write_pyc_fp(packed, told, code)
    checked = b"\3\0\0\0" + importlib.util.source_hash(Path(path).read_bytes())
    if packed.getvalue()[4:16] != checked:  # an older pytest, which goes by time and size
        return
    folder = os.path.dirname(importlib.util.cache_from_source(path))
    os.makedirs(folder, exist_ok=True)
    target = os.path.join(folder, os.path.basename(path)[:-3] + rewrite.PYC_TAIL)
    with open(target + ".part", "wb") as file:
        file.write(packed.getvalue())
    os.replace(target + ".part", target)

for path in json.load(sys.stdin):
    path = os.path.abspath(path)
    ways = [compile_plain]
    if REWRITTEN.fullmatch(os.path.basename(path)):
        ways.append(compile_rewritten)
    for way in ways:
        try:
            way(path)
        except Exception:  # whoever imports it will see why
            pass
"""

Source = tuple[str, bytes]
"""Path and content."""
Made = Mapping[str, bytes]
"""Path -> bytecode; empty where a source cannot be compiled."""


class BytecodePool:
    """A `core.sandbox.SandboxPool` that adds bytecode of their files to the sandboxes of tasks that
    have a virtual environment."""

    def __init__(self, pool: SandboxPool) -> None:
        self._pool = pool
        self._made: dict[tuple[str, str], dict[Source, Made]] = {}
        """Keyed by the Python that the bytecode is for."""
        self._making: dict[tuple[str, str], asyncio.Lock] = {}

    @property
    def tier(self) -> Tier:
        return self._pool.tier

    def check(self, spec: SandboxSpec) -> None:
        self._pool.check(spec)

    @contextlib.asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        made = await self._bytecode(spec) if _has_environment(spec) else {}
        if made and _has_room(spec, made):
            spec = replace(spec, files={**made, **spec.files})
        async with self._pool.open(spec) as sandbox:
            yield sandbox

    async def _bytecode(self, spec: SandboxSpec) -> dict[str, bytes]:
        python = spec.image, spec.env["PATH"]
        sources = _importable(spec)
        async with self._making.setdefault(python, asyncio.Lock()):
            known = self._made.setdefault(python, {})
            batch = _first(source for source in sources if source not in known)
            if sum(len(content) for _, content in batch) >= _WORTH_BYTES:
                known |= await self._make(spec, batch)
                if _size(each for made in self._made.values() for each in made.values()) > (
                    _HELD_BYTES
                ):
                    self._made.clear()
        return {path: code for each in sources for path, code in known.get(each, {}).items()}

    async def _make(self, spec: SandboxSpec, sources: list[Source]) -> dict[Source, Made]:
        """Compile the sources in a working copy that has these files alone, with a Python that does
        not import from it."""
        bare = replace(spec, files=dict(sources), repository=None, services=(), network=())
        async with self._pool.open(bare) as sandbox:
            asked = json.dumps([path for path, _ in sources])
            # by its PATH: the `python` of a sandbox itself may have no packages
            argv = ["env", "python", "-I", "-B", "-c", _PROGRAM]
            await sandbox.run(argv, stdin=asked, timeout_s=_TIMEOUT_S)
            try:
                changed = await sandbox.patch()
            except ValueError:  # the bytecode is too large
                changed = {}
        found: dict[str, dict[str, bytes]] = {}
        for path, entry in changed.items():
            if entry and path.endswith(".pyc"):
                found.setdefault(_source_of(path), {})[path] = entry[1]
        return {source: found.get(source[0], {}) for source in sources}

    def owing(self) -> dict[str, float]:
        return self._pool.owing()

    async def close(self) -> None:
        await self._pool.close()


def _has_environment(spec: SandboxSpec) -> bool:
    return spec.env.get("PATH", "").startswith(f"{VENVS}/")


def _importable(spec: SandboxSpec) -> list[Source]:
    """The files of a working copy that may be modules."""
    files = ((inside(path), content) for path, content in spec.files.items())
    return [
        (path, to_bytes(content))
        for path, content in files
        if path.endswith(".py")
        and PurePosixPath(path).stem.isidentifier()
        and len(content) <= _BATCH_BYTES
    ]


def _first(sources: Iterable[Source]) -> list[Source]:
    """As many sources as are compiled in one batch."""
    batch: list[Source] = []
    left = _BATCH_BYTES
    for source in sources:
        left -= len(source[1])
        if left < 0:
            break
        batch.append(source)
    return batch


def _source_of(path: str) -> str:
    """`shop/__pycache__/cart.cpython-311.pyc` -> `shop/cart.py`"""
    place = PurePosixPath(path)
    return str(place.parent.parent / f"{place.name.partition('.')[0]}.py")


def _size(made: Iterable[Made]) -> int:
    return sum(len(code) for each in made for code in each.values())


def _has_room(spec: SandboxSpec, made: Made) -> bool:
    """True if the bytecode leaves at least half of the working copy's disk and files free."""
    disk = spec.limits.disk_bytes or COPY_BYTES
    taken = _size([made]) + sum(len(content) for content in spec.files.values())
    # each in a directory of its own, at worst
    return 2 * taken <= disk and 2 * (len(spec.files) + 2 * len(made)) <= files_in(disk)
