"""Small, plausible mistakes in a Python source: things that a hurried change drops, swaps or misses
by one.

A mutant replaces one piece of the text. Text for people is left alone (docstrings, messages, logs,
help, the indentation of JSON). So are annotations, which no run of the program reads, assertions,
and durations (names that end in `_s` or begin with `timeout`), since no test measures time.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

COMPARE = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"), ast.In: ("in", "not in"), ast.NotIn: (r"not\s+in", "in"),
}  # fmt: skip
BINARY = {
    ast.Add: (r"\+", "-"), ast.Sub: ("-", "+"), ast.Mult: (r"\*", "/"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "//"),
}  # fmt: skip
# Calls that could be replaced by their first argument, and methods by their object, by somebody who
# forgot why they are needed.
WRAPPERS = {"abs", "shield", "sorted", "reversed", "quote", "ceil"}
CLEANERS = {
    "clone",
    "detach",
    "copy",
    "clamp",
    "clip",
    "strip",
    "rstrip",
    "lower",
    "resolve",
    "float",
    "contiguous",
}
# Decorators without which a class or a function is so different that the first import or call
# fails.
FORMS = {
    "dataclass", "property", "cached_property", "staticmethod", "classmethod", "abstractmethod",
    "overload", "jit", "contextmanager", "asynccontextmanager", "runtime_checkable", "final",
    "override",
}  # fmt: skip
SPEECH = {
    "print",
    "warn",
    "warning",
    "info",
    "debug",
    "log",
    "add_argument",
    "add_parser",
    "write_line",
}
WORDING = {
    "help",
    "description",
    "metavar",
    "title",
    "examples",
    "stacklevel",
    "flush",
    "name",
    "style",
    "errors",
    "indent",
}
# Keys of texts for people in JSON.
PROSE = {"description", "title", "summary"}
UNREAD = {"__repr__", "__str__", "__rich__", "__rich_console__"}


@dataclass(frozen=True, slots=True)
class Mutant:
    file: str
    function: str
    """Dotted name, including classes; empty at the top of a module."""
    first: int
    last: int
    """Range of lines, one of which runs if the mistake can have an effect: the statement, or the
    body of the function that it belongs to."""
    imported: bool
    """True if these lines run when the module is imported, rather than when something is called."""
    line: int
    start: int
    end: int
    text: str
    """Replacement for the bytes `start` to `end` of the file."""
    before: str
    after: str
    """The changed lines joined to one, for people and for the list of known survivors."""

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.file, self.function, self.before, self.after

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]


def mutants(file: str, source: bytes) -> list[Mutant]:
    """Every mistake in a file, including the few that do not compile: compiling all of them here
    would take a minute."""
    return list(_Finder(file, source).module())


def compiles(mutant: Mutant, source: bytes) -> bool:
    try:
        compile(mutant.apply(source), mutant.file, "exec")
    except SyntaxError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Scope:
    function: str
    first: int
    last: int
    imported: bool


class _Finder:
    def __init__(self, file: str, source: bytes) -> None:
        self.file = file
        self.source = source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.tree = ast.parse(source)
        self.arbitrary = {id(part) for node in ast.walk(self.tree) for part in _arbitrary(node)}

    def module(self) -> Iterator[Mutant]:
        yield from self.block(self.tree.body, _Scope("", 1, 1, True), in_function=False)

    def block(self, body: list[ast.stmt], scope: _Scope, in_function: bool) -> Iterator[Mutant]:
        for statement in body:
            if not _unread(statement):
                yield from self.statement(statement, scope, in_function, last=statement is body[-1])

    def statement(
        self, node: ast.stmt, scope: _Scope, in_function: bool, last: bool
    ) -> Iterator[Mutant]:
        blocks = [
            getattr(node, name)
            for name in ("body", "orelse", "finalbody")
            if getattr(node, name, None)
        ]
        blocks += [
            part.body for part in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]
        ]
        end = min((block[0].lineno - 1 for block in blocks), default=node.end_lineno or node.lineno)
        here = _Scope(scope.function, node.lineno, max(node.lineno, end), scope.imported)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name, defaults = f"{scope.function}.{node.name}".lstrip("."), []
            if not isinstance(node, ast.ClassDef):
                here = _Scope(name, node.body[0].lineno, node.end_lineno or node.lineno, False)
                defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
            for decorator in node.decorator_list:
                if not FORMS & set(re.findall(r"\w+", ast.unparse(decorator))):
                    yield self.change(here, decorator, "", start=self.at(decorator)[0] - 1)
                    yield from self.expressions(decorator, here)
            for default in defaults:
                yield from self.expressions(default, here)
            yield from self.block(
                node.body, _Scope(name, 0, 0, here.imported), not isinstance(node, ast.ClassDef)
            )
            return
        yield from self.whole(node, here, in_function, last)
        for field in _read(node):
            yield from self.expressions(field, here)
        for block in blocks:
            yield from self.block(block, scope, in_function)
        for handler in getattr(node, "handlers", []):
            line = _Scope(scope.function, handler.lineno, handler.body[0].lineno, scope.imported)
            yield from self.handler(handler.type, line)

    def whole(
        self, node: ast.stmt, here: _Scope, in_function: bool, last: bool
    ) -> Iterator[Mutant]:
        """Mistakes of a whole statement: dropping it, forcing its condition, not holding its
        resource."""
        early = (
            isinstance(node, ast.Return) and not last or isinstance(node, ast.Raise | ast.Delete)
        )
        called = isinstance(node, ast.Expr) and any(
            isinstance(n, ast.Call) for n in ast.walk(node.value)
        )
        kept = isinstance(node, ast.Assign | ast.AugAssign) and not here.function.endswith(
            "__init__"
        )
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        state = kept and all(
            isinstance(target, ast.Attribute | ast.Subscript) for target in targets
        )
        returned = isinstance(node, ast.Return) and last and in_function and node.value is None
        if (
            early
            or called
            or state
            or returned
            or isinstance(node, ast.Continue | ast.Break | ast.AugAssign)
        ):
            yield self.change(here, node, "pass")
        if isinstance(node, ast.If):
            yield self.change(here, node.test, "True")
            yield self.change(here, node.test, "False")
        if isinstance(node, ast.AugAssign) and (swap := BINARY.get(type(node.op))):
            yield self.swap(here, node.target, node.value, *swap)
        if isinstance(node, ast.With | ast.AsyncWith) and not any(
            item.optional_vars for item in node.items
        ):
            end = self.source.index(b":", self.at(node.items[-1].context_expr)[1])
            yield self.change(here, node, "if True", end=end)

    def handler(self, caught: ast.expr | None, here: _Scope) -> Iterator[Mutant]:
        if isinstance(caught, ast.Tuple):
            for dropped in caught.elts:
                rest = ", ".join(ast.unparse(kind) for kind in caught.elts if kind is not dropped)
                yield self.change(here, caught, f"({rest},)")
        elif caught is not None:
            yield self.change(here, caught, "()")

    def expressions(self, node: ast.AST, here: _Scope) -> Iterator[Mutant]:
        if (
            isinstance(node, ast.JoinedStr | ast.Lambda)
            or _speaks(node)
            or id(node) in self.arbitrary
        ):
            return
        yield from self.expression(node, here)
        for child in ast.iter_child_nodes(node):
            yield from self.expressions(child, here)

    def expression(self, node: ast.AST, here: _Scope) -> Iterator[Mutant]:
        match node:
            case ast.Compare():
                for op, left, right in zip(
                    node.ops, [node.left, *node.comparators], node.comparators, strict=False
                ):
                    yield self.swap(here, left, right, *COMPARE[type(op)])
                    if isinstance(op, ast.Eq | ast.NotEq | ast.In | ast.NotIn):
                        yield from self.keys(here, right)
            case ast.BoolOp():
                for left, right in zip(node.values, node.values[1:], strict=False):
                    yield self.swap(
                        here,
                        left,
                        right,
                        *(("and", "or") if isinstance(node.op, ast.And) else ("or", "and")),
                    )
                for dropped in node.values:
                    rest = [self.of(value) for value in node.values if value is not dropped]
                    yield self.change(
                        here, node, (" and " if isinstance(node.op, ast.And) else " or ").join(rest)
                    )
            case ast.BinOp(left=left, right=right) if isinstance(node.op, ast.BitOr | ast.BitAnd):
                if not here.imported or all(
                    isinstance(n, ast.BinOp | ast.Attribute) for n in (left, right)
                ):
                    yield self.change(here, node, self.of(left))
                    yield self.change(here, node, self.of(right))
            case ast.BinOp(left=left, right=right) if type(node.op) in BINARY and not _texts(
                left, right
            ):
                yield self.swap(here, left, right, *BINARY[type(node.op)])
            case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
                yield self.change(here, node, self.of(operand))
            case ast.IfExp(body=body, orelse=orelse):
                yield self.change(here, node, f"({self.of(body)})")
                yield self.change(here, node, f"({self.of(orelse)})")
            case ast.Call():
                yield from self.call(here, node)
            case ast.Slice(lower=lower, upper=upper):
                for bound in filter(None, (lower, upper)):
                    yield self.change(here, bound, "")
            case ast.Subscript(slice=key):
                yield from self.keys(here, key)
            case ast.Dict(keys=keys):
                for key in filter(None, keys):
                    if getattr(key, "value", None) not in PROSE:
                        yield from self.keys(here, key)
            case ast.Constant(value=bool() as value):
                yield self.change(here, node, str(not value))
            case ast.Constant(value=int() as value):
                yield self.change(here, node, str(value + 1))
                yield self.change(here, node, f"({value - 1})" if value < 1 else str(value - 1))
            case ast.Constant(value=float() as value):
                yield self.change(here, node, str(value * 2 or 1.0))

    def call(self, here: _Scope, node: ast.Call) -> Iterator[Mutant]:
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        whole = [
            argument
            for argument in node.args
            if not isinstance(argument, ast.Starred | ast.GeneratorExp)
        ]
        if name in ("max", "min", "maximum", "minimum") and len(whole) > 1:
            for argument in whole:
                yield self.change(here, node, f"({self.of(argument)})")
        if name in WRAPPERS and whole:
            yield self.change(here, node, f"({self.of(whole[0])})")
        if name in CLEANERS and isinstance(node.func, ast.Attribute):
            yield self.change(here, node, self.of(node.func.value))
        if name in ("get", "pop", "getattr") and node.args:
            yield from self.keys(here, node.args[0])
        for keyword in node.keywords:
            if keyword.arg not in WORDING and id(keyword) not in self.arbitrary:
                start, end = self.at(keyword)
                comma = re.compile(rb"\s*,?").match(self.source, end)
                yield self.change(here, keyword, "", end=comma.end() if comma else end)

    def keys(self, here: _Scope, node: ast.expr) -> Iterator[Mutant]:
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.isprintable()
        ):
            yield self.change(here, node, repr(node.value + "_"))

    def swap(
        self, here: _Scope, left: ast.expr, right: ast.expr, operator: str, other: str
    ) -> Mutant:
        start, end = self.at(left)[1], self.at(right)[0]
        text = re.sub(
            rf"({operator})(?![^\n]*#)", lambda _: other, self.source[start:end].decode(), count=1
        )
        return self.change(here, left, text, start=start, end=end)

    def change(
        self, here: _Scope, node: ast.AST, text: str, start: int = -1, end: int = -1
    ) -> Mutant:
        own = self.at(node)
        start, end = own[0] if start < 0 else start, own[1] if end < 0 else end
        first = self.source.rfind(b"\n", 0, start) + 1
        last = self.source.find(b"\n", end) % (len(self.source) + 1)
        before = self.source[first:last].decode()
        after = f"{self.source[first:start].decode()}{text}{self.source[end:last].decode()}"
        line = self.source.count(b"\n", 0, start) + 1
        return Mutant(
            self.file, here.function, here.first, here.last, here.imported, line, start, end, text,
            " ".join(before.split()), " ".join(after.split()),
        )  # fmt: skip

    def at(self, node: ast.AST) -> tuple[int, int]:
        """The byte range of a node."""
        return (
            self.starts[node.lineno - 1] + node.col_offset,  # type: ignore[attr-defined]
            self.starts[node.end_lineno - 1] + node.end_col_offset,  # type: ignore[attr-defined]
        )

    def of(self, node: ast.AST) -> str:
        start, end = self.at(node)
        text = self.source[start:end].decode()
        return (
            text
            if isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.Constant)
            else f"({text})"
        )


def _unread(node: ast.stmt) -> bool:
    """True if the behaviour of the program does not depend on the statement."""
    if (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        or isinstance(node, ast.Assert)
    ):
        return True
    if isinstance(node, ast.Import | ast.ImportFrom | ast.Global | ast.Nonlocal | ast.Pass):
        return True
    if isinstance(node, ast.FunctionDef) and node.name in UNREAD:
        return True
    if isinstance(node, ast.ClassDef) and any(
        "Protocol" in ast.unparse(base) for base in node.bases
    ):
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "__name__ == '__main__'",
    ):
        return True
    return isinstance(node, ast.Expr) and _speaks(node.value)


def _speaks(node: ast.AST) -> bool:
    node = node.value if isinstance(node, ast.Await) else node
    return (
        isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", "")) in SPEECH
    )


def _read(node: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a statement itself, without blocks, annotations and messages."""
    if isinstance(node, ast.Raise):
        return
    for name, field in ast.iter_fields(node):
        if name not in ("annotation", "body", "orelse", "finalbody", "handlers", "cases"):
            yield from (
                part
                for part in (field if isinstance(field, list) else [field])
                if isinstance(part, ast.AST)
            )


