"""Advantages, with numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.core.advantage import (
    ADVANTAGE,
    AdvantageEstimator,
    GroupAdvantages,
    constant_advantage,
    dr_grpo,
    grpo,
    oldest_version,
    rloo,
    self_imitation,
    to_rows,
    unit_std,
)
from etude.core.effort import Effort
from etude.core.sampling import (
    SamplingParams,
    SamplingSpan,
    VersionSpan,
    expand_spans,
    version_spans,
)
from etude.core.types import Batch, Credit, Group, Score, Segment, Trajectory, turns
from etude.run.loop import assemble_batch


def segment(first_version: int = 1) -> Segment:
    """Two prompt tokens; the policy samples 12, the harness inserts 13, the policy samples 14 and
    15."""
    return Segment(
        prompt=(10, 11),
        tokens=(12, 13, 14, 15),
        mask=(True, False, True, True),
        logprobs=(-1.0, 0.0, -2.0, -3.0),
        versions=(VersionSpan(first_version, 1), VersionSpan(first_version + 1, 2)),
        experts=None,
    )


def group(*rewards: float | None) -> Group:
    attempts = tuple(
        Trajectory(
            id=f"g.{i}",
            task="t",
            group="g",
            segments=(segment(),),
            score=None if reward is None else Score(reward),
            status="failed" if reward is None else "done",
        )
        for i, reward in enumerate(rewards)
    )
    return Group(id="g", task="t", slot=0, admitted=0, trajectories=attempts)


def test_centered() -> None:
    assert dr_grpo([1.0, 0.0, 0.0, 0.0]) == [0.75, -0.25, -0.25, -0.25]


def test_praise_passes_over_what_is_below_the_mean() -> None:
    assert self_imitation([1.0, 0.0, 0.0, 0.0]) == [0.75, 0.0, 0.0, 0.0]
    assert self_imitation([1.0, 1.0, 1.0, 0.0]) == [0.25, 0.25, 0.25, 0.0]


def test_leave_one_out() -> None:
    assert rloo([1.0, 0.0, 0.5]) == [1.0 - 0.25, 0.0 - 0.75, 0.5 - 0.5]
    assert rloo([1.0]) == [0.0]


def test_std_normalised() -> None:
    assert grpo([1.0, 0.0]) == [1.0, -1.0]
    # mean 0.25, deviation sqrt(3) / 4
    assert grpo([1.0, 0.0, 0.0, 0.0]) == pytest.approx([3**0.5, *[-(3**-0.5)] * 3])
    assert grpo([0.0, 1e-200]) == [0.0, 0.0], "a difference that is lost in rounding is none"


@pytest.mark.parametrize("unit", [1.0, 1e-6, 1e6])
def test_what_the_docs_say_of_the_credits_of_trl(unit: float) -> None:
    """The deviation is computed with n, with nothing added: the unit of rewards does not matter,
    and the result is 7 % larger than with n - 1 for 8 attempts."""
    rewards = [unit * reward for reward in (1, 0, 0, 1, 0, 0.5, 0, 0)]
    theirs = [advantage / stdev(rewards) for advantage in dr_grpo(rewards)]
    assert grpo(rewards) == pytest.approx([math.sqrt(8 / 7) * advantage for advantage in theirs])
    assert math.sqrt(8 / 7) == pytest.approx(1.07, abs=0.005)
    # One task is nearly always solved, the other hardly ever. The distance between them sets no
    # scale.
    batch = [
        *dr_grpo([unit, 0.0, 0.0, 0.0]),
        *dr_grpo([100 * unit, 99 * unit, 100 * unit, 100 * unit]),
    ]
    assert unit_std(batch) == pytest.approx(1 / (unit * math.sqrt(0.1875)))


def test_a_batch_of_unit_deviation() -> None:
    """One factor for all groups: the overall deviation becomes 1, and a group of small rewards
    stays small."""
    advantages = [*dr_grpo([1.0, 0.0]), *dr_grpo([0.1, 0.0])]
    factor = unit_std(advantages)
    assert factor == pytest.approx(1 / ((2 * 0.25 + 2 * 0.0025) / 4) ** 0.5)
    scaled = [factor * advantage for advantage in advantages]
    assert sum(a * a for a in scaled) / 4 == pytest.approx(1.0) and scaled[0] == pytest.approx(
        10 * scaled[2]
    )


@pytest.mark.parametrize("estimator", ADVANTAGE.values(), ids=ADVANTAGE.keys())
def test_what_every_credit_must_do(estimator: AdvantageEstimator) -> None:
    result = estimator.per_group([0.0, 1.0, 0.25, 1.0])
    assert result[1] == result[3] == max(result) > 0 and result[0] == min(result)
    assert estimator.batch_scale(result) > 0


@pytest.mark.parametrize("within", [dr_grpo, rloo, grpo])
def test_a_credit_without_bias_adds_up_to_nothing(within: GroupAdvantages) -> None:
    assert sum(within([0.0, 1.0, 0.25, 1.0])) == pytest.approx(0.0)


@pytest.mark.parametrize("estimator", ADVANTAGE.values(), ids=ADVANTAGE.keys())
def test_a_failed_attempt_is_no_zero_and_changes_nothing_for_the_others(
    estimator: AdvantageEstimator,
) -> None:
    with_failures, without = (
        estimator.estimate(group(1.0, None, 0.0, 0.5, None)),
        estimator.estimate(group(1.0, 0.0, 0.5)),
    )
    assert list(with_failures.advantages.values()) == list(without.advantages.values())
    assert with_failures.failed == ("g.1", "g.4") and without.failed == ()


def test_an_attempt_that_said_nothing_is_left_out() -> None:
    full = group(1.0, 0.0)
    silent = Trajectory(
        id="g.2", task="t", group="g", segments=(), score=Score(0.0), status="timeout"
    )
    outcome = AdvantageEstimator().estimate(
        replace(full, trajectories=(*full.trajectories, silent))
    )
    assert outcome.advantages == {"g.0": 0.5, "g.1": -0.5} and outcome.failed == ("g.2",)


@pytest.mark.parametrize(
    "rewards", [(1.0, 1.0, 1.0), (0.0, None, 0.0), (None, None), (1.0,), (1.0, None), ()]
)
def test_a_group_without_a_difference_teaches_nothing(rewards: tuple[float | None, ...]) -> None:
    outcome = AdvantageEstimator().estimate(group(*rewards))
    assert outcome.advantages == {} and outcome.malformed == {}
    assert len(outcome.no_signal) + len(outcome.failed) == len(rewards)


@pytest.mark.parametrize("estimator", ADVANTAGE.values())
def test_rounding_is_no_difference(estimator: AdvantageEstimator) -> None:
    """The same three scores, added up in two orders."""
    outcome = estimator.estimate(group(0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1))
    assert 0.1 + 0.2 + 0.3 != 0.3 + 0.2 + 0.1
    assert outcome.advantages == {} and outcome.no_signal == ("g.0", "g.1")
    assert estimator.estimate(group(0.0, 1e-12)).advantages


def test_every_attempt_has_one_fate() -> None:
    outcome = ADVANTAGE["self_imitation"].estimate(group(1.0, None, 0.0, math.nan, 1.0))
    assert (set(outcome.advantages), outcome.passed_over, outcome.failed) == (
        {"g.0", "g.4"},
        ("g.2",),
        ("g.1",),
    )
    assert outcome.malformed == {"g.3": "its reward is nan"}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1.7e308])
def test_a_reward_that_is_not_finite_changes_nothing_for_the_others(bad: float) -> None:
    outcome = AdvantageEstimator().estimate(group(1.0, bad, 0.0))
    assert outcome.advantages == {"g.0": 0.5, "g.2": -0.5} and outcome.malformed == {
        "g.1": f"its reward is {bad}"
    }


def test_a_statistic_that_is_not_finite_drops_the_group_by_name() -> None:
    outcome = AdvantageEstimator(per_group=lambda rewards: [math.inf for _ in rewards]).estimate(
        group(1.0, 1.0, -1.0)
    )
    assert outcome.advantages == {} and outcome.no_signal == ()
    assert (
        all("not finite" in why for why in outcome.malformed.values())
        and len(outcome.malformed) == 3
    )


def sampled_with(group: Group, number: int, **params: float) -> Group:
    """The group with an attempt whose last two tokens were sampled with these parameters."""
    attempts = list(group.trajectories)
    spans = (SamplingSpan(SamplingParams(), 1), SamplingSpan(SamplingParams(**params), 2))  # type: ignore[arg-type]
    segments = (segment(), replace(segment(), sampling=spans))
    attempts[number] = replace(attempts[number], segments=segments)
    return replace(group, trajectories=tuple(attempts))


def test_an_attempt_that_cannot_be_recomputed_is_named_and_changes_nothing_for_the_others() -> None:
    cut = sampled_with(group(1.0, 1.0, 0.0, 1.0), 1, top_p=0.9, top_k=5)
    outcome = AdvantageEstimator().estimate(sampled_with(cut, 3, temperature=0.0))
    assert outcome.advantages == {"g.0": 0.5, "g.2": -0.5} and outcome.malformed == {}
    assert outcome.untrainable == {"g.1": "top_p, top_k", "g.3": "temperature 0"}


def test_a_temperature_is_trained_on_and_goes_with_the_row() -> None:
    warm = sampled_with(group(1.0, 0.0), 0, temperature=0.5)
    outcome = AdvantageEstimator().estimate(warm)
    assert outcome.advantages == {"g.0": 0.5, "g.1": -0.5} and outcome.untrainable == {}
    plain, ours = to_rows(warm.trajectories[0], 0.5)
    assert plain.sampling == () and ours.sampling == warm.trajectories[0].segments[1].sampling


def test_rows_that_are_too_long_or_of_unknown_versions_are_named() -> None:
    """Every segment has six tokens, of versions 1 and 2; the group was admitted at version 0."""
    assert AdvantageEstimator(max_tokens=6, max_lag=2).estimate(group(1.0, 0.0)).malformed == {}
    (why, _) = AdvantageEstimator(max_tokens=5).estimate(group(1.0, 0.0)).malformed.values()
    assert why == "it has 6 tokens, more than the context of 5"
    (why, _) = AdvantageEstimator(max_lag=1).estimate(group(1.0, 0.0)).malformed.values()
    assert why == "a token comes from version 2, but only versions 0 to 1 are possible"


def test_effort_is_paid_before_credit_is_given() -> None:
    """Two solved attempts, one of which used half the tokens: it gets the credit."""
    pair = group(1.0, 1.0)
    long = replace(pair.trajectories[1], segments=(segment(), segment()))
    outcome = AdvantageEstimator(effort=Effort(scale=0.1, q=0.0, tokens=1.0)).estimate(
        replace(pair, trajectories=(pair.trajectories[0], long))
    )
    # 3 tokens cost 0.3, 6 cost 0.6
    assert outcome.advantages == pytest.approx({"g.0": 0.15, "g.1": -0.15})


def test_where_a_teacher_judges_every_attempt_that_was_graded_counts() -> None:
    estimator = AdvantageEstimator(per_group=constant_advantage, keep_zero_std=True)
    assert estimator.estimate(group(0.0, None, 0.0)).advantages == {"g.0": 1.0, "g.2": 1.0}


def test_rows_credit_the_sampled_tokens_of_every_segment() -> None:
    trajectory = Trajectory(
        id="g.0",
        task="t",
        group="g",
        segments=(segment(4), segment(3)),
        score=Score(1.0),
        status="done",
    )
    first, second = to_rows(trajectory, 0.5)
    assert first.sample == second.sample == "g.0"
    assert first.tokens == (10, 11, 12, 13, 14, 15)
    assert first.mask == (False, False, True, False, True, True)
    assert first.logprobs == (0.0, 0.0, -1.0, 0.0, -2.0, -3.0)
    assert first.advantages == (0.0, 0.0, 0.5, 0.0, 0.5, 0.5)
    assert second.versions == (VersionSpan(3, 1), VersionSpan(4, 2))
    assert oldest_version([first, second]) == 3
    batch = Batch(step=6, rows=(first, second), oldest=3)
    assert batch.lag == 2 and batch.lags == (2, 3, 1)  # versions 4, 5, 5 and 3, 4, 4 on top of 5


def test_summaries_can_be_left_out() -> None:
    """A summary is the last answer of a context that another one continues; a sub-agent opens a
    context without one."""
    helper = replace(segment(), kind="subagent", parent=1)
    segments = (segment(), replace(segment(), parent=0), helper)
    attempt = replace(group(1.0).trajectories[0], segments=segments)
    credit = (Credit(0.25, segment=0, turn=1),)
    summed_up, last, helped = to_rows(attempt, 0.5, credit, train_summaries=False)
    assert summed_up.advantages == (0.0, 0.0, 0.5, 0.0, 0.0, 0.0)
    assert last.advantages == helped.advantages == (0.0, 0.0, 0.5, 0.0, 0.5, 0.5)
    assert to_rows(attempt, 0.5)[0].advantages == (0.0, 0.0, 0.5, 0.0, 0.5, 0.5)

    two = replace(group(1.0, 0.0), trajectories=(attempt, group(1.0, 0.0).trajectories[1]))
    estimator = replace(ADVANTAGE["dr_grpo"], train_summaries=False)
    assert assemble_batch(3, [two], estimator)[0].rows[0].advantages[-1] == 0.0


def test_a_summary_is_of_the_agent_and_not_of_one_that_worked_for_it() -> None:
    """The context after it names the newest earlier context as its parent, which may be a
    sub-agent's. A parent without an answer has nothing to leave out."""
    helper = replace(segment(), kind="subagent", parent=0)
    segments = (segment(), helper, replace(helper, parent=1), replace(segment(), parent=2))
    attempt = replace(group(1.0).trajectories[0], segments=segments)
    summed_up, *others = to_rows(attempt, 0.5, train_summaries=False)
    assert summed_up.advantages == (0.0, 0.0, 0.5, 0.0, 0.0, 0.0)
    assert {row.advantages for row in others} == {(0.0, 0.0, 0.5, 0.0, 0.5, 0.5)}

    silent = replace(segment(), mask=(False,) * 4)
    attempt = replace(attempt, segments=(silent, replace(segment(), parent=0)))
    nothing, last = to_rows(attempt, 0.5, train_summaries=False)
    assert not any(nothing.advantages) and last.advantages[-1] == 0.5


