"""The table `[rewards]` of a run's config."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from etude.core.expression import Expression
from etude.core.schema import Config, Count, NonNegative, Positive, Url, of_form
from etude.core.types import DETECTOR_PART, ENVIRONMENT_PART

PartName = Annotated[
    str, of_form(r"[A-Za-z_][A-Za-z0-9_]*", "letters, digits and _, with no digit first")
]


class JudgeConfig(Config):
    """A model that is asked whether an attempt meets rubrics (docs/rewards.md)."""

    url: Url
    """An OpenAI-compatible server, including `/v1`. If ETUDE_JUDGE_KEY is set, it is sent as the
    key."""
    model: str
    """The model's name on that server."""
    rubrics: Annotated[dict[PartName, str], Field(min_length=1)]
    """Name of a part of the score -> the condition for it to be 1. One aspect each: every rubric is
    a separate question."""
    votes: Count = 3
    """The number of times that each rubric is asked."""
    needed: Count = 2
    """Votes that make a pass."""
    temperature: NonNegative = 1.0
    """Sampling temperature of the judge."""
    max_tokens: Count = 512
    """Tokens of one verdict."""
    timeout_s: Positive = 60.0
    """Time for one verdict."""

    @field_validator("rubrics")
    @classmethod
    def _own_names(cls, rubrics: dict[str, str]) -> dict[str, str]:
        for name in (ENVIRONMENT_PART, DETECTOR_PART):
            if name in rubrics:
                raise ValueError(
                    f"{name!r} is the name of a built-in part: choose another name for the rubric"
                )
        return rubrics

    @model_validator(mode="after")
    def _can_pass(self) -> JudgeConfig:
        if self.needed > self.votes:
            raise ValueError(
                f"needed = {self.needed} with votes = {self.votes}: nothing could pass"
            )
        return self


class RewardsConfig(Config):
    """Judges, the reward as a function of the parts of a score, and the reaction to cheating."""

    detector: Literal["quarantine", "flag", "off"] = "quarantine"
    """The treatment of an attempt in which the detector finds a known trick (docs/rewards.md):
    `quarantine` sets it aside, so that it is not trained on, `flag` only flags it, `off` disables
    the detector."""
    jumps: Literal["quarantine", "flag", "off"] = "flag"
    """The treatment of attempts at a task, or a family of tasks, whose reward jumps from one
    version to the next: learning is gradual, while a hole in a grader is exploited all at once."""
    failed_call: NonNegative = 0.0
    """Penalty on a turn with a failed tool call, such as an edit of lines that do not exist: a
    process reward for that turn alone, in the unit of advantages."""
    reward: str | None = None
    """The reward as an expression over the parts of the score and `environment`, the environment's
    own reward: names, numbers, + - * /, min, max and comparisons, which are 1 or 0. None: the
    environment's own reward."""
    judge: JudgeConfig | None = None
    """A model that is asked whether an attempt meets rubrics; each answer is a part of the
    score."""

    @property
    def quarantines(self) -> bool:
        return self.detector == "quarantine"

    @model_validator(mode="after")
    def _sets_aside(self) -> RewardsConfig:
        if self.jumps == "quarantine" and not self.quarantines:
            raise ValueError(
                'jumps = "quarantine" sets attempts aside, but detector is set not to: give '
                "both the same value"
            )
        return self

    @field_validator("reward")
    @classmethod
    def _readable(cls, reward: str | None) -> str | None:
        if reward is not None and DETECTOR_PART in Expression.parse(reward).names:
            raise ValueError(
                f"{DETECTOR_PART!r} cannot be used in the reward: rewards.detector decides "
                "what happens to an attempt in which the detector finds something"
            )
        return reward
