"""Bytecode in a new working copy: it is used, it is never stale, no change shows it, and bytecode
that an attempt writes in its place is never used elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from etude.core.sandbox import VENVS, Limits, Sandbox, SandboxPool, SandboxSpec
from etude.factory.grade import NOT_TAKEN
from etude.factory.install import CopyInstaller, Installed
from etude.factory.task import LIMITS, PYTEST, sandbox_env
from etude.rewards.fresh import grade_by_command
from etude.sandbox.bytecode import BytecodePool
from etude.sandbox.pool import open_sandbox_pool
from tests.namespaces import need_namespaces

LONG_S = 60.0
WORTH_IT = '"""' + "It is long.\n" * 2000 + '"""\n'
"""Large enough to be compiled in advance."""
BROKEN, MENDED = f"{WORTH_IT}def total(a, b):\n    return a - b\n", "a + b"
TEST = "from shop.cart import total\n\n\ndef test_total():\n    assert total(1, 2) == 3\n"
PACKAGE, TESTS = "shop/__pycache__/cart.cpython-", "tests/__pycache__/test_cart.cpython-"
SPEC = SandboxSpec(
    files={
        "shop/__init__.py": "",
        "shop/cart.py": BROKEN,
        "tests/test_cart.py": TEST,
        "README.md": "A shop.\n",
    },
    env=sandbox_env("shop", [""], []),
    limits=LIMITS,
)
EDIT = """
import os, sys
path, old, new = sys.argv[1:]
status, text = os.stat(path), open(path).read()
assert old in text and len(old) == len(new)
open(path, "w").write(text.replace(old, new))
os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
assert os.stat(path).st_mtime_ns == status.st_mtime_ns
"""
TROJAN = """
import glob, importlib._bootstrap_external as importing
code = compile("def total(a, b):\\n    return a + b\\n", "cart.py", "exec")
data = importing._code_to_hash_pyc(code, bytes(8), False)
for path in glob.glob("shop/__pycache__/cart.*.pyc"):
    open(path, "wb").write(data)
