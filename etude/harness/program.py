"""A program as an agent: a script, or a coding agent that exists, started in the task's sandbox.

It finds the model where every client of OpenAI's API looks: OPENAI_BASE_URL and OPENAI_API_KEY. A
sandbox has no network, so the URL is that of a small server within it, which says on its standard
output what it is asked; the asking is done out here, with the true key, and only of this session's
model. The program is one of the sandbox's processes: it ends with its attempt, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import aiohttp

from etude.core.errors import RolloutFailure
from etude.core.sandbox import Process, Sandbox
from etude.core.seeds import derive
from etude.core.types import Json, Task, Transcript

OUTPUT_BYTES = 64 << 10
"""The end of its output that is kept."""
_LAST_WORDS = 500
_REFUSAL = 200
_CHAT = "/v1/chat/completions"
_SERVER = """
import http.server, json, sys

class Server(http.server.HTTPServer):
    def handle_error(self, *whoever):
        pass  # the client went away

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        print(json.dumps([self.path, body.decode(errors="replace")]), flush=True)
        status, kind, text = json.loads(sys.stdin.readline())
        answer = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST

    def log_message(self, *line):
        pass

server = Server(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


class Answer(NamedTuple):
    status: int
    content_type: str
    text: str


class ProgramAgent:
    """A `core.protocols.Agent`; a subclass says which program.

    The program starts in the working copy. On its standard input it finds the task as one JSON
    object, `{"messages": [...], "meta": {...}}`. When it ends with exit code 0 the attempt is
    finished, whatever it did; with another one it has failed."""

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

    @abstractmethod
    def command(self, task: Task) -> Sequence[str]:
        """The program and its arguments. It must be there in the sandbox: by a mount of the run,
        or as the text of a script, `["python", "-c", text]`."""

    async def run(
        self, task: Task, sandbox: Sandbox, *, base_url: str, api_key: str, seed: int
    ) -> Transcript:
        session = _Session(self._http, base_url, api_key, seed, self._defaults)
        output = bytearray()
        finished = False
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                code = await self._run_program(task, sandbox, session, output)
                finished = _ended_well(code, output, session)
        except TimeoutError:
            # someone else's time ran out: a failure, not the end of the session
            if not deadline.expired():
                raise
            if not session.has_asked:
                raise RolloutFailure(
                    f"agent: its time was over after {self._timeout_s:g} s (harness.timeout_s), "
                    f"and it had not asked the model yet"
                ) from None
        said = {"role": "tool", "name": "program", "content": output.decode(errors="replace")}
        return Transcript(messages=[*(session.messages or task.opening), said], finished=finished)

    async def _run_program(
        self, task: Task, sandbox: Sandbox, session: _Session, output: bytearray
    ) -> int:
        """Its exit code."""
        async with model_inside(sandbox, session.ask) as url:
            env = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "the-sandbox-has-it"}
            program = await sandbox.start(list(self.command(task)), env=env)
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


class _Session:
    """The program's conversation with the model."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        base_url: str,
        api_key: str,
        seed: int,
        defaults: dict[str, Json],
    ) -> None:
        self._http = http
        self._base_url = base_url
        self._headers = {
            "Authorization": f"Bearer {api_key}",
            "Content-Type": "application/json",
        }
        self._seed = seed
        self._defaults = defaults
        self._turn = 0
        self.messages: list[dict[str, Json]] = []
        """Of the last question, with its answer."""
        self.out_of_context = False
        self.refusal = ""
        """What was said to the last question, if that was no answer."""

    @property
    def has_asked(self) -> bool:
        return self._turn > 0

    async def ask(self, path: str, body: str) -> Answer:
        if path != _CHAT:
            return _refusal(404, f"only POST {_CHAT} is there")
        try:
            asked = {**self._defaults, "seed": derive(self._seed, self._turn), **json.loads(body)}
        except (ValueError, TypeError) as e:
            return _refusal(400, f"the body is no JSON object: {e}")
        self._turn += 1
        async with self._http.post(
            f"{self._base_url}/chat/completions",
            json=asked,
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None),
        ) as response:
            answer = Answer(response.status, response.content_type, await response.text())
        self._note(asked, answer)
        return answer

    def _note(self, asked: dict[str, Json], answer: Answer) -> None:
        told = " ".join(answer.text.split())[:_REFUSAL]
        self.refusal = "" if answer.status == 200 else f"{answer.status} {told}"
        self.out_of_context |= answer.status == 400 and "context_length_exceeded" in answer.text
        if answer.status == 200:
            self.messages = list(asked["messages"])
            if answer.content_type == "application/json":  # else a stream, which is for its client
                self.messages.append(json.loads(answer.text)["choices"][0]["message"])


def _refusal(status: int, message: str) -> Answer:
    return Answer(status, "application/json", json.dumps({"error": {"message": message}}))


def _ended_well(code: int, output: bytearray, session: _Session) -> bool:
    """Whether it came to its end; a program that has to give up because the model can read no more
    has not, and is graded as it stands."""
    if code and not session.out_of_context:
        refused = f"its last question was refused ({session.refusal}); " if session.refusal else ""
        raise RolloutFailure(
            f"the program ended with exit code {code}; {refused}its last words: {_end(output)}"
        )
    return code == 0


def _end(output: bytearray) -> str:
    """Its last lines, from the beginning of one."""
    said = output.decode(errors="replace").strip()
    if len(said) <= _LAST_WORDS:
        return said
    cut = said[-_LAST_WORDS:]
    return cut.partition("\n")[2] or cut


@contextlib.asynccontextmanager
async def model_inside(
    sandbox: Sandbox, ask: Callable[[str, str], Awaitable[Answer]]
) -> AsyncIterator[str]:
    """A base URL within the sandbox while the block runs. `ask` answers a path and a body, one
    after the other."""
    server = await sandbox.start(["python", "-c", _SERVER])
    lines = _lines(server)
    try:
        port = int(await anext(lines, b"nothing"))
    except ValueError as e:
        raise RolloutFailure(f"no server could be started in the sandbox: {e}") from e
    answering = asyncio.create_task(_answer_all(server, lines, ask))
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        answering.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await answering


async def _answer_all(
    server: Process, lines: AsyncIterator[bytes], ask: Callable[[str, str], Awaitable[Answer]]
) -> None:
    try:
        async for line in lines:
            path, body = json.loads(line)
            await server.write(json.dumps(await ask(path, body)).encode() + b"\n")
    finally:
        await server.kill()  # so that nobody waits for an answer that will not come


async def _lines(process: Process) -> AsyncIterator[bytes]:
    pending = b""
    while chunk := await process.read():
        *whole, pending = (pending + chunk).split(b"\n")
        for line in whole:
            yield line
