"""Plugin of pytest for use in a sandbox, without the rest of this package: it records how each test
ended, its cost, and the lines that it ran. Times are processor times, which do not depend on how
busy a machine is."""

import json
import os
import re
import sys
import time
import zlib
from typing import Any

CASE = re.compile(r"\[.*\]$", re.DOTALL)


class Survey:
    def __init__(self, prefix: str) -> None:
        """`prefix`: of the files whose lines are recorded; empty: none."""
        self.outcomes: dict[str, tuple[bool, float]] = {}
        self.start_s: float | None = None
        self.begun = 0.0
        self.prefix = prefix
        self.coverage: Any = None
        if prefix:
            import coverage

            self.coverage = coverage.Coverage(
                data_file=None, config_file=False, include=[f"{prefix}*"], messages=False
            )
            self.coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.begun = time.process_time()
        if self.start_s is None:
            self.start_s = self.begun
        if self.coverage:
            self.coverage.switch_context(CASE.sub("", nodeid))

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = CASE.sub("", report.nodeid)
        passed, seconds = self.outcomes.get(name, (True, 0.0))
        now = time.process_time()
        self.outcomes[name] = (passed and report.outcome == "passed", seconds + now - self.begun)
        self.begun = now

    def pytest_sessionfinish(self, session: Any) -> None:
        order = {name: place for place, name in enumerate(self.outcomes)}
        lines = {}
        if self.coverage:
            self.coverage.stop()
            data = self.coverage.get_data()
            for path in data.measured_files():
                lines[os.path.relpath(path, self.prefix)] = {
                    line: sorted(order[name] for name in names if name in order)
                    for line, names in data.contexts_by_lineno(path).items()
                }
        told = {"tests": self.outcomes, "lines": lines, "start_s": self.start_s or 0.0}
        with open(os.path.join(session.config.rootpath, ".etude-survey"), "wb") as file:
            file.write(zlib.compress(json.dumps(told).encode()))


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(PLUGIN, "etude-survey-results")


# before any module of the project is imported
PLUGIN = Survey(os.environ.get("ETUDE_SURVEY", "")) if "pytest" in sys.modules else None
