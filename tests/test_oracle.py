"""The real system with all its processes equals the simplest implementation in one file, to the
bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from etude.core.config import parse
from etude.core.events import EVENTS, StepDone
from etude.core.ledger import Dropped
from etude.model.files import write_directory
from etude.model.from_scratch import tokenizer_files
from etude.model.tokenizer import ChatTokenizer
from etude.model.transformer import ModelConfig, init_from_scratch
from etude.store.runs import Run
from etude.tasks.demos import demonstrations
from etude.tasks.factory import make_tasks
from etude.train.learner import Learner
from etude.train.packing import TokenSequence
from etude.trainer.data import tokenize
from examples.one_file_loop import run_oracle

ROOT = Path(__file__).parent.parent
TASKS = 3

TOML = f"""
name = "oracle"
deterministic = true

[model]
path = "PATH"

[tasks]
train = {TASKS}
heldout = 1
novel = 0

[harness]
max_turns = 4
max_tokens = 32

[engine]
regions = ["here"]
max_num_seqs = 1

[sandbox]
isolation = "process"

[[stage]]
kind = "rl"
steps = 3
groups_per_step = 2
group_size = 5
max_lag = 0
fresh_frac = 1.0
lr = 3e-4
"""


def half_trained(path: Path) -> None:
    """Train a small model that has nearly memorized one solution of every task except one. It
    succeeds sometimes, so there is something to learn; and it always fails at that one task, so
    that groups are dropped."""
    shown = sorted(demonstrations(make_tasks("train", TASKS, 0), 60, 0), key=len, reverse=True)
    shortest = list({session[0]["content"]: session for session in shown}.values())[1:]
    texts = [
        str(message["content"]) for session in shortest for message in session if message["content"]
    ]
    small = tokenizer_files(texts, vocab_size=400)
    tokenizer = ChatTokenizer(small)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        max_position_embeddings=512,
    )
    learner = Learner(init_from_scratch(config, 0))
    lesson = [TokenSequence(*row) for session in shortest for row in tokenize(session, tokenizer)]
    while learner.supervised_step(lesson, lr=3e-3).loss > 0.012:
        pass
    write_directory(path, small | {"config.json": config.to_json().encode()}, learner.weights())


@pytest.mark.e2e
def test_the_real_system_has_the_losses_of_the_oracle_to_the_bit(tmp_path: Path) -> None:
    half_trained(tmp_path / "model")
    text, directory = TOML.replace("PATH", str(tmp_path / "model")), tmp_path / "run"
    (tmp_path / "run.toml").write_text(text)
    argv = [
        sys.executable,
        "-m",
        "etude",
        "run",
        str(tmp_path / "run.toml"),
        "--dir",
        str(directory),
    ]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    run = Run.open(f"file:{directory}", create=False)
    steps = [
        event for event in run.events("trainer", EVENTS).records() if isinstance(event, StepDone)
    ]

    assert [step.loss for step in steps] == run_oracle(parse(text))

    # The comparison is meaningful: the losses differ, there were groups without signal, and
    # decoding and learning nearly agree.
    assert len({step.loss for step in steps}) == 3
    assert any(
        isinstance(entry, Dropped) and entry.reason == "no_signal" for entry in run.ledger.records()
    )
    assert all(step.k3_p99 < 1e-8 for step in steps)
