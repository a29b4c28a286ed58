"""A missing package of an extra is reported with the name of the extra."""

from __future__ import annotations

import importlib
import sys

import pytest

from etude.core.errors import EtudeError


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("etude.model.from_gguf", "gguf", "gguf"),
        ("etude.bench.delta", "zstandard", "bench"),
        ("etude.launch.ray", "ray", "ray"),
    ],
)
def test_a_missing_extra_is_named(
    module: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(EtudeError, match=rf"pip install 'etude\[{extra}\]'"):
        importlib.import_module(module)
