"""Bodies of production mode's own routes."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec


class FeedbackRequest(msgspec.Struct, forbid_unknown_fields=True):
    event: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    """An id of the product's own: the same one twice is one event."""
    completion: Annotated[str, msgspec.Meta(max_length=100)]
    """The `id` of the answer, as the client was given it."""
    kind: Annotated[str, msgspec.Meta(max_length=100)]
    strength: Annotated[float, msgspec.Meta(ge=-1, le=1)] | None = None
    choice: Annotated[int, msgspec.Meta(ge=0, lt=2048)] = 0
    time: float | None = None
    text: Annotated[str, msgspec.Meta(max_length=4000)] = ""


class FeedbackStored(msgspec.Struct):
    status: Literal["stored", "duplicate", "not_recorded"]


class ConsentRequest(msgspec.Struct, forbid_unknown_fields=True):
    granted: bool
    time: float | None = None


class ConsentStored(msgspec.Struct):
    granted: bool
    """The word that counts now."""


class UserDeleted(msgspec.Struct):
    objects: int
