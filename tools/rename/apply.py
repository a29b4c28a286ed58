"""python apply.py TREE: performs the great renaming on a clean checkout. See README.md beside it."""

from __future__ import annotations

import ast
import fnmatch
import io
import re
import subprocess
import sys
import time
import tokenize
from pathlib import Path

HERE = Path(__file__).resolve().parent
PYTHON = ".venv-rename/bin/python"
if sys.version_info < (3, 12):  # f-strings have exact positions from 3.12 on
    import os

    os.execv(PYTHON, [PYTHON, *sys.argv])
sys.path.insert(0, str(HERE))

import layout
import prose
import rules as rulebook
import semantic
import textrules
import wrap

problems: list[str] = []
notes: list[str] = []


def say(text: str) -> None:
    print(text, flush=True)


def run(root: Path, *argv: str, check: bool = True) -> str:
    done = subprocess.run(argv, cwd=root, capture_output=True, text=True, check=False)
    if check and done.returncode:
        problems.append(f"{' '.join(argv[:4])}: {done.stdout[-1500:]}{done.stderr[-1500:]}")
    return done.stdout


def python_files(root: Path) -> list[Path]:
    found = [p for folder in ("etude", "tests", "examples") for p in (root / folder).rglob("*.py")]
    return sorted([*found, root / "setup.py"])


def text_files(root: Path) -> list[Path]:
    kinds = (".py", ".md", ".toml", ".c", ".h", ".txt")
    folders = [p for folder in ("etude", "tests", "examples", "docs", ".ci") for p in (root / folder).rglob("*")]
    top = [p for p in root.iterdir() if p.is_file()]
    return sorted(
        p for p in (*folders, *top)
        if p.is_file() and not p.is_symlink() and "__pycache__" not in p.parts and (p.suffix in kinds or p.name in ("Makefile", "run"))
        and p.name not in ("LICENSE",) and not p.name.startswith("requirements")
    )


# -- moves -----------------------------------------------------------------------------------------------------

def module_moves(root: Path, named: dict[str, str]) -> dict[str, str]:
    moves = dict(named)
    for old, new in layout.PACKAGES.items():
        for path in (root / old.replace(".", "/")).rglob("*.py"):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            if not name.endswith("__init__"):
                moves.setdefault(name, name.replace(old, new, 1))
    return {old: new for old, new in moves.items() if (root / (old.replace(".", "/") + ".py")).exists()}


def move_files(root: Path, modules: dict[str, str]) -> dict[str, str]:
    """old path -> new path, all at once: names are swapped, so everything goes by way of another name."""
    paths = {f"{o.replace('.', '/')}.py": f"{n.replace('.', '/')}.py" for o, n in modules.items()}
    for old, new in layout.PACKAGES.items():
        paths[f"{old.replace('.', '/')}/__init__.py"] = f"{new.replace('.', '/')}/__init__.py"
    paths |= {o: n for o, n in layout.FILES.items()}
    for old in list(paths):
        if not (root / old).exists():
            problems.append(f"move: there is no {old}")
            del paths[old]
    for old in paths:
        (root / old).rename(root / f"{old}.moving")
    for old, new in paths.items():
        (root / new).parent.mkdir(parents=True, exist_ok=True)
        if (root / new).exists():
            problems.append(f"move: {new} is there already")
        (root / f"{old}.moving").rename(root / new)
    for name, text in layout.INITS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for old in layout.PACKAGES:
        folder = root / old.replace(".", "/")
        for cache in folder.glob("__pycache__"):
            subprocess.run(["rm", "-rf", str(cache)], check=True)
        if folder.exists() and not any(folder.iterdir()):
            folder.rmdir()
    return paths


