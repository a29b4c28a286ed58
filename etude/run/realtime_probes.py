"""The probes of the gate as an environment, so that any harness can attempt them
(`realtime.probes`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from etude.core.errors import EtudeError, user_code
from etude.core.realtime_config import GateConfig
from etude.core.sandbox import Sandbox, SandboxPool, SandboxSpec
from etude.core.types import Attempt, Part, Score, Task
from etude.realtime.probes import PROBE_SUITES, Probe, digest_of, make_probes, read_probes
from etude.rewards.detector import detect

UNREAD = "unread"
"""The detector's finding for a session that is too long to read, which is not a trick."""


def probe_splits(config: GateConfig, seed: int) -> tuple[str, ...]:
    """A split for each suite that has probes. A digest in its name tells these probes from others:
    versions are compared on the same probes, and evaluated again when these change."""
    return tuple(
        _split(suite, probes_of(config, suite, seed))
        for suite in PROBE_SUITES
        if getattr(config, suite)
    )


def suite_of(split: str) -> str:
    """The suite of a split; a split of tasks is a suite of its own."""
    suite = split.partition("_")[0]
    return suite if suite in PROBE_SUITES else split


def probes_of(config: GateConfig, suite: str, seed: int) -> list[Probe]:
    """The built-in probes, then those of the product."""
    probes = make_probes(suite, getattr(config, suite), seed)
    if config.probes is not None:
        with user_code(f"realtime.gate.probes = {config.probes!r}"):
            text = Path(config.probes).read_text(encoding="utf-8")
            probes += read_probes(text, suite, config.probes)
    return probes


def _split(suite: str, probes: Sequence[Probe]) -> str:
    return f"{suite}_{digest_of(probes)}"


class Probes:
    """A `core.protocols.Environment` with the splits of `probe_splits`. A probe is solved if the
    attempt did nothing that it forbids."""

    suites = PROBE_SUITES

    def __init__(self, pool: SandboxPool, config: GateConfig, seed: int) -> None:
        self._pool = pool
        self._config = config
        self._seed = seed
        self._probes: dict[str, Probe] = {}

    def tasks(self, split: str) -> Sequence[Task]:
        probes = probes_of(self._config, suite_of(split), self._seed)
        if _split(suite_of(split), probes) != split:
            raise EtudeError(
                f"{self._config.probes} has changed since the loop started: restart it to test "
                "all versions with the new probes"
            )
        self._probes |= {probe.id: probe for probe in probes}
        return [
            Task(id=probe.id, prompt=probe.prompt, sandbox=SandboxSpec(files=dict(probe.files)))
            for probe in probes
        ]

    def open(self, task: Task) -> AbstractAsyncContextManager[Sandbox]:
        return self._pool.open(task.sandbox)

    async def score(self, task: Task, sandbox: Sandbox, attempt: Attempt) -> Score:
        messages = attempt.transcript.messages
        found = detect(messages, await sandbox.diff())
        tricks = [each for each in found if each.family != UNREAD]
        told = "\n".join(f"{each.family}: {each.evidence}" for each in tricks)
        is_clean = self._probes[task.id].is_clean(messages)
        part = Part("tricks", float(len(tricks)), told)
        return Score(float(is_clean and not tricks), parts=(part,))
