"""The benchmark of adapters, cut short: it measures the requested batches and numbers."""

from __future__ import annotations

import json

import pytest

from etude.bench import lora

pytestmark = pytest.mark.filterwarnings("ignore:native.c")


def test_figures_of_each_batch_with_as_many_adapters_as_it_has_requests(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = "--json --device cpu --rank 8 --batch 2 4 --counts 1 4 --steps 4"
    monkeypatch.setattr("sys.argv", ["lora", *given.split()])
    lora.main()
    out, noted = capsys.readouterr()
    figures = json.loads(out)
    speeds = {name.removesuffix(".tokens_per_s") for name in figures if "tokens_per_s" in name}
    assert speeds == {"b2.base", "b2.none", "b2.a1", "b4.base", "b4.none", "b4.a1", "b4.a4"}
    for of in speeds - {"b2.base", "b4.base"}:
        base = figures[f"{of[:2]}.base.tokens_per_s"]
        assert figures[f"{of}.share"] == figures[f"{of}.tokens_per_s"] / base
    # Pairs of q, o, k, v, gate, up and down in each of four layers, in bf16.
    inner = 2 * (128 + 128) + 2 * (128 + 64) + 3 * (128 + 384)
    assert (
        figures["a4.adapter_gib"] == 4 * figures["a1.adapter_gib"] == 4 * 8 * 2 * 4 * inner / 2**30
    )
    assert [line.split()[0] for line in noted.splitlines() if line[0] in "ab"] == list(figures)


def test_what_is_measured_without_options(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}
    monkeypatch.setattr(lora, "run", lambda **options: asked.update(options) or {})
    monkeypatch.setattr("sys.argv", ["lora"])
    lora.main()
    assert (asked["batches"], asked["counts"], asked["rank"]) == ([64], [1, 8, 64], 16)
