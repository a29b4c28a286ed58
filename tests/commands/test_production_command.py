"""Recordings of production mode as training data that the stages read exactly, and the deletion of
users, also from exports."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from etude.cli import main
from etude.commands.production import read_trajectories
from etude.core.advantage import to_rows
from etude.core.errors import EtudeError
from etude.core.recorded import RecordedTurn
from etude.core.stages import DpoConfig, SftConfig
from etude.core.types import Batch
from etude.model.transformer import ModelConfig, init_from_scratch
from etude.serve.production.config import read_user_key
from etude.store.objects import Objects
from etude.store.production import ProductionStore
from etude.store.rollouts import RolloutLog
from etude.train import stages
from etude.train.learner import Learner
from etude.trainer.data import read_preferences, read_sessions
from tests.serve.producing import KEY, production
from tests.serve.scripted import FILES, TOKENIZER, call
from tests.serve.test_production import TOOLS

SAID = ["Good. " + call("edit", line=3), "Done.", "Bad.", "Fine."]


@pytest.fixture
async def recorded(tmp_path: Path) -> AsyncIterator[Path]:
    """The configuration file of a production mode that has recorded two users."""
    (tmp_path / "user.key").write_text(KEY.hex())
    file = tmp_path / "production.toml"
    file.write_text('user_key_file = "user.key"\nstore = "store"\n')
    async with (
        aiohttp.ClientSession() as http,
        production(http, str(tmp_path / "store"), SAID) as made,
    ):
        first = await made.say("fix it", "one", tools=TOOLS)
        history: list[Any] = [
            {"role": "user", "content": "fix it"},
            first["choices"][0]["message"],
            {"role": "tool", "tool_call_id": "x", "content": "ok"},
        ]
        second = await made.ask(history, "one", tools=TOOLS)
        bad = await made.say("fix it", "two", tools=TOOLS)
        bob = {"X-Etude-User": "bob", "X-Etude-Consent": "granted"}
        other = await made.say("mail bob@example.com", "one", headers=bob)
        for answer, kind in ((first, "accepted"), (second, "kept_commit"), (bad, "thumbs_down")):
            await made.feedback(event=answer["id"], completion=answer["id"], kind=kind)
        await made.feedback(bob, event="1", completion=other["id"], kind="tip")
    yield file


def etude(*argv: object) -> int:
    return main(["production", *map(str, argv)])


def turns_of(file: Path) -> list[RecordedTurn]:
    store = ProductionStore(Objects.open(str(file.parent / "store")))
    return [turn for session in store.sessions().sessions for turn in session.turns]


def learner() -> Learner:
    return Learner(init_from_scratch(ModelConfig.from_json(FILES["config.json"]), 0))


def changed(one: Learner) -> bool:
    fresh = learner().weights()
    return any(not tensor.equal(fresh[name]) for name, tensor in one.weights().items())


async def test_every_export_trains(recorded: Path, tmp_path: Path) -> None:
    sft, dpo, rl = tmp_path / "sft.jsonl", tmp_path / "dpo.jsonl", tmp_path / "rl"
    for kind, target in (("sft", sft), ("dpo", dpo), ("rl", rl)):
        assert etude("export", recorded, "--for", kind, target) == 0

    sessions = read_sessions(str(sft), TOKENIZER, 4096, "error")
    lines = [json.loads(line) for line in sft.read_text().splitlines()]
    # The stage reads the very tokens that were recorded, or messages if they have other ids.
    exact = [(line["tokens"], line["mask"]) for line in lines]
    assert sorted((*sessions.train, *sessions.heldout)) == sorted(exact)
    (sampled,) = [t.sampled for t in turns_of(recorded) if t.messages[-1]["content"] == "Done."]
    assert any(tuple(tokens[-len(sampled) :]) == sampled for tokens, _ in exact)
    foreign = sft.read_text().replace(TOKENIZER.vocabulary, "another")
    (tmp_path / "foreign.jsonl").write_text(foreign)
    rendered = read_sessions(str(tmp_path / "foreign.jsonl"), TOKENIZER, 4096, "error")
    assert len((*rendered.train, *rendered.heldout)) == len(exact)
    (tmp_path / "wrong.jsonl").write_text(sft.read_text().replace('"mask": [false', '"mask": [1'))
    with pytest.raises(EtudeError, match=r"wrong\.jsonl:1: tokens and mask are invalid"):
        read_sessions(str(tmp_path / "wrong.jsonl"), TOKENIZER, 4096, "error")
    tuned = learner()
    config = SftConfig(kind="sft", path=str(sft), max_epochs=1)
    assert stages.sft(tuned, config, sessions.train, sessions.heldout, seed=0)
    assert changed(tuned)

    pairs, _ = read_preferences(str(dpo), TOKENIZER, 4096, "error")
    assert len(pairs) == 1
    preferred = learner()
    given = DpoConfig(kind="dpo", path=str(dpo), lr=1e-3, warmup_steps=0)
    stages.dpo(preferred, given, pairs, seed=0)
    assert changed(preferred)

    found = read_trajectories(rl)
    assert {t.source for t in found} == {"production"} and len(found) == 2
    assert sorted(t.reward or 0 for t in found) == [-1.0, 0.625]
    (row, *_) = RolloutLog(Objects.open(str(rl))).rows()
    assert (row.kind, row.source, row.policy) == ("production", "production", "mine")
    reinforced = learner()
    batch = [row for t in found for row in to_rows(t, t.reward or 0.0)]
    reinforced.rl_step(Batch(step=1, rows=tuple(batch), oldest=0), lr=1e-3)
    assert changed(reinforced)


async def test_a_deleted_user_is_taken_out_of_copies(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sft, rl = tmp_path / "sft.jsonl", tmp_path / "rl"
    etude("export", recorded, "--for", "sft", sft)
    etude("export", recorded, "--for", "rl", rl)
    # An answer may contain this: in JSON it does not end a line.
    sft.write_text(sft.read_text().replace('"content": "', '"content": "\u2028'))
    before = sft.read_text().count("\n")
    assert etude("delete", recorded, "--user", "alice@example.com") == 0
    assert "0 name the user" in capsys.readouterr().out
    assert etude("purge", recorded, sft, rl) == 0
    assert sft.read_text().count("\n") == before - 1 == 1
    assert not read_trajectories(rl)
    assert b"fix it" not in b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    assert etude("status", recorded) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 users, 1 sessions, 1 answers")
    assert etude("sweep", recorded) == 0


async def test_a_copy_with_line_ends_in_its_texts_is_purged(recorded: Path, tmp_path: Path) -> None:
    """Unicode's line separators, which JSON leaves unescaped."""
    sft = tmp_path / "sft.jsonl"
    etude("export", recorded, "--for", "sft", sft)
    text = sft.read_text().replace("fix it", "fix\u2028it\x85now")
    sft.write_text(text)
    assert etude("purge", recorded, sft) == 0
    assert sft.read_text() == text
    assert etude("delete", recorded, "--user", "alice@example.com") == 0
    assert etude("purge", recorded, sft) == 0
    assert "fix" in text and "fix" not in sft.read_text()


async def test_what_cannot_be_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "production.toml"

    def told(text: str) -> str:
        file.write_text(text)
        assert etude("status", file) == 2
        return capsys.readouterr().err

    assert "user_key_file" in told("sampling_rate = 1.0")
    assert "sampling_rate must be between 0 and 1" in told(
        'user_key_file = "k"\nsampling_rate = 2.0'
    )
    assert "no such kind" in told('user_key_file = "k"\n[redaction]\nkinds = ["mail"]')
    assert "retention" in told('user_key_file = "k"\nretention = 3')
    assert "has no store" in told('user_key_file = "k"')
    (tmp_path / "store").mkdir()
    assert "has no readable pseudonym key" in told('user_key_file = "k"\nstore = "store"')
    key = read_user_key(tmp_path / "k", create=True)
    assert read_user_key(tmp_path / "k", create=True) == key and len(key) == 32
    assert (tmp_path / "k").stat().st_mode & 0o077 == 0
