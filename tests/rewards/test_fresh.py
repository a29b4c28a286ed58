"""A working copy graded by a command in a fresh sandbox: honest work counts, and nothing else that
an agent left does."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, cast

import pytest

from etude.core.errors import RolloutFailure
from etude.core.memo import Memo
from etude.core.sandbox import CommandResult, Sandbox, SandboxPool, SandboxSpec
from etude.core.types import Score
from etude.rewards.fresh import grade_by_command, run_in_fresh_sandbox
from etude.rewards.junit import parse_junit
from etude.sandbox.fake import FakeSandboxPool
from etude.sandbox.namespaces import NamespaceSandboxPool
from etude.sandbox.process import ProcessSandboxPool
from tests.namespaces import need_namespaces

BROKEN = "def area(a, b):\n    return a + b\n"
HONEST = "def area(a, b):\n    return a * b\n"
SPEC = SandboxSpec(
    files={"src/shape.py": BROKEN, "tests/check.py": "import os; os._exit(1)", "data.bin": b"\0"}
)
CHECK = """
import os, sys
sys.path.insert(0, "src")
cases = []
try:
    import shape
    for name, args, right in (("square", (3, 3), 9), ("oblong", (3, 5), 15)):
        cases.append(f'<testcase classname="check" name="{name}">')
        if shape.area(*args) != right: cases.append("<failure/>")
        cases.append("</testcase>")
except Exception as e:
    print(type(e).__name__)
