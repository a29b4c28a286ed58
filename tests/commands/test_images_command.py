"""`etude images`, from a folder to an image and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from etude.cli import main


def test_from_a_folder_to_an_image_and_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "cart.py").write_text("TOTAL = 1\n")
    spec = tmp_path / "shop.toml"
    spec.write_text('name = "shop"\n[repository]\nsource = "shop"\n')
    store = ["--store", str(tmp_path / "store")]

    assert main(["images", "build", str(spec), *store, "--json"]) == 0
    built = json.loads(capsys.readouterr().out)
    assert built["name"] == "shop" and len(built["digest"]) == 64
    assert main(["images", "list", *store, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [built]
    assert main(["images", "show", "shop", *store]) == 0
    assert f"shop@sha256:{built['digest']}" in capsys.readouterr().out.replace("\n", "")

    (tmp_path / "shop" / "cart.py").write_text("TOTAL = 2\n")
    assert main(["images", "build", str(spec), *store, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["digest"] != built["digest"]
    assert main(["images", "remove", "shop", *store]) == 0
    capsys.readouterr()
    assert main(["images", "show", "shop", *store]) == 2
    assert "etude images build SPEC.toml" in capsys.readouterr().err
