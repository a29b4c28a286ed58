"""Documents and records from other people's files: read lazily, with the file and line in every
error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from etude.core.errors import EtudeError
from etude.tasks.sources import files, records, texts


def read(path: Path, field: str = "text") -> list[str]:
    return [text for _, text in texts(path, field)]


def test_every_format_gives_its_documents(tmp_path: Path) -> None:
    said = ["def f():\n    return 1\n", "zwei\n", "三"]
    (tmp_path / "a.py").write_text(said[0])
    (tmp_path / "b.jsonl").write_text(
        "".join(json.dumps({"body": text}) + "\n\n" for text in [*said, " \n"])
    )
    parquet.write_table(
        pyarrow.table({"id": [1, 2, 3], "body": said}), tmp_path / "c.parquet", row_group_size=2
    )
    assert read(tmp_path / "a.py") == said[:1]
    assert read(tmp_path / "b.jsonl", "body") == read(tmp_path / "c.parquet", "body") == said
    assert [where for where, _ in texts(tmp_path / "b.jsonl", "body")][
        1
    ] == f"{tmp_path / 'b.jsonl'}:3"


def test_a_pattern_stands_for_files_in_order(tmp_path: Path) -> None:
    for name in ("x/2.py", "x/y/1.py", "x/3.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert files(f"{tmp_path}/**/*.py") == [tmp_path / "x/2.py", tmp_path / "x/y/1.py"]
    with pytest.raises(EtudeError, match=r"/.*\*\.c: no such file; check the path: "):
        files(f"{tmp_path}/*.c")


def test_what_comes_before_a_mistake_is_read(tmp_path: Path) -> None:
    """Nothing reads ahead: a file larger than memory is not a problem."""
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n{')
    assert [text for _, text in islice(texts(tmp_path / "a.jsonl", "text"), 2)] == ["one", "two"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"a.jsonl:2: the line is not valid JSON \(Expecting [^:]* at column 2\): fix"),
        ("[1]", r"a.jsonl:2: the line is not a JSON object but a list"),
        ('{"body": "x"}', r"a.jsonl:2: there is no 'text', only 'body'; set field"),
        ('{"text": 3}', r"a.jsonl:2: 'text' must be a text, not int"),
        ("[" * 100_000, r"a.jsonl:2: the line is not valid JSON"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(EtudeError, match=message):
        read(tmp_path / "a.jsonl")


def test_files_that_are_something_else_are_named(tmp_path: Path) -> None:
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).write_bytes(b"\xff\xfe\x00")
        with pytest.raises(EtudeError, match=f"{name} is not UTF-8 text"):
            read(tmp_path / name)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(EtudeError, match=r"a\.parquet is not a readable Parquet file"):
        read(tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"id": [1]}), tmp_path / "b.parquet")
    with pytest.raises(EtudeError, match=r"b\.parquet: there is no column 'text', only id"):
        read(tmp_path / "b.parquet")
    with pytest.raises(EtudeError, match=r"b\.parquet, row 1: 'id' must be a text, not int"):
        read(tmp_path / "b.parquet", "id")
    with pytest.raises(EtudeError, match="cannot be read"):
        list(records(tmp_path))


def test_parquet_needs_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(EtudeError, match=r"a\.parquet is Parquet.*pip install 'etude\[parquet\]'"):
        read(tmp_path / "a.parquet")


def test_a_text_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").mkdir()
    with pytest.raises(EtudeError, match=r"a\.txt cannot be read \(Is a directory\)"):
        read(tmp_path / "a.txt")


def test_files_are_utf_8_whatever_the_place(tmp_path: Path) -> None:
    for name, text in (("a.txt", "Grüße"), ("a.jsonl", '{"text": "Grüße"}\n')):
        (tmp_path / name).write_bytes(text.encode())
    code = f"""
from pathlib import Path
from etude.tasks.sources import texts
for name in ("a.txt", "a.jsonl"):
    for _, text in texts(Path({str(tmp_path)!r}) / name, "text"):
        print(ascii(text))
"""
    plain = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    said = subprocess.check_output([sys.executable, "-c", code], env=os.environ | plain, text=True)
    assert said.split() == [ascii("Grüße")] * 2
