"""Rows in the format of SWE-bench, one JSON object per line.

A row names a commit and two patches. Our working copies are commits only if a task comes from
history. For the others, `setup_patch`, which other programs ignore, leads from the commit, or from
the sdist in `version`, to the working copy.
"""

from __future__ import annotations

import difflib
import io
import json
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from etude.core.errors import EtudeError
from etude.factory.install import write_files
from etude.factory.task import Files, RepositoryTask


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of SWE-bench."""

    instance_id: str
    repo: str
    base_commit: str
    problem_statement: str
    patch: str
    test_patch: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    version: str = ""
    setup_patch: str = ""

    def to_json(self) -> str:
        told = asdict(self) | {"hints_text": "", "created_at": "", "environment_setup_commit": ""}
        for key in ("fail_to_pass", "pass_to_pass"):
            told[key.upper()] = json.dumps(told.pop(key))
        return json.dumps(told)

    @classmethod
    def from_json(cls, record: Mapping[str, object], where: str) -> Row:
        """Read a row. EtudeError if a field is missing or not text."""
        names = ("instance_id", "repo", "base_commit", "problem_statement", "patch", "test_patch")
        for name in names:
            if not isinstance(record.get(name), str):
                raise EtudeError(
                    f"{where}: not a SWE-bench row: {name!r} is missing or not a string"
                )
        told = {name: str(record[name]) for name in names}
        return cls(
            **told,
            fail_to_pass=_names(record.get("FAIL_TO_PASS"), where),
            pass_to_pass=_names(record.get("PASS_TO_PASS"), where),
            version=str(record.get("version", "")),
            setup_patch=str(record.get("setup_patch", "")),
        )


def _names(value: object, where: str) -> tuple[str, ...]:
    """Names of tests; most files have such lists as JSON in a string."""
    try:
        listed = json.loads(value) if isinstance(value, str) else value
    except ValueError as e:
        raise EtudeError(f"{where}: a list of tests is not valid JSON: {e}") from e
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        raise EtudeError(f"{where}: FAIL_TO_PASS and PASS_TO_PASS must be lists of tests")
    return tuple(listed)


def row_of(task: RepositoryTask) -> Row:
    """A task as a row."""
    origin, *commit = task.origin.rsplit("@", 1)  # a URL may have an @ of its own
    shown = {path: task.opening.get(path, b"") for path in (*task.changes, *task.tests)}
    return Row(
        instance_id=task.id,
        repo=origin,
        base_commit=task.facts.get("parent", "".join(commit)),
        problem_statement=task.instruction,
        patch=diff(task.opening, task.solution),
        test_patch=diff(shown, task.tests),
        fail_to_pass=task.fail_to_pass,
        pass_to_pass=task.pass_to_pass,
        version=origin.partition("==")[2],
        setup_patch=diff(task.base, task.changes),
    )


def write_rows(path: Path, tasks: Iterable[RepositoryTask]) -> int:
    """Write tasks as rows. Return their number."""
    half = path.with_suffix(".part")
    count = 0
    with half.open("w") as file:
        for task in tasks:
            file.write(row_of(task).to_json() + "\n")
            count += 1
    half.rename(path)
    return count


def read_rows(path: Path) -> list[Row]:
    """The rows of a .jsonl file."""
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if line.strip():
            try:
                record = json.loads(line)
            except json.JSONDecodeError as e:
                why = f"{e.msg} at column {e.colno}"
                raise EtudeError(f"{path}:{number}: the line is not valid JSON ({why})") from e
            rows.append(Row.from_json(record, f"{path}:{number}"))
    return rows


def diff(before: Files, after: Files) -> str:
    """Patch that turns files into `after`, as git would write it."""
    told: list[str] = []
    for path, content in after.items():
        old, new = before.get(path, b""), content
        if old == new:
            continue
        lines = difflib.unified_diff(
            _lines(old),
            _lines(new),
            f"a/{path}" if path in before else "/dev/null",
            f"b/{path}",
        )
        told.append(f"diff --git a/{path} b/{path}\n")
        if path not in before:
            told.append("new file mode 100644\n")
        for line in lines:
            told.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(told)


def _lines(content: bytes) -> list[str]:
    """Lines as git splits them: a form feed, for example, does not end one."""
    return [line.decode(errors="surrogateescape") for line in io.BytesIO(content)]


def patched(files: Files, patch: str) -> Files:
    """The files that a patch changes, in their new form. EtudeError if it does not apply."""
    if not patch.strip():
        return {}
    with tempfile.TemporaryDirectory(prefix="etude-patch-") as scratch:
        write_files(Path(scratch), files)
        ran = subprocess.run(
            ["git", "apply", "--whitespace=nowarn", "-"],
            cwd=scratch,
            input=patch.encode(errors="surrogateescape"),
            capture_output=True,
            check=False,
        )
        if ran.returncode:
            raise EtudeError(
                f"a patch does not apply: {ran.stderr.decode(errors='replace').strip()}"
            )
        return {
            path: (Path(scratch) / path).read_bytes()
            for path in patched_paths(patch)
            if (Path(scratch) / path).is_file()
        }


def patched_paths(patch: str) -> list[str]:
    return [line[6:].rstrip() for line in patch.split("\n") if line.startswith("+++ b/")]
