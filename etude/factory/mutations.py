"""Generated bugs: small changes of the syntax tree that people make by mistake, and deletions of
whole functions.

Each kind is a function from a node to its possible replacements. Comments and layout stay the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from etude.core.errors import EtudeError

try:
    import libcst as cst
    from libcst.metadata import MetadataWrapper, PositionProvider
except ModuleNotFoundError as e:
    raise EtudeError("tasks from repositories need libcst: pip install 'etude[tasks]'") from e

Replacement = cst.CSTNode | cst.RemovalSentinel
Mutation = Callable[[cst.CSTNode], Sequence[Replacement]]

_COMPARISONS: dict[type[cst.CSTNode], cst.BaseCompOp] = {
    cst.LessThan: cst.LessThanEqual(),
    cst.LessThanEqual: cst.LessThan(),
    cst.GreaterThan: cst.GreaterThanEqual(),
    cst.GreaterThanEqual: cst.GreaterThan(),
    cst.Equal: cst.NotEqual(),
    cst.NotEqual: cst.Equal(),
    cst.In: cst.NotIn(),
    cst.NotIn: cst.In(),
    cst.Is: cst.IsNot(),
    cst.IsNot: cst.Is(),
}
_ARITHMETIC: dict[type[cst.CSTNode], cst.BaseBinaryOp] = {
    cst.Add: cst.Subtract(),
    cst.Subtract: cst.Add(),
    cst.Multiply: cst.Add(),
    cst.Divide: cst.FloorDivide(),
    cst.FloorDivide: cst.Divide(),
    cst.Modulo: cst.FloorDivide(),
    cst.BitAnd: cst.BitOr(),
    cst.BitOr: cst.BitAnd(),
    cst.LeftShift: cst.RightShift(),
    cst.RightShift: cst.LeftShift(),
    cst.Power: cst.Multiply(),
}
_UPDATES: dict[type[cst.CSTNode], cst.BaseAugOp] = {
    cst.AddAssign: cst.SubtractAssign(),
    cst.SubtractAssign: cst.AddAssign(),
    cst.MultiplyAssign: cst.AddAssign(),
    cst.BitOrAssign: cst.BitAndAssign(),
    cst.BitAndAssign: cst.BitOrAssign(),
}
_ASSERTION = re.compile(r"^\s*assert\b|\bAssertionError\b")
_WRAPPERS = {
    "list",
    "tuple",
    "sorted",
    "reversed",
    "set",
    "iter",
    "abs",
    "str",
    "int",
    "max",
    "min",
} | {
    "enumerate",
    "len",
}


def comparison(node: cst.CSTNode) -> Sequence[Replacement]:
    """`<` for `<=`, `==` for `!=`, `in` for `not in`."""
    if isinstance(node, cst.ComparisonTarget) and type(node.operator) in _COMPARISONS:
        return [node.with_changes(operator=_COMPARISONS[type(node.operator)])]
    return []


def arithmetic(node: cst.CSTNode) -> Sequence[Replacement]:
    """Another operator between two values."""
    if isinstance(node, cst.BinaryOperation) and type(node.operator) in _ARITHMETIC:
        if isinstance(node.left, cst.SimpleString | cst.FormattedString):
            return []
        return [node.with_changes(operator=_ARITHMETIC[type(node.operator)])]
    return []


def update(node: cst.CSTNode) -> Sequence[Replacement]:
    """`-=` for `+=`, or an update that forgets the old value."""
    if not isinstance(node, cst.AugAssign):
        return []
    plain = cst.Assign(targets=[cst.AssignTarget(target=node.target)], value=node.value)
    if type(node.operator) not in _UPDATES:
        return [plain]
    return [node.with_changes(operator=_UPDATES[type(node.operator)]), plain]


def boolean(node: cst.CSTNode) -> Sequence[Replacement]:
    """`or` for `and`, or only one side of it."""
    if not isinstance(node, cst.BooleanOperation):
        return []
    other = cst.Or() if isinstance(node.operator, cst.And) else cst.And()
    return [node.with_changes(operator=other), node.left, node.right]


def condition(node: cst.CSTNode) -> Sequence[Replacement]:
    """A negated condition."""
    if not isinstance(node, cst.If | cst.While | cst.IfExp):
        return []
    if isinstance(node.test, cst.UnaryOperation) and isinstance(node.test.operator, cst.Not):
        return [node.with_changes(test=node.test.expression)]
    if isinstance(node, cst.While) or isinstance(node.test, cst.Comparison):
        return []  # hangs, or is the same as another comparison
    negated = cst.UnaryOperation(operator=cst.Not(), expression=_in_parentheses(node.test))
    return [node.with_changes(test=negated, **_spaced(node))]


def constant(node: cst.CSTNode) -> Sequence[Replacement]:
    """A number that is off by one, or the other truth value."""
    if isinstance(node, cst.Integer) and node.value.isdecimal():
        value = int(node.value)
        return [cst.Integer(str(each)) for each in (value + 1, value - 1) if each >= 0]
    if isinstance(node, cst.Name) and node.value in ("True", "False"):
        return [cst.Name("False" if node.value == "True" else "True")]
    return []


def statement(node: cst.CSTNode) -> Sequence[Replacement]:
    """A missing statement."""
    if not isinstance(node, cst.SimpleStatementLine) or len(node.body) != 1:
        return []
    only = node.body[0]
    if isinstance(only, cst.AugAssign | cst.Raise | cst.Del) or (
        isinstance(only, cst.Expr) and isinstance(only.value, cst.Call)
    ):
        return [node.with_changes(body=[cst.Pass()])]
    return []


def arguments(node: cst.CSTNode) -> Sequence[Replacement]:
    """Two arguments in the wrong order."""
    if not isinstance(node, cst.Call) or len(node.args) != 2:
        return []
    first, second = node.args
    if first.keyword or second.keyword or first.star or second.star:
        return []
    if first.value.deep_equals(second.value):
        return []
    swapped = [first.with_changes(value=second.value), second.with_changes(value=first.value)]
    return [node.with_changes(args=swapped)]


def keyword(node: cst.CSTNode) -> Sequence[Replacement]:
    """A keyword argument that is not passed on."""
    if not isinstance(node, cst.Call) or not any(each.keyword for each in node.args):
        return []
    last = max(place for place, each in enumerate(node.args) if each.keyword)
    kept = [each for place, each in enumerate(node.args) if place != last]
    if kept:
        kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    return [node.with_changes(args=kept)]


def result(node: cst.CSTNode) -> Sequence[Replacement]:
    """A function that forgets to return its result."""
    if isinstance(node, cst.Return) and node.value and not _is_none(node.value):
        return [node.with_changes(value=cst.Name("None"))]
    return []


def branch(node: cst.CSTNode) -> Sequence[Replacement]:
    """A case that is not handled."""
    if isinstance(node, cst.If) and isinstance(node.orelse, cst.If):
        return [node.with_changes(orelse=node.orelse.orelse)]
    if isinstance(node, cst.If) and node.orelse is not None:
        return [node.with_changes(orelse=None)]
    return []


def jump(node: cst.CSTNode) -> Sequence[Replacement]:
    """`continue` for `break`."""
    if isinstance(node, cst.Break):
        return [cst.Continue()]
    return [cst.Break()] if isinstance(node, cst.Continue) else []


def bounds(node: cst.CSTNode) -> Sequence[Replacement]:
    """A slice without one of its bounds."""
    if not isinstance(node, cst.Slice):
        return []
    return [
        *([node.with_changes(lower=None)] if node.lower else []),
        *([node.with_changes(upper=None)] if node.upper else []),
    ]


def wrapper(node: cst.CSTNode) -> Sequence[Replacement]:
    """A missing call of a function such as `sorted`."""
    if (
        isinstance(node, cst.Call)
        and isinstance(node.func, cst.Name)
        and node.func.value in _WRAPPERS
        and len(node.args) == 1
        and not node.args[0].star
    ):
        return [_in_parentheses(node.args[0].value)]
    return []


def handler(node: cst.CSTNode) -> Sequence[Replacement]:
    """An exception that is not caught."""
    if isinstance(node, cst.ExceptHandler) and isinstance(node.type, cst.Tuple):
        return [node.with_changes(type=each.value) for each in node.type.elements[:1]]
    return []


def default(node: cst.CSTNode) -> Sequence[Replacement]:
    """Another default value."""
    if isinstance(node, cst.Param) and node.default is not None and _is_none(node.default):
        return [node.with_changes(default=cst.Integer("0"))]
    return []


MUTATIONS: dict[str, Mutation] = {
    each.__name__: each
    for each in (comparison, arithmetic, update, boolean, condition, constant, statement, arguments)
    + (keyword, result, branch, jump, bounds, wrapper, handler, default)
}


def _is_none(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Name) and node.value == "None"


def _in_parentheses(node: cst.BaseExpression) -> cst.BaseExpression:
    if node.lpar or isinstance(node, cst.Name | cst.Call | cst.Attribute | cst.Subscript):
        return node
    return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def _spaced(node: cst.CSTNode) -> dict[str, cst.SimpleWhitespace]:
    """`if(x)` becomes `if not (x)`."""
    name = "whitespace_before_test"
    return {name: cst.SimpleWhitespace(" ")} if isinstance(node, cst.If) else {}


@dataclass(frozen=True, slots=True)
class Site:
    """A place where a file can be changed, with the change."""

    kind: str
    function: str
    """Its qualified name."""
    line: int
    node: cst.CSTNode
    replacement: Replacement


@dataclass(frozen=True, slots=True)
class Function:
    """A function or method of a file."""

    name: str
    """Qualified."""
    first: int
    last: int
    """First and last line."""
    head: str
    """Its signature and docstring."""
    node: cst.FunctionDef
    is_method: bool
    is_decorated: bool

    @property
    def body_lines(self) -> range:
        return range(self.node_body_line, self.last + 1)

    @property
    def node_body_line(self) -> int:
        return self.first + self.head.count("\n") + 1


class SourceFile:
    """A Python file with the places where it can be changed. ValueError if it is not valid
    Python."""

    def __init__(self, content: bytes) -> None:
        try:
            # libcst never ends, or crashes, on code that is nested too deeply; Python refuses it
            compile(content, "file", "exec", dont_inherit=True)
            wrapper = MetadataWrapper(cst.parse_module(content), unsafe_skip_copy=True)
            self._module = wrapper.module
            finder = _Finder(wrapper.resolve(PositionProvider), wrapper.module)
            for finder.statement, each in enumerate(wrapper.module.body):
                each.visit(finder)
        # ValueError: a null byte; SyntaxError: also an unknown encoding
        except (cst.ParserSyntaxError, SyntaxError, ValueError, RecursionError, MemoryError) as e:
            raise ValueError(f"cannot be parsed: {e}") from e
        self._pieces = [self._module.code_for_node(each) for each in self._module.body]
        self._code = self._module.code
        self._statement = finder.statements
        self.sites: list[Site] = finder.sites
        self.functions: list[Function] = finder.functions

    @cached_property
    def asserting(self) -> set[str]:
        """The functions with an assertion. If tests assert with such a function, a weaker one
        passes on any input: a change of it cannot be told from a repair."""
        lines = self._code.split("\n")  # a form feed does not end a line
        return {
            each.name
            for each in self.functions
            if any(_ASSERTION.search(line) for line in lines[each.first - 1 : each.last])
        }

    def mutated(self, sites: Sequence[Site]) -> bytes:
        return self._changed({site.node: site.replacement for site in sites})

    def stubbed(self, function: Function) -> bytes:
        """The file with the function's body replaced by `raise NotImplementedError`."""
        docstring = _docstring(function.node)
        raised = cst.parse_statement("raise NotImplementedError")
        body = cst.IndentedBlock([*([docstring] if docstring else []), raised])
        return self._changed({function.node: function.node.with_changes(body=body)})

    def without(self, function: Function) -> bytes:
        """The file without the function, and without its name in `__all__`."""
        changes: dict[cst.CSTNode, Replacement] = {function.node: cst.RemoveFromParent()}
        for place, element in self._exported(function.name):
            changes[element] = cst.RemoveFromParent()
            self._statement[element] = place
        return self._changed(changes)

    def _exported(self, name: str) -> Iterator[tuple[int, cst.CSTNode]]:
        for place, each in enumerate(self._module.body):
            match each:
                case cst.SimpleStatementLine(
                    body=[
                        cst.Assign(
                            targets=[cst.AssignTarget(target=cst.Name("__all__"))],
                            value=cst.List() | cst.Tuple() as listed,
                        )
                    ]
                ):
                    for element in listed.elements:
                        value = element.value
                        if isinstance(value, cst.SimpleString) and value.raw_value == name:
                            yield place, element

    def _changed(self, changes: Mapping[cst.CSTNode, Replacement]) -> bytes:
        """Visit and regenerate only the statements of the module that contain a change."""
        code = self._code
        before = len("".join(map(self._module.code_for_node, self._module.header)))
        after = code[before + sum(map(len, self._pieces)) :]
        pieces = list(self._pieces)
        for place in {self._statement[node] for node in changes}:
            changed = self._module.body[place].visit(_Replace(changes))
            pieces[place] = (
                self._module.code_for_node(changed) if isinstance(changed, cst.CSTNode) else ""
            )
        return "".join([code[:before], *pieces, after]).encode(self._module.encoding)


