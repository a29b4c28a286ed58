"""`etude chat`: talk to a model in the terminal: that of a server, of a directory or of a run.

Ctrl-C stops an answer and keeps its beginning; Ctrl-D or /quit ends the chat. Without a server, the
model is served by a separate process on a free port of this machine, which ends with the chat.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from etude.core.errors import EtudeError
from etude.core.sampling import CHAT_TEMPERATURE
from etude.model.directory import GENERATION
from etude.run.process import die_with_parent
from etude.serve.process import authorization, token

Message = dict[str, Any]

END = ("/quit", "/exit")
HELP = """\
/quit, /exit or Ctrl-D   end the chat
/help                    show this help
Ctrl-C                   stop an answer and keep what it says so far
anything else            is sent to the model, with the conversation so far"""

ANSWER_S = 10.0
"""Time for a server to accept a connection."""
_PORTS = {"http": 80, "https": 443}
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
"""Control characters, which are not printed: a model must not clear the screen or write to the
clipboard."""
ALWAYS_REFUSED = (401, 403, 404, 405)
"""Statuses that further turns would get as well."""


class Refused(EtudeError):
    """The server rejected this turn; it may answer another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sampling settings of every turn; None leaves a setting to the server."""

    model: str | None
    system: str | None
    temperature: float | None
    max_tokens: int | None
    seed: int | None

    def request(self, messages: list[Message]) -> dict[str, Any]:
        wanted = {"model": self.model, "temperature": self.temperature, "seed": self.seed}
        given = {name: value for name, value in wanted.items() if value is not None}
        if self.max_tokens is not None:
            given["max_completion_tokens"] = self.max_tokens
        return given | {
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def usual_temperature(target: str) -> float:
    """The sampling temperature that a model directory recommends, or the default."""
    said: Any = None
    with contextlib.suppress(OSError, ValueError):
        said = json.loads((Path(target) / GENERATION).read_bytes())
    wanted = said.get("temperature") if isinstance(said, dict) else None
    return float(wanted) if isinstance(wanted, int | float) else CHAT_TEMPERATURE


def chat(target: str, version: int | None, settings: Settings, console: Console) -> None:
    with _server(target, version, console) as (url, who):
        console.print(
            f"talking to {who}   /help for help, /quit to end",
            style="dim",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # input() then has a history and line editing
        messages: list[Message] = (
            [{"role": "system", "content": settings.system}] if settings.system else []
        )
        while (said := _next_line(console)) is not None:
            if said.strip():
                asked = [*messages, {"role": "user", "content": said}]
                try:
                    answer = _answer(url, settings.request(asked), console)
                except Refused as e:
                    console.print(
                        f"{e}; this turn was dropped", style="bold", highlight=False, markup=False
                    )
                else:
                    messages = [*asked, {"role": "assistant", "content": answer}]


def _next_line(console: Console) -> str | None:
    """The next text for the model; None to end the chat."""
    while True:
        try:
            said = input("> ")
        except KeyboardInterrupt:
            console.print("\n(/quit ends)", style="dim")
            continue
        except EOFError:
            console.print()
            return None
        if said.strip() in END:
            return None
        if said.strip() != "/help":
            return said
        console.print(HELP, style="dim", highlight=False)


def _answer(url: str, request: dict[str, Any], console: Console) -> str:
    """Show the answer as it arrives; returns what has arrived when it ends or is stopped."""
    said = ""
    began = time.monotonic()
    usage = None
    reason = None
    try:
        for chunk in _stream(url, request):
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                reason = choice.get("finish_reason") or reason
                piece = choice["delta"].get("content") or ""
                said += piece
                console.out(_CONTROL.sub("\ufffd", piece), end="", highlight=False)
    except KeyboardInterrupt:
        console.print(" (stopped)", style="dim")
        return said
    console.print()
    if usage:
        count = usage["completion_tokens"]
        seconds = time.monotonic() - began
        cut = "; cut off: raise --max-tokens for longer answers" if reason == "length" else ""
        console.print(
            f"{count} tokens, {count / seconds:.1f} tokens/s{cut}", style="dim", highlight=False
        )
    return said


def _stream(url: str, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The chunks of an answer. Leaving the iteration closes the connection, which stops the
    server."""
    place = urlsplit(url)
    kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
    headers = {"Content-Type": "application/json"} | authorization(token())
    path = place.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
    with contextlib.closing(kind(place.netloc)) as connection:
        try:
            connection.request("POST", path, json.dumps(request), headers)
            response = connection.getresponse()
            if response.status != 200:
                error = EtudeError if response.status in ALWAYS_REFUSED else Refused
                raise error(f"{url} answered {response.status}: {_reason(response.read())}")
            for line in response:
                if line.startswith(b"data: {"):
                    chunk = json.loads(line.removeprefix(b"data: "))
                    if "error" in chunk:
                        raise Refused(f"{url} broke off: {chunk['error']['message']}")
                    yield chunk
        except (OSError, http.client.HTTPException) as e:
            raise EtudeError(
                f"no answer from {url}: {e or type(e).__name__}; is a server running there?"
            ) from e


def _check_answers(url: str) -> None:
    """Check that a server accepts connections."""
    try:
        with socket.create_connection(
            (urlsplit(url).hostname, urlsplit(url).port or _PORTS[urlsplit(url).scheme]), ANSWER_S
        ):
            pass
    except OSError as e:
        raise EtudeError(f"no answer from {url}: {e}; is a server running there?") from e


def _reason(body: bytes) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["error"]["message"])
    return body.decode(errors="replace")[:200]


@contextlib.contextmanager
def _server(target: str, version: int | None, console: Console) -> Iterator[tuple[str, str]]:
    """A server for the target: its URL, and a description of what it serves."""
    if target.startswith(("http://", "https://")):
        if version is not None:
            raise EtudeError(
                f"--version {version} does not apply: the server at {target} chooses its weights"
            )
        try:
            port, host = urlsplit(target).port, urlsplit(target).hostname
        except ValueError as e:
            raise EtudeError(
                f"{target} is not a URL: {e}; write it like http://127.0.0.1:8000"
            ) from e
        if not host or port == 0:
            raise EtudeError(f"{target} names no server; write it like http://127.0.0.1:8000")
        _check_answers(target)
        yield target, target
        return
    if "://" not in target and not Path(target).is_dir():
        raise EtudeError(f"{target} is neither a URL (http://..), nor a model directory, nor a run")
    argv = [sys.executable, "-m", "etude", "serve", target, "--port", "0", "--quiet"]
    if version is not None:
        argv += ["--version", str(version)]
    # In a session of its own, so that Ctrl-C in the terminal stops the answer, not the server.
    child = subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=partial(die_with_parent, os.getpid()),
    )
    try:
        assert child.stdout is not None
        with console.status(f"loading {target}"):
            line = child.stdout.readline()
        if not line:
            raise EtudeError(f"the server for {target} did not start")
        chosen = re.search(r" \(version (\d+)\) at ", line)
        yield line.split()[-1], target + (f", version {chosen[1]}" if chosen else "")
    finally:
        child.terminate()
        child.wait()
