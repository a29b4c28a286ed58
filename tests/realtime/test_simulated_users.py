"""Simulated users: reproducible from their seed, and as diverse as specified."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from etude.core.feedback import STRENGTHS
from etude.realtime.population import Answer, Population, Reaction

POPULATION = Population.of(400, seed=5, saboteurs=0.05, drift=0.1)
HONEST = [user for user in POPULATION.users if not user.is_saboteur]
SABOTEURS = [user for user in POPULATION.users if user.is_saboteur]


def answer(quality: float, number: int = 0) -> Answer:
    return Answer(completion=f"{number:024x}", quality=quality, aspects=(0.0, 0.0))


def kept(reactions: tuple[Reaction, ...]) -> bool:
    return any(each.kind.startswith("kept") for each in reactions)


def test_a_population_is_data() -> None:
    assert Population.of(400, seed=5, saboteurs=0.05, drift=0.1) == POPULATION
    assert Population.of(400, seed=6, saboteurs=0.05, drift=0.1) != POPULATION


def test_what_a_user_does_follows_from_the_answer_alone() -> None:
    answers = [answer(0.7, number) for number in range(20)]
    user = HONEST[0]
    forth = [POPULATION.react(user, each) for each in answers]
    back = [POPULATION.react(user, each) for each in reversed(answers)]
    assert forth == back[::-1]
    assert len(set(forth)) > 1


def test_so_many_are_saboteurs_whatever_the_seed() -> None:
    assert len(SABOTEURS) == 20
    assert not any(user.is_saboteur for user in Population.of(100, seed=1).users)


def test_users_keep_better_answers_and_saboteurs_say_they_do_not() -> None:
    def share(users: list, quality: float) -> float:  # type: ignore[type-arg]
        return fmean(kept(POPULATION.react(user, answer(quality))) for user in users)

    assert share(HONEST, 1.0) > share(HONEST, 0.5) + 0.2 > share(HONEST, 0.0) + 0.3
    assert share(SABOTEURS, 1.0) < 0.5 < share(SABOTEURS, 0.0)


def test_saboteurs_send_everything_many_times() -> None:
    assert {each.copies for each in POPULATION.react(SABOTEURS[0], answer(0.5))} == {20}
    assert {r.copies for u in HONEST for r in POPULATION.react(u, answer(0.5))} == {1}


def test_users_differ_and_tastes_drift() -> None:
    appeals = [POPULATION.appeal(user, answer(0.7)) for user in HONEST]
    assert min(appeals) < 0.3 < 0.7 < max(appeals)
    user = HONEST[0]
    assert POPULATION.appeal(user, answer(0.7), day=0) != POPULATION.appeal(user, answer(0.7), 9)
    still = replace(POPULATION, drift=(0.0,) * 4)
    assert still.appeal(user, answer(0.7), 0) == still.appeal(user, answer(0.7), 9)


def test_all_reactions_are_kinds_of_feedback_and_some_answers_have_none() -> None:
    found = [POPULATION.react(user, answer(0.6)) for user in POPULATION.users]
    assert {each.kind for reactions in found for each in reactions} <= STRENGTHS.keys()
    assert any(not reactions for reactions in found)
    texts = [r.text for reactions in found for r in reactions if r.kind == "follow_up"]
    assert texts and all(texts)


def test_sessions_of_a_day_are_about_as_many_as_the_user_has() -> None:
    user = max(POPULATION.users, key=lambda user: user.sessions_per_day)
    mean = fmean(POPULATION.sessions(user, day) for day in range(60))
    assert 0.7 * user.sessions_per_day < mean < 1.3 * user.sessions_per_day


def test_tastes_drift_from_the_first_day_on() -> None:
    answer, user = (
        Answer(completion="c", quality=0.5, aspects=(0.3,) * len(POPULATION.drift)),
        POPULATION.users[0],
    )
    assert POPULATION.appeal(user, answer) == POPULATION.appeal(user, answer, day=0.0)
    assert POPULATION.appeal(user, answer) != POPULATION.appeal(user, answer, day=30.0)
    assert POPULATION.react(user, answer) == POPULATION.react(user, answer, day=0.0)
