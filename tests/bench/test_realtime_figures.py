"""The benchmarks of real-time RL: their parts against results computed by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from etude.bench import _realtime_alone, realtime_credit, realtime_saboteurs, realtime_show
from etude.bench import _realtime_setup as setup
from etude.bench._planted import KINDS, Update, Users, fate
from etude.bench._realtime_tasks import any_song, sessions_to_imitate, style, vowel_quality
from etude.bench.realtime import Liked, gain_of, p_value, shrinkage
from etude.bench.realtime_gate import PLAN
from etude.core.config import parse
from etude.core.consent import pseudonym
from etude.core.realtime_config import RealtimeConfig
from etude.core.traffic import start
from etude.realtime.gate import SUITES
from etude.realtime.population import Population
from etude.realtime.robust import Caps
from etude.serve.production.config import read_user_key


@pytest.fixture(scope="module")
def users() -> Users:
    return Users(Population.of(4000, seed=1, saboteurs=0.05))


@pytest.mark.parametrize("kind", KINDS)
def test_a_very_bad_update_is_stopped_where_it_shows(users: Users, kind: str) -> None:
    found = fate(Update(kind, 8.0), users, SUITES, PLAN, seed=0)
    assert found.stopped_by == ("gate" if kind in ("weaker", "unsafe", "cheating") else "canary")
    assert found.seen < 0.02


def test_a_much_better_update_reaches_all(users: Users) -> None:
    plan = replace(PLAN, ramp=(0.05, 1.0))
    found = fate(Update("disliked", -4.0), users, SUITES, plan, seed=0)
    assert (found.stopped_by, found.seen) == ("deployed", 1.0)


def test_the_true_gradient_is_the_slope_of_the_reward() -> None:
    prompts = realtime_credit.draw_prompts(np.random.default_rng(0))
    odds = np.linspace(-1, 1, realtime_credit.KINDS)

    def expected(odds: NDArray[np.float64]) -> float:
        second = 1 / (1 + np.exp(-odds[prompts.kind]))
        return float((prompts.ease + second * prompts.better).mean())

    step = 1e-5 * np.eye(realtime_credit.KINDS)
    slopes = [(expected(odds + each) - expected(odds - each)) / 2e-5 for each in step]
    assert realtime_credit.true_gradient(prompts, odds) == pytest.approx(slopes, abs=1e-8)


class From(realtime_show.ShowPolicy):
    """A policy that shows suggestions from a given probability of acceptance on."""

    def __init__(self, chance: float) -> None:
        super().__init__(5)
        self.chance = chance

    def shows(self, contexts: realtime_show.Contexts) -> NDArray[np.bool_]:
        return contexts.chance >= self.chance


def test_the_threshold_of_a_policy_is_found() -> None:
    population = Population.of(200, seed=0)
    at, wrong = realtime_show.threshold(From(0.4), population, seed=0)
    assert at == pytest.approx(0.4, abs=0.002)
    assert wrong > 0.05
    assert realtime_show.threshold(From(0.25), population, seed=0)[1] == 0.0


def test_a_few_steps_bring_the_threshold_near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(realtime_show, "STEPS", 60)
    monkeypatch.setattr(realtime_show, "BATCH", 512)
    population = Population.of(200, seed=0)
    policy = realtime_show.train("show", population, seed=0)
    assert 0.1 < realtime_show.threshold(policy, population, seed=0)[0] < 0.45


def test_what_saboteurs_take_is_a_share_of_the_gain_with_its_chance() -> None:
    clean = [0.2, 0.3, 0.1, 0.2]
    found = realtime_saboteurs.shrinks([0.9 * gain for gain in clean], clean)
    assert found == pytest.approx(dict.fromkeys(found, 0.1))
    odd = realtime_saboteurs.shrinks([0.2, 0.2, 0.1, 0.2], clean)
    assert odd["shrinks_low"] == 0.0 < odd["shrinks"] < odd["shrinks_high"]
    assert odd["shrinks_max"] == pytest.approx(1 / 3)


def test_a_style_moves_to_what_was_liked() -> None:
    style = np.zeros(4)
    liked = np.array([0.4, 0.0, 0.0, 0.0])
    samples = [
        realtime_saboteurs.Sample(
            id=str(n),
            user=str(n),
            organisation="",
            style=liked if n % 2 else -liked,
            reward=float(n % 2),
        )
        for n in range(20)
    ]
    found = realtime_saboteurs.learn(style, samples, realtime_saboteurs.CAPS, update="1")
    assert found[0] > 0.05 and not found[1:].any()


def test_the_caps_of_the_bench_are_the_defaults() -> None:
    config = RealtimeConfig(production="production.toml")
    caps = Caps(per_user=config.per_user, per_organisation_share=config.per_organisation_share)
    assert caps == realtime_saboteurs.CAPS


def test_a_very_small_chance_is_not_none() -> None:
    ours, theirs = [1.0, 0.9] * 500, [0.1, 0.2] * 500
    assert 0.0 <= p_value(theirs, ours, -1.0) < 1e-16
    near = [0.8 + 0.1 * (n % 5) for n in range(100)], [0.1 * (n % 9) for n in range(100)]
    assert 0.0 < p_value(*near, 1.0) < 1e-16
    assert p_value(*near, -1.0) == 1.0


def test_the_gain_is_that_of_honest_users_over_those_held_out() -> None:
    key, population = b"k" * 32, Population.of(400, seed=1, saboteurs=0.1)
    traffic = start(0, 0.0, heldout_share=0.3).traffic
    liked = [
        Liked(user, 0.0, 0.0 if user.is_saboteur else 0.5 + 0.2 * is_taught + 0.1 * (number % 2))
        for number, user in enumerate(population.users)
        for is_taught in [not traffic.is_heldout(pseudonym(user.id, key))]
    ]
    gain, error = gain_of(liked, traffic, key)
    assert gain == pytest.approx(0.2, abs=4 * error) and 0 < error < 0.02


def test_a_song_has_a_quality_and_a_style() -> None:
    assert vowel_quality("") == 0.0 and vowel_quality("xyz") == 0.0
    assert vowel_quality("aeio") == vowel_quality("banana") == 1.0
    assert style("a" * 16) == (0.0, 1.0) and style("12" * 40) == (1.0, -1.0)


def test_the_songs_that_are_shown_are_of_all_kinds() -> None:
    draw = Random(0)
    songs = [any_song(draw) for _ in range(2000)]
    assert {len(song) for song in songs} == set(range(4, 33))
    qualities = np.array([vowel_quality(song) for song in songs])
    assert 0.4 < qualities.mean() < 0.7 and qualities.std() > 0.25
    assert (np.std([style(song) for song in songs], axis=0) > 0.4).all()


def test_the_songs_that_are_shown_follow_from_the_seed() -> None:
    lines = sessions_to_imitate(3, 1).splitlines()
    assert lines == sessions_to_imitate(3, 1).splitlines() != sessions_to_imitate(3, 2).splitlines()
    roles = [message["role"] for message in json.loads(lines[0])["messages"]]
    assert roles == ["user", "assistant"]


def test_users_are_the_same_with_and_without_saboteurs() -> None:
    ours, clean = setup.users_of(3, setup.SABOTEURS).users, setup.users_of(3, 0.0).users
    assert tuple(replace(user, is_saboteur=False) for user in ours) == clean
    assert len(setup.honest_ids(3)) == 0.95 * setup.USERS


def test_runs_of_a_seed_hold_out_the_same_users(tmp_path: Path) -> None:
    keys = []
    for name, seed in (("saboteurs", 3), ("clean", 3), ("other", 4)):
        folder = tmp_path / name
        folder.mkdir()
        setup.write_run(folder, seed, port=1234)
        config = parse((folder / "run.toml").read_text())
        assert (config.seed, config.engine.port) == (seed, 1234)
        keys.append(read_user_key(folder / "user.key", create=False))
    assert keys[0] == keys[1] != keys[2]


def test_what_is_missing_to_the_gain_has_an_error() -> None:
    ours, clean = {"gain": 0.18, "gain_error": 0.006}, {"gain": 0.2, "gain_error": 0.008}
    found = shrinkage(ours, clean)
    assert found["shrinks"] == pytest.approx(0.1)
    assert found["shrinks_error"] == pytest.approx((0.03**2 + (0.9 * 0.04) ** 2) ** 0.5)


def test_both_trainings_of_a_seed_begin_with_the_same_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick = setup.RUN.replace("max_epochs = 6", "max_epochs = 1")
    quick = quick.replace("min_sessions = 1500", "min_sessions = 40")
    monkeypatch.setattr(_realtime_alone, "RUN", quick)
    monkeypatch.setattr(_realtime_alone, "SONGS", 60)
    monkeypatch.setattr(_realtime_alone, "MEASURED", 40)
    singer = _realtime_alone.Singer(_realtime_alone.settings(0))
    gains = [_realtime_alone.gain(singer, 0, 0.0, updates=2) for _ in range(2)]
    assert gains[0] == gains[1] != 0.0
