"""Real packages as images: three sdists from PyPI with their requirements, each opened, tested,
forked, edited differently in each fork, and graded in fresh sandboxes. Every second edit breaks the
package, and every verdict must be right.

    NAME.build_s               building the image, from the index to the store; 0 if it existed
    NAME.image_mib             size of its layers
    NAME.first_open_ms         opening the first sandbox, which starts a zygote for the image and
                               loads the working copy into memory
    NAME.open_p50_ms           opening the next ones
    NAME.tests, tests_s        tests of the whole suite that passed in a sandbox, and their time
    NAME.fork_p50_ms, p99      a fork of the sandbox in which the suite was run
    NAME.fork_kib              memory for the files of a fork, after its edit
    NAME.grade_s               grading all forks, two at a time, by a part of the suite in a fresh
                               sandbox
    NAME.right                 correct verdicts
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from etude.core.sandbox import Limits, Sandbox, SandboxSpec
from etude.factory.image_spec import ImageSpec, Pypi, Source
from etude.factory.images import build_image
from etude.rewards.fresh import grade_by_command
from etude.sandbox.image import ImageStore, default_store
from etude.sandbox.image_view import view
from etude.sandbox.namespaces import NamespaceSandboxPool

_LONG_S = 900.0
_OPENS = 20
_AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class _Package:
    name: str
    source: str
    requirements: tuple[str, ...]
    module: str
    """The file that is edited."""
    graded_by: str
    """The part of the suite that grades a fork."""


_PYTEST = "pytest==8.3.5"
_PACKAGES = (
    _Package(
        "flask",
        "flask==3.0.3",
        (
            "werkzeug==3.0.6",
            "jinja2==3.1.6",
            "itsdangerous==2.2.0",
            "click==8.1.8",
            "blinker==1.9.0",
            _PYTEST,
        ),
        "src/flask/app.py",
        "tests/test_basic.py",
    ),
    _Package(
        "jinja2",
        "jinja2==3.1.6",
        ("markupsafe==3.0.2", "trio==0.27.0", _PYTEST),
        "src/jinja2/environment.py",
        "tests/test_filters.py",
    ),
    _Package(
        "itsdangerous",
        "itsdangerous==2.2.0",
        ("freezegun==1.5.1", _PYTEST),
        "src/itsdangerous/signer.py",
        "tests/test_itsdangerous/test_signer.py",
    ),
)


async def forked_repositories(forks: int) -> dict[str, float]:
    store = default_store()
    figures = {"load_before": os.getloadavg()[0], "forks": float(forks)}
    for package in _PACKAGES:
        print(package.source, file=sys.stderr, flush=True)
        measured = await _measure(package, store, forks)
        print(measured, file=sys.stderr, flush=True)
        figures |= {f"{package.name}.{name}": value for name, value in measured.items()}
    return figures


async def _measure(package: _Package, store: ImageStore, forks: int) -> dict[str, float]:
    spec = ImageSpec(
        name=f"bench-{package.name}",
        pypi=Pypi(requirements=package.requirements),
        repository=Source(source=package.source),
    )
    began = time.perf_counter()
    image = await asyncio.to_thread(build_image, spec, store, lambda words: None)
    figures = {"build_s": time.perf_counter() - began, "image_mib": image.size_bytes / 2**20}
    began = time.perf_counter()
    pool = NamespaceSandboxPool(image=view(store, image))
    try:
        limits = Limits(memory_bytes=2 << 30, processes=64)
        wanted = SandboxSpec(env={"PYTHONPATH": "src"}, limits=limits)
        async with pool.open(wanted) as sandbox:
            figures["first_open_ms"] = 1e3 * (time.perf_counter() - began)
            figures |= await _opened_again(pool, wanted)
            figures |= await _tested(sandbox)
            figures |= await _forked(package, pool, wanted, sandbox, forks)
    finally:
        await pool.close()
    return figures


async def _opened_again(pool: NamespaceSandboxPool, spec: SandboxSpec) -> dict[str, float]:
    times = []
    for _ in range(_OPENS):
        began = time.perf_counter()
        async with pool.open(spec):
            times.append(time.perf_counter() - began)
    return {"open_p50_ms": 1e3 * sorted(times)[_OPENS // 2]}


async def _tested(sandbox: Sandbox) -> dict[str, float]:
    began = time.perf_counter()
    ran = await sandbox.run(_pytest("tests"), timeout_s=_LONG_S)
    passed = re.search(r"(\d+) passed", ran.output)
    assert passed, ran.output[-2000:]
    return {"tests": float(passed[1]), "tests_s": time.perf_counter() - began}


def _pytest(path: str) -> list[str]:
    return ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", path]


async def _forked(
    package: _Package,
    pool: NamespaceSandboxPool,
    spec: SandboxSpec,
    sandbox: Sandbox,
    forks: int,
) -> dict[str, float]:
    times: list[float] = []
    made: list[Sandbox] = []
    for _ in range(forks):
        began = time.perf_counter()
        made.append(await sandbox.fork())
        times.append(time.perf_counter() - began)
    before = await sandbox.read(package.module)
    used = []
    for number, fork in enumerate(made):
        fault = "raise RuntimeError('broken')" if number % 2 else "pass"
        await fork.write(package.module, f"{before}\n# edit {number}\n{fault}\n")
        ran = await fork.run(["df", "--output=used", "-B1024", "."], timeout_s=_LONG_S)
        used.append(int(ran.output.split()[-1]))
    began = time.perf_counter()
    rewards = await _graded(package, pool, spec, made)
    grade_s = time.perf_counter() - began
    for fork in made:
        await fork.close()
    right = sum(reward == float(number % 2 == 0) for number, reward in enumerate(rewards))
    times.sort()
    return {
        "fork_p50_ms": 1e3 * times[forks // 2],
        "fork_p99_ms": 1e3 * times[min(forks - 1, forks * 99 // 100)],
        "fork_kib": sum(used) / forks,
        "grade_s": grade_s,
        "right": float(right),
    }


async def _graded(
    package: _Package, pool: NamespaceSandboxPool, spec: SandboxSpec, made: Sequence[Sandbox]
) -> list[float]:
    turn = asyncio.Semaphore(_AT_ONCE)

    async def grade(fork: Sandbox) -> float:
        async with turn:
            argv = _pytest(package.graded_by)
            score = await grade_by_command(fork, pool, spec, argv, timeout_s=_LONG_S)
            return score.reward

    return await asyncio.gather(*[grade(fork) for fork in made])