def with_credit(group: Group, *credit: tuple[Credit, ...]) -> Group:
    """The group with these credits for its attempts, one after the other."""
    attempts = [
        replace(t, score=replace(t.score, credit=some) if t.score else None)
        for t, some in zip(group.trajectories, credit, strict=True)
    ]
    return replace(group, trajectories=tuple(attempts))


def test_turns_are_unbroken_runs_of_sampled_tokens() -> None:
    assert turns(segment()) == [range(0, 1), range(2, 4)]
    assert turns(replace(segment(), mask=(False, True, True, False))) == [range(1, 3)]
    assert turns(replace(segment(), mask=(False,) * 4)) == []


def test_credit_by_hand() -> None:
    """Of three credits with the mean 0.4, the first turn of a solved attempt has the largest."""
    pair = with_credit(
        group(1.0, 0.0), (Credit(0.9, 0, turn=0), Credit(0.3, 0, turn=1)), (Credit(0.0, 0),)
    )
    outcome = AdvantageEstimator().estimate(pair)
    assert outcome.distinct_advantages() == pytest.approx([0.5 + 0.5, 0.5 - 0.1, -0.5 - 0.4])
    batch, samples = assemble_batch(3, [pair], AdvantageEstimator())
    assert samples == ("g.0", "g.1")
    solved, failed = (row.advantages for row in batch.rows)
    assert solved == pytest.approx((0, 0, 0.5 + 0.5, 0, 0.5 - 0.1, 0.5 - 0.1))
    assert failed == pytest.approx((0, 0, -0.5 - 0.4, 0, -0.5 - 0.4, -0.5 - 0.4))


