"""Test files with and without some of their tests."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator

_Function = ast.FunctionDef | ast.AsyncFunctionDef
# Python 3.11 counts the depth of all trees that are being parsed together, and fails if threads
# interfere.
_one_at_a_time = threading.Lock()


def functions_of(content: bytes) -> dict[str, str]:
    """Qualified name of each function of a file, as in `TestCart::test_total` -> its source.
    ValueError if the file is not valid Python."""
    text = content.decode()
    lines = text.splitlines(keepends=True)
    return {
        name: "".join(lines[_first(node) - 1 : node.end_lineno])
        for name, node, _ in _walk(_parse(text))
    }


def without_functions(content: bytes, names: set[str]) -> bytes:
    """The file without these functions. A class that would be empty gets a `pass`."""
    text = content.decode()
    lines = text.splitlines(keepends=True)
    gone: list[tuple[_Function, list[ast.stmt]]] = [
        (node, siblings) for name, node, siblings in _walk(_parse(text)) if name in names
    ]
    removed = {id(node) for node, _ in gone}
    for node, siblings in gone:
        for line in range(_first(node), (node.end_lineno or node.lineno) + 1):
            lines[line - 1] = ""
        if all(id(each) in removed for each in siblings):
            lines[_first(node) - 1] = " " * node.col_offset + "pass\n"
    return "".join(lines).encode()


def _parse(text: str) -> ast.Module:
    try:
        with _one_at_a_time:
            return ast.parse(text)
    except (SyntaxError, RecursionError) as e:
        raise ValueError(f"cannot be parsed: {e}") from e


def _walk(
    parent: ast.Module | ast.ClassDef, prefix: str = ""
) -> Iterator[tuple[str, _Function, list[ast.stmt]]]:
    for node in parent.body:
        if isinstance(node, _Function):
            yield prefix + node.name, node, parent.body
        elif isinstance(node, ast.ClassDef):
            yield from _walk(node, f"{prefix}{node.name}::")


def _first(node: _Function) -> int:
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])
