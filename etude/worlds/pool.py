"""The door to the worlds: from the word in the run's file to the thing that makes sandboxes."""

from __future__ import annotations

from collections.abc import Callable

from etude.core.seams import Worlds
from etude.worlds.namespaces import PATIENCE_S, NamespaceWorlds
from etude.worlds.process import ProcessWorlds

ISOLATION: dict[str, Callable[[float], Worlds]] = {
    "namespaces": NamespaceWorlds,
    "process": lambda silence_s: ProcessWorlds(),
}


def open_worlds(isolation: str, silence_s: float = PATIENCE_S) -> Worlds:
    """Opens a trial sandbox before it returns; raises EtudeError where this machine cannot. Never picks a weaker
    isolation than it was asked for. Whoever opens the worlds closes them."""
    return ISOLATION[isolation](silence_s)
