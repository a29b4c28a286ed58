"""Conversations that a server keeps for its clients, up to a number of bytes: the oldest are
forgotten first. With a journal they outlive the process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from etude.model.tokenizer import Message
from etude.serve.session_journal import ForgottenResponse, Journal, KeptResponse, NoJournal

MAX_BYTES = 256 << 20
"""Over all that is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    response: object
    """As it was sent to the client."""
    items: tuple[dict[str, Any], ...]
    """The input, each item with an id."""
    messages: tuple[Message, ...]
    """The conversation up to and including the answer, which comes last."""
    previous: str | None = None
    """The response that it continues."""


class ConversationStore:
    """Responses by session ("" for none) and id."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.journal: Journal = NoJournal()
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._sizes: dict[tuple[str, str], int] = {}
        # Output items of all kept responses, by session and item id.
        self._items: dict[tuple[str, str], Mapping[str, Any]] = {}
        self.num_bytes = 0

    def put(self, session: str, id: str, stored: StoredResponse) -> None:
        """Keep a response. It is durable once the journal is committed."""
        base = self.get(session, stored.previous) if stored.previous else None
        num_known = len(base.messages) if base else 0
        self.journal.append(
            KeptResponse(
                session=session,
                id=id,
                previous=stored.previous if base else None,
                response=msgspec.to_builtins(stored.response),
                items=stored.items,
                messages=stored.messages[num_known:],
            )
        )
        self._keep(session, id, stored)

    def restore(self, entry: KeptResponse | ForgottenResponse) -> None:
        """Restore a response from the journal of an earlier process, unless it continues a response
        that is not kept any more."""
        if isinstance(entry, ForgottenResponse):
            self.delete(entry.session, entry.id)
            return
        base = self.get(entry.session, entry.previous) if entry.previous else None
        if entry.previous and base is None:
            return
        messages = (*(base.messages if base else ()), *entry.messages)
        stored = StoredResponse(
            response=entry.response, items=entry.items, messages=messages, previous=entry.previous
        )
        self._keep(entry.session, entry.id, stored)

    def _keep(self, session: str, id: str, stored: StoredResponse) -> None:
        # The messages before belong to responses that are kept, and counted, on their own.
        size = len(msgspec.json.encode((stored.response, stored.items)))
        self._kept[session, id] = stored
        self._sizes[session, id] = size
        self._items |= {(session, item["id"]): item for item in _output(stored)}
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            self.delete(*next(iter(self._kept)))

    def get(self, session: str, id: str) -> StoredResponse | None:
        return self._kept.get((session, id))

    def item(self, session: str, id: str) -> Mapping[str, Any] | None:
        """An output item of a kept response, by the item's own id."""
        return self._items.get((session, id))

    def delete(self, session: str, id: str) -> None:
        if (session, id) in self._kept:
            self._remove((session, id))
            self.journal.append(ForgottenResponse(session=session, id=id))

    def forget(self, session: str) -> None:
        """Forget all responses of a session."""
        for key in [key for key in self._kept if key[0] == session]:
            self._remove(key)

    def _remove(self, key: tuple[str, str]) -> None:
        for item in _output(self._kept.pop(key)):
            del self._items[key[0], item["id"]]
        self.num_bytes -= self._sizes.pop(key)


def _output(stored: StoredResponse) -> Sequence[Mapping[str, Any]]:
    output: Sequence[Mapping[str, Any]] = msgspec.to_builtins(stored.response).get("output", ())
    return output