def _arbitrary(node: ast.AST) -> Iterator[ast.AST]:
    """Arbitrary numbers: durations in seconds, and seeds of random generators. Also the argument
    `strict` of `zip`, which is an assertion."""
    pairs: list[tuple[str | None, ast.AST | None]] = []
    match node:
        case (
            ast.Assign(targets=[ast.Name(id=name)], value=value)
            | ast.AnnAssign(target=ast.Name(id=name), value=value)
        ):
            pairs = [(name, value)]
        case ast.keyword(arg=name, value=value):
            pairs = [(name, value)]
        case ast.arguments():
            placed = [*node.posonlyargs, *node.args]
            pairs = [
                (arg.arg, value)
                for arg, value in zip(placed[::-1], node.defaults[::-1], strict=False)
            ]
            pairs += [
                (arg.arg, value)
                for arg, value in zip(node.kwonlyargs, node.kw_defaults, strict=True)
            ]
        case ast.Call(func=ast.Attribute(attr="manual_seed")):
            yield from node.args
        case ast.Call(func=ast.Name(id="zip")):
            yield from node.keywords
    for name, given in pairs:
        if given is not None and name and _is_free(name.lower()):
            yield from (part for part in ast.walk(given) if _number(part))


def _is_free(name: str) -> bool:
    """True for names of durations, and of the indentation of text for people."""
    return name.endswith("_s") or name.startswith("timeout") or name == "indent"


def _texts(*nodes: ast.AST) -> bool:
    inner = (part for node in nodes for part in ast.walk(node))
    return any(
        isinstance(part, ast.JoinedStr | ast.Constant) and not _number(part) for part in inner
    )


def _number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)
