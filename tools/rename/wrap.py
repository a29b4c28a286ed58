"""Lines of at most 100 columns: docstrings, comments and string literals, and one assignment a line in constructors."""

from __future__ import annotations

import ast
import io
import re
import textwrap
import tokenize
from pathlib import Path

WIDTH = 100
PRAGMA = re.compile(r"#\s*(noqa|type:|fmt:|pragma)")


def cols(line: str) -> int:
    return len(line.rstrip("\n"))


# -- parallel assignments in constructors ------------------------------------------------------------------------

def split_assignments(text: str) -> str:
    tree = ast.parse(text)
    lines = text.splitlines(keepends=True)
    edits: list[tuple[int, int, list[str]]] = []
    for cls in ast.walk(tree):
        if not isinstance(cls, ast.ClassDef):
            continue
        for function in cls.body:
            if isinstance(function, ast.FunctionDef) and function.name in ("__init__", "__post_init__"):
                for node in ast.walk(function):
                    if isinstance(node, ast.Assign) and (made := _split(node, text)) is not None:
                        edits.append((node.lineno, node.end_lineno or node.lineno, made))
    for first, last, made in sorted(edits, reverse=True):
        line = lines[first - 1]
        indent = line[: len(line) - len(line.lstrip())]
        tail = lines[last - 1]
        comment = _comment(tail)
        if comment is None and "#" in tail and "#" not in "".join(made):
            continue
        new = [f"{indent}{each}\n" for each in made]
        if comment:
            if PRAGMA.match(comment):
                new[-1] = new[-1].rstrip("\n") + f"  {comment}\n"
            else:
                new.insert(0, f"{indent}{comment}\n")
        lines[first - 1 : last] = new
    return "".join(lines)


def _comment(line: str) -> str | None:
    try:
        for token in tokenize.generate_tokens(io.StringIO(line.strip() + "\n").readline):
            if token.type == tokenize.COMMENT:
                return token.string
    except (tokenize.TokenError, IndentationError):
        return None
    return None


def _split(node: ast.Assign, text: str) -> list[str] | None:
    if len(node.targets) != 1:
        return None
    target, value = node.targets[0], node.value
    if not (isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts)):
        return None
    if any(isinstance(e, ast.Starred) for e in (*target.elts, *value.elts)):
        return None
    names = [ast.unparse(e) for e in target.elts]
    for number, name in enumerate(names):
        for later in value.elts[number + 1 :]:
            if any(ast.unparse(n) == name for n in ast.walk(later) if isinstance(n, (ast.Name, ast.Attribute))):
                return None
    sources = [ast.get_source_segment(text, e) or ast.unparse(e) for e in value.elts]
    sources = [s if "\n" not in s else ast.unparse(e) for s, e in zip(sources, value.elts)]
    return [f"{name} = {source}" for name, source in zip(names, sources)]


# -- fmt: skip ------------------------------------------------------------------------------------------------

def drop_skips(text: str) -> str:
    """A statement that is kept from the formatter and too wide for it now is handed to it."""
    lines = text.splitlines(keepends=True)
    tree = ast.parse(text)
    spans = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            spans.setdefault(node.end_lineno, []).append(node)
            for decorator in getattr(node, "decorator_list", ()):
                spans.setdefault(decorator.end_lineno, []).append(decorator)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                header = node.body[0].lineno - 1
                for number in range(node.lineno, header + 1):
                    spans.setdefault(number, []).append(node)
    for number in range(len(lines), 0, -1):
        line = lines[number - 1]
        if "# fmt: skip" in line:
            nodes = [n for n in spans.get(number, []) if not isinstance(n, (ast.With, ast.If, ast.For, ast.ClassDef))]
            first = max((n.lineno for n in nodes if n.lineno < number), default=number)
            block = lines[first - 1 : number]
            if any(cols(re.sub(r"\s*# fmt: skip", "", each)) > WIDTH for each in block):
                made = refill(block)
                if made is not None:
                    trial = lines[: first - 1] + made + lines[number:]
                    try:
                        if ast.dump(ast.parse("".join(trial))) == ast.dump(ast.parse("".join(lines))):
                            lines = trial
                            continue
                    except SyntaxError:
                        pass
                lines[number - 1] = re.sub(r"\s*# fmt: skip", "", line)
    return "".join(lines)


