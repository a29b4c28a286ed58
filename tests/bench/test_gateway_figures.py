"""The benchmark of the gateway, with two sessions of one turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.bench import gateway


def test_what_was_measured_stays_if_the_other_proxy_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "litellm"
    broken.write_text("#!/bin/sh\necho no such option >&2\nexit 2\n")
    broken.chmod(0o755)
    monkeypatch.setattr(gateway, "LITELLM", broken)
    monkeypatch.setattr(gateway, "TURNS", 1)
    figures = gateway.run(sessions=2)
    assert figures["sessions"] == 2 and figures["etude.retries"] == 0
    assert figures["etude.turns_per_s"] > 0 and figures["etude.rss_mb"] > 0
    assert not any(name.startswith("litellm") for name in figures)
    assert "LiteLLM did not start: no such option" in capsys.readouterr().err
