"""Reports of tests in JUnit's XML, as pytest and most others write it."""

from __future__ import annotations

from typing import NoReturn
from xml.parsers import expat


def parse_junit(report: bytes) -> dict[str, bool]:
    """`classname::name` of each test -> whether it passed. One that is there twice passed if both
    did. ValueError for anything but such a report: its text is in the hands of the graded code."""
    found: dict[str, bool] = {}
    inside: list[str] = []

    def start(tag: str, attributes: dict[str, str]) -> None:
        if tag == "testcase":
            name = f"{attributes.get('classname', '')}::{attributes.get('name', '')}"
            found.setdefault(name, True)
            inside.append(name)
        elif tag in ("failure", "error", "skipped") and inside:
            found[inside[-1]] = False

    def end(tag: str) -> None:
        if tag == "testcase":
            inside.pop()

    parser = expat.ParserCreate()
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.EntityDeclHandler = _refuse  # a few of them make gigabytes
    try:
        parser.Parse(report, True)
    except expat.ExpatError as e:
        raise ValueError(f"the report is not XML: {e}") from e
    return found


def _refuse(*declaration: object) -> NoReturn:
    raise ValueError("the report declares entities")