def fill_calls(text: str) -> str:
    """Kernels take many plain arguments: a call of one that does not fit into a line is filled, not put one to a line."""
    lines = text.splitlines(keepends=True)
    for node in sorted((n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Expr)), key=lambda n: -n.lineno):
        call = node.value
        if not isinstance(call, ast.Call) or len(call.args) < 10 or call.keywords:
            continue
        source = ast.get_source_segment(text, node) or ""
        if "#" in source or "fmt: skip" in lines[(node.end_lineno or 1) - 1] or not all(isinstance(a, ast.Name) for a in call.args):
            continue
        indent = " " * node.col_offset
        inner = ", ".join(ast.unparse(a) for a in call.args)
        if len(indent) + 4 + len(inner) <= WIDTH:
            continue
        block = [f"{indent}{ast.unparse(call.func)}(\n", f"{indent}    {inner},\n", f"{indent})  # fmt: skip\n"]
        if (made := refill(block)) is not None:
            lines[node.lineno - 1 : node.end_lineno] = made
    return "".join(lines)


def refill(block: list[str]) -> list[str] | None:
    """Items between `(` at the end of the first line and `)` at the start of the last, filled to the margin."""
    if len(block) < 3 or not re.search(r"[(\[{]$", block[0].rstrip()) or not re.match(r"\s*[)\]}]", block[-1]):
        return None
    if any("#" in line for line in block[:-1]):
        return None
    inner = " ".join(line.strip() for line in block[1:-1])
    items, depth, current, quote = [], 0, "", ""
    for c in inner:
        if quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        elif c == "," and depth == 0:
            items.append(current.strip())
            current = ""
            continue
        current += c
    if current.strip():
        items.append(current.strip())
    indent = block[1][: len(block[1]) - len(block[1].lstrip())]
    out, line = [], ""
    for item in items:
        if line and len(indent) + len(line) + len(item) + 2 > WIDTH:
            out.append(f"{indent}{line}\n")
            line = ""
        line += (" " if line else "") + item + ","
    out.append(f"{indent}{line}\n")
    if not block[-2].rstrip().endswith(","):
        out[-1] = out[-1].rstrip(",\n") + "\n"
    if any(cols(each) > WIDTH for each in (*out, block[0])):
        return None
    return [block[0], *out, block[-1]]


# -- docstrings -----------------------------------------------------------------------------------------------

BULLET = re.compile(r"^(\s*)([-*] |\d+\. )")


def wrap_paragraph(lines: list[str], indent: str, first_room: int, last_extra: int) -> list[str]:
    """Words of some lines, newly broken; the first line has less room, the last one must leave some."""
    match = BULLET.match(lines[0][len(indent) :] if lines[0].startswith(indent) else lines[0])
    hang = " " * len(match[2]) if match else ""
    words = " ".join(line.strip() for line in lines).split(" ")
    out: list[str] = []
    current, room = "", first_room
    for number, word in enumerate(words):
        extra = last_extra if number == len(words) - 1 else 0
        candidate = f"{current} {word}" if current else word
        if current and len(candidate) + extra > room:
            out.append(current)
            current, room = word, WIDTH - len(indent) - len(hang)
        else:
            current = candidate
    out.append(current)
    return [out[0], *(hang + line for line in out[1:])]


def _wide_table_line(line: str) -> list[str]:
    """A preformatted line with columns: the last column goes on below itself."""
    body = line.rstrip()
    gaps = [m.end() for m in re.finditer(r"\S(\s{2,})(?=\S)", body)]
    column = gaps[-1] if gaps else len(body) - len(body.lstrip())
    if column > 70:
        column = gaps[-2] if len(gaps) > 1 else len(body) - len(body.lstrip())
    pieces = textwrap.wrap(body[column:], WIDTH - column, break_long_words=False, break_on_hyphens=False)
    return [body[:column] + pieces[0], *(" " * column + piece for piece in pieces[1:])]