def test_credits_of_the_same_token_add_up_and_others_have_none() -> None:
    one = with_credit(group(1.0, 0.0), (Credit(3.0, 0), Credit(0.0, 0, turn=1)), ())
    batch, _ = assemble_batch(3, [one], AdvantageEstimator())
    # the mean is 1.5
    assert batch.rows[0].advantages == (0, 0, 0.5 + 1.5, 0, 0.5, 0.5)
    assert batch.rows[1].advantages == (0, 0, -0.5, 0, -0.5, -0.5)


def test_the_scale_of_a_batch_counts_a_turn_once_however_many_credits_it_has() -> None:
    """Two credits of the same turn add up, and so do those of a turn and its segment."""
    first, second, whole = Credit(3.0, 0, turn=0), Credit(1.0, 0, turn=1), Credit(0.0, 0)
    pair = with_credit(group(1.0, 0.0), (first, Credit(0.0, 0, turn=0), second), ())
    found = AdvantageEstimator().estimate(pair).distinct_advantages()
    mean = 4 / 3
    assert found == pytest.approx([0.5 + 3 - 2 * mean, 0.5 + 1 - mean, -0.5])
    pair = with_credit(group(1.0, 0.0), (first, whole), (whole,))
    found = AdvantageEstimator().estimate(pair).distinct_advantages()
    assert found == pytest.approx([0.5 + 3 - 2, 0.5 - 1, -0.5 - 1])


