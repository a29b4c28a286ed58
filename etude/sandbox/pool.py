"""Sandbox pools by the name of their isolation in the run's config."""

from __future__ import annotations

from collections.abc import Callable

from etude.core.errors import EtudeError
from etude.core.sandbox import TIERS, SandboxPool, Tier
from etude.sandbox.link import REPLY_TIMEOUT_S
from etude.sandbox.namespaces import NamespaceSandboxPool
from etude.sandbox.process import ProcessSandboxPool

ISOLATION: dict[str, Callable[[float], SandboxPool]] = {
    "namespaces": NamespaceSandboxPool,
    "process": lambda reply_timeout_s: ProcessSandboxPool(),
}


def open_sandbox_pool(isolation: str, reply_timeout_s: float = REPLY_TIMEOUT_S) -> SandboxPool:
    """Opens a trial sandbox before it returns; raises EtudeError where this machine cannot. Never
    picks a weaker isolation than it was asked for. The caller closes the pool."""
    return ISOLATION[isolation](reply_timeout_s)


def check_tier(pool: SandboxPool, lowest: Tier) -> None:
    """Raise EtudeError if sandboxes of this pool hold less."""
    if TIERS.index(pool.tier) < TIERS.index(lowest):
        raise EtudeError(
            f"the sandboxes of this machine hold no more than tier {pool.tier}, and sandbox.tier "
            f"accepts none below {lowest}: etude doctor says what is missing"
        )