def rewrap_doc(text: str, indent: str, closing_own_line: bool) -> str:
    """The body of a docstring (between the quotes). `indent`: of its lines after the first."""
    raw = text.split("\n")
    lines = [raw[0], *raw[1:]]
    if closing_own_line:
        lines = lines[:-1]
    # paragraphs of (start, end) in lines
    blocks: list[tuple[str, list[str]]] = []
    for number, line in enumerate(lines):
        stripped = line.strip()
        own = "" if number == 0 else (line[: len(line) - len(line.lstrip())] if stripped else "")
        if not stripped:
            kind = "blank"
        elif number and len(own) > len(indent) and not _continues_bullet(blocks, own, indent):
            kind = "pre"
        else:
            kind = "text"
        starts_bullet = kind == "text" and BULLET.match(line[len(indent) :] if number else line) is not None
        if blocks and blocks[-1][0] == kind == "text" and not starts_bullet:
            blocks[-1][1].append(line)
        else:
            blocks.append((kind, [line]))
    out: list[str] = []
    for position, (kind, block) in enumerate(blocks):
        last = position == len(blocks) - 1 and not closing_own_line
        first = position == 0
        widths = [cols(line) for line in block]
        if first:
            widths[0] += len(indent) + 3
        if last:
            widths[-1] += 3
        if max(widths) <= WIDTH:
            out += block
        elif kind == "pre":
            for line in block:
                out += [line] if cols(line) <= WIDTH else _wide_table_line(line)
        else:
            room = WIDTH - len(indent) - (3 if first else 0)
            wrapped = wrap_paragraph(block, indent, room, 3 if last else 0)
            out += [line if first and n == 0 else indent + line for n, line in enumerate(wrapped)]
    if closing_own_line:
        out.append(raw[-1])
    return "\n".join(out)


def _continues_bullet(blocks: list[tuple[str, list[str]]], own: str, indent: str) -> bool:
    if not blocks or blocks[-1][0] != "text":
        return False
    head = blocks[-1][1][0]
    match = BULLET.match(head[len(indent) :] if head.startswith(indent) else head)
    return bool(match) and len(own) == len(indent) + len(match[2])


def docstrings(tree: ast.Module) -> list[ast.Constant]:
    found = []
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            for statement in body:
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str):
                    found.append(statement.value)
    return found


def wrap_docstrings(text: str) -> str:
    tree = ast.parse(text)
    lines = text.splitlines(keepends=True)
    for node in sorted(docstrings(tree), key=lambda n: -n.lineno):
        first, last = node.lineno, node.end_lineno or node.lineno
        block = lines[first - 1 : last]
        if max(map(cols, block)) <= WIDTH:
            continue
        indent = block[0][: len(block[0]) - len(block[0].lstrip())]
        source = "".join(block).rstrip("\n")
        match = re.match(r'^\s*([rRbBuU]?)"""(.*)"""(\s*#.*)?$', source, re.DOTALL)
        if not match:
            continue
        body = match[2]
        own = "\n" in body and not body.rsplit("\n", 1)[1].strip()
        made = rewrap_doc(body, indent, own)
        lines[first - 1 : last] = [f'{indent}{match[1]}"""{made}"""{match[3] or ""}\n']
        lines = "".join(lines).splitlines(keepends=True)
    return "".join(lines)


# -- comments -------------------------------------------------------------------------------------------------

def wrap_comments(text: str, prefix: str = "#") -> str:
    lines = text.splitlines(keepends=True)
    inside = _string_lines(text) if prefix == "#" else set[int]()
    out: list[str] = []
    number = 0
    while number < len(lines):
        line = lines[number]
        stripped = line.lstrip()
        if stripped.startswith("# ") and number + 1 not in inside and not PRAGMA.match(stripped):
            indent = line[: len(line) - len(stripped)]
            block = []
            while (number < len(lines) and lines[number].startswith(indent + "# ") and number + 1 not in inside
                   and not PRAGMA.match(lines[number].lstrip()) and not lines[number].startswith(indent + "#  ")):
                block.append(lines[number])
                number += 1
            if not block:
                out.append(line)
                number += 1
                continue
            if max(map(cols, block)) > WIDTH:
                words = " ".join(each.strip()[2:] for each in block)
                pieces = textwrap.wrap(words, WIDTH - len(indent) - 2, break_long_words=False, break_on_hyphens=False)
                out += [f"{indent}# {piece}\n" for piece in pieces]
            else:
                out += block
            continue
        out.append(line)
        number += 1
    return "".join(out)


