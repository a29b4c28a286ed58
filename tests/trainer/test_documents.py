"""From sources to tokens: tokenized once, memory-mapped, and held-out documents stay out."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.core.stages import MidtrainConfig
from etude.model.tokenizer import ChatTokenizer
from etude.train.stream import TokenizedDocuments
from etude.trainer import documents
from etude.trainer.documents import read_corpus
from tests.small_model import small_files

FILES = small_files()
TOKENIZER = ChatTokenizer(FILES)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(documents, "NUM_BUILT_IN", 50)


def stage(text: str) -> MidtrainConfig:
    (found,) = parse(f'name = "x"\n[[stage]]\nkind = "midtrain"\nsteps = 1\n{text}').stage
    assert isinstance(found, MidtrainConfig)
    return found


def said(given: TokenizedDocuments) -> list[str]:
    starts = [0, *given.ends_D[:-1]]
    pieces = [given.tokens_N[a:b] for a, b in zip(starts, given.ends_D, strict=True)]
    assert all(piece[-1] == TOKENIZER.eos_token_id for piece in pieces)
    return [TOKENIZER.decode(piece[:-1].tolist()) for piece in pieces]


def write(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def test_sources_with_weights_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.jsonl", ["one", "two"])
    (tmp_path / "b.py").write_text("def area(a, b):\n    return a * b\n")
    told = (
        f'sources = [{{path = "{tmp_path}/a.jsonl", weight = 3.0}}, {{path = "{tmp_path}/*.py"}}]'
    )
    corpus = read_corpus(stage(told), FILES, 0)
    assert [(said(docs), weight) for docs, weight in corpus.sources] == [
        (["one", "two"], 3.0),
        (["def area(a, b):\n    return a * b\n"], 1.0),
    ]
    assert all(isinstance(docs.tokens_N, np.memmap) for docs, _ in corpus.sources)
    assert len(corpus.heldout.ends_D) == 0

    with monkeypatch.context() as patch:
        patch.setattr("etude.tasks.sources.texts", None)  # the files are not read again
        assert read_corpus(stage(told), FILES, 0).about == corpus.about
    write(tmp_path / "a.jsonl", ["one", "two", "three"])
    assert read_corpus(stage(told), FILES, 0).about != corpus.about


def test_of_two_that_write_the_same_tokens_either_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.jsonl", ["one", "two"])
    told = stage(f'sources = [{{path = "{tmp_path}/a.jsonl"}}]')
    rename, others = Path.rename, []

    def outrun(self: Path, target: Path) -> Path:
        shutil.copytree(self, target)
        (target / "digest").write_text("of the other")
        others.append(target)
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", outrun)
        (docs, _), *_ = read_corpus(told, FILES, 0).sources
    assert said(docs) == ["one", "two"]
    (folder,) = (tmp_path / "cache").rglob("digest")
    assert [folder.parent] == others and folder.read_text() == "of the other"

    def fail(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    shutil.rmtree(folder.parent)
    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(
        EtudeError, match=r"cannot write the tokens of .* \(No space left on device\)"
    ):
        read_corpus(told, FILES, 0)


def test_a_share_is_held_out_by_content(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(200)]
    write(tmp_path / "a.jsonl", texts)
    write(tmp_path / "b.jsonl", texts[:100])  # copies: held out in both files
    told = (
        f'heldout_frac = 0.2\nsources = [{{path = "{tmp_path}/a.jsonl"}}, {{path = '
        f'"{tmp_path}/b.jsonl"}}]'
    )
    corpus = read_corpus(stage(told), FILES, 0)
    held, (a, b) = set(said(corpus.heldout)), (said(docs) for docs, _ in corpus.sources)
    assert 20 <= len(held) <= 60 and not held & {*a, *b} and held | set(a) == set(texts)
    assert set(b) == set(a) & set(texts[:100])


def test_a_held_out_codebase_is_left_out_of_every_source(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ["one", "two", "three"])
    (tmp_path / "exam").mkdir()
    (tmp_path / "exam" / "x.py").write_text("two")
    corpus = read_corpus(
        stage(f'heldout_path = "{tmp_path}/exam/*"\nsources = [{{path = "{tmp_path}/a.jsonl"}}]'),
        FILES,
        0,
    )
    assert said(corpus.sources[0][0]) == ["one", "three"] and said(corpus.heldout) == ["two"]


def test_the_built_in_corpus_can_be_mixed_and_held_out(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ["one", "two"])
    mixed = read_corpus(
        stage(f'sources = [{{path = "built-in"}}, {{path = "{tmp_path}/a.jsonl"}}]'), FILES, 0
    )
    assert len(mixed.sources[0][0].ends_D) == 50
    whole = read_corpus(stage("heldout_frac = 0.3"), FILES, 0)
    assert set(said(whole.heldout)).isdisjoint(said(whole.sources[0][0]))
    assert len(whole.heldout.ends_D) + len(whole.sources[0][0].ends_D) == 50


def test_nothing_to_train_on_and_nowhere_to_write_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.jsonl", ["", " "])
    told = f'sources = [{{path = "{tmp_path}/a.jsonl"}}]'
    with pytest.raises(EtudeError, match=r"a\.jsonl: no documents are left to train on"):
        read_corpus(stage(told), FILES, 0)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(EtudeError, match="cannot write the tokens of .* set XDG_CACHE_HOME"):
        read_corpus(stage(told), FILES, 0)


def test_a_mistake_leaves_no_half_written_cache(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{')
    told = f'sources = [{{path = "{tmp_path}/a.jsonl"}}]'
    with pytest.raises(EtudeError, match=r"a\.jsonl:2"):
        read_corpus(stage(told), FILES, 0)
    assert list(documents.cache().iterdir()) == []


def test_the_order_of_what_is_held_out_makes_no_other_rule(tmp_path: Path) -> None:
    exam = [f"document {number}" for number in range(1000)]
    write(tmp_path / "a.jsonl", ["one", "document 7"])
    told = stage(
        f'heldout_path = "{tmp_path}/exam.jsonl"\nsources = [{{path = "{tmp_path}/a.jsonl"}}]'
    )
    found = []
    for texts in (exam, exam[::-1]):
        write(tmp_path / "exam.jsonl", texts)
        assert said(read_corpus(told, FILES, 0).sources[0][0]) == ["one"]
        found.append({path.name for path in documents.cache().iterdir()})
    # the tokens of the source are found again, and only the held-out file is new
    assert len(found[0]) == 2 and len(found[1] - found[0]) == 1
