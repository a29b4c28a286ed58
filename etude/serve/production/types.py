"""Bodies of the routes that only production mode has."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec


class FeedbackRequest(msgspec.Struct, forbid_unknown_fields=True):
    event: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    """An id chosen by the product. A repeated id is the same event."""
    completion: Annotated[str, msgspec.Meta(max_length=100)]
    """The `id` of the answer, as it was sent to the client."""
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
    """The consent that is now in force."""


class UserDeleted(msgspec.Struct):
    objects: int
