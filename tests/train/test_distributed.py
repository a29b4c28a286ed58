"""Several ranks against one: the same curve, the same weights, and an error with a name when one of
them is lost.

A longer curve: ETUDE_STEPS=20 python -m pytest tests/train/test_distributed.py
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from etude.core.errors import EtudeError
from etude.train import distributed
from etude.train.distributed import SINGLE_PROCESS, RankLiveness, World, shard_rows
from tests.train import distributed_work
from tests.train.distributed_work import Curve, joined
from tests.train.together import together

STEPS = int(os.environ.get("ETUDE_STEPS", "5"))


@pytest.fixture(scope="module")
def one() -> dict[str, Curve]:
    return distributed_work.train_all(SINGLE_PROCESS, STEPS)


@pytest.fixture(scope="module")
def two() -> list[dict[str, Curve]]:
    return together(2, distributed_work.train_all, STEPS)


@pytest.fixture(scope="module")
def four() -> list[dict[str, Curve]]:
    return together(4, distributed_work.train_all, STEPS)


@pytest.mark.parametrize("many", ["two", "four"])
def test_ranks_have_the_loss_curve_of_one(
    one: dict[str, Curve], many: str, request: pytest.FixtureRequest
) -> None:
    first, *others = request.getfixturevalue(many)
    for case, alone in one.items():
        assert len({stats.loss for stats in alone.steps}) == STEPS
        times = 100 if case == "hybrid" else 1  # a norm magnifies a nearly empty read
        for a, b in zip(alone.steps, first[case].steps, strict=True):
            assert b.loss == pytest.approx(a.loss, rel=times * 1e-6), case
            assert b.entropy == pytest.approx(a.entropy, rel=times * 1e-6), case
            assert b.mismatch.k3_p99 == pytest.approx(a.mismatch.k3_p99, rel=times * 1e-5), case
            assert b.grad_norm == pytest.approx(a.grad_norm, rel=times * 1e-5), case
        assert first[case].exam == pytest.approx(alone.exam, rel=times * 1e-6)
        for other in others:
            assert other[case].steps == first[case].steps and other[case].exam == first[case].exam


def test_what_ranks_hold_makes_up_the_whole(
    one: dict[str, Curve], four: list[dict[str, Curve]]
) -> None:
    for case, alone in one.items():
        shards = [rank[case].state for rank in four]
        for name, whole in alone.state.items():
            parts = [shard[name] for shard in shards]
            found = np.concatenate(parts) if whole.ndim else parts[0]
            np.testing.assert_allclose(found, whole, rtol=1e-3, atol=2e-6, err_msg=f"{case} {name}")
            if whole.ndim:
                assert [len(part) for part in parts] == [
                    len(range(len(whole))[shard_rows(len(whole), rank, 4)]) for rank in range(4)
                ]
        union = joined([rank[case] for rank in four])
        assert union.keys() == alone.rows.keys()
        for name, (_, rows) in alone.rows.items():
            np.testing.assert_allclose(
                union[name], rows, rtol=1e-3, atol=2e-6, err_msg=f"{case} {name}"
            )


def test_another_number_of_ranks_goes_on(
    one: dict[str, Curve], four: list[dict[str, Curve]]
) -> None:
    """Four ranks saved; one and two continue with the same weights, and take the same step up to
    the order of sums."""
    case = "moe"
    states = [rank[case].state for rank in four]
    alone = distributed_work.resume(SINGLE_PROCESS, states, "moe", "muon")
    pair = together(2, distributed_work.resume, states, "moe", "muon")
    saved = joined([rank[case] for rank in four])
    for weights in (joined([alone]), joined(pair)):
        assert weights.keys() == saved.keys()
        assert all(np.array_equal(weights[name], saved[name]) for name in weights)
    assert pair[0].steps[0].loss == pytest.approx(alone.steps[0].loss, rel=1e-6)
    assert pair[0].steps == pair[1].steps


def test_ranks_split_the_masters_of_their_rows() -> None:
    for split, whole, loaded in together(3, distributed_work.in_halves):
        for name, found in split.items():
            np.testing.assert_array_equal(found, whole[name], err_msg=name)
            np.testing.assert_array_equal(found, loaded[name], err_msg=name)


def test_a_rank_that_dies_in_a_step_is_named_by_the_others() -> None:
    victim = 1
    began = time.monotonic()
    outcomes = together(3, distributed_work.die_in_step, victim)
    assert time.monotonic() - began < 60
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert outcome == "ended with -9"
        else:
            assert f"rank {victim} of 3 cannot be reached" in str(outcome)
            assert f"rank {rank} stops at step 3 of rl" in str(outcome)


def test_somebody_who_is_missing_is_not_waited_for_longer_because_others_ask_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank that hangs ends some time after the first check in which a rank was missing."""
    now, store = [0.0], dict[str, str]()

    class Ended:
        def wait(self, seconds: float) -> bool:
            now[0] += seconds
            number = int(now[0] // distributed.LIVENESS_S)
            store.update({f"call {n}": "" for n in range(number)})
            return now[0] > 100 * distributed.LIVENESS_S

    shared = SimpleNamespace(
        check=lambda keys: all(key in store for key in keys), set=store.__setitem__
    )
    monkeypatch.setattr(distributed.threading, "Thread", lambda **told: SimpleNamespace(start=str))
    monkeypatch.setattr(distributed.threading, "Event", Ended)
    monkeypatch.setattr(distributed.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(distributed.os, "_exit", sys.exit)
    check = RankLiveness(shared, World(rank=0, world_size=2))  # type: ignore[arg-type]
    with pytest.raises(SystemExit, match="2"):
        check._answer()
    assert 3 * distributed.LIVENESS_S <= now[0] < 4 * distributed.LIVENESS_S
    assert "rank 1 of 2 cannot be reached" in capsys.readouterr().err
    assert "here 0 0" in store


def test_a_store_that_is_gone_was_kept_by_rank_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone(*told: object) -> None:
        raise RuntimeError("connection reset by peer")

    monkeypatch.setattr(distributed.threading, "Thread", lambda **told: SimpleNamespace(start=str))
    monkeypatch.setattr(distributed, "POLL_S", 0.0)
    monkeypatch.setattr(distributed.os, "_exit", sys.exit)
    store = SimpleNamespace(add=gone, set=gone, check=gone)
    check = RankLiveness(store, World(rank=1, world_size=2))  # type: ignore[arg-type]
    assert check.missing_ranks() == [0]
    with pytest.raises(SystemExit, match="2"):
        check._answer()
    assert "rank 0 of 2 cannot be reached" in capsys.readouterr().err


def test_a_rank_is_waited_for_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store serves all ranks, and they need the processor too."""
    now, asked = [0.0], []

    class Clock:
        def monotonic(self) -> float:
            now[0] += 1e-3
            return now[0]

        def sleep(self, seconds: float) -> None:
            now[0] += seconds

    def check(keys: list[str]) -> bool:
        asked.append(keys)
        return keys == ["here 6 0"]

    monkeypatch.setattr(distributed.threading, "Thread", lambda **told: SimpleNamespace(start=str))
    monkeypatch.setattr(distributed, "time", Clock())
    store = SimpleNamespace(add=lambda key, one: 7, set=lambda key, value: None, check=check)
    watchdog = RankLiveness(store, World(rank=0, world_size=2))  # type: ignore[arg-type]
    assert watchdog.missing_ranks() == [1]
    assert now[0] >= distributed.LIVENESS_S
    assert len(asked) < 300  # a few times a second, for two ranks


def test_a_check_that_is_closed_answers_nobody_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "POLL_S", 0.001)
    store = SimpleNamespace(check=lambda keys: False)
    check = RankLiveness(store, World(rank=0, world_size=2))  # type: ignore[arg-type]
    assert check._thread.is_alive()
    check.close()
    assert not check._thread.is_alive()


def test_a_rank_that_stays_alone_gives_up_when_it_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(EtudeError, match="rank 0 of 2 could not connect to all others within 0 s"):
        World.on_one_machine(0, 2, tmp_path / "rendezvous", timeout_s=0.1)