def _string_lines(text: str) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and (not isinstance(node, ast.Constant) or isinstance(node.value, (str, bytes))):
            if (node.end_lineno or 0) > node.lineno:
                found |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return found


def lift_trailing_comments(text: str) -> str:
    """A trailing comment that makes its line too wide goes above it."""
    lines = text.splitlines(keepends=True)
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    for token in reversed([t for t in tokens if t.type == tokenize.COMMENT]):
        row, column = token.start
        line = lines[row - 1]
        if cols(line) <= WIDTH or not line[:column].strip() or PRAGMA.match(token.string):
            continue
        if PRAGMA.search(token.string):
            continue
        indent = line[: len(line) - len(line.lstrip())]
        code = line[:column].rstrip()
        if code.lstrip()[:1] in ")]}":  # the comment speaks of the statement above: leave it to a person
            continue
        words = token.string.lstrip("# ")
        pieces = textwrap.wrap(words, WIDTH - len(indent) - 2, break_long_words=False, break_on_hyphens=False)
        lines[row - 1] = "".join(f"{indent}# {piece}\n" for piece in pieces) + code + "\n"
    return "".join(lines)


# -- string literals ------------------------------------------------------------------------------------------

def split_strings(text: str) -> str:
    """Literals that reach beyond the margin are cut at a blank into neighbours, which Python joins."""
    for _ in range(6):
        made = _split_once(text)
        if made == text:
            return text
        text = made
    return text


def _literals(text: str) -> list[tuple[tuple[int, int], tuple[int, int], int, bool, bool]]:
    """(start, end, depth of brackets, preceded by a literal, ends the logical line) of every single-line literal"""
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline)]
    found, depth, fdepth, start = [], 0, 0, None
    previous_is_string = False
    result = []
    for index, token in enumerate(tokens):
        if token.type == tokenize.FSTRING_START:
            if fdepth == 0:
                start = token.start
            fdepth += 1
            continue
        if token.type == tokenize.FSTRING_END:
            fdepth -= 1
            if fdepth == 0:
                result.append([start, token.end, depth, previous_is_string, index])
                previous_is_string = True
            continue
        if fdepth:
            continue
        if token.type == tokenize.STRING:
            result.append([token.start, token.end, depth, previous_is_string, index])
            previous_is_string = True
            continue
        if token.type in (tokenize.NL, tokenize.COMMENT):
            continue
        if token.type == tokenize.OP and token.string in "([{":
            depth += 1
        if token.type == tokenize.OP and token.string in ")]}":
            depth -= 1
        previous_is_string = False
    for start, end, depth, before, index in result:
        following = next((t for t in tokens[index + 1 :] if t.type not in (tokenize.NL, tokenize.COMMENT)), None)
        found.append((start, end, depth, before, following is not None and following.type == tokenize.NEWLINE))
    return found


def _cuts(literal: str) -> list[int]:
    """Places behind a blank at which a literal may be cut."""
    match = re.match(r"^([A-Za-z]*)(\"\"\"|'''|\"|')", literal)
    if not match or len(match[2]) == 3:
        return []
    is_f, is_raw = "f" in match[1].lower(), "r" in match[1].lower()
    places, depth, i = [], 0, match.end()
    while i < len(literal) - 1:
        c = literal[i]
        if c == "\\" and not is_raw:
            i += 2
            continue
        if is_f and c == "{":
            if literal[i + 1] == "{" and depth == 0:
                i += 2
                continue
            depth += 1
        elif is_f and c == "}":
            if depth == 0:
                i += 2
                continue
            depth -= 1
        elif c == " " and depth == 0:
            places.append(i + 1)
        i += 1
    return [p for p in places if match.end() < p < len(literal) - 1]


