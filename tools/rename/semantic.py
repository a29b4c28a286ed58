"""Renames of symbols by their full names, resolved with mypy's own semantic analysis.

A rule is `full.name -> new`. Kinds of full names:
    etude.engine.plan.Plan               a class, function or variable of a module
    etude.engine.blocks.Blocks.learn     a method, field or attribute of a class (subclasses follow)
    etude.engine.engine.Engine.__init__(step_tokens)   a parameter, with its uses in the body and keywords of callers
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import defaultdict
from pathlib import Path

from mypy import build
from mypy.find_sources import create_source_list
from mypy.nodes import (
    CallExpr, ClassDef, Decorator, FuncDef, Import, ImportAll, ImportFrom, MemberExpr, MypyFile, NameExpr,
    Node, OverloadedFuncDef, RefExpr, StrExpr, TypeInfo, Var, Argument, LambdaExpr,
)
from mypy.options import Options
from mypy.patterns import ClassPattern
from mypy.types import (
    AnyType, CallableType, Instance, LiteralType, NoneType, Overloaded, TupleType, Type, TypeAliasType, TypeType,
    TypeVarType, UnionType, get_proper_type,
)


def analyse(root: Path, folders: list[str], python: str) -> build.BuildResult:
    import os
    os.chdir(root)
    options = Options()
    options.export_types = True
    options.preserve_asts = True
    options.incremental = False
    options.cache_dir = os.devnull
    options.check_untyped_defs = True
    options.namespace_packages = True
    options.explicit_package_bases = True
    options.ignore_missing_imports = True
    options.python_version = (3, 11)
    options.python_executable = None
    options.no_site_packages = True
    options.mypy_path = [str(root)]
    options.follow_imports = "normal"
    sources = create_source_list([f for f in folders if (root / f).exists()], options)
    from mypy.main import infer_python_executable  # noqa: F401
    from mypy.modulefinder import get_search_dirs  # noqa: F401
    return build.build(sources, options, stdout=io.StringIO(), stderr=io.StringIO())


EXCLUDED = {
    "node", "info", "type", "unanalyzed_type", "names", "original_def", "expanded", "analyzed", "def_var", "variables",
    "definition", "plugin_deps", "alias_deps", "method_type", "method_types", "impl_", "base_info", "typeinfo", "imports",
    "future_import_flags", "tvars", "type_vars", "old_type", "new_type", "target",
}
_FIELDS: dict[type, list[str]] = {}


def fields_of(kind: type) -> list[str]:
    if kind not in _FIELDS:
        found = []
        for base in kind.__mro__:
            for name, value in base.__dict__.items():
                if not name.startswith("_") and name not in EXCLUDED and type(value).__name__ in ("getset_descriptor", "member_descriptor"):
                    found.append(name)
        _FIELDS[kind] = list(dict.fromkeys(found))
    return _FIELDS[kind]


def _gather(value: object, into: list[Node]) -> None:
    if isinstance(value, (list, tuple)):
        for each in value:
            _gather(each, into)
    elif isinstance(value, Node) and not isinstance(value, (Var, TypeInfo, MypyFile)):
        into.append(value)


class File:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path.read_text()
        self.lines = self.text.splitlines(keepends=True)
        self.tokens = list(tokenize.generate_tokens(io.StringIO(self.text).readline))
        self.names = [t for t in self.tokens if t.type == tokenize.NAME]
        self.at = {t.start: t for t in self.names}
        self.edits: dict[tuple[int, int], tuple[str, str]] = {}

    def byte_to_col(self, line: int, col: int) -> int:
        """ast counts bytes in UTF-8, tokenize characters."""
        text = self.lines[line - 1]
        return col if text.isascii() else len(text.encode()[:col].decode(errors="replace"))

    def edit(self, line: int, col: int, old: str, new: str) -> bool:
        if (line, col) in self.edits:
            return True
        if self.lines[line - 1][col : col + len(old)] != old:
            return False
        self.edits[line, col] = (old, new)
        return True

    def tokens_between(self, start: tuple[int, int], end: tuple[int, int]) -> list[tokenize.TokenInfo]:
        return [t for t in self.tokens if start <= t.start < end]

    def apply(self) -> None:
        for (line, col), (old, new) in sorted(self.edits.items(), reverse=True):
            text = self.lines[line - 1]
            assert text[col : col + len(old)] == old, (self.path, line, col, old, text)
            self.lines[line - 1] = text[:col] + new + text[col + len(old) :]
        if self.edits:
            self.path.write_text("".join(self.lines))


class Renamer:
    def __init__(self, rules: dict[str, str], result: build.BuildResult, tree: MypyFile, file: File, report: "Report") -> None:
        self.rules, self.result, self.tree, self.file, self.report = rules, result, tree, file, report
        self.members = report.members
        self.locals: set[tuple[int, int]] = set()
        self.parameters: dict[int, str] = {}  # id of a Var -> its new name

    def walk(self) -> None:
        handlers = {
            NameExpr: self.visit_name_expr, MemberExpr: self.visit_member_expr, ClassDef: self.visit_class_def,
            FuncDef: self.visit_func_def, CallExpr: self.visit_call_expr, ImportFrom: self.visit_import_from,
            ClassPattern: self.visit_class_pattern,
        }
        seen: set[int] = set()
        stack: list[Node] = [self.tree]
        while stack:
            node = stack.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if (handler := handlers.get(type(node))) is not None:
                handler(node)
            children: list[Node] = []
            for name in fields_of(type(node)):
                _gather(getattr(node, name, None), children)
            stack.extend(reversed(children))

    # -- lookups
    def rule(self, full: str | None) -> str | None:
        if full is not None and full in self.rules:
            self.report.used.add(full)
            return self.rules[full]
        return None

    def member(self, info: TypeInfo, name: str) -> str | None:
        for base in info.mro:
            if (new := self.rule(f"{base.fullname}.{name}")) is not None:
                return new
        for protocol in self.report.protocols.get(name, ()):  # whoever has all of its members implements it
            if all(any(member in base.names for base in info.mro) for member in protocol.names if not member.startswith("__")):
                return self.rule(f"{protocol.fullname}.{name}")
        return None

    def member_of(self, type: Type | None, name: str) -> tuple[str | None, bool]:
        """(new name, whether the type was known)"""
        if type is None:
            return None, False
        type = get_proper_type(type)
        if isinstance(type, AnyType):
            return None, False
        if isinstance(type, Instance):
            return self.member(type.type, name), True
        if isinstance(type, UnionType):
            found = [self.member_of(item, name) for item in type.items if not isinstance(get_proper_type(item), NoneType)]
            known = [new for new, _ in found if new is not None]
            return (known[0] if known else None), all(ok for _, ok in found)
        if isinstance(type, TypeType):
            return self.member_of(type.item, name)
        if isinstance(type, TupleType):
            return self.member_of(type.partial_fallback, name)
        if isinstance(type, LiteralType):
            return self.member_of(type.fallback, name)
        if isinstance(type, TypeVarType):
            return self.member_of(type.upper_bound, name)
        if isinstance(type, CallableType) and type.is_type_obj():
            return self.member(type.type_object(), name), True
        if isinstance(type, Overloaded) and type.is_type_obj():
            return self.member(type.type_object(), name), True
        return None, True

    # -- nodes
    def put(self, node_line: int, col: int, old: str, new: str, what: str) -> None:
        col = self.file.byte_to_col(node_line, col)
        if not self.file.edit(node_line, col, old, new):
            self.report.lost.append(f"{self.file.path}:{node_line}: {what} {old} -> {new}")

    def visit_name_expr(self, o: NameExpr) -> None:
        where = (o.line, self.file.byte_to_col(o.line, o.column))
        if isinstance(o.node, Var) and id(o.node) in self.parameters:
            self.put(o.line, o.column, o.name, self.parameters[id(o.node)], "parameter")
            return
        full = o.fullname
        if o.node is not None and not isinstance(o.node, MypyFile):
            full = o.node.fullname or full
        if full and "." in full:
            new = self.rule(full)
            if new is None and isinstance(o.node, Var) and o.node.info and o.node.info.mro:
                new = self.member(o.node.info, o.name)
            # an alias (`import x as y`) has another name in the text
            if new is not None and self.file.lines[where[0] - 1][where[1] : where[1] + len(o.name)] == full.rpartition(".")[2]:
                self.put(o.line, o.column, o.name, new, "name")
        self.locals.add(where)

    def visit_member_expr(self, o: MemberExpr) -> None:
        new = None
        base = o.expr
        if isinstance(base, RefExpr) and isinstance(base.node, MypyFile):
            symbol = base.node.names.get(o.name)
            full = symbol.fullname if symbol else f"{base.node.fullname}.{o.name}"
            new = self.rule(full)
        elif isinstance(base, RefExpr) and isinstance(base.node, TypeInfo):
            new = self.member(base.node, o.name)
        else:
            new, known = self.member_of(self.result.types.get(base), o.name)
            if new is None and not known:
                here = str(self.file.path)
                new = next((to for part, name, to in self.report.forced if name == o.name and part in here), None)
            if new is None and not known and o.name in self.members:
                self.report.unknown.append(f"{self.file.path}:{o.line}: .{o.name}")
        if new is not None and o.end_line is not None and o.end_column is not None:
            col = self.file.byte_to_col(o.end_line, o.end_column) - len(o.name)
            if not self.file.edit(o.end_line, col, o.name, new):
                self.report.lost.append(f"{self.file.path}:{o.line}: member {o.name} -> {new}")

    def visit_class_def(self, o: ClassDef) -> None:
        if (new := self.rule(o.fullname)) is not None:
            self.after(o.line, "class", o.name, new)

    def after(self, line: int, keyword: str, name: str, new: str) -> None:
        for first, second in zip(self.file.names, self.file.names[1:]):
            if first.start[0] >= line and first.string == keyword and second.string == name:
                self.file.edit(*second.start, name, new)
                return
        self.report.lost.append(f"{self.file.path}:{line}: {keyword} {name}")

    def visit_func_def(self, o: FuncDef) -> None:
        new = self.rule(o.fullname)
        if new is None and o.info and o.info.mro:
            new = self.member(o.info, o.name)
        if new is not None:
            self.after(o.line, "def", o.name, new)
        for argument in o.arguments:
            name = argument.variable.name
            target = self.rule(f"{o.fullname}({name})")
            if target is None and o.info and o.info.mro:
                target = next((t for b in o.info.mro if (t := self.rule(f"{b.fullname}.{o.name}({name})"))), None)
            if target is not None:
                self.parameters[id(argument.variable)] = target
                self.put(argument.line, argument.column, name, target, "parameter")

    def visit_call_expr(self, o: CallExpr) -> None:
        self.strings(o)
        for name, arg in zip(o.arg_names, o.args):
            if name is not None and (new := self.keyword(o, name)) is not None:
                self.replace_keyword(o, name, arg, new)

    def keyword(self, o: CallExpr, name: str) -> str | None:
        callee = o.callee
        node = callee.node if isinstance(callee, RefExpr) else None
        if isinstance(node, RefExpr):
            node = node.node
        full = callee.fullname if isinstance(callee, RefExpr) else None
        if full in ("dataclasses.replace", "copy.replace") and o.args:
            return self.member_of(self.result.types.get(o.args[0]), name)[0]
        if full == "functools.partial" and o.args and isinstance(o.args[0], RefExpr):
            node = o.args[0].node
        if isinstance(node, TypeInfo):
            return self.of_class(node, name)
        if isinstance(node, (FuncDef, Decorator, OverloadedFuncDef)):
            return self.of_function(node, name)
        if isinstance(callee, MemberExpr):
            type = get_proper_type(self.result.types.get(callee.expr)) if callee.expr in self.result.types else None
            infos = []
            for item in (type.items if isinstance(type, UnionType) else [type]):
                item = get_proper_type(item) if item is not None else None
                if isinstance(item, Instance):
                    infos.append(item.type)
                elif isinstance(item, CallableType) and item.is_type_obj():
                    infos.append(item.type_object())
            for info in infos:
                for base in info.mro:
                    if (new := self.rule(f"{base.fullname}.{callee.name}({name})")) is not None:
                        return new
        type = get_proper_type(self.result.types.get(callee)) if callee in self.result.types else None
        if isinstance(type, CallableType):
            if type.is_type_obj():
                return self.of_class(type.type_object(), name)
            if type.definition is not None and isinstance(type.definition, (FuncDef, Decorator, OverloadedFuncDef)):
                return self.of_function(type.definition, name)
        return None

    def of_function(self, node: Node, name: str) -> str | None:
        full = node.fullname  # type: ignore[attr-defined]
        if (new := self.rule(f"{full}({name})")) is not None:
            return new
        info = getattr(node, "info", None) or getattr(getattr(node, "func", None), "info", None)
        if info and info.mro:
            method = full.rpartition(".")[2]
            return next((t for b in info.mro if (t := self.rule(f"{b.fullname}.{method}({name})"))), None)
        return None

    def of_class(self, info: TypeInfo, name: str) -> str | None:
        for base in info.mro:
            own = base.names.get("__init__")
            if own is not None and own.plugin_generated or base.fullname == "builtins.object":
                break
            if own is not None and isinstance(own.node, FuncDef) and not own.plugin_generated:
                return self.rule(f"{base.fullname}.__init__({name})")
        return self.member(info, name)

    def replace_keyword(self, o: CallExpr, name: str, arg: Node, new: str) -> None:
        before = (arg.line, self.file.byte_to_col(arg.line, arg.column))
        start = (o.line, self.file.byte_to_col(o.line, o.column))
        candidates = [
            (a, b) for a, b in zip(self.file.tokens, self.file.tokens[1:])
            if start <= a.start < before and a.type == tokenize.NAME and a.string == name and b.string == "="
        ]
        if not candidates:
            self.report.lost.append(f"{self.file.path}:{arg.line}: keyword {name} -> {new}")
            return
        self.file.edit(*candidates[-1][0].start, name, new)

    def strings(self, o: CallExpr) -> None:
        """setattr(x, "name"), monkeypatch.setattr(x, "name", ..), getattr(x, "name")"""
        callee = o.callee
        called = callee.name if isinstance(callee, (MemberExpr, NameExpr)) else ""
        if called not in ("setattr", "getattr", "hasattr", "delattr", "object") or len(o.args) < 2:
            return
        target, text = o.args[0], o.args[1]
        if not isinstance(text, StrExpr):
            return
        if isinstance(target, RefExpr) and isinstance(target.node, MypyFile):
            symbol = target.node.names.get(text.value)
            new = self.rule(symbol.fullname if symbol else f"{target.node.fullname}.{text.value}")
        elif isinstance(target, RefExpr) and isinstance(target.node, TypeInfo):
            new = self.member(target.node, text.value)
        else:
            new, _ = self.member_of(self.result.types.get(target), text.value)
        if new is not None:
            col = self.file.byte_to_col(text.line, text.column)
            quote = self.file.lines[text.line - 1][col]
            if not self.file.edit(text.line, col + 1, text.value, new):
                self.report.lost.append(f"{self.file.path}:{text.line}: string {quote}{text.value}")

    def visit_import_from(self, o: ImportFrom) -> None:
        module = self.result.graph.get(o.id)
        if module is None or module.tree is None:
            return
        for name, _ in o.names:
            symbol = module.tree.names.get(name)
            full = symbol.fullname if symbol is not None and symbol.fullname else f"{o.id}.{name}"
            new = self.rule(full)
            if new is None:
                continue
            begin = (o.line, 0)
            tokens = [t for t in self.file.tokens if t.start >= begin]
            seen_import = False
            for t in tokens:
                if t.string == "import" and t.type == tokenize.NAME:
                    seen_import = True
                elif seen_import and t.type == tokenize.NAME and t.string == name:
                    self.file.edit(*t.start, name, new)
                    break
                elif t.type == tokenize.NEWLINE:
                    self.report.lost.append(f"{self.file.path}:{o.line}: import {name}")
                    break

    def visit_class_pattern(self, o: ClassPattern) -> None:
        info = o.class_ref.node
        if isinstance(info, TypeInfo):
            for key in o.keyword_keys:
                if (new := self.member(info, key)) is not None:
                    for a, b in zip(self.file.tokens, self.file.tokens[1:]):
                        if a.start >= (o.line, o.column) and a.string == key and b.string == "=":
                            self.file.edit(*a.start, key, new)
                            break

    def annotations(self) -> None:
        """What mypy keeps as types and not as expressions: names in annotations, casts and type arguments."""
        tree = ast.parse(self.file.text)
        imported: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = self.result.graph.get(node.module)
                for alias in node.names:
                    if module is not None and module.tree is not None and alias.name in module.tree.names:
                        symbol = module.tree.names[alias.name]
                        imported[alias.asname or alias.name] = symbol.fullname or f"{node.module}.{alias.name}"
        for statement in tree.body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__" and isinstance(statement.value, (ast.List, ast.Tuple)):
                for each in statement.value.elts:
                    if isinstance(each, ast.Constant) and each.value in self.tree.names:
                        symbol = self.tree.names[each.value]
                        new = self.rule(symbol.fullname or f"{self.tree.fullname}.{each.value}")
                        if new is not None:
                            self.put(each.lineno, each.col_offset + 1, each.value, new, "__all__")
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                where = (node.lineno, self.file.byte_to_col(node.lineno, node.col_offset))
                if where in self.locals:
                    continue
                symbol = self.tree.names.get(node.id)
                full = imported.get(node.id) or (symbol.fullname if symbol else None)
                new = self.rule(full) if full else None
                if new is not None and full and full.rpartition(".")[2] == node.id:
                    self.put(node.lineno, node.col_offset, node.id, new, "annotation")
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                symbol = self.tree.names.get(node.value.id)
                if symbol is not None and isinstance(symbol.node, MypyFile):
                    inner = symbol.node.names.get(node.attr)
                    new = self.rule(inner.fullname if inner else f"{symbol.node.fullname}.{node.attr}")
                    if new is not None:
                        col = self.file.byte_to_col(node.end_lineno or 0, node.end_col_offset or 0) - len(node.attr)
                        self.file.edit(node.end_lineno or 0, col, node.attr, new)


class Report:
    def __init__(self, rules: dict[str, str]) -> None:
        self.used: set[str] = set()
        self.lost: list[str] = []
        self.unknown: list[str] = []
        plain = {full.rpartition(".")[2] for full in rules if "(" not in full and full.split(".")[-2][:1].isupper() or full.split(".")[-2][:1] == "_"}
        self.members = plain
        self.forced: list[tuple[str, str, str]] = []
        self.protocols: dict[str, list[TypeInfo]] = defaultdict(list)

    def find_protocols(self, rules: dict[str, str], result: build.BuildResult) -> None:
        for full in rules:
            holder, _, name = full.rpartition(".")
            module, _, cls = holder.rpartition(".")
            state = result.graph.get(module)
            if "(" in full or state is None or state.tree is None or cls not in state.tree.names:
                continue
            info = state.tree.names[cls].node
            if isinstance(info, TypeInfo) and info.is_protocol:
                self.protocols[name].append(info)


def rename(root: Path, rules: dict[str, str], python: str, folders: list[str], forced=()) -> tuple[Report, list[str]]:
    result = analyse(root, folders, python)
    report = Report(rules)
    report.forced = list(forced)
    report.find_protocols(rules, result)
    files = {}
    for name, state in result.graph.items():
        path = state.path
        if path is None or state.tree is None:
            continue
        path = (root / path).resolve()
        if root.resolve() not in path.parents or ".venv" in path.parts or not path.suffix == ".py":
            continue
        file = File(path)
        renamer = Renamer(rules, result, state.tree, file, report)
        renamer.walk()
        renamer.annotations()
        files[path] = file
    for file in files.values():
        file.apply()
    return report, [str(e) for e in result.errors]