def test_an_attempt_is_trained_on_for_its_credits_alone() -> None:
    same = with_credit(group(1.0, 1.0, 1.0), (Credit(1.0, 0, turn=0),), (Credit(0.0, 0),), ())
    outcome = AdvantageEstimator().estimate(same)
    assert outcome.advantages == {"g.0": 0.0, "g.1": 0.0} and outcome.passed_over == ("g.2",)
    batch, _ = assemble_batch(3, [same], ADVANTAGE["reinforce_plus_plus_baseline"])
    assert [row.advantages for row in batch.rows] == [(0, 0, 1, 0, 0, 0), (0, 0, -1, 0, -1, -1)]


def test_a_failed_or_malformed_attempt_has_no_say_in_the_mean_of_credits() -> None:
    some = with_credit(
        group(1.0, None, 0.0, 0.0), (Credit(1.0, 0),), (), (Credit(0.0, 0),), (Credit(1e300, 0),)
    )
    outcome = AdvantageEstimator().estimate(some)
    assert outcome.malformed == {"g.3": "a credit of it is 1e+300"}
    assert outcome.credit == {"g.0": (Credit(0.5, 0),), "g.2": (Credit(-0.5, 0),)}


def test_where_a_teacher_judges_credits_do_not_count() -> None:
    some = with_credit(group(1.0, 0.0), (Credit(1.0, 0),), (Credit(0.0, 0),))
    estimator = AdvantageEstimator(
        per_group=constant_advantage, keep_zero_std=True, use_credit=False
    )
    assert estimator.estimate(some) == estimator.estimate(group(1.0, 0.0))


