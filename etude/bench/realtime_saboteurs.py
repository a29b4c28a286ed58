"""Benchmark of poisoned feedback: what 5 % saboteurs take from the gain of five updates.

`etude bench realtime` without its processes, so that it can be repeated: its model, songs and
users, signals, caps, credit and training are the same code, in this process. Saboteurs say the
opposite of what they think. Each seed is another model and other users. With and without saboteurs
the users are the same, and ask for the same songs; who would be a saboteur is honest then. Gain:
how much more the honest ones like the songs of the last version than those of the first, by their
appeal, from 0 to 1, of the same requests.

    clean.gain          10,000 users, no saboteurs
    saboteurs.gain      5 % saboteurs, who come as often as others and say everything three times
    few.clean.gain      120 users, each of whom comes about five times an update; no saboteurs
    few.flood.gain      5 % saboteurs, who come ten times as often as others
    few.open.gain       the same without caps
    X.shrinks           what is missing to the gain without saboteurs, as a share of it, of the
                        means over seeds
    X.shrinks_low, X.shrinks_high   95 % interval, by drawing seeds anew (bootstrap)
    X.shrinks_max       of the worst seed

Caps are those of docs/realtime.md, everywhere but in `few.open`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from random import Random

import numpy as np
import torch

from etude.bench._realtime_tasks import style, vowel_quality
from etude.bench.realtime import DRIFT, RUN, SABOTEURS, USERS
from etude.core.config import RunConfig, parse
from etude.core.feedback import STRENGTHS, FeedbackEvent, join
from etude.core.recorded import RecordedTurn, by_answer, put_together
from etude.core.sampling import RegionSpan, Request, Sample, SamplingParams
from etude.core.seeds import derive
from etude.core.stages import RlConfig
from etude.engine.engine import Engine, FinishedRequest
from etude.model.tokenizer import ChatTokenizer
from etude.realtime.collect import make_update
from etude.realtime.credit import BASELINE
from etude.realtime.population import Answer, Population, SimulatedUser
from etude.realtime.robust import Caps
from etude.realtime.signals import SessionOutcome, session_outcome
from etude.run.realtime_sessions import signal_table
from etude.store.production import digest
from etude.train.learner import Learner
from etude.train.start import initial_model
from etude.trainer.prepare import model_files
from etude.trainer.step import objective_of

SEEDS = 12
UPDATES = 5
SESSIONS = 600
"""In each update, and more if saboteurs come more often."""
MEASURED = 1000
MAX_TOKENS = 16
AT_ONCE = 100
CONFIG = parse(RUN.replace("PORT", "0"))
NO_CAPS = Caps(per_user=10**9, per_organisation_share=1.0)


@cache
def files() -> dict[str, bytes]:
    return model_files(CONFIG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """`activity`: how often saboteurs come, as a multiple of what others do. `against`: the variant
    without them."""

    users: int
    saboteurs: float = 0.0
    activity: float = 1.0
    has_caps: bool = True
    against: str = ""


VARIANTS = {
    "clean": Variant(users=USERS),
    "saboteurs": Variant(users=USERS, saboteurs=SABOTEURS, against="clean"),
    "few.clean": Variant(users=120),
    "few.flood": Variant(users=120, saboteurs=SABOTEURS, activity=10.0, against="few.clean"),
    "few.open": Variant(
        users=120, saboteurs=SABOTEURS, activity=10.0, has_caps=False, against="few.clean"
    ),
}


@dataclass(frozen=True, slots=True)
class Song:
    """What was asked, and what was sung."""

    prompt: tuple[int, ...]
    asked: str
    sample: Sample
    text: str

    def answer(self, completion: str) -> Answer:
        quality = vowel_quality(self.text)
        return Answer(completion=completion, quality=quality, aspects=style(self.text))


class Product:
    """A model that learns from users, with engine and learner of a run."""

    def __init__(self, config: RunConfig, files: dict[str, bytes], seed: int) -> None:
        stage, realtime = config.stage[-1], config.realtime
        assert isinstance(stage, RlConfig) and realtime is not None
        self.stage = stage
        self.realtime = realtime
        self.max_tokens = config.model.max_context
        self.tokenizer = ChatTokenizer(files)
        self.learner = Learner(initial_model(None, files["config.json"], seed))
        served = initial_model(None, files["config.json"], seed).requires_grad_(False)
        self.engine = Engine(served, max_num_seqs=AT_ONCE)
        self.engine.load_weights(0, self.learner.weights())
        self.baseline = BASELINE[realtime.baseline]()

    def sing(self, numbers: Sequence[int], seed: int) -> list[Song]:
        """One song for each request."""
        asked = [f"sing {number}" for number in numbers]
        prompts = [
            tuple(
                self.tokenizer.encode(
                    self.tokenizer.render([{"role": "user", "content": each}], (), answer=True)
                )
            )
            for each in asked
        ]
        for place, prompt in enumerate(prompts):
            request = Request(
                prompt=prompt,
                max_tokens=MAX_TOKENS,
                seed=derive(seed, place),
                stop_token_ids=(self.tokenizer.eos_token_id,),
            )
            self.engine.add(request, str(place))
        samples: dict[int, Sample] = {}
        while not self.engine.idle:
            for event in self.engine.step():
                if isinstance(event, FinishedRequest):
                    samples[int(event.id)] = event.sample
        return [
            Song(prompts[place], asked[place], samples[place], self._text(samples[place]))
            for place in range(len(prompts))
        ]

    def _text(self, sample: Sample) -> str:
        eos = self.tokenizer.eos_token_id
        return self.tokenizer.decode([token for token in sample.tokens if token != eos])

    def learn(self, outcomes: Sequence[SessionOutcome], step: int, caps: Caps) -> None:
        made = make_update(
            outcomes,
            step=step,
            base=step - 1,
            caps=caps,
            baseline=self.baseline,
            max_tokens=self.max_tokens,
        )
        assert made.batch is not None
        self.learner.rl_step(made.batch, lr=self.stage.lr, objective=objective_of(self.stage))
        self.engine.load_weights(step, self.learner.weights())


def collect(
    product: Product, population: Population, activity: float, *, seed: int, step: int
) -> list[SessionOutcome]:
    """Sessions of an update, with what their users did about them."""
    draw = Random(derive(seed, "sessions", step))
    users = population.users
    usual = [user.sessions_per_day for user in users]
    often = [
        each * (activity if user.is_saboteur else 1)
        for user, each in zip(users, usual, strict=True)
    ]
    count = round(SESSIONS * sum(often) / sum(usual))
    asking = draw.choices(users, cum_weights=list(accumulate(often)), k=count)
    songs = product.sing([draw.randrange(1000) for _ in asking], derive(seed, "songs", step))
    turns: list[RecordedTurn] = []
    events: list[FeedbackEvent] = []
    for place, (user, song) in enumerate(zip(asking, songs, strict=True)):
        turns.append(_turn(user, song, f"{seed}/{step}/{place}"))
        events += _events(population, user, song, turns[-1], day=float(step))
    made = put_together(turns)
    joined = join(by_answer(made.sessions), events, now=0.0, horizon_s=0.0)
    table = signal_table(product.realtime)
    return [session_outcome(session, joined.by_answer, table) for session in made.sessions]


def _turn(user: SimulatedUser, song: Song, name: str) -> RecordedTurn:
    return RecordedTurn(
        completion=digest(name)[:24],
        choice=0,
        user=digest(user.id),
        organisation=digest(user.organisation),
        session=f"{0:013d}-{digest(name)}",
        started=0.0,
        time=0.0,
        number=0,
        propensity=1.0,
        policy="songs",
        vocabulary="",
        segment=0,
        start=0,
        kind="turns",
        parent=None,
        read=song.prompt,
        sampled=song.sample.tokens,
        logprobs=song.sample.logprobs,
        versions=song.sample.versions,
        regions=(RegionSpan("here", len(song.sample.tokens)),),
        params=SamplingParams(),
        redacted=(),
        first_message=0,
        messages=(
            {"role": "user", "content": song.asked},
            {"role": "assistant", "content": song.text},
        ),
        tools=(),
    )


def _events(
    population: Population, user: SimulatedUser, song: Song, turn: RecordedTurn, day: float
) -> list[FeedbackEvent]:
    """As in `etude bench realtime`, a user does everything at once."""
    return [
        FeedbackEvent(
            event=digest(f"{turn.completion}/{number}/{copy}"),
            user=turn.user,
            completion=turn.completion,
            kind=reaction.kind,
            strength=STRENGTHS[reaction.kind],
            time=0.0,
            received=0.0,
            text=reaction.text,
        )
        for number, reaction in enumerate(population.react(user, song.answer(turn.completion), day))
        for copy in range(reaction.copies)
    ]


def appeal(product: Product, population: Population, honest: set[str], seed: int) -> float:
    """How much honest users like the songs of the version that is served."""
    draw = Random(derive(seed, "measured"))
    users = [user for user in population.users if user.id in honest]
    songs = product.sing([draw.randrange(1000) for _ in range(MEASURED)], derive(seed, "measured"))
    day = float(UPDATES)
    return statistics.fmean(
        population.appeal(user, song.answer(""), day)
        for user, song in zip(draw.choices(users, k=MEASURED), songs, strict=True)
    )


def gain(variant: Variant, seed: int) -> float:
    product = Product(CONFIG, files(), seed)
    realtime = product.realtime

    def population(saboteurs: float) -> Population:
        return Population.of(
            variant.users, seed=seed, num_aspects=2, saboteurs=saboteurs, drift=DRIFT, flood=3
        )

    users = population(variant.saboteurs)
    honest = {user.id for user in population(SABOTEURS).users if not user.is_saboteur}
    caps = NO_CAPS
    if variant.has_caps:
        caps = Caps(
            per_user=realtime.per_user, per_organisation_share=realtime.per_organisation_share
        )
    before = appeal(product, users, honest, seed)
    for step in range(1, UPDATES + 1):
        outcomes = collect(product, users, variant.activity, seed=seed, step=step)
        product.learn(outcomes, step, caps)
    return appeal(product, users, honest, seed) - before


def shrinks(found: Sequence[float], clean: Sequence[float]) -> dict[str, float]:
    """What is missing to the gain without saboteurs, seed by seed the same users."""
    ours, theirs = np.array(found), np.array(clean)
    draw = np.random.default_rng(0)
    drawn = draw.integers(0, len(ours), (10_000, len(ours)))
    again = 1 - ours[drawn].mean(1) / theirs[drawn].mean(1)
    low, high = np.quantile(again, [0.025, 0.975])
    return {
        "shrinks": float(1 - ours.mean() / theirs.mean()),
        "shrinks_low": float(low),
        "shrinks_high": float(high),
        "shrinks_max": float((1 - ours / theirs).max()),
    }


def run(seeds: int = SEEDS) -> dict[str, float]:
    torch.set_num_threads(1)  # more would wait for each other, with so small a model
    gains = {
        name: [gain(variant, seed) for seed in range(seeds)] for name, variant in VARIANTS.items()
    }
    figures = {"seeds": float(seeds)}
    for name, found in gains.items():
        figures[f"{name}.gain"] = statistics.mean(found)
        if against := VARIANTS[name].against:
            missing = shrinks(found, gains[against])
            figures |= {f"{name}.{figure}": value for figure, value in missing.items()}
    return figures
