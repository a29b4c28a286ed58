"""`[engine.lend]`: what workers in front of users lend to RL."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from etude.core.schema import Config, Count, Place, Positive, Url, of_form

TIME = r"([01]\d|2[0-3]):[0-5]\d"
Hours = Annotated[str, of_form(rf"{TIME}-{TIME}", "hours of a day, such as 20:00-06:00")]


class LendConfig(Config):
    """What workers in front of users lend to RL (docs/clusters.md). Without `run`, RL of the same
    model takes the slots that users leave idle; with it, whole workers go to that run and come
    back."""

    hours: Annotated[tuple[Hours, ...], Field(strict=False)] = ()
    """When they may lend, in UTC, such as "22:00-06:00"; none: always."""
    max_ttft_s: Positive = 1.0
    """Time to first token that 99 of 100 requests of users keep to; beyond it RL gets less."""
    run: Annotated[str, Place.PATH] | None = None
    """The run, by its store, whose weights a lent worker loads."""
    gateway: Url | None = None
    """The gateway of that run, which a lent worker joins."""
    keep: Count = 1
    """Workers that stay with the users in any case."""
    max_load: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Share of their slots that users may fill before lent workers come back. At half of it, of the
    slots that would be left, another worker goes."""
    calm_s: Positive = 60.0
    """Time that the load must have been so low before a worker goes."""
    return_s: Positive = 120.0
    """Time that a worker needs to come back; if one took longer, that counts. It begins so long
    before the hours end."""

    @model_validator(mode="after")
    def _both(self) -> LendConfig:
        if (self.run is None) != (self.gateway is None):
            raise ValueError("run and gateway go together: a lent worker needs both")
        return self