"""
"""The right answer, as bytecode that is used without looking at its source."""


@pytest.fixture(scope="module")
def venvs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("venvs")
    folder.chmod(0o755)
    CopyInstaller().install_again(
        Installed(requirements=(), generated={}, metadata={}), folder / "shop"
    )
    return folder


@pytest.fixture
async def pool(venvs: Path) -> AsyncIterator[SandboxPool]:
    need_namespaces()
    opened = open_sandbox_pool("namespaces", mounts=[f"{venvs}:{VENVS}"])
    yield opened
    await opened.close()


async def told(sandbox: Sandbox, *argv: str) -> str:
    return (await sandbox.run(["env", *argv], timeout_s=LONG_S)).output


async def passes(sandbox: Sandbox) -> bool:
    ran = await sandbox.run(["env", *PYTEST.split()], timeout_s=LONG_S)
    assert ran.exit_code in (0, 1), ran.output
    return ran.exit_code == 0


async def rewards(pool: SandboxPool, sandbox: Sandbox) -> float:
    argv = ["sh", "-c", f"exec {PYTEST} --assert=plain --junitxml=$ETUDE_REPORT"]
    score = await grade_by_command(
        sandbox,
        pool,
        SPEC,
        argv,
        timeout_s=LONG_S,
        files={"tests/test_cart.py": TEST},
        only=("shop/*",),
        without=NOT_TAKEN,
        expected=("tests.test_cart::test_total",),
    )
    return score.reward


async def test_what_a_task_begins_with_is_not_compiled_again(pool: SandboxPool) -> None:
    async with pool.open(SPEC) as sandbox:
        said = await told(sandbox, "python", "-v", "-c", "import shop.cart")
        assert "code object from '/work/shop/__pycache__/cart." in said
        said = await told(sandbox, *PYTEST.split(), "--debug=told.txt")
        assert "found cached rewritten pyc for" in await sandbox.read("told.txt"), said


async def test_only_a_task_with_a_virtual_environment_has_any(pool: SandboxPool) -> None:
    async with pool.open(replace(SPEC, env={})) as sandbox:
        assert "__pycache__" not in await told(sandbox, "find", ".")


@pytest.mark.parametrize("rewritten", [True, False])
async def test_an_edit_of_the_same_size_and_time_is_what_runs(
    pool: SandboxPool, rewritten: bool
) -> None:
    async with pool.open(SPEC) as sandbox:
        assert not await passes(sandbox)
        edit = (
            ("tests/test_cart.py", "== 3", "!= 3")
            if rewritten
            else ("shop/cart.py", "a - b", MENDED)
        )
        assert await told(sandbox, "python", "-c", EDIT, *edit) == ""
        assert await passes(sandbox)


async def test_no_change_has_bytecode_in_it(pool: SandboxPool) -> None:
    async with pool.open(SPEC) as sandbox:
        await passes(sandbox)
        assert "__pycache__" in await told(sandbox, "find", ".")
        assert await sandbox.diff() == ""
        await sandbox.write("shop/cart.py", "total = sum\n")
        await told(sandbox, "python", "-c", "import shop.cart")
        fork = await sandbox.fork()
        assert list(await fork.patch()) == list(await sandbox.patch()) == ["shop/cart.py"]
        await fork.close()


async def test_what_an_attempt_writes_in_its_place_earns_nothing(pool: SandboxPool) -> None:
    async with pool.open(SPEC) as sandbox:
        assert await told(sandbox, "python", "-c", TROJAN) == ""
        assert await passes(sandbox)  # in its own working copy
        assert await rewards(pool, sandbox) == 0.0
    async with pool.open(SPEC) as other:
        assert not await passes(other)
        await told(other, "python", "-c", EDIT, "shop/cart.py", "a - b", MENDED)
        assert await rewards(pool, other) == 1.0


async def test_nothing_of_the_repository_runs_while_it_is_compiled(pool: SandboxPool) -> None:
    own = "open('/work/shop/__pycache__/proof.pyc', 'w')\nraise SystemExit\n"
    names = ("sitecustomize", "json", "warnings", "_pytest/__init__", "conftest", "shop/__init__")
    planted = {f"{name}.py": own + WORTH_IT for name in names}
    async with pool.open(replace(SPEC, files={**SPEC.files, **planted})) as sandbox:
        found = await told(sandbox, "find", ".", "-name", "*.pyc")
        assert "proof" not in found and PACKAGE in found and "/conftest.cpython-" in found
        assert "-pytest-" in found


async def test_what_cannot_be_compiled_says_so_where_it_is_imported(pool: SandboxPool) -> None:
    files = {"odd.py": WORTH_IT + "def f(:\n", "warns.py": WORTH_IT + 'text = "\\d"\n'}
    async with pool.open(replace(SPEC, files={**SPEC.files, **files})) as sandbox:
        assert "SyntaxError" in await told(sandbox, "python", "-c", "import odd")
        said = await told(sandbox, "python", "-W", "always", "-c", "import warns")
        assert "invalid escape sequence" in said
        assert PACKAGE in await told(sandbox, "find", ".")


async def test_other_tasks_of_a_repository_share_it(pool: SandboxPool) -> None:
    assert isinstance(pool, BytecodePool)
    async with pool.open(SPEC) as first:
        before = await first.read_bytes((await _compiled(first))[0])
    files = {**SPEC.files, "shop/cart.py": BROKEN.replace("a - b", MENDED)}
    async with pool.open(replace(SPEC, files=files)) as second:
        assert await passes(second)
        assert await second.read_bytes((await _compiled(second))[0]) != before
    small = {**SPEC.files, "shop/__init__.py": "small = True\n"}  # not worth starting a sandbox for
    async with pool.open(replace(SPEC, files=small)) as third:
        found = await told(third, "find", ".")
        assert PACKAGE in found and TESTS in found and "__init__.cpython-" not in found


async def _compiled(sandbox: Sandbox) -> list[str]:
    found = await told(sandbox, "find", "shop", "-name", "cart.*.pyc")
    return found.split()


async def test_a_small_working_copy_is_not_filled_with_it(pool: SandboxPool) -> None:
    limits = Limits(disk_bytes=96 << 10, memory_bytes=LIMITS.memory_bytes)
    async with pool.open(replace(SPEC, limits=limits)) as sandbox:
        assert "__pycache__" not in await told(sandbox, "find", ".")
