"""Input of a chat: text for the model, and commands of the chat itself."""

from __future__ import annotations

import builtins
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from etude.cli import main
from etude.commands import chat
from etude.core.errors import EtudeError
from etude.core.sampling import CHAT_MAX_TOKENS, CHAT_TEMPERATURE

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
    assert "/help for help, /quit to end" in shown and "Ctrl-C                   stop" in shown


def test_the_temperature_is_the_models_own_or_a_calm_one(tmp_path: Path) -> None:
    assert chat.usual_temperature(str(tmp_path)) == CHAT_TEMPERATURE < 1.0
    assert chat.usual_temperature("http://127.0.0.1:8000") == CHAT_TEMPERATURE
    for said in ("[]", "{", '{"temperature": null}', '{"eos_token_id": 2}'):
        (tmp_path / "generation_config.json").write_text(said)
        assert chat.usual_temperature(str(tmp_path)) == CHAT_TEMPERATURE
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.2}')
    assert chat.usual_temperature(str(tmp_path)) == 0.2


def test_what_is_not_said_on_the_command_line_is_told_by_the_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.2}')
    asked: list[chat.Settings] = []
    monkeypatch.setattr(chat, "chat", lambda target, version, settings, _: asked.append(settings))
    assert main(["chat", str(tmp_path)]) == main(["chat", "http://127.0.0.1:8000"]) == 0
    assert main(["chat", str(tmp_path), "--temperature", "0", "--max-tokens", "9"]) == 0
    assert [(each.temperature, each.max_tokens) for each in asked] == [
        (0.2, CHAT_MAX_TOKENS),
        (CHAT_TEMPERATURE, CHAT_MAX_TOKENS),
        (0.0, 9),
    ]
    with pytest.raises(SystemExit):
        main(["chat", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert f"else {CHAT_TEMPERATURE})" in told and f"(default: {CHAT_MAX_TOKENS})" in told


@pytest.mark.parametrize(("reason", "is_told"), [("length", True), ("stop", False)])
def test_an_answer_that_was_cut_says_so(
    reason: str, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = [
        {"choices": [{"delta": {"content": "and so on"}, "finish_reason": reason}]},
        {"choices": [], "usage": {"completion_tokens": 3}},
    ]
    monkeypatch.setattr(chat, "_stream", lambda url, request: iter(chunks))
    console = Console(record=True, width=100)
    assert chat._answer("http://x", {}, console) == "and so on"
    assert ("cut off: raise --max-tokens" in console.export_text()) is is_told


def test_what_would_work_the_terminal_is_shown_and_sent_back_as_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "a\x1b]52;c;eA==\x07b\x9b2J\nc 中文\u3000é"
    chunks = [{"choices": [{"delta": {"content": piece}}]} for piece in said]
    monkeypatch.setattr(chat, "_stream", lambda url, request: iter(chunks))
    assert chat._answer("http://x", {}, Console(width=100)) == said
    shown = capsys.readouterr().out
    assert shown == "a\ufffd]52;c;eA==\ufffdb\ufffd2J\nc 中文\u3000é\n"


def test_a_server_that_is_not_there_is_told_before_anything_is_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    console = Console(record=True)
    with pytest.raises(EtudeError, match="no answer from .*: .* is a server running there"):
        chat.chat(f"http://127.0.0.1:{port}/v1", None, SETTINGS, console)
    assert "talking to" not in console.export_text()