def rewrite_imports(text: str, modules: dict[str, str]) -> str:
    """`from etude.run import data, journal` when some of these modules move."""
    tree = ast.parse(text)
    lines = text.splitlines(keepends=True)
    for node in sorted((n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)), key=lambda n: -n.lineno):
        if not node.module or not any(f"{node.module}.{alias.name}" in modules for alias in node.names):
            continue
        indent = lines[node.lineno - 1][: node.col_offset]
        stay = [a for a in node.names if f"{node.module}.{a.name}" not in modules]
        made = []
        if stay:
            made.append(f"{indent}from {node.module} import " + ", ".join(f"{a.name} as {a.asname}" if a.asname else a.name for a in stay))
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            if full in modules:
                package, _, name = modules[full].rpartition(".")
                called = alias.asname or alias.name
                called = called if alias.asname else MODULE_ALIASES.get((alias.name, name), called)
                made.append(f"{indent}from {package} import {name}" + (f" as {called}" if called != name else ""))
        tail = lines[node.end_lineno - 1][node.end_col_offset :].strip("\n")
        lines[node.lineno - 1 : node.end_lineno] = [f"{line}{tail if n == 0 else ''}\n" for n, line in enumerate(made)]
    return "".join(lines)


MODULE_ALIASES: dict[tuple[str, str], str] = {}


def replace_names(text: str, modules: dict[str, str], paths: dict[str, str]) -> str:
    """Dotted names and paths, everywhere in the text, all at once."""
    table = dict(modules)
    table |= {o.replace("etude.", "etude/", 1).replace(".", "/"): n.replace("etude.", "etude/", 1).replace(".", "/") for o, n in modules.items()}
    table |= {o: n for o, n in layout.PACKAGES.items()}
    table |= {o.replace(".", "/"): n.replace(".", "/") for o, n in layout.PACKAGES.items()}
    table |= paths
    table |= {
        o.removesuffix(".py").replace("/", "."): n.removesuffix(".py").replace("/", ".")
        for o, n in paths.items() if o.startswith("tests/")
    }
    # links within docs/
    for old, new in paths.items():
        if old.endswith(".md"):
            table[old.rpartition("/")[2]] = new.rpartition("/")[2]
    pattern = re.compile(r"(?<![\w./-])(" + "|".join(re.escape(k) for k in sorted(table, key=len, reverse=True)) + r")(?![\w])")
    docs = re.compile(r"(?<=\()((?:\.\./|docs/)*)(" + "|".join(re.escape(k) for k in table if k.endswith(".md") and "/" not in k) + r")(?=[)#])")
    text = docs.sub(lambda m: m[1] + table[m[2]], text)
    return pattern.sub(lambda m: table[m[1]], text)


# -- tokens ----------------------------------------------------------------------------------------------------

def rename_tokens(text: str, names: dict[str, str]) -> str:
    """Plain names (locals, parameters, fixtures), never attributes or keywords of calls unless told (`name=`)."""
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    lines = text.splitlines(keepends=True)
    edits = []
    for index, token in enumerate(tokens):
        if token.type != tokenize.NAME or token.string not in names:
            continue
        before = tokens[index - 1].string if index else ""
        if before == "from" or before == "." and not re.search(r"_[A-Z]+[a-z]?$|^num_single$", token.string):
            continue
        edits.append((token.start, token.string))
    for (row, column), old in reversed(edits):
        line = lines[row - 1]
        lines[row - 1] = line[:column] + names[old] + line[column + len(old) :]

    def parameters(match: re.Match[str]) -> str:
        return match[1] + re.sub(r"\w+", lambda word: names.get(word[0], word[0]), match[2])

    return re.sub(r"(parametrize\(\s*)(\([^)]*\)|\"[^\"]*\")", parameters, "".join(lines))


