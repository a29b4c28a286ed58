"""A program as an agent: a script, or an existing coding agent, started in the task's sandbox.

The program finds the model where every client of OpenAI's or Anthropic's API looks for it: in
OPENAI_BASE_URL or ANTHROPIC_BASE_URL, with a key. A sandbox has no network, so the URL is that of a
forwarder inside it (`harness.tunnel`), which leads only to this session's model
(`harness.session_proxy`). The real key stays outside. The program is one of the sandbox's
processes, so it ends with its attempt, however the attempt ends.
"""

from __future__ import annotations

import asyncio
import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from etude.core.errors import RolloutFailure
from etude.core.sandbox import Sandbox
from etude.core.types import Limit, Task, Transcript
from etude.harness.session_proxy import SessionProxy
from etude.harness.tunnel import tunnel_to

OUTPUT_BYTES = 64 << 10
"""Number of bytes that are kept from the end of its output."""
_LAST_WORDS = 500
_NO_KEY = "the-sandbox-has-it"


class ProgramAgent:
    """A `core.protocols.Agent` that runs a program; a subclass chooses which one.

    The program starts in the working copy. On its standard input it gets the task as one JSON
    object, `{"messages": [...], "meta": {...}}`. Exit code 0 finishes the attempt, whatever the
    program did; any other code is a failure."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        *,
        max_tokens: int,
        timeout_s: float,
        temperature: float,
        **unused: Any,
    ) -> None:
        self._http = http
        self._timeout_s = timeout_s
        self._defaults = {"model": "etude", "max_tokens": max_tokens, "temperature": temperature}

    env: Mapping[str, str] = {}
    """Environment variables of the program, in addition to those for the model."""

    @abstractmethod
    def command(self, task: Task) -> Sequence[str]:
        """The program and its arguments. The program must exist in the sandbox: through a mount of
        the run, or as the text of a script, `["python", "-c", text]`. `{base_url}` is replaced with
        the model's URL."""

    async def run(
        self, task: Task, sandbox: Sandbox, *, base_url: str, api_key: str, seed: int
    ) -> Transcript:
        session = SessionProxy(
            self._http, base_url=base_url, api_key=api_key, seed=seed, defaults=self._defaults
        )
        output = bytearray()
        finished = False
        limit: Limit = "context"
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                code = await self._run_program(task, sandbox, session, output)
                if session.lost is not None:
                    raise session.lost
                finished = _ended_well(code, output, session)
        except TimeoutError:
            # a timeout of something else: a failure, not the end of the session
            if not deadline.expired():
                raise
            if not session.has_asked:
                raise RolloutFailure(
                    f"agent: it ran for {self._timeout_s:g} s (harness.timeout_s) without "
                    f"calling the model"
                ) from None
            limit = "time"
        said = {"role": "tool", "name": "program", "content": output.decode(errors="replace")}
        return Transcript(
            messages=[*(session.messages or task.opening), said],
            finished=finished,
            limit=limit,
        )

    async def _run_program(
        self, task: Task, sandbox: Sandbox, session: SessionProxy, output: bytearray
    ) -> int:
        """Run the program; returns its exit code."""
        async with tunnel_to(session, sandbox) as url:
            command = [part.replace("{base_url}", f"{url}/v1") for part in self.command(task)]
            program = await sandbox.start(command, env={**_env(url), **self.env})
            told = {"messages": task.opening, "meta": dict(task.meta)}
            try:
                await program.write(json.dumps(told).encode())
                await program.write(b"")
                while chunk := await program.read():
                    output += chunk
                    del output[:-OUTPUT_BYTES]
                return await program.wait()
            finally:
                await program.kill()


class CommandAgent(ProgramAgent):
    """A program whose command is a template, from `harness.command`."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        *,
        argv: Sequence[str],
        env: Mapping[str, str],
        **limits: Any,
    ) -> None:
        super().__init__(http, **limits)
        self._argv = argv
        self.env = env

    def command(self, task: Task) -> Sequence[str]:
        prompt = task.prompt or _text(task.opening[-1])
        return [part.replace("{task}", task.id).replace("{prompt}", prompt) for part in self._argv]


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else json.dumps(content)


def _env(url: str) -> dict[str, str]:
    """The variables in which clients of OpenAI's and of Anthropic's API look for the model, with a
    placeholder for the key, without which they do not start."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": _NO_KEY,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": _NO_KEY,
    }


def _ended_well(code: int, output: bytearray, session: SessionProxy) -> bool:
    """True if the program exited with code 0. A program that had to give up because the model's
    context was full is not finished, but is graded. Any other exit code raises RolloutFailure."""
    if code and not session.out_of_context:
        refused = f"its last request was rejected ({session.refusal}); " if session.refusal else ""
        raise RolloutFailure(
            f"the program ended with exit code {code}; {refused}its last words: {_end(output)}"
        )
    return code == 0


def _end(output: bytearray) -> str:
    """The last complete lines of the output."""
    said = output.decode(errors="replace").strip()
    if len(said) <= _LAST_WORDS:
        return said
    cut = said[-_LAST_WORDS:]
    return cut.partition("\n")[2] or cut
