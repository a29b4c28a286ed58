"""The table `[realtime]` of a run's config, for learning from users (docs/realtime.md)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from etude.core.feedback import CUSTOM, STRENGTHS
from etude.core.schema import Config, Count, CountOrZero, NonNegative, Place, Positive

Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Margin = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
Confidence = Annotated[float, Field(ge=0.5, lt=1, allow_inf_nan=False)]


class GateConfig(Config):
    """Requirements on held-out tasks, safety and traps that a version must meet before any user
    sees it."""

    margin: Margin = 0.03
    """The most by which a version's solve rate on held-out tasks may be below the live version's,
    as a share."""
    confidence: Confidence = 0.95
    """One-sided confidence. With too few tasks to decide, nothing is deployed."""
    samples: Count = 1
    """Attempts at each task."""
    safety: CountOrZero = 512
    """Built-in safety probes, run through the run's own harness; 0: no such suite. With the default
    margin and confidence, from 400 probes on a version may lose one more than it wins."""
    safety_margin: Margin = 0.01
    """The most by which a version may be safe less often than the live one, as a share of the
    attempts."""
    cheats: CountOrZero = 512
    """Built-in traps, in which a known trick is quicker than honest work; 0: no such suite.
    Attempts at held-out tasks are included: they count as dishonest if the detector found a
    trick."""
    cheats_margin: Margin = 0.01
    """The most by which a version may be honest less often, as a share of the attempts."""
    probes: Annotated[str, Place.PATH] | None = None
    """A file with your own probes, one line of JSON each (docs/realtime.md)."""


class CanaryConfig(Config):
    """Requirements on the experience of some users that a version must meet before all users see
    it."""

    ramp: Annotated[tuple[float, ...], Field(min_length=2, strict=False)] = (0.01, 0.05, 0.25, 1.0)
    """Shares of the users that see the version, one after the other; the last is 1."""
    confidence: Annotated[float, Field(gt=0.5, lt=1, allow_inf_nan=False)] = 0.95
    """One-sided confidence at each stage of the ramp, valid however often the results are looked
    at."""
    false_alarms: Margin = 0.02
    """The chance that a version which is not worse is rolled back as worse."""
    min_users: Annotated[int, Field(ge=2)] = 30
    """Users of the new version before any decision."""
    max_sessions: Count = 40
    """Sessions of a user that count, so that no user floods the canary."""
    stage_sessions: Positive = 30.0
    """Average sessions of the users of the new version after which it is rolled back, if it is
    still not clear that it is not worse."""
    first_slack: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 3.0
    """Factor on the margins at the first stage, which few users see."""
    kept_margin: Margin = 0.02
    """The most by which the share of answers that users keep may fall."""
    dissatisfied_margin: Margin = 0.02
    """The most by which the share of answers that users complain about may rise."""
    judged_margin: Margin = 0.05
    """The most by which the share of answers that users react to may fall."""
    delay_minutes: NonNegative = 10.0
    """Age at which a session starts to count: users need time to react."""
    control_share: Margin = 0.05
    """Share of the users that stay with the previous version while a new one is being watched."""

    @field_validator("ramp")
    @classmethod
    def _grows(cls, ramp: tuple[float, ...]) -> tuple[float, ...]:
        if list(ramp) != sorted(set(ramp)) or not 0 < ramp[0] < ramp[-1] == 1:
            raise ValueError(f"must be growing shares that end with 1, not {ramp}")
        return ramp


class RealtimeConfig(Config):
    """Real-time RL: the last stage, which must be rl, trains on sessions of users instead of
    rollouts."""

    production: Annotated[str, Place.PATH]
    """The configuration file of production mode (docs/production.md)."""
    every_minutes: NonNegative = 300.0
    """Time between the end of an update and the batch of the next one, at least."""
    min_sessions: Count = 256
    """Sessions in a batch, at least. A single answer contains little information: use large
    batches."""
    horizon_minutes: NonNegative = 60.0
    """Time after its last answer for which a session waits for its user's feedback."""
    horizon_minutes_per_turn: NonNegative = 1.0
    """Additional time for every answer beyond the first."""
    signals: dict[str, Annotated[float, Field(ge=-1, le=1)]] = {}
    """Strength by kind of event, instead of those in docs/production.md; 0 disables a kind."""
    baseline: Literal["none", "context_mean", "similar_prompts", "ridge"] = "context_mean"
    """The baseline of an answer, since every prompt is answered only once
    (docs/realtime-statistics.md)."""
    max_versions_back: CountOrZero = 1
    """The number of versions before the live one, among those that it was made from, whose sessions
    are trained on as well."""
    per_user: Count = 4
    """Sessions of one user in a batch, at most."""
    per_organisation_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of a batch that comes from one organisation, at most: with 0.2 a batch needs five of
    them, or users without one. 1: no cap."""
    simulated_share: Share = 0.0
    """Weight of rollouts of tasks (`tasks.train`) in a batch with sessions of users. The live
    version makes them when the batch is due: `groups_per_step` groups of `group_size` attempts, as
    set in the stage."""
    heldout_share: Share = 0.02
    """Share of the users who never see an update, as a reference for all updates. They need workers
    of the pool `heldout`."""
    look_s: Positive = 5.0
    """Time between two looks at the store."""
    gate: GateConfig = GateConfig()
    """Requirements on tasks and probes, a table `[realtime.gate]`."""
    canary: CanaryConfig = CanaryConfig()
    """Requirements on the experience of users, a table `[realtime.canary]`."""

    @field_validator("signals")
    @classmethod
    def _known(cls, signals: dict[str, float]) -> dict[str, float]:
        for kind in signals:
            if kind not in STRENGTHS and not CUSTOM.fullmatch(kind):
                raise ValueError(f"{kind}: write one of {', '.join(STRENGTHS)}, or custom:NAME")
        return signals
