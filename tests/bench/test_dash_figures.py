"""The benchmark of the dashboard, small: the real server answers, and no figure is missing."""

from __future__ import annotations

import json

import pytest

from etude.bench import dash
from etude.cli import main


def test_the_figures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("ROLLOUTS", 300), ("TOKENS", 200)):
        monkeypatch.setattr(dash, name, value)
    assert main(["bench", "dash", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert figures.keys() == {
        "load",
        "open_s",
        *(f"filter_{name}_ms" for name in ("p50", "p95", "max")),
        *(f"view_{view}_ms" for view in dash.VIEWS),
        "session_conversation_s",
        "session_tokens_s",
        "live_s",
        "rss_mib",
        "page_kb",
    }
    assert all(value > 0 for name, value in figures.items() if name != "load")
