"""The probes of the gate as an environment: any harness can be asked them (`realtime.probes`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from etude.core.realtime_config import GateConfig
from etude.core.sandbox import Sandbox, SandboxPool, SandboxSpec
from etude.core.types import Attempt, Part, Score, Task
from etude.realtime.probes import PROBE_SUITES, Probe, make_probes, read_probes
from etude.rewards.detector import detect

UNREAD = "unread"
"""A long session is no trick."""


def probe_suites(config: GateConfig) -> tuple[str, ...]:
    """Those of which there are probes."""
    return tuple(suite for suite in PROBE_SUITES if getattr(config, suite))


class Probes:
    """A `core.protocols.Environment` whose splits are the suites. A probe is solved if nothing was
    done that it forbids."""

    suites = PROBE_SUITES

    def __init__(self, pool: SandboxPool, config: GateConfig, seed: int) -> None:
        self._pool = pool
        self._config = config
        self._seed = seed
        self._probes: dict[str, Probe] = {}

    def tasks(self, split: str) -> Sequence[Task]:
        probes = make_probes(split, getattr(self._config, split), self._seed)
        if self._config.probes is not None:
            file = Path(self._config.probes)
            probes += read_probes(file.read_text(encoding="utf-8"), split, str(file))
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