def map_text_tokens(text: str, change: "callable[[str, str], str]") -> str:
    """Comments and string literals through `change(text, kind)`; code is left alone."""
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    offsets = [0]
    for line in text.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))

    def at(place: tuple[int, int]) -> int:
        return offsets[place[0] - 1] + place[1]

    docs = set()
    for node in wrap.docstrings(ast.parse(text)):
        line = text.splitlines()[node.lineno - 1]
        docs.add((node.lineno, len(line) - len(line.lstrip())))
    spans = []
    for token in tokens:
        if token.type == tokenize.COMMENT:
            spans.append((at(token.start), at(token.end), "comment"))
        elif token.type == tokenize.STRING:
            spans.append((at(token.start), at(token.end), "doc" if token.start in docs else "string"))
        elif token.type == tokenize.FSTRING_MIDDLE:
            # doubled braces are one in the token: take the text itself
            spans.append((at(token.start), at(token.end), "string"))
    for start, end, kind in reversed(spans):
        piece = text[start:end]
        made = change(piece, kind)
        if made != piece:
            text = text[:start] + made + text[end:]
    return text


# -- steps -----------------------------------------------------------------------------------------------------

def step_prose(root: Path) -> None:
    by_file = prose.read()
    for name, pairs in by_file.items():
        path = root / name
        if not path.exists():
            problems.append(f"prose: there is no {name}")
            continue
        text = path.read_text()
        for old, new in pairs:
            maybe, old = old.startswith("?"), old.lstrip("?")
            words = [re.escape(word) for word in old.split()]
            joint = r"\s+(?:#\s+)?"
            matches = list(re.finditer(joint.join(words), text))
            if not matches:
                (notes if maybe else problems).append(f"prose: {name}: not found: {old[:90]}")
                continue
            match = matches[0]
            text = text[: match.start()] + new.replace("\\n", "\n") + text[match.end() :]
        path.write_text(text)


def step_symbols(root: Path, renames: dict[str, str], optional: set[str]) -> None:
    report, _ = semantic.rename(root, renames, "", ["etude", "tests", "examples"], textrules.FORCED)
    for full in sorted(set(renames) - report.used):
        (notes if full in optional else problems).append(f"symbol: {full} is nowhere")
    problems.extend(f"symbol: {lost}" for lost in report.lost)
    ignored = textrules.ANY_IGNORED
    for unknown in sorted(set(report.unknown)):
        if unknown.rpartition(".")[2] not in ignored:
            notes.append(f"look at: {Path(unknown.partition(':')[0]).relative_to(root)}:{unknown.split(':', 1)[1]} (its type is not known)")


def step_moves(root: Path, modules: dict[str, str]) -> None:
    paths = move_files(root, modules)
    for path in [p for folder in ("examples", "etude", "tests", "docs") for p in (root / folder).rglob("*") if p.is_symlink()]:
        target = str((path.parent / path.readlink()).resolve().relative_to(root))
        if target in paths:
            import os.path

            path.unlink()
            path.symlink_to(os.path.relpath(root / paths[target], path.parent))
    for path in python_files(root):
        text = path.read_text()
        made = rewrite_imports(text, modules)
        if made != text:
            path.write_text(made)
    for path in text_files(root):
        text = path.read_text()
        made = replace_names(text, modules, paths)
        if made != text:
            path.write_text(made)


_EVERY: dict[Path, list[Path]] = {}


def glob(root: Path, pattern: str) -> list[Path]:
    every = _EVERY.setdefault(root, text_files(root))
    return [p for p in every if any(fnmatch.fnmatch(str(p.relative_to(root)), part) for part in pattern.split(","))]


def step_locals(root: Path) -> None:
    for pattern, names in textrules.LOCALS:
        hit: set[str] = set()
        for path in glob(root, pattern):
            if path.suffix != ".py":
                continue
            text = path.read_text()
            made = rename_tokens(text, names)
            if made != text:
                hit |= {name for name in names if re.search(rf"\b{name}\b", text)}
                path.write_text(made)
        for name in set(names) - hit:
            notes.append(f"local: {name} is nowhere in {pattern}")