def _split_once(text: str) -> str:
    lines = text.splitlines(keepends=True)
    doc_lines = {number for node in docstrings(ast.parse(text)) for number in range(node.lineno, (node.end_lineno or 0) + 1)}
    for start, end, depth, before, ends in reversed(_literals(text)):
        if start[0] != end[0] or start[0] in doc_lines:
            continue
        line = lines[start[0] - 1]
        limit = WIDTH - (1 if line[end[1] : end[1] + 1] in (",", ")") else 0)
        if cols(re.sub(r"\s*# (noqa|type:|fmt:).*", "", line)) <= WIDTH or end[1] <= WIDTH - 8:
            continue
        literal = line[start[1] : end[1]]
        prefix = re.match(r"^([A-Za-z]*)(\"|')", literal)
        if prefix is None:
            continue
        quote = prefix[2]
        room = limit - start[1] - 1
        if depth == 0:
            if not ends or before:
                continue
            indent = line[: len(line) - len(line.lstrip())] + "    "
            room = WIDTH - len(indent) - 1
        else:
            indent = " " * start[1]
        places = [p for p in _cuts(literal) if p <= room]
        if not places:
            if depth == 0 and len(literal) + len(indent) <= WIDTH:
                rest = line[end[1] :]
                lines[start[0] - 1] = f"{line[: start[1]]}(\n{indent}{literal}\n{indent[:-4]}){rest}"
                break
            continue
        place = places[-1]
        first, second = literal[:place] + quote, prefix[1] + quote + literal[place:]
        if depth == 0:
            lines[start[0] - 1] = f"{line[: start[1]]}(\n{indent}{first}\n{indent}{second}\n{indent[:-4]}){line[end[1] :]}"
        else:
            lines[start[0] - 1] = f"{line[: start[1]]}{first}\n{indent}{second}{line[end[1] :]}"
    made = "".join(lines)
    assert ast.dump(ast.parse(made)) == ast.dump(ast.parse(text)), "a cut changed the program"
    return made


def mark_wide(text: str) -> str:
    """What lies within a literal of several lines, or is kept from the formatter, and cannot be cut."""
    lines = text.splitlines(keepends=True)
    too_wide = {n for n, line in enumerate(lines, 1) if cols(PRAGMA.split(line)[0].rstrip()) > WIDTH}
    ends: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and (node.end_lineno or 0) > node.lineno:
            inside = set(range(node.lineno, (node.end_lineno or 0) + 1))
            if inside & too_wide:
                ends.add(node.end_lineno or 0)
                too_wide -= inside
    for number in ends | {n for n in too_wide if "# fmt: skip" in text}:
        line = lines[number - 1].rstrip("\n")
        if "noqa" not in line:
            lines[number - 1] = f"{line}  # noqa: E501\n"
    return "".join(lines)


def raise_ignores(text: str) -> str:
    """A `type: ignore` behind the closing bracket of a statement that is several lines now goes to its first line."""
    lines = text.splitlines(keepends=True)
    starts = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if (node.end_lineno or 0) > node.lineno and not hasattr(node, "body"):
                starts[node.end_lineno] = node.lineno
    for number, line in enumerate(lines, 1):
        match = re.match(r"^(\s*[)\]}]+)(  # type: ignore.*)$", line.rstrip("\n"))
        if match and number in starts:
            first = lines[starts[number] - 1].rstrip("\n")
            if "#" not in first:
                lines[starts[number] - 1] = first + match[2] + "\n"
                lines[number - 1] = match[1] + "\n"
    return "".join(lines)


def wide(text: str) -> list[int]:
    return [n for n, line in enumerate(text.splitlines(), 1) if cols(PRAGMA.split(line)[0].rstrip()) > WIDTH]


def process(path: Path, steps: str) -> None:
    text = path.read_text()
    made = text
    if "a" in steps:
        made = split_assignments(made)
    if "s" in steps:
        made = lift_trailing_comments(made)
        made = drop_skips(made)
        if "kernels" in path.parts:
            made = fill_calls(made)
    if "d" in steps:
        made = wrap_docstrings(made)
        made = lift_trailing_comments(made)
        made = wrap_comments(made)
    if "t" in steps:
        made = split_strings(made)
    if "i" in steps:
        made = raise_ignores(made)
    if "n" in steps:
        made = mark_wide(made)
    if made != text:
        ast.parse(made)
        path.write_text(made)
