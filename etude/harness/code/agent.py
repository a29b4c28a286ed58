"""The coding harness as an agent: the loop of the built-in agent, with a product's tools and
prompt."""

from __future__ import annotations

from typing import Any

import aiohttp

from etude.core.harness_config import CodeConfig
from etude.core.memo import Memo
from etude.core.sandbox import CommandResult, Sandbox, spec_digest
from etude.core.seeds import derive
from etude.core.types import Task
from etude.harness.agent import CodingAgent, Opening
from etude.harness.code.diagnostics import Diagnostics, DiagnosticSource
from etude.harness.code.prompt import SYSTEM, collect_parts, counter, render
from etude.harness.code.servers import LanguageServers
from etude.harness.code.tool import TestCache, Workspace
from etude.harness.code.toolset import Toolset

REMEMBERED = 16384
"""Number of test results that are kept, over all tasks."""


class CodeAgent(CodingAgent):
    """A `core.protocols.Agent`. A subclass may use other tools."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        code: CodeConfig,
        test_results: Memo[CommandResult] | None = None,
        **limits: Any,
    ) -> None:
        """`test_results`: the cache for results, if it is shared with other processes."""
        super().__init__(session, **limits)
        self._code = code
        self._test_results = test_results or Memo(REMEMBERED)

    async def open(self, task: Task, sandbox: Sandbox, seed: int) -> Opening:
        parts = await collect_parts(task, sandbox, self._code)
        prompt = self._code.prompt
        messages = render(
            parts,
            prompt.max_tokens,
            counter(prompt.chars_per_token),
            without=(SYSTEM,) if is_dropped(seed, prompt.dropout) else (),
        )
        if task.messages:
            is_told = any(message.get("role") == "system" for message in task.messages)
            messages = [*([] if is_told else messages), *task.opening]
        diagnostics = Diagnostics(self.diagnostics(sandbox))
        workspace = Workspace(sandbox, self._code, diagnostics, self._test_cache(task))
        return Opening(messages=messages, tools=Toolset(workspace), prompt_parts=tuple(parts))

    def _test_cache(self, task: Task) -> TestCache | None:
        """The cache of a task's test results. None if caching is off, or if tests may depend on
        more than the working copy."""
        if not self._code.remember_tests or task.sandbox.services or task.sandbox.network:
            return None
        return TestCache(task.id, spec_digest(task.sandbox), self._test_results)

    def diagnostics(self, sandbox: Sandbox) -> DiagnosticSource:
        """The linters and type checkers for the edits of a session."""
        servers, timeout_s = self._code.diagnostics, self._code.diagnostics_timeout_s
        return LanguageServers(sandbox, servers, timeout_s=timeout_s)


def is_dropped(seed: int, share: float) -> bool:
    """True if a session runs without the system prompt, as derived from its seed."""
    return derive(seed, "prompt dropout") / 2**63 < share