with open(os.environ["ETUDE_REPORT"], "w") as report:
    report.write(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
sys.exit("<failure/>" in cases or len(cases) < 4)
"""
NAMES = ("check::square", "check::oblong")


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    need_namespaces()
    opened = NamespaceSandboxPool()
    yield opened
    asyncio.run(opened.close())


async def graded(
    pool: SandboxPool,
    script: str = "",
    *,
    source: str | None = None,
    expected: tuple[str, ...] = NAMES,
    timeout_s: float = 60.0,
    only: tuple[str, ...] = ("*",),
) -> Score:
    async with pool.open(SPEC) as sandbox:
        if source is not None:
            await sandbox.write("src/shape.py", source)
        if script:
            await sandbox.run(["sh", "-c", script], timeout_s=60)
        return await grade_by_command(
            sandbox,
            pool,
            SPEC,
            ["python", "tests/check.py"],
            timeout_s=timeout_s,
            files={"tests/check.py": CHECK},
            only=only,
            expected=expected,
        )


def worth(score: Score) -> tuple[float, float]:
    (part,) = score.parts
    assert part.name == "tests" and part.evidence
    return score.reward, part.value


async def test_honest_work_counts(pool: SandboxPool) -> None:
    assert worth(await graded(pool, source=HONEST)) == (1.0, 1.0)
    assert worth(await graded(pool, source=HONEST, expected=())) == (1.0, 1.0)
    assert worth(await graded(pool)) == (0.0, 0.0)


async def test_half_of_it_is_seen_and_not_paid(pool: SandboxPool) -> None:
    assert worth(await graded(pool, source="def area(a, b): return 9")) == (0.0, 0.5)


async def test_the_work_may_be_spread_over_files_of_every_kind(pool: SandboxPool) -> None:
    script = r"""
mkdir -p lib; printf '\377\000*' > lib/operator.bin; ln -s ../lib src/lib; rm data.bin
printf '#!/bin/sh\necho times' > lib/sign; chmod +x lib/sign
cat > src/shape.py <<'END'
import os, subprocess
here = os.path.dirname(__file__)
def area(a, b):
    assert open(f"{here}/lib/operator.bin", "rb").read() == b"\xff\x00*"
    assert not os.path.exists("data.bin") and os.path.islink(f"{here}/lib")
    sign = subprocess.check_output([f"{here}/lib/sign"], text=True).strip()
    return a * b if sign == "times" else None
END
"""
    assert worth(await graded(pool, script)) == (1.0, 1.0)


EXIT = "import os; os._exit(0)"
FORGE = """
import os
cases = "".join(f'<testcase classname="check" name="{n}"/>' for n in NAMES)
open(os.environ["ETUDE_REPORT"], "w").write(f"<testsuites>{cases}</testsuites>")
"""
CHEATS = {
    "edited tests": "echo 'raise SystemExit(0)' > tests/check.py",
    "tests that are a link": "rm tests/check.py; ln -s /bin/true tests/check.py",
    "tests that are a directory": "rm tests/check.py; mkdir tests/check.py",
    "the directory of the tests is a link": "rm -r tests; mkdir away; ln -s away tests",
    "a planted report": "echo '<testsuites/>' > report.xml; mkdir -p dev/fd; echo x > dev/fd/3",
    "a process that waits": "(while sleep 0.01; do echo 'def area(a, b): return a * b' > src/shape.py; done) & sleep 0.2; echo > src/shape.py",  # noqa: E501
    "a cache": """
cat > x.py <<'END'
import py_compile
open("src/shape.py", "w").write("def area(a, b): return a * b")
py_compile.compile("src/shape.py", invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
open("src/shape.py", "w").write("def area(a, b): return 0")
END
python3 x.py; ls src/__pycache__""",
    "a compiled module beside none": """
cat > x.py <<'END'
import py_compile
open("src/shape.py", "w").write("def area(a, b): return a * b")
py_compile.compile("src/shape.py", cfile="src/shape.pyc")
END
python3 x.py; rm src/shape.py""",
    "another python": "printf '#!/bin/sh\\nexit 0' > python; chmod +x python; cp python python3",
    "no module": "rm src/shape.py",
    "ends with status 0": f"echo '{EXIT}' > src/shape.py",
    "ends with status 0 in a test": f"echo 'def area(a, b): {EXIT}' > src/shape.py",
    "too much to take over": "for n in 1 2 3; do head -c 9000000 /dev/zero > f$n; done",
    "a forged report of other tests": f"cat > src/shape.py <<'END'\nNAMES = ['a', 'b']{FORGE}{EXIT}\nEND",  # noqa: E501
    "a report that is none": 'echo \'import os; open(os.environ["ETUDE_REPORT"], "w").write("<")\' > src/shape.py',  # noqa: E501
}


@pytest.mark.parametrize("script", CHEATS.values(), ids=CHEATS.keys())
async def test_nothing_but_the_work_counts(pool: SandboxPool, script: str) -> None:
    score = await graded(pool, script)
    assert worth(score)[0] == 0.0, score.parts[0].evidence


async def test_an_honest_fix_counts_whatever_lies_around_it(pool: SandboxPool) -> None:
    for name in ("edited tests", "tests that are a link", "tests that are a directory"):
        assert worth(await graded(pool, CHEATS[name], source=HONEST)) == (1.0, 1.0)


async def test_what_is_left_behind_may_be_large(pool: SandboxPool) -> None:
    """Such as a virtual environment in the working copy."""
    script = CHEATS["too much to take over"]
    assert worth(await graded(pool, script, source=HONEST)) == (0.0, 0.0)
    assert worth(await graded(pool, script, source=HONEST, only=("src/*",))) == (1.0, 1.0)


async def test_a_hang_is_the_works_fault(pool: SandboxPool) -> None:
    score = await graded(pool, source="import time; time.sleep(1000)", timeout_s=0.5)
    assert worth(score) == (0.0, 0.0)


async def test_a_machine_on_which_the_solution_runs_out_of_time_is_no_verdict() -> None:
    async def worth_of(source: str, hangs: Sequence[str]) -> tuple[float, float]:
        """The reward if a command runs out of time with these sources."""

        def respond(files: dict[str, Any], argv: Sequence[str]) -> CommandResult:
            return CommandResult(None if files["src/shape.py"].decode() in hangs else 0, "")

        pool = FakeSandboxPool(respond)
        async with pool.open(SPEC) as sandbox:
            await sandbox.write("src/shape.py", source)
            solution = {"src/shape.py": HONEST}
            return worth(
                await grade_by_command(
                    sandbox, pool, SPEC, ["make"], timeout_s=180, solution=solution
                )
            )

    assert await worth_of("while 1: pass", hangs=["while 1: pass"]) == (0.0, 0.0)
    with pytest.raises(RolloutFailure, match="the solution did not end within 180 s"):
        await worth_of("while 1: pass", hangs=["while 1: pass", HONEST])
    assert await worth_of("return 1", hangs=[HONEST]) == (1.0, 1.0)


async def test_a_broken_sandbox_is_no_verdict(pool: SandboxPool) -> None:
    async with pool.open(SPEC) as sandbox:
        await sandbox.close()
        with pytest.raises(RolloutFailure):
            await grade_by_command(sandbox, pool, SPEC, ["true"], timeout_s=60)


async def test_what_ran_can_be_looked_at(pool: SandboxPool) -> None:
    async with pool.open(SPEC) as sandbox:
        await sandbox.write("src/shape.py", HONEST)
        argv = ["sh", "-c", "cat src/shape.py; echo told > $ETUDE_REPORT"]
        ran = await run_in_fresh_sandbox(sandbox, pool, SPEC, argv, timeout_s=60)
        assert (ran.output, ran.report) == (HONEST, b"told\n")


def test_a_report_names_each_test() -> None:
    report = b"""<?xml version="1.0" encoding="utf-8"?>
<testsuites name="pytest tests"><testsuite name="pytest" errors="0" failures="1" tests="4">
<testcase classname="tests.test_a" name="test_one" time="0.001" />
<testcase classname="tests.test_a" name="test_two"><failure message="x">...</failure></testcase>
<testcase classname="tests.test_a" name="test_three"><skipped type="pytest.skip"/></testcase>
<testcase classname="tests.test_a" name="test_four"><system-out>text</system-out></testcase>
<testcase classname="tests.test_a" name="test_one"><error/></testcase>
</testsuite></testsuites>"""
    assert parse_junit(report) == {
        "tests.test_a::test_one": False,
        "tests.test_a::test_two": False,
        "tests.test_a::test_three": False,
        "tests.test_a::test_four": True,
    }


BOMB = b'<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><x>&b;</x>'


@pytest.mark.parametrize(
    "report", [b"", b"<", b"ok", b"<a></b>", BOMB, b"\xff\xfe", b"<a>" * 10**5]
)
def test_no_report_breaks_the_parser(report: bytes) -> None:
    with pytest.raises(ValueError):
        parse_junit(report)


async def test_pytest_reports_by_itself() -> None:
    """In sandboxes without walls, which have this machine's packages."""
    tests = "import shape\n\ndef test_area():\n    assert shape.area(2, 3) == 6\n"
    tests += "\nclass TestMore:\n    def test_square(self):\n        assert shape.area(3, 3) == 9\n"
    argv = ["sh", "-c", f"{sys.executable} -m pytest -p no:cacheprovider --junitxml=$ETUDE_REPORT"]
    expected = ("tests.test_shape::test_area", "tests.test_shape.TestMore::test_square")
    spec = SandboxSpec(files={"shape.py": BROKEN}, env={"PYTHONPATH": "."})
    pool = ProcessSandboxPool()
    rewards = []
    for source in (BROKEN, HONEST):
        async with pool.open(spec) as sandbox:
            await sandbox.write("shape.py", source)
            score = await grade_by_command(
                sandbox,
                pool,
                spec,
                argv,
                timeout_s=60,
                files={"tests/test_shape.py": tests},
                expected=expected,
            )
            rewards.append(worth(score))
    assert rewards == [(0.0, 0.0), (1.0, 1.0)], score.parts[0].evidence


class Counting:
    """A pool that counts opened sandboxes."""

    def __init__(self, pool: SandboxPool) -> None:
        self._pool = pool
        self.opened = 0

    def open(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        self.opened += 1
        return self._pool.open(spec)


async def test_with_a_cache_a_fresh_sandbox_is_for_new_changes_only(pool: SandboxPool) -> None:
    counted, cache = Counting(pool), Memo[Score](64)

    async def worth_of(source: str, argv: list[str], timeout_s: float = 60.0) -> float:
        async with pool.open(SPEC) as sandbox:
            await sandbox.write("src/shape.py", source)
            await sandbox.run(["sh", "-c", "date > .pytest_cache"], timeout_s=60)
            score = await grade_by_command(
                sandbox,
                cast(SandboxPool, counted),
                SPEC,
                argv,
                timeout_s=timeout_s,
                files={"tests/check.py": CHECK},
                only=("src/*",),
                expected=NAMES,
                graded=cache,
            )
            return score.reward

    check = ["python", "tests/check.py"]
    assert await worth_of(HONEST, ["sleep", "100"], timeout_s=0.1) == 0.0
    assert await worth_of(HONEST, check) == 1.0, "it did not end, and is graded again"
    assert await worth_of(HONEST, check) == 1.0
    assert await worth_of(BROKEN, check) == 0.0
    assert await worth_of(BROKEN, check) == 0.0
    assert counted.opened == 3
