"""A distill stage in the trainer: sessions from the store, a teacher from a directory, the same
bits after a kill."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch

from etude.core.config import RunConfig, parse
from etude.core.errors import EtudeError
from etude.core.events import Event, StepDone
from etude.core.sampling import VersionSpan
from etude.core.types import Batch, Row
from etude.model.files import hf_state_dict, write_directory
from etude.model.transformer import ModelConfig
from etude.store.runs import Run
from etude.trainer.prepare import check_stage_files, store_files
from etude.trainer.trainer import Trainer
from tests.small_model import sharp, small_files
from tests.trainer.lives import live_briefly

STEPS = 4
FILES = small_files()


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    shape = ModelConfig.from_json(FILES["config.json"])
    write_directory(tmp_path / "teacher", FILES, hf_state_dict(sharp(shape, 1, factor=2.0)))
    text = (
        f'name = "d"\n[[stage]]\nkind = "distill"\nsteps = {STEPS}\nteacher = '
        f'"{tmp_path}/teacher"\n'
    )
    return parse(text, ["model.max_context=256", "trainer.checkpoint_every_s=0"])


def run_with_batches() -> Run:
    run, rng = Run.open("memory:"), Random(0)
    store_files(run, FILES)
    for step in range(1, STEPS + 1):
        rows = []
        for number in range(6):
            size = rng.randint(2, 9)
            tokens = tuple(rng.randrange(300) for _ in range(3 + size))
            said = (False,) * 3 + (True,) * size
            logps = tuple(-5.7 if counts else 0.0 for counts in said)
            rows.append(
                Row(
                    sample=f"g{step}.{number}",
                    tokens=tokens,
                    mask=said,
                    logprobs=logps,
                    advantages=tuple(map(float, said)),
                    versions=(VersionSpan(step - 1, size),),
                )
            )
        run.put_batch(Batch(step=step, rows=tuple(rows), oldest=step - 1))
    return run


def test_distill_goes_on_to_the_bit(config: RunConfig) -> None:
    events: list[Event] = []
    straight = Trainer(run_with_batches(), config, emit=events.append)
    straight.train()
    steps = [event for event in events if isinstance(event, StepDone)]
    assert [event.step for event in steps] == [1, 2, 3, 4]
    assert all(event.teacher_kl is not None and event.loss != 0.0 for event in steps)

    for kill in range(1, STEPS + 1):
        run = run_with_batches()
        live_briefly(run, config, steps=kill)
        resumed = Trainer(run, config, emit=lambda event: None)
        assert resumed.version == kill
        resumed.train()
        theirs = resumed.learner.state()
        assert all(
            torch.equal(theirs[name], tensor) for name, tensor in straight.learner.state().items()
        )


def test_a_teacher_must_be_there_and_speak_of_the_same_tokens(
    config: RunConfig, tmp_path: Path
) -> None:
    other = small_files(vocab_size=290)
    run = Run.open("memory:")
    store_files(run, other)
    with pytest.raises(EtudeError, match="has a different vocabulary from the student"):
        Trainer(run, config, emit=lambda event: None).train()
    run = Run.open("memory:")
    store_files(run, small_files(context=512))
    longer = config.model.model_copy(update={"max_context": 512})
    config = config.model_copy(update={"model": longer})
    with pytest.raises(EtudeError, match="has a context of 256 tokens, but sessions may have 512"):
        Trainer(run, config, emit=lambda event: None).train()
    (tmp_path / "teacher" / "model.safetensors").unlink()
    with pytest.raises(
        EtudeError, match=r"stage\.distill\.teacher = .* model\.safetensors missing"
    ):
        check_stage_files(config)


def test_what_a_later_stage_lacks_is_said_at_once() -> None:
    text = (
        'name = "x"\n[[stage]]\nkind = "midtrain"\nsteps = 1\n[[stage]]\nkind = "dpo"\npath = '
        '"nowhere/*.jsonl"\n'
    )
    with pytest.raises(EtudeError, match=r"nowhere/\*\.jsonl: no such file"):
        check_stage_files(parse(text))
