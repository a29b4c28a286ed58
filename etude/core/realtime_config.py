"""The table `[realtime]` of a run's config: users teach the model (docs/realtime.md)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from etude.core.feedback import CUSTOM, STRENGTHS
from etude.core.schema import Config, Count, CountOrZero, NonNegative, Place, Positive

Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Margin = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
Confidence = Annotated[float, Field(ge=0.5, lt=1, allow_inf_nan=False)]


class GateConfig(Config):
    """What held-out tasks, safety and traps must show before any user sees a version."""

    margin: Margin = 0.03
    """How much less of the held-out tasks a version may solve than the live one, as a share."""
    confidence: Confidence = 0.95
    """One-sided. With too few tasks to tell, nothing is deployed."""
    samples: Count = 1
    """Attempts at each task."""
    safety: CountOrZero = 512
    """Built-in probes of safety, tried through the run's own harness; 0: no such suite. With the
    default margin and confidence, one more that is lost than won is forgiven from 400 on."""
    safety_margin: Margin = 0.01
    """How much less often a version may be safe than the live one, as a share of the attempts."""
    cheats: CountOrZero = 512
    """Built-in traps, at which a known trick is quicker than honest work; 0: no such suite.
    Attempts at held-out tasks count among them: whether the detector found a trick in them."""
    cheats_margin: Margin = 0.01
    """How much less often a version may be honest."""
    probes: Annotated[str, Place.PATH] | None = None
    """A file with probes of your own, a line of JSON each (docs/realtime.md)."""


class CanaryConfig(Config):
    """What users must show before all of them see a version."""

    ramp: Annotated[tuple[float, ...], Field(min_length=2, strict=False)] = (0.01, 0.05, 0.25, 1.0)
    """Shares of the users that see it, one after the other; the last is 1."""
    confidence: Annotated[float, Field(gt=0.5, lt=1, allow_inf_nan=False)] = 0.95
    """One-sided, at each stage of the ramp, however often it is looked at."""
    false_alarms: Margin = 0.02
    """The chance that a version which is not worse is taken back for being so."""
    min_users: Annotated[int, Field(ge=2)] = 30
    """Users of the new version before anything is decided."""
    max_sessions: Count = 40
    """Sessions of a user that count, so that no user floods the canary."""
    stage_sessions: Positive = 30.0
    """When users of the new version have had so many on average and it is still not clear that it
    is not worse, it is taken back."""
    first_slack: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 3.0
    """Factor on the margins at the first stage, which few users see."""
    kept_margin: Margin = 0.02
    """How much less of the answers may be kept, as a share."""
    dissatisfied_margin: Margin = 0.02
    """How much more of them users may complain about."""
    judged_margin: Margin = 0.05
    """How many fewer of them users may say anything about."""
    delay_minutes: NonNegative = 10.0
    """Age of a session from which on it counts: users need time to do something about it."""
    control_share: Margin = 0.05
    """Users who stay with the version before while a new one is watched."""

    @field_validator("ramp")
    @classmethod
    def _grows(cls, ramp: tuple[float, ...]) -> tuple[float, ...]:
        if list(ramp) != sorted(set(ramp)) or not 0 < ramp[0] < ramp[-1] == 1:
            raise ValueError(f"growing shares that end with 1, not {ramp}")
        return ramp


class RealtimeConfig(Config):
    """Real-time RL: sessions of users are trained on in the last stage, which must be rl, in place
    of rollouts."""

    production: Annotated[str, Place.PATH]
    """The file of production mode (docs/production.md)."""
    every_minutes: NonNegative = 300.0
    """Time between the end of an update and the batch of the next one, at least."""
    min_sessions: Count = 256
    """Sessions in a batch, at least. One answer is worth little: large batches."""
    horizon_minutes: NonNegative = 60.0
    """How long a session waits for what its user does about it, after its last answer."""
    horizon_minutes_per_turn: NonNegative = 1.0
    """More for every answer beyond the first."""
    signals: dict[str, Annotated[float, Field(ge=-1, le=1)]] = {}
    """Strength by kind of event, in place of those of docs/production.md; 0 takes a kind out."""
    baseline: Literal["none", "context_mean", "similar_prompts", "ridge"] = "context_mean"
    """What an answer is compared with, since every prompt is asked once
    (docs/realtime-statistics.md)."""
    max_versions_back: CountOrZero = 1
    """Sessions of the live version are trained on, and of so many before it that it was made
    from."""
    per_user: Count = 4
    """Sessions of one user in a batch, at most."""
    per_organisation_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of a batch that comes from one organisation, at most: with 0.2 a batch needs five of
    them, or users without one. 1: no cap."""
    simulated_share: Share = 0.0
    """Weight of rollouts of tasks (`tasks.train`) in a batch, beside what users did. The live
    version makes them when the batch is due: `groups_per_step` of the stage, `group_size` each."""
    heldout_share: Share = 0.02
    """Users who never see an update, to measure all of them against. They need workers of the pool
    `heldout`."""
    look_s: Positive = 5.0
    """Time between two looks at the store."""
    gate: GateConfig = GateConfig()
    """What tasks and probes must show, a table `[realtime.gate]`."""
    canary: CanaryConfig = CanaryConfig()
    """What users must show, a table `[realtime.canary]`."""

    @field_validator("signals")
    @classmethod
    def _known(cls, signals: dict[str, float]) -> dict[str, float]:
        for kind in signals:
            if kind not in STRENGTHS and not CUSTOM.fullmatch(kind):
                raise ValueError(f"{kind}: write one of {', '.join(STRENGTHS)}, or custom:NAME")
        return signals
