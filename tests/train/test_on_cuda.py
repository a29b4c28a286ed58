"""The trainer on a CUDA device: the curve of the CPU, and the same bits again after a stop.

CI has no such device; `python -m pytest tests/train/test_on_cuda.py` where there is one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from etude.run.trainer import Trainer
from etude.train.learner import Learner
from etude.train.ranks import ALONE
from tests.run.lives import STAGES, fingerprint, live_briefly, prepared
from tests.train import ranks_work
from tests.train.test_learner import CONFIG, batch, equal, fresh, texts, through_bytes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_it_has_the_curve_of_the_cpu() -> None:
    here, there = (ranks_work.train_all(ALONE, 5, device) for device in ("cpu", "cuda"))
    for case, own in here.items():
        for a, b in zip(own.steps, there[case].steps, strict=True):
            assert b.loss == pytest.approx(a.loss, rel=1e-4, abs=1e-5), case
            assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-3), case
            assert b.drift.k3 == pytest.approx(a.drift.k3, rel=1e-3), case
        assert there[case].exam == pytest.approx(own.exam, rel=1e-4)
        for name, whole in own.state.items():
            np.testing.assert_allclose(there[case].state[name], whole, rtol=1e-2, atol=1e-4, err_msg=f"{case} {name}")


def test_a_state_goes_on_to_the_bit_and_to_the_other_kind_of_device() -> None:
    first = Learner(fresh(CONFIG, 0).to("cuda"))
    first.fit(texts(0), lr=1e-3)
    first.keep()
    first.step(batch(1), lr=1e-3, microbatch_tokens=0)
    state = through_bytes(first.state())
    second, on_cpu = Learner(fresh(CONFIG, 1).to("cuda")), Learner(fresh(CONFIG, 1))
    second.load_state(state)
    on_cpu.load_state(state)
    stats = [one.step(batch(2), lr=1e-3, microbatch_tokens=0) for one in (first, second, on_cpu)]
    assert stats[0] == stats[1] and stats[2].loss == pytest.approx(stats[0].loss, rel=1e-4)
    assert equal(first.state(), second.state())
    second.recall()
    assert second.weights()["model.norm.weight"].is_cuda


@pytest.mark.parametrize("kind", STAGES)
def test_a_stage_that_was_stopped_has_the_hash_of_one_that_was_not(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr("etude.run.trainer.CHECKPOINT_S", 0.0)
    whole, stopped = (prepared(tmp_path / name, kind) for name in ("whole", "stopped"))
    live_briefly(stopped, stopped.config(), steps=7, device="cuda")
    for run in (whole, stopped):
        trainer = Trainer(run, run.config(), lambda event: None, device=torch.device("cuda"))
        trainer.train()
        trainer.close()
    assert fingerprint(stopped) == fingerprint(whole)
