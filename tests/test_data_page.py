"""The page on the data of a run: its code runs on an existing run."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from etude.store.objects import Objects
from tests.run.fake_stage import FIRST, stage

ROOT = Path(__file__).parent.parent


def test_the_code_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    objects = Objects.open(str(tmp_path / "runs/mine"))
    asyncio.run(stage(objects, seed=1, last=FIRST + 2, max_lag=1))
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/data.md").read_text()
    code = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec("\n".join(code), {"__name__": "page"})
    assert "merged 1.0" in capsys.readouterr().out
