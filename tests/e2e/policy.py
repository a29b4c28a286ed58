"""A model directory to start tiny runs from, taught the few training tasks of such a run until it
solves some.

python -m tests.e2e.policy DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from etude.core.config import RunConfig, parse
from etude.core.stages import SftConfig
from etude.model.files import write_directory
from etude.model.tokenizer import ChatTokenizer
from etude.model.transformer import ModelConfig, init_from_scratch
from etude.tasks.demos import demonstrations
from etude.tasks.factory import make_tasks
from etude.train.learner import Learner
from etude.train.stages import sft
from etude.trainer.data import tokenize
from etude.trainer.prepare import scratch_files

SHAPE = """
name = "policy"
[model]
hidden_size = 64
num_layers = 2
num_heads = 2
num_kv_heads = 1
intermediate_size = 128
max_context = 320
[[stage]]
kind = "rl"
steps = 1
"""


def write_policy(directory: Path, run: RunConfig, *, epochs: int = 8) -> None:
    files = scratch_files(parse(SHAPE))
    tokenizer = ChatTokenizer(files)
    tasks = make_tasks("train", run.tasks.train, run.seed)
    sessions = [
        row
        for session in demonstrations(tasks, 60, run.seed)
        for row in tokenize(session, tokenizer)
    ]
    learner = Learner(init_from_scratch(ModelConfig.from_json(files["config.json"]), seed=0))
    # The held-out sessions are the training sessions: the model is to memorize these tasks.
    stage = SftConfig(
        kind="sft",
        name="sft",
        demonstrations=60,
        max_epochs=epochs,
        patience=epochs,
        batch_tokens=640,
        lr=5e-3,
    )
    sft(learner, stage, sessions, sessions[:4], seed=0)
    write_directory(directory, files, learner.weights())


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_policy(Path(sys.argv[1]), parse((Path(__file__).parent / "tiny.toml").read_text()))
