"""The split of GPUs between trainer and engines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from etude.core.placement import GPUS, Gpu, ModelSize, Workload, decode_s, plan_placement

H200 = GPUS["h200"]
DENSE = ModelSize(parameters=8e9, active=8e9, kv_bytes=147e3)
SPARSE = ModelSize(parameters=1.04e12, active=32e9, kv_bytes=70e3, weight_bytes=1)
WORK = Workload(
    sessions=128, turns=10, sampled=4000, read=6000, tool_s=20.0, max_lag=2, max_num_seqs=64
)


def test_all_gpus_are_used_and_the_model_fits() -> None:
    for gpus in (4, 8, 16, 64, 1000):
        found = plan_placement(DENSE, WORK, H200, gpus)
        assert found.trainer_gpus + found.engines * found.engine_gpus == gpus
        assert max(found.trainer_bytes, found.engine_bytes) <= H200.memory_bytes
        assert not found.colocated and found.step_s >= max(found.train_s, found.rollout_s)


def test_a_session_takes_longer_the_more_it_samples_reads_and_waits() -> None:
    without_cache = replace(DENSE, kv_bytes=0)

    def session_s(**change: float) -> float:
        work = replace(WORK, **change)  # type: ignore[arg-type]
        return plan_placement(without_cache, work, H200, 16).session_s

    assert session_s(tool_s=50.0) == pytest.approx(session_s() + 30.0)
    assert session_s(read=16000) > session_s() > session_s(read=0)
    once, twice = session_s(read=0, tool_s=0.0), session_s(read=0, tool_s=0.0, sampled=8000)
    assert twice == pytest.approx(2 * once)


def test_no_other_split_is_faster() -> None:
    found = plan_placement(DENSE, WORK, H200, 16)
    fewer = [plan_placement(DENSE, WORK, H200, gpus).step_s for gpus in range(2, 16)]
    assert found.step_s <= min(fewer)
    assert 0.3 < found.train_s / found.rollout_s < 3.0, "both sides work about as long"


def test_one_gpu_is_shared_in_turns() -> None:
    small = replace(DENSE, parameters=1e9, active=1e9)
    found = plan_placement(small, WORK, H200, 1)
    assert found.colocated and found.step_s == found.train_s + found.rollout_s
    assert "take turns" in found.advice[0]


def test_a_model_that_does_not_fit_is_told_with_what_it_needs() -> None:
    with pytest.raises(ValueError, match=r"8 GPUs are too few: training needs 139 .*an engine 16"):
        plan_placement(SPARSE, replace(WORK, sampled=24000, read=40000), H200, 8)


def test_engines_come_in_powers_of_two_and_sparse_models_read_all_their_experts() -> None:
    found = plan_placement(SPARSE, WORK, H200, 1000)
    assert found.engine_gpus == 16
    one, many = (decode_s(SPARSE, WORK, H200, 16, seqs) for seqs in (1, 64))
    assert 20 < many / one < 64, "a single request reads only its own experts"


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ({"sampled": 40000, "read": 100}, "GPUs for each of the trainer"),
        ({"sessions": 1, "max_lag": 0}, "the trainer is busy"),
        ({"tool_s": 5000.0}, "raise max_lag"),
    ],
)
def test_what_to_change_is_told(change: dict[str, int], advice: str) -> None:
    found = plan_placement(DENSE, replace(WORK, **change), H200, 16)
    assert any(advice in each for each in found.advice), found.advice


def test_a_split_that_so_few_gpus_cannot_have_is_not_asked_for() -> None:
    found = plan_placement(DENSE, replace(WORK, sampled=40000, read=100), H200, 3)
    assert "that takes 4" in found.advice[0] and "shorten" not in found.advice[0]


def test_activations_that_do_not_fit_are_told() -> None:
    large = replace(DENSE, activation_bytes=H200.memory_bytes)
    found = plan_placement(large, WORK, H200, 16)
    assert "the trainer needs" in found.advice[0] and "microbatch_tokens" in found.advice[0]
    assert not any("wants" in each for each in plan_placement(DENSE, WORK, H200, 16).advice)


ROUND = Gpu(memory_bytes=100e9, flops=1e15, bandwidth=1e12)
SMALL = ModelSize(parameters=1e9, active=1e9, kv_bytes=1e3)
SHORT = Workload(
    sessions=10, turns=4, sampled=100, read=300, tool_s=20.0, max_lag=1, max_num_seqs=8
)


def test_a_token_takes_what_is_read_or_what_is_computed() -> None:
    reading = (2e9 + 8 * 200 * 1e3) / (0.6 * 1e12)
    assert decode_s(SMALL, SHORT, ROUND, 1, 8) == pytest.approx(reading)
    assert decode_s(SMALL, SHORT, ROUND, 2, 8) == pytest.approx(reading / 2)
    quick = replace(ROUND, bandwidth=1e20)
    assert decode_s(SMALL, SHORT, quick, 1, 8) == pytest.approx(2 * 1e9 * 8 / (0.4 * 1e15))


def test_a_plan_by_hand() -> None:
    found = plan_placement(SMALL, SHORT, ROUND, 2)
    token_s, read_s = decode_s(SMALL, SHORT, ROUND, 1, 8), 300 * 2e9 / (0.5 * 1e15)
    assert (found.gpus, found.trainer_gpus, found.engines, found.engine_gpus) == (2, 1, 1, 1)
    assert (found.seqs, found.ratio, found.colocated) == (8, 1.0, False)
    assert found.train_s == pytest.approx(6e9 * 10 * 400 / (0.35 * 1e15))
    assert found.rollout_s == pytest.approx(10 * (100 * token_s / 8 + read_s))
    assert found.session_s == pytest.approx(100 * token_s + 8 * read_s + 20.0)
    assert found.turn_s == pytest.approx((found.session_s - 20.0) / 4)
    assert found.step_s == pytest.approx(found.session_s / 2), "two steps' sessions are under way"
    assert found.trainer_bytes == pytest.approx(16e9)
    assert found.engine_bytes == pytest.approx(2e9 + 8 * 400 * 1e3)
    assert (found.gpu_bytes, found.activation_bytes) == (100e9, 0.0)


def test_an_engine_decodes_as_many_requests_as_its_memory_holds() -> None:
    large = replace(SMALL, kv_bytes=50e6)
    found = plan_placement(large, SHORT, ROUND, 2)
    assert (found.engine_gpus, found.seqs) == (1, 4), "(85 - 2) / (400 * 0.05) GB"
    assert found.engine_bytes == pytest.approx(2e9 + 4 * 400 * 50e6)
    larger = plan_placement(replace(large, kv_bytes=52e6), SHORT, ROUND, 3)
    assert larger.engine_gpus == 2, "a few whole sessions fit in any case"


def test_trainers_of_large_fleets_come_in_whole_machines() -> None:
    work = replace(SHORT, sessions=100_000)
    assert all(plan_placement(SMALL, work, ROUND, n).trainer_gpus % 8 == 0 for n in (17, 24, 100))
    assert plan_placement(SMALL, work, ROUND, 16).trainer_gpus % 8
    # so large that the trainer needs more than one machine
    huge = replace(SMALL, parameters=40e9, active=1e9)
    assert plan_placement(huge, SHORT, ROUND, 24).trainer_gpus == 16
