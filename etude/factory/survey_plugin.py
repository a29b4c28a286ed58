"""A plugin of pytest, for use in a sandbox: how each test ended, how long it took, and which lines
it ran. It stands alone there."""

import json
import os
import re
import sys
import zlib

CASE = re.compile(r"\[.*\]$", re.DOTALL)


class Survey:
    def __init__(self, prefix):
        """`prefix`: of the files whose lines are wanted; empty: none are."""
        self.outcomes = {}
        self.prefix = prefix
        self.coverage = None
        if prefix:
            import coverage

            self.coverage = coverage.Coverage(
                data_file=None, config_file=False, include=[f"{prefix}*"], messages=False
            )
            self.coverage.start()

    def pytest_runtest_logstart(self, nodeid, location):
        if self.coverage:
            self.coverage.switch_context(CASE.sub("", nodeid))

    def pytest_runtest_logreport(self, report):
        name = CASE.sub("", report.nodeid)
        passed, seconds = self.outcomes.get(name, (True, 0.0))
        self.outcomes[name] = (passed and report.outcome == "passed", seconds + report.duration)

    def pytest_sessionfinish(self, session):
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
        told = json.dumps({"tests": self.outcomes, "lines": lines}).encode()
        with open(os.path.join(session.config.rootpath, ".etude-survey"), "wb") as file:
            file.write(zlib.compress(told))


def pytest_configure(config):
    config.pluginmanager.register(PLUGIN, "etude-survey-results")


# before any module of the project is imported
PLUGIN = Survey(os.environ.get("ETUDE_SURVEY", "")) if "pytest" in sys.modules else None
