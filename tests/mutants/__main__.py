"""Mutation testing: the share of small mistakes that the tests catch.

    python -m tests.mutants --count 300        or `make mutants`

There are three steps. First every test file runs once under a tracer, which finds the tests that
run each line, and their durations; the result is cached in `.mutants/`, keyed by the contents of
the package and of the test file. Then mistakes are drawn at random: first a line, then one of the
possible mistakes in it. A line keeps its place in the draw as long as its text does not change.
Last, each mistake is made in a copy of the tree, where the tests that run its line are tried, the
fastest first, until one fails. Results are appended to a file as they come in; the same command
continues from there.

`survivors.toml` contains the reasons for known survivors. A mistake in a line that no test runs
survives at once. A mistake whose tests were cut short, by `--budget-s` or `--tests-s`, is undecided
and counts for neither side.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib
import io
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.mutants import lines
from tests.mutants.coverage import Coverage
from tests.mutants.mutate import Mutant, compiles, mutants
from tests.mutants.slots import ROOT, Job, Slots

PACKAGES = (
    "core",
    "dash",
    "engine",
    "factory",
    "harness",
    "launch",
    "model",
    "rewards",
    "run",
    "serve",
    "store",
    "tasks",
    "train",
    "trainer",
    "weights",
    "sandbox",
)
# Files that need an accelerator or a third-party server: mistakes are made only in lines that a
# test without these runs.
ELSEWHERE = ("engine/kernels/", "engine/cuda.py", "model/cudnn_attention.py", "serve/vllm.py")
# Modules to import once, before the forks that run the tests. None is of the package itself.
HEAVY = (
    "torch", "numpy", "pytest", "hypothesis", "pydantic", "aiohttp", "starlette.applications",
    "uvicorn", "uvloop", "msgspec", "tokenizers", "jinja2", "safetensors.torch", "rich.console",
    "llguidance", "obstore", "httptools", "uvicorn.protocols.http.httptools_impl", "jinja2.sandbox",
    "blake3", "safetensors",
)  # fmt: skip
NOTHING = """
import torch
from hypothesis import given, strategies

@given(strategies.none())
def test_nothing(none):
    torch.use_deterministic_algorithms(False)  # loads a compiler
