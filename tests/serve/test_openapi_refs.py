"""The document that describes the API can be read on its own: every name in it stands in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from etude.serve.dialects import document


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_every_reference_leads_somewhere() -> None:
    whole = json.loads(msgspec.json.encode(document()))
    found = set(references(whole))
    assert found
    for reference in found:
        place: Any = whole
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]
        assert isinstance(place, dict)
