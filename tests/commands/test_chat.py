"""What is said in a chat, and what is for the chat itself."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from etude.commands import chat

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
    chat.chat("http://127.0.0.1:1", None, SETTINGS, console)
    assert said == ["/etc/passwd is a file?"] and next(lines, None) is None
    shown = console.export_text()
    assert "/help tells more, /quit ends" in shown and "Ctrl-C                   stops" in shown
