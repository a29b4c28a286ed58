"""Plugins of pytest. In the traced run one records the current context; under a mistake the other
chooses and orders the tests."""

from __future__ import annotations

import json
import mmap
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


class Contexts:
    """Publishes the current context (see `lines`), and records the outcome and duration of each
    test and the fixtures that it shares with others."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = {"import": 0}
        self._test = "import"
        self._tests: dict[str, dict[str, Any]] = {}
        (folder / "context").write_bytes(bytes(8))
        with (folder / "context").open("r+b") as page:
            self._page = mmap.mmap(page.fileno(), 8)

    def _enter(self, name: str) -> None:
        self._page[:] = self._names.setdefault(name, len(self._names)).to_bytes(8, "little")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._test = nodeid
        self._tests[nodeid] = {"seconds": 0.0, "passed": True, "shares": []}
        self._enter(nodeid)

    def pytest_runtest_setup(self, item: pytest.Function) -> None:
        found = item._fixtureinfo.name2fixturedefs
        wide = [name for name, definitions in found.items() if definitions[-1].scope != "function"]
        self._tests[item.nodeid]["shares"] = [f"fixture {name}" for name in wide]

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        if fixturedef.scope != "function":
            self._enter(f"fixture {fixturedef.argname}")
        try:
            return (yield)
        finally:
            self._enter(self._test)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._tests[report.nodeid]
        test["seconds"] += report.duration
        test["passed"] &= report.outcome == "passed"

    def pytest_sessionfinish(self) -> None:
        (self._folder / "tests.json").write_text(
            json.dumps({"names": list(self._names), "tests": self._tests})
        )


class Chosen:
    """Runs the named tests in the given order, each with a time limit, and writes their progress to
    the file descriptor `progress`."""

    def __init__(self, limits_s: dict[str, float], progress: int) -> None:
        self._limits_s = limits_s
        self._progress = progress

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        order = {name: place for place, name in enumerate(self._limits_s)}
        items[:] = sorted(
            (item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid]
        )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        # The signal's default action ends the process, even if it hangs where no handler could run.
        signal.setitimer(signal.ITIMER_REAL, self._limits_s[nodeid])
        os.write(self._progress, f"{nodeid}\n".encode())