places = st.lists(st.sampled_from([None, 0, 1]), max_size=4)
rewards = st.lists(st.floats(-2, 2), min_size=2, max_size=5)


@given(rewards, st.data(), st.floats(-10, 10), st.sampled_from(sorted(ADVANTAGE)))
def test_a_constant_credit_changes_no_bit(
    values: list[float], data: st.DataObject, constant: float, name: str
) -> None:
    plain = group(*values)
    credits = [
        tuple(Credit(constant, 0, turn) for turn in data.draw(places)) for _ in plain.trajectories
    ]
    estimator, same = ADVANTAGE[name], with_credit(plain, *credits)
    assert estimator.estimate(same) == estimator.estimate(plain)
    if estimator.estimate(plain).advantages:
        assert assemble_batch(3, [same], estimator) == assemble_batch(3, [plain], estimator)


@given(st.lists(places, min_size=2, max_size=5), st.data(), st.integers(-8, 8))
def test_only_differences_between_credits_count(
    where: list[list[int | None]], data: st.DataObject, shift: int
) -> None:
    """Centered credits add up to 0, and shifting all of them changes none."""
    plain = group(*map(float, range(len(where))))
    values = st.integers(-8, 8).map(float)
    credits = [tuple(Credit(data.draw(values), 0, turn) for turn in some) for some in where]
    moved = [tuple(replace(c, value=c.value + shift) for c in some) for some in credits]
    some, others = (
        AdvantageEstimator().estimate(with_credit(plain, *each)) for each in (credits, moved)
    )
    centered = [credit.value for each in some.credit.values() for credit in each]
    assert sum(centered) == pytest.approx(0.0, abs=1e-9)
    assert centered == pytest.approx(
        [credit.value for each in others.credit.values() for credit in each], abs=1e-9
    )


def of_turns(*attempts: tuple[float, list[int]]) -> Group:
    """Attempts from their rewards and the number of turns, of one token each, in each segment."""
    plain = group(*(reward for reward, _ in attempts))
    return replace(
        plain,
        trajectories=tuple(
            replace(t, segments=tuple(_said(count) for count in counts))
            for t, (_, counts) in zip(plain.trajectories, attempts, strict=True)
        ),
    )


def _said(num_turns: int) -> Segment:
    return Segment(
        prompt=(1,), tokens=(2,) * 2 * num_turns, mask=(True, False) * num_turns,
        logprobs=(0.0,) * 2 * num_turns, versions=(VersionSpan(0, num_turns),),
    )  # fmt: skip


