"""Loss to saboteurs over five updates, for several seeds: `etude bench realtime --simulate`.

This is `etude bench realtime` in one process, without gateway, gate and canary, so that it can be
repeated. The model, its demonstrations, users, signals, caps, credit and training are the same
code. Each seed has a different model and different users. The runs with and without saboteurs have
the same users and requests; in the second, the saboteurs are honest. The gain is the increase of
the honest users' mean appeal (0 to 1) from the songs of the first version to those of the last, for
the same requests.

    gain, clean.gain    with 5 % saboteurs and without; mean over the seeds
    clean.spread        standard deviation over the seeds, as a share of the mean
    shrinks             loss to saboteurs, as a share of clean.gain, from the means over seeds
    shrinks_low, shrinks_high   95 % interval, by resampling seeds (bootstrap)
    shrinks_max         of the worst seed
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random

import torch

from etude.bench._realtime_setup import RUN, SABOTEURS, SONGS, honest_ids, users_of
from etude.bench._realtime_tasks import (
    LONGEST,
    request,
    sessions_to_imitate,
    style,
    vowel_quality,
)
from etude.bench.realtime_saboteurs import shrinks
from etude.core.config import RunConfig, parse
from etude.core.feedback import STRENGTHS, FeedbackEvent, join
from etude.core.recorded import RecordedTurn, by_answer, put_together
from etude.core.sampling import RegionSpan, Request, Sample, SamplingParams
from etude.core.seeds import derive
from etude.core.stages import RlConfig, SftConfig
from etude.engine.engine import Engine, FinishedRequest
from etude.model.tokenizer import ChatTokenizer
from etude.model.transformer import Transformer
from etude.realtime.collect import make_update
from etude.realtime.credit import BASELINE
from etude.realtime.population import Answer, Population, SimulatedUser
from etude.realtime.robust import Caps
from etude.realtime.signals import SessionOutcome, session_outcome
from etude.run.realtime_sessions import signal_table
from etude.store.production import digest
from etude.train import stages as learning
from etude.train.learner import Learner
from etude.train.start import initial_model
from etude.trainer.data import read_sessions
from etude.trainer.prepare import model_files
from etude.trainer.step import objective_of

SEEDS = 6
MEASURED = 2000
AT_ONCE = 256


def run(steps: int, first: int, seeds: int = SEEDS) -> dict[str, float]:
    """Run seeds `first` to `first + seeds - 1`."""
    torch.set_num_threads(1)  # with so small a model more threads only wait for each other
    ours: list[float] = []
    clean: list[float] = []
    for seed in range(first, first + seeds):
        singer = Singer(settings(seed))
        for gains, saboteurs in ((ours, SABOTEURS), (clean, 0.0)):
            gains.append(gain(singer, seed, saboteurs, updates=steps))
        told = {"seed": seed, "gain": ours[-1], "clean.gain": clean[-1]}
        print(json.dumps(told), file=sys.stderr, flush=True)
    return {
        "seeds": float(seeds),
        "gain": statistics.mean(ours),
        "clean.gain": statistics.mean(clean),
        "clean.spread": statistics.stdev(clean) / statistics.mean(clean),
        **shrinks(ours, clean),
    }


def gain(singer: Singer, seed: int, saboteurs: float, *, updates: int) -> float:
    singer.begin()
    users, honest = users_of(seed, saboteurs), honest_ids(seed)
    before = appeal(singer, users, honest, day=updates)
    for step in range(1, updates + 1):
        singer.learn(collect(singer, users, step), step)
    return appeal(singer, users, honest, day=updates) - before


def settings(seed: int) -> RunConfig:
    return parse(RUN.replace("PORT", "0").replace("SEED", str(seed)))


@dataclass(frozen=True, slots=True)
class Song:
    """A request with its answer."""

    asked: str
    prompt: tuple[int, ...]
    sample: Sample
    text: str

    def answer(self, completion: str) -> Answer:
        return Answer(
            completion=completion, quality=vowel_quality(self.text), aspects=style(self.text)
        )


class Singer:
    """A model that has imitated songs and learns from users, with the engine and learner of a
    run."""

    def __init__(self, config: RunConfig) -> None:
        imitate, stage = config.stage
        assert isinstance(imitate, SftConfig) and isinstance(stage, RlConfig)
        assert config.realtime is not None
        self.stage = stage
        self.realtime = config.realtime
        self.config = config
        self.files = model_files(config)
        self.tokenizer = ChatTokenizer(self.files)
        self.learner = Learner(self._fresh())
        self._imitate(imitate)

    def begin(self) -> None:
        """Restore the weights from before any learning from users."""
        self.learner.restore_snapshot()
        self.learner.begin_stage()
        self.learner.snapshot()
        self.engine = Engine(self._fresh().requires_grad_(False), max_num_seqs=AT_ONCE)
        self.engine.load_weights(0, self.learner.weights())
        self.baseline = BASELINE[self.realtime.baseline]()

    def _fresh(self) -> Transformer:
        return initial_model(None, self.files["config.json"], self.config.seed)

    def _imitate(self, stage: SftConfig) -> None:
        """Train on demonstrations of songs."""
        seed, context = self.config.seed, self.config.model.max_context
        with tempfile.TemporaryDirectory(prefix="etude-realtime-") as folder:
            path = Path(folder) / "songs.jsonl"
            path.write_text(sessions_to_imitate(SONGS, seed))
            shown = read_sessions(str(path), self.tokenizer, context, stage.overlong)
        learning.sft(self.learner, stage, shown.train, shown.heldout, seed=seed)

    def sing(self, asked: Sequence[str], seed: int) -> list[Song]:
        """One song for each request."""
        prompts = [self._prompt(each) for each in asked]
        for place, prompt in enumerate(prompts):
            asking = Request(
                prompt=prompt,
                max_tokens=LONGEST,
                seed=derive(seed, place),
                stop_token_ids=(self.tokenizer.eos_token_id,),
            )
            self.engine.add(asking, str(place))
        samples: dict[int, Sample] = {}
        while not self.engine.idle:
            for event in self.engine.step():
                if isinstance(event, FinishedRequest):
                    samples[int(event.id)] = event.sample
        return [
            Song(asked[place], prompts[place], samples[place], self._text(samples[place]))
            for place in range(len(prompts))
        ]

    def _prompt(self, asked: str) -> tuple[int, ...]:
        message = {"role": "user", "content": asked}
        return tuple(self.tokenizer.encode(self.tokenizer.render([message], (), answer=True)))

    def _text(self, sample: Sample) -> str:
        eos = self.tokenizer.eos_token_id
        return self.tokenizer.decode([token for token in sample.tokens if token != eos])

    def learn(self, outcomes: Sequence[SessionOutcome], step: int) -> None:
        realtime = self.realtime
        made = make_update(
            outcomes,
            step=step,
            base=step - 1,
            caps=Caps(
                per_user=realtime.per_user,
                per_organisation_share=realtime.per_organisation_share,
            ),
            baseline=self.baseline,
            max_tokens=self.config.model.max_context,
        )
        assert made.batch is not None
        self.learner.rl_step(made.batch, lr=self.stage.lr, objective=objective_of(self.stage))
        self.engine.load_weights(step, self.learner.weights())


def collect(singer: Singer, population: Population, step: int) -> list[SessionOutcome]:
    """The sessions of an update with their users' feedback. An update takes one simulated day."""
    seed, users = population.seed, population.users
    draw = Random(derive(seed, "sessions", step))
    activity = list(accumulate(user.sessions_per_day for user in users))
    asking = draw.choices(users, cum_weights=activity, k=singer.realtime.min_sessions)
    songs = singer.sing([request(draw) for _ in asking], derive(seed, "songs", step))
    turns: list[RecordedTurn] = []
    events: list[FeedbackEvent] = []
    for place, (user, song) in enumerate(zip(asking, songs, strict=True)):
        turns.append(_turn(user, song, f"{seed}/{step}/{place}"))
        events += _events(population, user, song, turns[-1], day=float(step))
    made = put_together(turns)
    joined = join(by_answer(made.sessions), events, now=0.0, horizon_s=0.0)
    table = signal_table(singer.realtime)
    outcomes = [session_outcome(session, joined.by_answer, table) for session in made.sessions]
    return [outcome for outcome in outcomes if not outcome.is_censored]


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
    """The feedback events of a user. As in `etude bench realtime`, all come at once."""
    reactions = population.react(user, song.answer(turn.completion), day)
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
        for number, reaction in enumerate(reactions)
        for copy in range(reaction.copies)
    ]


def appeal(singer: Singer, population: Population, honest: frozenset[str], day: int) -> float:
    """The honest users' mean appeal of the songs of the served version."""
    seed = derive(population.seed, "measured")
    draw = Random(seed)
    users = [user for user in population.users if user.id in honest]
    songs = singer.sing([request(draw) for _ in range(MEASURED)], seed)
    return statistics.fmean(
        population.appeal(user, song.answer(""), float(day))
        for user, song in zip(draw.choices(users, k=MEASURED), songs, strict=True)
    )
