"""Reads rules.txt: symbol renames and module moves."""
from __future__ import annotations
from pathlib import Path

HERE = Path(__file__).parent

def read() -> tuple[dict[str, str], set[str], dict[str, str], list[tuple[str, str, str, str]]]:
    """(rules, optional rules, module moves, rows for the table)"""
    rules, optional, moves, rows = {}, set(), {}, []
    module = ""
    for line in (HERE / "rules.txt").read_text().splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            module, _, target = line.partition("]")
            module = "etude." + module[1:]
            if target.strip().startswith("->"):
                moves[module] = "etude." + target.strip()[2:].strip()
            continue
        body, _, why = line.partition(";")
        old, new = body.split()
        maybe = old.startswith("?")
        old = old.lstrip("?")
        full = f"{module}.{old}"
        assert full not in rules, full
        rules[full] = new
        if maybe:
            optional.add(full)
        rows.append((module, old, new, why.strip()))
    return rules, optional, moves, rows
