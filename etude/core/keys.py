"""The keys of a run's config as data: each with its type, default and meaning, taken from the
tables themselves. `docs/config.md` and `etude keys` are generated from this."""

from __future__ import annotations

import ast
import inspect
import json
import sys
from dataclasses import dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from etude.core.config import STAGES, RunConfig
from etude.core.schema import Config
from etude.core.stages import StageConfig

REQUIRED = "(required)"
NONE = "(none)"
TYPES = {int: "integer", float: "number", bool: "true or false", str: "string"}
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "min_length": "at least"}


@dataclass(frozen=True, slots=True)
class Key:
    name: str
    type: str
    default: str
    """The default as TOML, or `REQUIRED`, or `NONE`."""
    meaning: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the config file."""

    path: str
    """The table's name for `--set` and `etude keys`; empty for the top level."""
    header: str
    """The table's header in a file."""
    meaning: str
    keys: tuple[Key, ...]


def tables() -> tuple[Table, ...]:
    """All tables, in the order of a file: the top level, its sections, the stages, and the tables
    within these."""
    sections = {
        name: kind
        for name, field in RunConfig.model_fields.items()
        if name != "stage" and (kind := _table_in(field.annotation))
    }
    plain = tuple(key for key in _keys(RunConfig) if key.name not in {*sections, "stage"})
    found = [Table("", "", _text(RunConfig), plain)]
    for name, kind in sections.items():
        found += _nested(name, kind)
    for name, stage in STAGES.items():
        header = f'[[stage]] kind = "{name}"'
        found.append(Table(f"stage.{name}", header, _text(stage), _stage_keys(name, stage)))
        found += [
            Table(f"stage.{name}.{key}", f"{key} of {name}", _text(inner), _keys(inner))
            for key, inner in _inner(stage).items()
        ]
    return tuple(found)


def _nested(path: str, kind: type[Config]) -> list[Table]:
    """A table, and those within it."""
    found = [Table(path, f"[{path}]", _text(kind), _keys(kind))]
    for key, inner in _inner(kind).items():
        found += _nested(f"{path}.{key}", inner)
    return found


def _inner(table: type[Config]) -> dict[str, type[Config]]:
    """The tables within a table."""
    fields = table.model_fields.items()
    return {key: inner for key, field in fields if (inner := _table_in(field.annotation))}


def _keys(table: type[Config]) -> tuple[Key, ...]:
    return tuple(
        Key(name, _type(field.annotation, field.metadata), _default(field), _meaning(table, name))
        for name, field in table.model_fields.items()
    )


def _stage_keys(kind: str, stage: type[Config]) -> tuple[Key, ...]:
    """The keys of a stage, those of its kind first. The kind itself is in the header, and is the
    default name."""
    inherited = set(StageConfig.model_fields)
    keys = [key for key in _keys(stage) if key.name != "kind"]
    named = [replace(key, default=json.dumps(kind)) if key.name == "name" else key for key in keys]
    return tuple(sorted(named, key=lambda key: key.name in inherited))


def _is_table(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Config)


def _table_in(annotation: Any) -> type[Config] | None:
    if _is_table(annotation):
        return annotation  # type: ignore[no-any-return]
    return next((found for part in get_args(annotation) if (found := _table_in(part))), None)


def _type(annotation: Any, metadata: Any = ()) -> str:
    bounds = ", ".join(
        f"{words} {limit:g}"
        for item in metadata
        for name, words in BOUNDS.items()
        if (limit := getattr(item, name, None)) is not None
    )
    return _kind(annotation) + (f", {bounds}" if bounds else "")


def _kind(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        constraints = [c for m in parts[1:] for c in getattr(m, "metadata", ())]
        return _type(parts[0], constraints)
    if origin is Literal:
        return " or ".join(map(json.dumps, parts))
    if origin in (Union, UnionType):
        return " or ".join(_kind(part) for part in parts if part is not NoneType)
    if origin is tuple:
        return f"list of {_kind(parts[0])}"
    if origin is dict:
        return f"table of {_kind(parts[1])}"
    return "table" if _is_table(annotation) else TYPES[annotation]


def _default(field: Any) -> str:
    if field.is_required():
        return REQUIRED
    return NONE if field.default is None else _toml(field.default)


def _toml(value: Any) -> str:
    if isinstance(value, Config):
        pairs = (f"{key} = {_toml(inner)}" for key, inner in value.model_dump().items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def _text(table: type[Config]) -> str:
    return inspect.cleandoc(table.__doc__ or "").replace("\n", " ")


def _meaning(table: type[Config], key: str) -> str:
    """The text under a field; without one, the text in the parent table."""
    for kind in table.__mro__:
        if text := _texts(kind.__module__).get((kind.__name__, key)):
            return inspect.cleandoc(text).replace("\n", " ")
    return ""


@cache
def _texts(module: str) -> dict[tuple[str, str], str]:
    """The strings under the fields of a module's classes, which Python itself does not keep."""
    if not module.startswith("etude."):
        return {}
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {
        (kind.name, field.target.id): text.value.value
        for kind in tree.body
        if isinstance(kind, ast.ClassDef)
        for field, text in zip(kind.body, kind.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(text.value.value, str)
    }