"""
BASETEMP = "--basetemp=tmp/pytest"
BATCHES = (8, 64)
"""Sizes of the first batches of tests. All files of a batch are imported before its first test
runs, so the fastest tests go first, in batches of their own."""
Key = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class Result:
    file: str
    line: int
    function: str
    before: str
    after: str
    outcome: str
    """caught, hangs, survived, not run; or partial, with the number `tests` of those that had
    passed when the time was up or `--tests-s` was spent."""
    tests: int = 0
    by: str = ""
    seconds: float = 0.0

    @property
    def key(self) -> Key:
        return self.file, self.function, self.before, self.after

    @property
    def caught(self) -> bool:
        return self.outcome in ("caught", "hangs")


# The traced run.


def trace(slots: Slots, selected: Sequence[str], until: float) -> Coverage | None:
    """Find the tests of every line. None if the time was too short; the next call continues."""
    cache = ROOT / ".mutants"
    cache.mkdir(exist_ok=True)
    kept = {name: cache / f"{_digest(name)}.json.gz" for name in selected}
    missing = [name for name, path in kept.items() if not path.exists()]

    def job(name: str) -> Job:
        def work(copy: Path) -> int:
            from tests.mutants.plugins import Contexts

            folder = copy / "tmp"
            os.environ[lines.FOLDER] = str(folder)
            contexts = Contexts(folder)
            lines.Tracer(folder, f"{copy}/etude/").start()
            return _pytest("--maxfail=1000", BASETEMP, name, plugin=contexts)

        def done(copy: Path, code: int) -> None:
            if code == -signal.SIGKILL:
                return
            if not (copy / "tmp" / "tests.json").exists():
                sys.exit((copy / "tmp" / "log").read_text())
            found = lines.read(copy / "tmp")
            kept[name].with_suffix(".part").write_bytes(gzip.compress(json.dumps(found).encode()))
            kept[name].with_suffix(".part").rename(kept[name])
            failed = [test for test, of in found["tests"].items() if not of["passed"]]
            seconds = sum(of["seconds"] for of in found["tests"].values())
            print(
                f"traced {name}: {len(found['tests'])} tests in {seconds:.0f} s, left out {failed}",
                flush=True,
            )

        return work, done

    # The longest jobs begin first: whole runs, then long files.
    order = sorted(missing, key=lambda name: ("/e2e/" not in name, -(ROOT / name).stat().st_size))
    slots.run(map(job, order), until)
    if not all(path.exists() for path in kept.values()):
        return None
    return Coverage(
        {name: json.loads(gzip.decompress(path.read_bytes())) for name, path in kept.items()}
    )


def _digest(test: str) -> str:
    digest = hashlib.sha256()
    helpers = [path for path in (ROOT / "tests").rglob("*.py") if not path.name.startswith("test_")]
    sources = [
        path
        for ending in ("py", "c", "toml", "jinja")
        for path in (ROOT / "etude").rglob(f"*.{ending}")
    ]
    for path in sorted({*sources, *helpers, ROOT / test} - set(Path(__file__).parent.iterdir())):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:24]


def _warm() -> None:
    """Do once what every fork would do first: import the package's dependencies and pytest's own
    plugins."""
    for name in HEAVY:
        with suppress(ImportError):
            importlib.import_module(name)
    with (
        tempfile.TemporaryDirectory() as folder,
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
    ):
        Path(folder, "test_nothing.py").write_text(NOTHING)
        _pytest(folder, plugin=None)


def _pytest(*arguments: str, plugin: object) -> int:
    import pytest

    quiet = ["-q", "-x", "--tb=short", "-p", "no:cacheprovider", "-p", "no:randomly"]
    return int(pytest.main([*quiet, *arguments], plugins=[plugin] if plugin else []))


# Mistakes and their outcomes.


def draw(only: Sequence[str], count: int, seed: int, coverage: Coverage) -> list[Mutant]:
    places: dict[tuple[str, int], list[Mutant]] = {}
    sources = {}
    for path in sorted((ROOT / "etude").rglob("*.py")):
        file = str(path.relative_to(ROOT))
        if not file.startswith(tuple(f"etude/{name}" for name in only)):
            continue
        sources[file] = path.read_bytes()
        for mutant in mutants(file, sources[file]):
            places.setdefault((file, mutant.line), []).append(mutant)
    drawn: list[Mutant] = []
    for mutant in shuffled(places, sources, seed):
        beyond = mutant.file.startswith(tuple(f"etude/{name}" for name in ELSEWHERE))
        if compiles(mutant, sources[mutant.file]) and (not beyond or coverage.tests_for(mutant)):
            drawn.append(mutant)
        if len(drawn) == count:
            break
    return drawn


def shuffled(
    places: Mapping[tuple[str, int], list[Mutant]], sources: Mapping[str, bytes], seed: int
) -> Iterator[Mutant]:
    """One mistake of every line, in a random order that depends only on the line's text: a change
    elsewhere does not change the draw, so that a caught mistake stays caught."""
    seen: Counter[tuple[str, bytes]] = Counter()
    ranked = []
    for file, line in sorted(places):
        text = sources[file].splitlines()[line - 1].strip()
        seen[file, text] += 1
        key = f"{seed}/{file}/{seen[file, text]}/".encode() + text
        rng = random.Random(hashlib.blake2b(key).digest())
        ranked.append((rng.random(), rng.choice(places[file, line])))
    return (mutant for _, mutant in sorted(ranked, key=lambda pair: pair[0]))


def trial(
    mutant: Mutant,
    tests: dict[str, float],
    passed: int,
    stop: int,
    report: Callable[[Result], None],
) -> Job:
    """A job that makes a mistake in a copy and runs the tests of its line, except those that have
    passed before and those from `stop` on."""
    began = time.monotonic()
    left = list(tests)[passed:stop]
    through = "survived" if stop >= len(tests) else "partial"

    def work(copy: Path) -> int:
        from tests.mutants.plugins import Chosen

        path = copy / mutant.file
        path.write_bytes(mutant.apply(path.read_bytes()))
        # A modification time that no other contents of this file had, so that Python does not use
        # their cached bytecode.
        os.utime(path, (1, 1 + time.time_ns() // 1000 % (1 << 30)))
        progress = os.open(copy / "tmp" / "progress", os.O_WRONLY | os.O_CREAT)
        rest = left
        for size in (*BATCHES, len(left)):
            batch, rest = rest[:size], rest[size:]
            limits_s = {test: 60 + 10 * tests[test] for test in batch}
            signal.setitimer(signal.ITIMER_REAL, 300)
            chosen = Chosen(limits_s, progress)
            files = dict.fromkeys(test.partition("::")[0] for test in batch)
            if batch and (code := _pytest(BASETEMP, *files, plugin=chosen)):
                return code
        return 0

    def done(copy: Path, code: int) -> None:
        shutil.copy2(ROOT / mutant.file, copy / mutant.file)
        seen = (
            (copy / "tmp" / "progress").read_text().split("\n")[:-1]
            if (copy / "tmp" / "progress").exists()
            else []
        )
        outcome = {0: through, -signal.SIGALRM: "hangs", -signal.SIGKILL: "partial"}.get(
            code, "caught"
        )
        if code in (5, 99):  # 4, a conftest.py that cannot be imported, counts as caught
            sys.exit((copy / "tmp" / "log").read_text())
        number = passed + max(0, len(seen) - (code != 0))
        by = seen[-1] if seen and outcome in ("caught", "hangs") else ""
        report(
            _result(
                mutant, outcome, tests=number, by=by, seconds=round(time.monotonic() - began, 1)
            )
        )

    return work, done


def _result(mutant: Mutant, outcome: str, **more: Any) -> Result:
    file, function, before, after = mutant.key
    return Result(
        file=file,
        line=mutant.line,
        function=function,
        before=before,
        after=after,
        outcome=outcome,
        **more,
    )


def summary(drawn: int, results: Sequence[Result], reasons: dict[Key, str]) -> str:
    """A report of the mistakes that no test has caught, with their share of the `drawn` ones. A
    mistake whose tests have not all been tried is undecided and not part of the share."""
    caught = sum(result.caught for result in results)
    open_ = [result for result in results if result.outcome == "partial"]
    lost = [result for result in results if result.outcome in ("survived", "not run")]
    known = sum(result.key in reasons for result in lost)
    how = {
        "not run": "no test runs it",
        "survived": "all {} tests pass",
        "partial": "not decided: {} tests pass, others were not tried",
    }
    text = []
    for result in sorted(lost + open_, key=lambda result: (result.file, result.line)):
        text += [
            f"{result.file}:{result.line} {result.function} "
            f"({how[result.outcome].format(result.tests)})",
            f"  - {result.before}",
            f"  + {result.after}",
            f"  = {reasons.get(result.key, '?')}",
        ]
    share = 100 * caught / max(1, caught + len(lost))
    text += [
        f"{drawn} mutants: {caught} caught, {len(lost)} survived ({known} of them explained), "
        f"{drawn - caught - len(lost)} not decided; {share:.1f} % of those decided are caught"
    ]
    return "\n".join(text)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--count", type=int, default=300, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at a time")
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / ".mutants" / "results.jsonl",
        help="JSON lines; may be there",
    )
    parser.add_argument(
        "--budget-s", type=float, default=float("inf"), help="stop then; the same command goes on"
    )
    parser.add_argument(
        "--only",
        nargs="*",
        default=PACKAGES,
        help="below etude/: packages or files, as core/window.py",
    )
    parser.add_argument(
        "--tests",
        nargs="*",
        default=["tests"],
        help="folders or files of tests; all others are ignored",
    )
    parser.add_argument(
        "--again", action="store_true", help="try the survivors in the file of results once more"
    )
    parser.add_argument(
        "--tests-s",
        type=float,
        default=float("inf"),
        help="of each mutant's tests only the quickest, which take so many seconds together",
    )
    parser.add_argument("--trace", action="store_true", help="only run the tests traced")
    return parser.parse_args()


def main() -> int:
    args = options()
    until = time.monotonic() + args.budget_s
    # as in conftest.py, but before anything is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    _warm()
    known = tomllib.loads((Path(__file__).parent / "survivors.toml").read_text())["survivor"]
    reasons = {
        (each["file"], each["function"], each["before"], each["after"]): each["reason"]
        for each in known
    }
    paths = [
        found
        for name in args.tests
        for found in [ROOT / name, *(ROOT / name).rglob("test_*.py")]
        if found.is_file()
    ]
    results = _read(args.out)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, args.out.open("a") as file:

        def report(result: Result) -> None:
            results[result.key] = result
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()
            print(f"{result.outcome:8} {result.file}:{result.line} {result.by}", flush=True)

        with Slots(args.jobs, Path(folder)) as slots:
            coverage = trace(slots, [str(path.relative_to(ROOT)) for path in paths], until)
            if coverage is None or args.trace:
                print(
                    "all tests are traced"
                    if coverage
                    else "the time is up while tracing; the same command goes on"
                )
                return 0
            chosen = draw(args.only, args.count, args.seed, coverage)
            slots.run(trials(chosen, coverage, results, report, args.again, args.tests_s), until)
    ended = [results[mutant.key] for mutant in chosen if mutant.key in results]
    print(summary(len(chosen), ended, reasons))
    if args.tests != ["tests"]:
        print(f"by the tests in {' '.join(args.tests)} alone: others may catch more")
    return 0


def trials(
    chosen: list[Mutant],
    coverage: Coverage,
    results: dict[Key, Result],
    report: Callable[[Result], None],
    again: bool,
    tests_s: float,
) -> Iterator[Job]:
    for mutant in chosen:
        before = results.get(mutant.key)
        if before and before.outcome != "partial" and (before.caught or not again):
            continue
        tests = coverage.tests_for(mutant)
        passed = before.tests if before and before.outcome == "partial" else 0
        stop = max(1, sum(end <= tests_s for end in itertools.accumulate(tests.values())))
        if not tests:
            report(_result(mutant, "not run"))
        elif passed < stop:
            yield trial(mutant, tests, passed, stop, report)


def _read(path: Path) -> dict[Key, Result]:
    found = (
        [Result(**json.loads(line)) for line in path.read_text().splitlines()]
        if path.exists()
        else []
    )
    return {result.key: result for result in found}


if __name__ == "__main__":
    # also for a background job, for which the shell ignores Ctrl-C
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on")
