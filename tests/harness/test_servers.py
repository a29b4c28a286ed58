"""The language server protocol, with a server simulated in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from etude.harness.code import servers
from etude.harness.code.diagnostics import Diagnostic, Diagnostics, FakeDiagnostics
from etude.harness.code.servers import LanguageServer, LanguageServers, ServerGone, start_server

Answer = Callable[[dict[str, Any]], list[Any]]


def framed(message: Any) -> bytes:
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    return b"Content-Type: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


class Played:
    """A process that sends the results of `answer`, a few bytes at a time."""

    def __init__(self, answer: Answer, greeting: bytes = b"/home/me\n", code: int = 0) -> None:
        self.heard: list[dict[str, Any]] = []
        self.killed = 0
        self._answer = answer
        self._out = bytearray(greeting)
        self._code = code

    async def write(self, data: bytes) -> None:
        head, _, body = data.partition(b"\r\n\r\n")
        assert head == b"Content-Length: %d" % len(body)
        message = json.loads(body)
        assert message.pop("jsonrpc") == "2.0"
        self.heard.append(message)
        for each in self._answer(message):
            self._out += each if isinstance(each, bytes) else framed(each)

    async def read(self) -> bytes:
        data = bytes(self._out[:7])
        del self._out[:7]
        if not data and self._code is None:
            await asyncio.Event().wait()
        return data

    async def kill(self) -> None:
        self.killed += 1

    async def wait(self) -> int:
        return self._code


def polite(*items: dict[str, Any]) -> Answer:
    """Answers requests, after sending a notification and a request of its own."""

    def answer(message: dict[str, Any]) -> list[Any]:
        if "id" not in message or "method" not in message:
            return []
        if message["method"] == "initialize":
            return [{"id": message["id"], "result": {}}]
        return [
            {"method": "window/logMessage", "params": {}},
            {"id": 77, "method": "workspace/configuration", "params": {"items": [1, 2]}},
            {"id": message["id"], "method": "client/registerCapability"},
            {"id": 999, "result": "of nobody"},
            {"id": message["id"], "result": {"items": list(items)}},
        ]

    return answer


def item(line: int, message: str, **more: Any) -> dict[str, Any]:
    return {"range": {"start": {"line": line}}, "message": message, **more}


async def started(process: Played) -> LanguageServer:
    async def start(argv: list[str], **how: Any) -> Played:
        assert argv[:2] == ["sh", "-c"] and argv[-2:] == ["ruff", "server"]
        return process

    sandbox: Any = SimpleNamespace(start=start)
    return await start_server(sandbox, "ruff", ["ruff", "server"])


async def test_a_text_is_opened_once_and_changed_then() -> None:
    process = Played(polite(
        item(3, "bad\nhint", code="F1", severity=1), item(0, "so so", severity=2),
        item(1, "a hint", severity=3), item(2, "unsaid"), item(4, "none", severity=None, code=7),
    ))  # fmt: skip
    server = await started(process)
    found = await server.check("a b.py", "x = 1")
    assert found == [
        Diagnostic(line=4, code="F1", message="bad", source="ruff"),
        Diagnostic(line=1, code="", message="so so", source="ruff"),
        Diagnostic(line=3, code="", message="unsaid", source="ruff"),
        Diagnostic(line=5, code="7", message="none", source="ruff"),
    ]
    await server.check("a b.py", "x = 2")
    await server.check("c.py", "y")
    first, ready, *rest = process.heard
    assert (first["id"], first["method"]) == (1, "initialize")
    assert first["params"]["rootUri"] == "file:///home/me"
    assert first["params"]["workspaceFolders"] == [{"uri": "file:///home/me", "name": "work"}]
    assert set(first["params"]["capabilities"]["textDocument"]) == {"diagnostic", "synchronization"}
    assert first["params"]["capabilities"]["general"] == {"positionEncodings": ["utf-16"]}
    assert ready == {"method": "initialized", "params": {}}
    uri = "file:///home/me/a%20b.py"
    told = [each for each in rest if "method" in each]
    assert told[0]["method"] == "textDocument/didOpen"
    assert told[0]["params"]["textDocument"] == {
        "uri": uri, "version": 1, "languageId": "python", "text": "x = 1"
    }  # fmt: skip
    assert told[1] == {"id": 2, "method": "textDocument/diagnostic",
                       "params": {"textDocument": {"uri": uri}}}  # fmt: skip
    assert told[2]["method"] == "textDocument/didChange"
    assert told[2]["params"] == {
        "textDocument": {"uri": uri, "version": 2}, "contentChanges": [{"text": "x = 2"}]
    }  # fmt: skip
    assert told[4]["method"] == "textDocument/didOpen"
    assert told[4]["params"]["textDocument"]["version"] == 1
    answered = [each for each in rest if "method" not in each]
    assert answered[:2] == [{"id": 77, "result": [None, None]}, {"id": 2, "result": None}]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (framed({"id": 1, "error": {"code": 3}}), r"it answered \{'code': 3\} \(exit code 0\)"),
        (b"Content-Length: x\r\n\r\n", "it does not speak LSP"),
        (b"Length: 3\r\n\r\n{}", "it does not speak LSP"),
        (b"Content-Length: -1\r\n\r\n", "it says too much"),
        (b"Content-Length: 16777217\r\n\r\n", "it says too much"),
        (framed(b"[1]"), "it does not speak LSP"),
        (framed(b"{nope"), "it does not speak LSP"),
        (framed(b"[" * 100_000), "it does not speak LSP"),
        (b"Content-Length: 9\r\n\r\nx", "it has ended"),
        (b"", "it has ended"),
    ],
)
async def test_what_does_not_start_is_ended(said: bytes, why: str) -> None:
    process = Played(lambda message: [said])
    with pytest.raises(ServerGone, match=why):
        await started(process)
    assert process.killed == 1


async def test_a_server_that_is_not_there_and_one_that_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ServerGone, match="^no program ruff in the sandbox$"):
        await started(Played(lambda message: [], greeting=b"", code=127))
    monkeypatch.setattr(servers, "START_S", 0.01)
    silent = Played(lambda message: [])
    silent._code = None  # type: ignore[assignment]
    with pytest.raises(ServerGone, match=r"it did not start within 0\.01 s"):
        await started(silent)
    assert silent.killed == 1


async def test_what_is_gone_is_told_once_and_not_asked_again() -> None:
    count = [0]

    async def start(argv: list[str], **how: Any) -> Played:
        count[0] += 1
        return played[argv[-1]]

    played = {
        "good": Played(polite(item(0, "x"))),
        "dies": Played(lambda m: [{"id": m["id"], "result": {}}] if m.get("id") == 1 else []),
    }
    sandbox: Any = SimpleNamespace(start=start)
    source = LanguageServers(sandbox, {name: [name] for name in played}, timeout_s=9.0)
    for _ in range(2):
        found = await source.check("a.py", "x")
        assert [each.source for each in found] == ["good"]
    assert count == [2]
    assert source.missing() == {"dies": "it has ended"} and source.missing() == {}
    assert (played["dies"].killed, played["good"].killed) == (1, 0)


async def test_what_a_lost_server_had_said_is_not_gone() -> None:
    class Losing(FakeDiagnostics):
        def missing(self) -> Mapping[str, str]:
            told = dict(news)
            news.clear()
            return told

    def check(path: str, text: str) -> list[Diagnostic]:
        return [Diagnostic(1, "X1", "bad", name) for name in asked if "bad" in text]

    asked, news = ["quick", "late"], dict[str, str]()
    diagnostics = Diagnostics(Losing(check))
    for path in ("a.py", "b.py"):
        assert "2 new" in await diagnostics.changed(path, None, "bad = 1")
    asked.remove("late")
    news["late"] = "it has ended"
    assert await diagnostics.changed("a.py", "bad = 1", "bad = 2") == (
        "(no diagnostics of late: it has ended)"
    )
    said = await diagnostics.changed("b.py", "bad = 1", "good = 1")
    assert said == "diagnostics: 0 new, 1 gone", "of those who can still say so"