def by_turn(whole: Group) -> list[list[float]]:
    """The advantages of each attempt's turns."""
    batch, samples = assemble_batch(0, [whole], ADVANTAGE["by_turn"])
    found: dict[str, list[float]] = {t.id: [] for t in whole.trajectories if t.id in samples}
    for row in batch.rows:
        found[row.sample] += [
            advantage for advantage, said in zip(row.advantages, row.mask, strict=True) if said
        ]
    return list(found.values())


def test_a_turn_is_compared_with_those_who_came_as_far() -> None:
    """The first attempt is solved at once. Of the others, with the same mean before, the one that
    goes on successfully is better than the one that does not."""
    found = by_turn(of_turns((1.0, [1]), (0.0, [2]), (1.0, [1, 1])))
    assert found == [
        pytest.approx([1 / 3]),
        pytest.approx([-2 / 3, -1 / 2]),
        pytest.approx([1 / 3, 1 / 2]),
    ]


def test_turns_of_sub_agents_have_the_baseline_of_all() -> None:
    """The time of their turns is not known. The turns of the agent are counted without them."""
    plain = of_turns((1.0, [1, 2]), (0.0, [2]), (0.0, [2, 1]))
    first, *others = plain.trajectories
    main, other = first.segments
    first = replace(first, segments=(main, replace(other, kind="subagent", parent=0)))
    found = by_turn(replace(plain, trajectories=(first, *others)))
    assert found[0] == pytest.approx([2 / 3, 2 / 3, 2 / 3])
    assert found[1:] == [pytest.approx([-1 / 3, 0]), pytest.approx([-1 / 3, 0, 0])]


def test_who_went_on_alone_has_nothing_to_be_compared_with() -> None:
    assert by_turn(of_turns((1.0, [1]), (0.0, [3])))[1] == pytest.approx([-1 / 2, 0, 0])


@given(
    st.lists(
        st.tuples(
            st.integers(-8, 8).map(float), st.lists(st.integers(1, 3), min_size=1, max_size=3)
        ),
        min_size=2,
        max_size=6,
    )
)
def test_the_advantages_of_all_who_took_a_turn_add_up_to_nothing(
    attempts: list[tuple[float, list[int]]],
) -> None:
    whole = of_turns(*attempts)
    if len({reward for reward, _ in attempts}) < 2:
        assert not ADVANTAGE["by_turn"].estimate(whole).advantages
        return
    found = by_turn(whole)
    for number in range(max(map(len, found))):
        assert sum(own[number] for own in found if len(own) > number) == pytest.approx(0, abs=1e-9)


def test_spans_and_back() -> None:
    versions = [3, 3, 4, 3]
    assert version_spans(versions) == (VersionSpan(3, 2), VersionSpan(4, 1), VersionSpan(3, 1))
    assert list(expand_spans(version_spans(versions))) == versions
    assert version_spans([]) == ()


def test_what_a_run_may_choose_from() -> None:
    """Names that users' files contain."""
    plain = AdvantageEstimator()
    assert {
        "dr_grpo": plain,
        "rloo": replace(plain, per_group=rloo),
        "grpo": replace(plain, per_group=grpo),
        "reinforce_plus_plus_baseline": replace(plain, batch_scale=unit_std),
        "self_imitation": replace(plain, per_group=self_imitation),
        "by_turn": replace(plain, by_turn=True),
    } == ADVANTAGE


def suspected(whole: Group, number: int, *flags: str) -> Group:
    attempts = list(whole.trajectories)
    score = attempts[number].score
    assert score is not None
    attempts[number] = replace(attempts[number], score=replace(score, flags=flags))
    return replace(whole, trajectories=tuple(attempts))


def test_a_suspect_is_set_aside_and_is_no_baseline() -> None:
    three = suspected(group(1.0, 0.0, 1.0), 2, "cheat:bytecode", "slow", "cheat:hang")
    ids = [t.id for t in three.trajectories]
    outcome = AdvantageEstimator(quarantine=True).estimate(three)
    assert outcome.quarantined == {ids[2]: "bytecode, hang"}
    assert outcome.advantages == {ids[0]: 0.5, ids[1]: -0.5}
    assert not outcome.no_signal and not outcome.failed
    assert assemble_batch(3, [three], AdvantageEstimator(quarantine=True))[0].reward == 0.5
    assert AdvantageEstimator().estimate(three).quarantined == {}
    of_its_own = suspected(three, 2, "slow")
    assert AdvantageEstimator(quarantine=True).estimate(of_its_own).quarantined == {}
