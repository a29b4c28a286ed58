"""`[engine.lend]`: capacity that workers in front of users lend to RL."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from etude.core.schema import Config, Count, Place, Positive, Url, of_form

TIME = r"([01]\d|2[0-3]):[0-5]\d"
Hours = Annotated[str, of_form(rf"{TIME}-{TIME}", "hours of a day, such as 20:00-06:00")]


class LendConfig(Config):
    """Capacity that workers in front of users lend to RL (docs/clusters.md). Without `run`, RL of
    the same model takes the slots that users leave idle; with it, whole workers go to that run and
    come back."""

    hours: Annotated[tuple[Hours, ...], Field(strict=False)] = ()
    """Hours in which they may lend, in UTC, such as "22:00-06:00"; none: always."""
    max_ttft_s: Positive = 1.0
    """Time to first token that 99 of 100 user requests must meet; if they do not, RL gets less."""
    run: Annotated[str, Place.PATH] | None = None
    """The run, by its store, whose weights a lent worker loads."""
    gateway: Url | None = None
    """The gateway of that run, which a lent worker joins."""
    keep: Count = 1
    """Workers that always stay with the users."""
    max_load: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Share of their slots that users may fill before lent workers come back. Another worker is
    lent at half that share of the slots that would remain."""
    calm_s: Positive = 60.0
    """Time for which the load must have been that low before a worker is lent."""
    return_s: Positive = 120.0
    """Time that a worker needs to come back; if one took longer, that time is used instead. The
    return starts this long before the hours end."""

    @model_validator(mode="after")
    def _both(self) -> LendConfig:
        if (self.run is None) != (self.gateway is None):
            raise ValueError("run and gateway go together: a lent worker needs both")
        return self
