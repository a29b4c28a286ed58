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

from etude.core.protocols import CommandResult
from etude.sandbox.files import inside
from etude.sandbox.limits import OUTPUT_BYTES, READ_BYTES


class ProcessSandboxPool:
    @contextlib.asynccontextmanager
    async def open(self, files: Mapping[str, str]) -> AsyncIterator[ProcessSandbox]:
        sandbox = ProcessSandbox(_new_directory())
        try:
            for path, text in files.items():
                await sandbox.write(path, text)
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
    def __init__(self, root: Path) -> None:
        self._root = root

    async def run(self, argv: Sequence[str], *, timeout_s: float, stdin: str = "") -> CommandResult:
        environment = {"PATH": os.defpath, "HOME": str(self._root), "LANG": "C.UTF-8"}
        python = [sys.executable, "-s", "-B"] if argv[0] in ("python", "python3") else [argv[0]]
        with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as output:
            source.write(stdin.encode())
            source.seek(0)
            try:
                process = await asyncio.create_subprocess_exec(
                    *python,
                    *argv[1:],
                    cwd=self._root,
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

    async def read(self, path: str) -> str:
        try:
            descriptor = os.open(self._inside(path), os.O_RDONLY | os.O_NONBLOCK)
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
        return data.decode()

    async def write(self, path: str, text: str) -> None:
        target, data = self._inside(path), text.encode()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        except OSError as e:
            raise ValueError(f"{path} cannot be written: {e.strerror}") from e

    def _inside(self, path: str) -> Path:
        try:
            target = (self._root / inside(path)).resolve()
        except (OSError, RuntimeError) as e:  # links in a circle
            raise ValueError(f"{path} cannot be read: {e}") from e
        if not target.is_relative_to(self._root):
            raise ValueError(f"{path} leaves the working copy")
        return target

    async def fork(self) -> ProcessSandbox:
        root = _new_directory()
        shutil.copytree(self._root, root, symlinks=True, dirs_exist_ok=True)
        return ProcessSandbox(root)

    async def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)
