"""Users, a trainer and an evaluation around the loop of real-time RL, under virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from etude.core.feedback import STRENGTHS, FeedbackEvent
from etude.core.realtime_config import RealtimeConfig
from etude.core.recorded import RecordedTurn
from etude.core.sampling import RegionSpan, SamplingParams, VersionSpan
from etude.realtime.cycle import Next
from etude.run.realtime import RealtimeLoop, Stage
from etude.run.realtime_fake import FakeEvaluation, FakeTrainer, fake_rollouts
from etude.run.realtime_sessions import UserSessions, signal_table
from etude.store.objects import Objects
from etude.store.production import ProductionStore, digest
from etude.store.realtime import TrafficLog
from etude.store.runs import Run

TICK_S = 600.0
STAGE = Stage(first=0, last=3, max_tokens=64, splits=("heldout",))
CANARY = {"ramp": (0.5, 1.0), "min_users": 3, "delay_minutes": 0.0, "first_slack": 1.0}
MARGINS = {f"{name}_margin": 0.9 for name in ("kept", "dissatisfied", "judged")}


def config(**more: object) -> RealtimeConfig:
    given: dict[str, object] = {
        "production": "production.toml",
        "every_minutes": 10.0,
        "min_sessions": 12,
        "horizon_minutes": 10.0,
        "heldout_share": 0.1,
        "canary": CANARY | MARGINS | {"control_share": 0.3},
    }
    return RealtimeConfig.model_validate(given | more)


def recorded(
    user: str, session: str, time: float, version: int, *, organisation: str = "", number: int = 0
) -> RecordedTurn:
    """One answer of two tokens."""
    return RecordedTurn(
        completion=digest(f"{user}/{session}/{number}")[:24],
        choice=0,
        user=user,
        organisation=organisation,
        session=session,
        started=time,
        time=time,
        number=number,
        propensity=1.0,
        policy="mine",
        vocabulary="v",
        segment=0,
        start=4 * number,
        kind="turns",
        parent=None,
        read=(1, 2),
        sampled=(3, 4),
        logprobs=(-1.0, -1.0),
        versions=(VersionSpan(version, 2),),
        regions=(RegionSpan("here", 2),),
        params=SamplingParams(),
        redacted=(),
        first_message=2 * number,
        messages=({"role": "user", "content": "go"}, {"role": "assistant", "content": "done"}),
        tools=(),
    )


def said(turn: RecordedTurn, kind: str, time: float, *, event: str = "") -> FeedbackEvent:
    return FeedbackEvent(
        event=digest(event or f"{turn.completion}/{kind}"),
        user=turn.user,
        completion=turn.completion,
        kind=kind,
        strength=STRENGTHS[kind],
        time=time,
        received=time,
    )


@dataclass
class World:
    """The world of the loop. `objects`: the store, which survives every crash. `pleases`: whether
    users like a version."""

    objects: Objects
    pleases: Callable[[int], bool] = lambda version: True
    solves: Callable[[int], int] = lambda version: 300
    num_users: int = 20
    organisation: str = ""
    """The organisation of all users."""
    now: float = 1e9
    told: list[str] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)
    """The sample ids of all sessions so far."""

    def __post_init__(self) -> None:
        self.store = ProductionStore(self.objects, lambda: self.now, announces=True)
        self.run = Run(self.objects)
        self.trainer = FakeTrainer(self.run, STAGE.first)
        self.users = [digest(f"user {n}") for n in range(self.num_users)]

    def delete(self, user: str) -> None:
        """Delete a user, who does not come back."""
        self.store.delete_user(user)
        self.users.remove(user)

    def tick(self) -> None:
        """Advance time: every user sends one request, is answered by the version of their arm, and
        gives feedback."""
        self.now += TICK_S
        self.trainer.train()
        if (newest := TrafficLog(self.objects).newest()) is None:
            return
        for user in self.users:
            arm = newest.traffic.arm(user)
            name = f"{int(self.now * 1000):013d}-{digest(user)}"
            self.asked.add(f"{user}.{name}")
            pleased = self.pleases(arm.version) ^ (user < "1")
            turn = recorded(user, name, self.now, arm.version, organisation=self.organisation)
            self.record(turn, "kept_5min" if pleased else "undone")

    def record(self, turn: RecordedTurn, kind: str) -> None:
        """Store an answer, and its user's feedback."""
        self.store.put_turn(turn)
        self.store.put_feedback(said(turn, kind, turn.time))

    def sessions(self, objects: Objects | None = None) -> UserSessions:
        """A new reader of the users' sessions."""
        objects = objects or self.objects
        store = ProductionStore(objects, lambda: self.now)
        return UserSessions(store, objects, policy="mine", table=signal_table(config()))

    def loop(self, objects: Objects | None = None, **more: object) -> RealtimeLoop:
        run = Run(objects or self.objects)
        return RealtimeLoop(
            run,
            self.sessions(run.objects),
            config(**more),
            STAGE,
            published=self.trainer.published,
            evaluate=FakeEvaluation(run, self.solves),
            simulate=fake_rollouts,
            tell=self.told.append,
            now=lambda: self.now,
        )

    def follow(self, loop: RealtimeLoop, *, until: Next, most: int = 400) -> None:
        """Step the loop until it wants to take this action. Time advances only while the loop
        waits, so that a loop which was cut short leaves the same world to the next one."""
        before: Next | None = None
        for _ in range(most):
            action: Next | None = asyncio.run(loop.step())
            if action == until:
                return
            if action == before:
                self.tick()
                action = None
            before = action
        raise AssertionError(f"it still waits: {before}")
