"""Expressions over named numbers, such as `tests * (0.8 + 0.2 * min(style, lint))`, which turn the
parts of a score into one reward.

The language has numbers, names, + - * /, min, max, brackets and comparisons, which are 1 or 0. It
uses Python's syntax and none of its other features: anything that is not on the list is refused
when the text is parsed.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

MAX_LENGTH = 1000
"""Characters of an expression, at most."""
MAX_DEPTH = 100
"""Nested operations, at most; a sum of n parts has depth n."""

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_COMPARED: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {"min": min, "max": max}


@dataclass(frozen=True, slots=True)
class Expression:
    text: str
    names: frozenset[str]
    _tree: ast.expr

    @classmethod
    def parse(cls, text: str) -> Expression:
        """Parse an expression. ValueError, naming the offending part, for anything else."""
        if len(text) > MAX_LENGTH:
            raise ValueError(f"an expression has at most {MAX_LENGTH} characters, not {len(text)}")
        try:
            tree = ast.parse(text.strip(), mode="eval").body
            names = frozenset(_names(tree, MAX_DEPTH))
        except SyntaxError as e:
            raise ValueError(f"{text!r} is not an expression: {e.msg}") from e
        except (RecursionError, MemoryError) as e:
            raise ValueError(f"{text[:40]!r}.. is nested too deeply") from e
        return cls(text, names, tree)

    def value(self, values: Mapping[str, float]) -> float:
        """The value of the expression. ValueError if a name has no value, or if the result is not
        finite."""
        if missing := sorted(self.names - values.keys()):
            known = ", ".join(sorted(values)) or "none"
            raise ValueError(
                f"{self.text!r} needs {missing[0]!r}, which is not one of the parts: {known}"
            )
        try:
            result = _value(self._tree, values)
        except ZeroDivisionError as e:
            raise ValueError(f"{self.text!r} divides by zero with {dict(values)}") from e
        if not math.isfinite(result):
            raise ValueError(f"{self.text!r} is {result} with {dict(values)}")
        return result


def _names(node: ast.expr, depth: int) -> list[str]:
    """The names in the expression; ValueError for anything that is not allowed in one."""
    if depth == 0:
        raise ValueError(f"an expression can be at most {MAX_DEPTH} operations deep")
    depth -= 1
    match node:
        case ast.Name():
            return [node.id]
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            if abs(number) > 1e300:
                raise ValueError("a number is too large")
            return []
        case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
            return _names(node.operand, depth)
        case ast.BinOp() if type(node.op) in _BINARY:
            return _names(node.left, depth) + _names(node.right, depth)
        case ast.Compare() if all(type(op) in _COMPARED for op in node.ops):
            sides = (node.left, *node.comparators)
            return [name for each in sides for name in _names(each, depth)]
        case ast.Call(func=ast.Name(id="min" | "max"), keywords=[]) if len(node.args) > 1:
            return [name for each in node.args for name in _names(each, depth)]
    raise ValueError(
        f"{ast.unparse(node)!r} is not allowed: use names, numbers, + - * /, comparisons, "
        "and min and max of several values"
    )


def _value(node: ast.expr, values: Mapping[str, float]) -> float:
    match node:
        case ast.Name():
            return values[node.id]
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.UnaryOp():
            inner = _value(node.operand, values)
            return -inner if isinstance(node.op, ast.USub) else inner
        case ast.BinOp():
            return _BINARY[type(node.op)](_value(node.left, values), _value(node.right, values))
        case ast.Compare():
            sides = [_value(each, values) for each in (node.left, *node.comparators)]
            pairs = zip(node.ops, sides, sides[1:], strict=False)
            return float(all(_COMPARED[type(op)](a, b) for op, a, b in pairs))
        case ast.Call(func=ast.Name(id=name)):
            return _FUNCTIONS[name](*(_value(each, values) for each in node.args))
    raise AssertionError(f"{ast.dump(node)} was let through")