def step_text(root: Path) -> None:
    """Regular expressions: (files, where, pattern, replacement[, may match nothing])."""
    compiled = [
        (re.compile("|".join(f"(?:{fnmatch.translate(part)})" for part in files.split(","))), where, re.compile(pattern, re.MULTILINE), new,
         re.search(r"\w{3,}", re.sub(r"\(\?.*?\)|\\.|\[.*?\]", " ", pattern)))
        for files, where, pattern, new, *_ in textrules.RULES
    ]
    counts = [0] * len(compiled)
    for path in text_files(root):
        name = str(path.relative_to(root))
        text = path.read_text()
        mine = [(n, where, expression, new) for n, (files, where, expression, new, _) in enumerate(compiled)
                if textrules.NEEDS.get(expression.pattern, "") in text and files.match(name) and expression.search(text)]
        if not mine:
            continue

        def change(piece: str, kind: str) -> str:
            for number, where, expression, new in mine:
                if where == "all" or kind in where.split("+"):
                    piece, count = expression.subn(new, piece)
                    counts[number] += count
            return piece

        made = text
        if path.suffix == ".py":
            for number, where, expression, new in mine:
                if where == "all":
                    made, count = expression.subn(new, made)
                    counts[number] += count
            mine = [each for each in mine if each[1] != "all"]
            made = map_text_tokens(made, change)
        else:
            made = change(text, "doc")
        if made != text:
            path.write_text(made)
    for number, (files, _, pattern, _, *maybe) in enumerate(textrules.RULES):
        if not counts[number] and not maybe:
            problems.append(f"text: nothing matches {pattern!r} in {files}")


def step_files(root: Path) -> None:
    for path in sorted((HERE / "files").rglob("*")):
        if path.is_file():
            target = root / path.relative_to(HERE / "files")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(path.read_text())


def step_format(root: Path) -> None:
    ruff = str(Path(".venv/bin/ruff"))

    def each(steps: str) -> None:
        for path in python_files(root):
            try:
                wrap.process(path, steps)
            except (SyntaxError, AssertionError, tokenize.TokenError) as e:
                problems.append(f"format: {path.relative_to(root)}: {type(e).__name__} {e}")

    each("as")
    run(root, ruff, "check", "--select", "I,F401", "--fix", "-q", ".", check=False)
    run(root, ruff, "format", "-q", ".")
    each("d")
    each("t")
    run(root, ruff, "format", "-q", ".")
    each("t")
    run(root, ruff, "check", "--select", "I,F401", "--fix", "-q", ".", check=False)
    run(root, ruff, "format", "-q", ".")
    each("i")
    each("d")
    each("n")
    run(root, ruff, "format", "-q", ".")
    for path in [root / "Makefile", *root.rglob("*.toml")]:
        if ".venv" in path.parts:
            continue
        text = path.read_text()
        made = wrap.wrap_comments(text, prefix="toml")
        if made != text:
            path.write_text(made)


def main() -> int:
    root = Path(sys.argv[1]).resolve()
    if "--dirty" not in sys.argv and run(root, "git", "status", "--porcelain", "--untracked-files=no").strip():
        say("the checkout is not clean: start from a clean one")
        return 2
    renames, optional, named, _ = rulebook.read()
    modules = module_moves(root, named)
    for old in sorted(set(named) - set(modules)):
        problems.append(f"move: there is no module {old}")
    for title, step in (
        ("prose", lambda: step_prose(root)),
        ("symbols (mypy)", lambda: step_symbols(root, renames, optional)),
        ("moves", lambda: step_moves(root, modules)),
        ("locals", lambda: step_locals(root)),
        ("text", lambda: step_text(root)),
        ("new files", lambda: step_files(root)),
        ("shape", lambda: textrules.shape(root, problems)),
        ("format", lambda: step_format(root)),
    ):
        if f"--skip={title.split()[0]}" in sys.argv:
            continue
        began = time.monotonic()
        step()
        if title.startswith("symbols") and (copy := next((a.partition("=")[2] for a in sys.argv if a.startswith("--copy=")), "")):
            subprocess.run(["cp", "-r", str(root), copy], check=True)
        say(f"== {title}: {time.monotonic() - began:.0f} s")
    for note in notes:
        say(f"note: {note}")
    for problem in problems:
        say(f"PROBLEM: {problem}")
    say(f"{len(problems)} problems, {len(notes)} notes")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
