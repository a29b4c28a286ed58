"""`etude keys` and docs/config.md: every key of the config, as in its tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.cli import main
from etude.commands.keys import markdown
from etude.core.advantage import ADVANTAGE
from etude.core.config import STAGES, parse
from etude.core.keys import REQUIRED, tables
from etude.core.stages import LOSSES

PAGE = Path(__file__).parents[2] / "docs" / "config.md"
TABLES = {table.path: {key.name: key for key in table.keys} for table in tables()}


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == markdown(), "run: etude keys --markdown > docs/config.md"


def test_every_key_is_there_and_says_what_it_means() -> None:
    config = parse('name = "x"\n[[stage]]\nkind = "rl"\nsteps = 1\n').model_dump()
    for section, values in config.items():
        if isinstance(values, dict):
            assert TABLES[section].keys() == values.keys()
    assert {*TABLES[""], *TABLES} >= config.keys() - {"stage"}
    for kind, stage in STAGES.items():
        assert TABLES[f"stage.{kind}"].keys() == stage.model_fields.keys() - {"kind"}
    silent = [
        (path, name)
        for path, keys in TABLES.items()
        for name, key in keys.items()
        if not key.meaning
    ]
    assert not silent


def test_what_they_say_of_a_key() -> None:
    rl = TABLES["stage.rl"]
    assert (rl["max_lag"].type, rl["max_lag"].default) == ("integer, at least 0", "2")
    assert rl["group_size"].default == "8", "its own, not that of all rollout stages"
    assert rl["name"].default == '"rl"'
    assert rl["steps"].default == REQUIRED
    assert rl["clip_low"].type == "number, at least 0"
    assert TABLES["engine"]["regions"].default == '["east", "west"]'
    assert TABLES["engine"]["device"].type == '"auto" or "cpu" or "cuda"'
    assert TABLES["stage.midtrain"]["sources"].type.startswith("list of table")
    assert TABLES["stage.midtrain.sources"]["weight"].type == "number, above 0"
    assert all(name in rl["loss"].meaning for name in LOSSES)
    assert all(name in rl["advantage"].meaning for name in ADVANTAGE)


def test_in_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys"]) == 0
    assert "stage.distill: steps" in capsys.readouterr().out
    assert main(["keys", "engine"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "[engine]" in said and "max_num_seqs" in said and "\\" not in said
    assert main(["keys", "stage.rl.max_lag"]) == 0
    said = capsys.readouterr().out
    assert "staleness" in said and "reorder_window" not in said
    assert main(["keys", "stage.midtrain.sources"]) == 0
    assert "weight" in capsys.readouterr().out
    assert main(["keys", "max_lagg"]) == 2
    assert "did you mean" in capsys.readouterr().err
    assert main(["keys", "stage"]) == 2
    said = capsys.readouterr().err
    assert all(f"stage.{kind}" in said for kind in STAGES)
    assert main(["keys", "harness.code.foo"]) == 2  # the message suggests a key and a table
    assert capsys.readouterr().err.count("harness.code.tool,") == 1
    assert main(["keys", "lr"]) == 2
    assert "stage.rl.lr" in capsys.readouterr().err
