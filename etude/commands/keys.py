"""`etude keys`: the keys of a run's configuration, in the terminal or as `docs/config.md`."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from etude.core.errors import EtudeError
from etude.core.keys import Key, Table, tables

HEAD = """# Configuration

Every key of a run's TOML file. This page is made by `etude keys --markdown > docs/config.md`; a
test checks that it is current. In the terminal: `etude keys`, `etude keys stage.rl`, `etude keys
stage.rl.lr`.

An unknown key is an error that names the nearest one. `--set stage.rl.steps=30` changes a key from
the command line; a stage goes by its name, which is its kind unless you give it another. Values are
strict: `"3"` is not a number. Relative paths start at the folder of the file, in `--set` too. What
the stages do is in [stages.md](stages.md).
"""
COLUMNS = ("key", "type", "default", "meaning")


def markdown() -> str:
    """The text of docs/config.md."""
    return "\n".join([HEAD, *map(_section, tables())])


def _section(table: Table) -> str:
    lines = [f"## {_title(table)}", "", table.meaning, "", f"| {' | '.join(COLUMNS)} |"]
    lines.append("|---" * len(COLUMNS) + "|")
    lines += [f"| {' | '.join(_cells(key))} |" for key in table.keys]
    return "\n".join(lines) + "\n"


def _title(table: Table) -> str:
    return f"`{table.header}`" if table.header else "Top level"


def _cells(key: Key) -> Sequence[str]:
    default = key.default if key.default.startswith("(") else f"`{key.default}`"
    return [cell.replace("|", "\\|") for cell in (f"`{key.name}`", key.type, default, key.meaning)]


def show(path: str | None, console: Console) -> None:
    """Show all tables by name, one table, or one key."""
    found = tables()
    if path is None:
        for table in found:
            names = ", ".join(key.name for key in table.keys)
            console.print(f"{table.path or '(top level)'}: {names}", highlight=False, markup=False)
        console.print("\nfor details: etude keys stage.rl, etude keys stage.rl.lr", style="dim")
        return
    for table in found:
        if table.path == path:
            return _print(table, table.keys, console)
    for table in found:
        for key in table.keys:
            if _path(table, key) == path:
                return _print(table, [key], console)
    known = [*(t.path for t in found if t.path), *(_path(t, k) for t in found for k in t.keys)]
    within = [name for name in known if name.rpartition(".")[0] == path]
    near = within or difflib.get_close_matches(path, set(known), n=3, cutoff=0.4)
    near += [name for name in known if name.rpartition(".")[2] == path and name not in near]
    hint = f"did you mean {', '.join(near)}?" if near else "`etude keys` lists all keys"
    raise EtudeError(f"there is no key or table {path}: {hint}")


def _path(table: Table, key: Key) -> str:
    return f"{table.path}.{key.name}" if table.path else key.name


def _print(table: Table, keys: Sequence[Key], console: Console) -> None:
    console.print(table.header or "(top level)", style="bold", highlight=False, markup=False)
    console.print(table.meaning, highlight=False, markup=False)
    for key in keys:
        default = key.default if key.default.startswith("(") else f"default {key.default}"
        console.print(Text.assemble((key.name, "bold"), "  ", (f"{key.type}, {default}", "dim")))
        console.print(Padding(Text(key.meaning), (0, 0, 0, 4), expand=False))
