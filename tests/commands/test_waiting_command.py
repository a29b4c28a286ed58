"""`etude doctor RUN`, on a store written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.commands.waiting import LISTED, waiting
from etude.core.config import parse
from etude.core.ledger import Issued
from etude.store.runs import Run


@pytest.mark.parametrize("more", [0, 4])
def test_what_is_not_listed_is_counted(
    more: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.open(f"file:{tmp_path}")
    run.put_config(parse('name = "x"\n[[stage]]\nkind = "rl"\nsteps = 1\n'))
    samples = tuple(f"g000000.{n}" for n in range(LISTED + more))
    run.ledger.append(Issued(group="g000000", task="t", samples=samples, version=0, epoch=0))
    waiting(str(tmp_path), as_json=False)
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "  and 4 more" if more else last.startswith("  g000000.")
