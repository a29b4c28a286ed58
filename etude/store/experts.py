"""Routed experts of recorded sessions, stored separately from the groups that name them.

    experts/{digest}    the ids of one segment, as the engine recorded them

One byte for each token, layer and expert (two with more than 256 experts) is a hundred times the
size of the tokens. So they go from the gateway to the trainer through the store, and all processes
in between handle only the digest. An object is written before anything names it, and named by its
content, so that writing it again changes nothing.
"""

from __future__ import annotations

from blake3 import blake3

from etude.store.codec import Damaged
from etude.store.objects import Missing, Objects

ADVICE = (
    "restore it from a backup, or start over with --fresh, with router_replay = false to train "
    "without it"
)


def put_experts(objects: Objects, data: bytes) -> str:
    name = _digest(data)
    objects.create(_key(name), data)
    return name


def get_experts(objects: Objects, name: str) -> bytes:
    try:
        data = objects.get(_key(name))
    except Missing as e:
        raise Missing(f"{e}; {ADVICE}") from e
    if _digest(data) != name:
        raise Damaged(f"{objects.url}: {_key(name)} is damaged; {ADVICE}")
    return data


def _digest(data: bytes) -> str:
    return blake3(data).hexdigest(length=16)


def _key(name: str) -> str:
    return f"experts/{name}"
