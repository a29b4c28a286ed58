"""Sandboxes without isolation: `isolation = "process"`.

A temporary directory and ordinary processes of the same user. What runs in it can read this
machine, reach the network, and leave processes behind if it means to. Only for code that you trust,
on machines whose kernel refuses namespaces.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from etude.core.errors import EtudeError
from etude.core.sandbox import CommandResult, Process, SandboxSpec
from etude.sandbox.files import inside, inside_directory, to_bytes
from etude.sandbox.limits import OUTPUT_BYTES, READ_BYTES
from etude.sandbox.spec import check_env, check_spec


class ProcessSandboxPool:
    @contextlib.asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[ProcessSandbox]:
        check_spec(spec, backend="process", gives=())
        sandbox = ProcessSandbox(_new_directory(), spec.env)
        try:
            for path, content in spec.files.items():
                await sandbox.write(path, content)
            yield sandbox
        finally:
            await sandbox.close()

    def owing(self) -> dict[str, float]:
        """There is no process between us and the commands."""
        return {}

    async def close(self) -> None:
        """Nothing is shared between sandboxes, so there is nothing to close."""


def _new_directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="etude-")).resolve()


class ProcessSandbox:
    def __init__(self, root: Path, env: Mapping[str, str]) -> None:
        self._root = root
        self._env = env

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: str | bytes = "",
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
    ) -> CommandResult:
        check_env(env or {})
        directory = self._directory(cwd)
        environment = {"PATH": os.defpath, "HOME": str(self._root), "LANG": "C.UTF-8"}
        environment |= {**self._env, **(env or {})}
        python = [sys.executable, "-s", "-B"] if argv[0] in ("python", "python3") else [argv[0]]
        with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as output:
            source.write(to_bytes(stdin))
            source.seek(0)
            try:
                process = await asyncio.create_subprocess_exec(
                    *python,
                    *argv[1:],
                    cwd=directory,
                    env=environment,
                    stdin=source,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            except OSError as e:
                return CommandResult(127, f"{argv[0]}: {e.strerror}\n")
            try:
                async with asyncio.timeout(timeout_s):
                    code: int | None = await process.wait()
            except TimeoutError:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            output.seek(max(0, output.seek(0, os.SEEK_END) - OUTPUT_BYTES))
            return CommandResult(code, output.read().decode(errors="replace"))

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        pty: bool = False,
    ) -> Process:
        raise EtudeError("process sandboxes have no background processes")

    async def read(self, path: str) -> str:
        return (await self.read_bytes(path)).decode()

    async def read_bytes(self, path: str) -> bytes:
        try:
            descriptor = os.open(self._inside(inside(path)), os.O_RDONLY | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError) as e:
            raise FileNotFoundError(path) from e
        except OSError as e:
            raise ValueError(f"{path} cannot be read: {e.strerror}") from e
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise ValueError(f"{path} is not a plain file")
        with open(descriptor, "rb") as file:
            data = file.read(READ_BYTES + 1)
        if len(data) > READ_BYTES:
            raise ValueError(f"{path} is larger than {READ_BYTES} bytes")
        return data

    async def write(self, path: str, content: str | bytes) -> None:
        target, data = self._inside(inside(path)), to_bytes(content)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        except OSError as e:
            raise ValueError(f"{path} cannot be written: {e.strerror}") from e

    def _inside(self, path: str) -> Path:
        try:
            target = (self._root / path).resolve()
        except (OSError, RuntimeError) as e:  # links in a circle
            raise ValueError(f"{path} cannot be read: {e}") from e
        if not target.is_relative_to(self._root):
            raise ValueError(f"{path} leaves the working copy")
        return target

    def _directory(self, path: str) -> Path:
        directory = self._inside(inside_directory(path))
        if not directory.is_dir():
            raise ValueError(f"{path} is not a directory of the working copy")
        return directory

    async def diff(self) -> str:
        raise EtudeError("process sandboxes do not know what has changed")

    async def fork(self) -> ProcessSandbox:
        root = _new_directory()
        shutil.copytree(self._root, root, symlinks=True, dirs_exist_ok=True)
        return ProcessSandbox(root, self._env)

    async def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)