class _Replace(cst.CSTTransformer):
    def __init__(self, changes: Mapping[cst.CSTNode, Replacement]) -> None:
        super().__init__()
        self._changes = changes

    def on_leave(self, original_node: cst.CSTNodeT, updated_node: cst.CSTNodeT) -> Any:
        return self._changes.get(original_node, updated_node)


class _Finder(cst.CSTVisitor):
    def __init__(self, positions: Mapping[cst.CSTNode, object], module: cst.Module) -> None:
        super().__init__()
        self.sites: list[Site] = []
        self.functions: list[Function] = []
        self._positions = positions
        self._module = module
        self._names: list[str] = []
        self._depth = 0
        self.statement = 0
        """Index in the module of the statement that is being visited."""
        self.statements: dict[cst.CSTNode, int] = {}
        """Index of the statement of every node that may be replaced."""

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.ClassDef | cst.FunctionDef):
            self._names.append(node.name.value)
        if isinstance(node, cst.FunctionDef):
            if self._depth == 0:
                self._add(node)
            self._depth += 1
        elif isinstance(node, cst.Annotation | cst.Decorator):
            return False
        elif self._depth:
            self._look(node)
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if isinstance(original_node, cst.ClassDef | cst.FunctionDef):
            self._names.pop()
        if isinstance(original_node, cst.FunctionDef):
            self._depth -= 1

    def _look(self, node: cst.CSTNode) -> None:
        for kind, mutation in MUTATIONS.items():
            for replacement in mutation(node):
                line = self._lines(node)[0]
                self.statements[node] = self.statement
                self.sites.append(Site(kind, ".".join(self._names), line, node, replacement))

    def _add(self, node: cst.FunctionDef) -> None:
        self.statements[node] = self.statement
        first, last = self._lines(node)
        docstring = _docstring(node)
        shown = node.with_changes(
            leading_lines=[],
            lines_after_decorators=[],
            decorators=[],
            body=cst.IndentedBlock([docstring] if docstring else []),
        )
        head = self._module.code_for_node(shown).rstrip()
        self.functions.append(
            Function(
                name=".".join(self._names),
                first=first,
                last=last,
                head=head if docstring else head.removesuffix("pass").rstrip(),
                node=node,
                is_method=len(self._names) > 1,
                is_decorated=bool(node.decorators),
            )
        )

    def _lines(self, node: cst.CSTNode) -> tuple[int, int]:
        place = self._positions[node]
        return place.start.line, place.end.line  # type: ignore[attr-defined]


def _docstring(node: cst.FunctionDef) -> cst.SimpleStatementLine | None:
    body = node.body.body
    match body[0] if body else None:
        case (
            cst.SimpleStatementLine(
                body=[cst.Expr(value=cst.SimpleString() | cst.ConcatenatedString())]
            ) as line
        ):
            return line
    return None
