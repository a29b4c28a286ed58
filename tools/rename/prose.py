"""Reads prose.txt: `## file`, then old sentence, a line `=>`, new sentence, a blank line."""
from pathlib import Path

def read() -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    file = ""
    path = Path(__file__).parent / "prose.txt"
    for block in path.read_text().split("\n\n"):
        block = block.strip("\n")
        if block.startswith("## "):
            first, _, block = block.partition("\n")
            file = first[3:].strip()
        if block.strip():
            old, arrow, new = block.partition("\n=>\n")
            assert arrow, block
            found.setdefault(file, []).append((old.strip(), new.strip()))  # a leading ? : may be absent
    return found
