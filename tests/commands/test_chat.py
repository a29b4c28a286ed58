"""What is said in a chat, and what is for the chat itself."""

from __future__ import annotations

import builtins
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from etude.commands import chat
from etude.core.errors import EtudeError

SETTINGS = chat.Settings(model=None, system=None, temperature=None, max_tokens=None, seed=None)


@pytest.mark.parametrize("end", ["/quit", " /exit "])
def test_it_ends_and_helps_without_asking_the_model(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["/help", "/etc/passwd is a file?", end])
    said: list[str] = []

    def answer(url: str, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        said.append(request["messages"][-1]["content"])
        yield {"choices": [{"delta": {"content": "yes"}}]}

    monkeypatch.setattr(builtins, "input", lambda prompt: next(lines))
    monkeypatch.setattr(chat, "_stream", answer)
    console = Console(record=True, width=100)
    with socket.create_server(("127.0.0.1", 0)) as server:
        chat.chat(f"http://127.0.0.1:{server.getsockname()[1]}", None, SETTINGS, console)
    assert said == ["/etc/passwd is a file?"] and next(lines, None) is None
    shown = console.export_text()
    assert "/help tells more, /quit ends" in shown and "Ctrl-C                   stops" in shown


def test_a_server_that_is_not_there_is_told_before_anything_is_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    console = Console(record=True)
    with pytest.raises(EtudeError, match="does not answer: .* is a server running there"):
        chat.chat(f"http://127.0.0.1:{port}/v1", None, SETTINGS, console)
    assert "talking to" not in console.export_text()
