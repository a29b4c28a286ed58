"""Sandbox pools by the name of their isolation in the run's config."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from etude.core.errors import EtudeError
from etude.core.sandbox import TIERS, VENVS, Limits, Sandbox, SandboxPool, SandboxSpec, Tier
from etude.sandbox.bytecode import BytecodePool
from etude.sandbox.container import ContainerSandboxPool
from etude.sandbox.egress import Outside
from etude.sandbox.fleet import Need
from etude.sandbox.fleet_pool import with_budget
from etude.sandbox.gvisor import GvisorSandboxPool
from etude.sandbox.image import default_store
from etude.sandbox.imaged import ImagedPool
from etude.sandbox.link import REPLY_TIMEOUT_S
from etude.sandbox.mounts import Mount, find_mounts, mount_places
from etude.sandbox.namespaces import SPARES, NamespaceSandboxPool
from etude.sandbox.process import ProcessSandboxPool
from etude.sandbox.vm import VmSandboxPool

ISOLATION: dict[str, Callable[[float, Sequence[Mount], Outside], SandboxPool]] = {
    "namespaces": lambda reply_timeout_s, mounts, outside: ImagedPool(
        NamespaceSandboxPool(reply_timeout_s, mounts, outside=outside, spares=SPARES),
        default_store(),
        lambda image: NamespaceSandboxPool(reply_timeout_s, mounts, image, outside, SPARES),
    ),
    "gvisor": lambda reply_timeout_s, mounts, outside: GvisorSandboxPool(reply_timeout_s, mounts),
    "container": lambda reply_timeout_s, mounts, outside: ContainerSandboxPool(
        reply_timeout_s, mounts
    ),
    "e2b": lambda reply_timeout_s, mounts, outside: _e2b(reply_timeout_s, mounts),
    "kubernetes": lambda reply_timeout_s, mounts, outside: _kubernetes(reply_timeout_s, mounts),
    "vm": lambda reply_timeout_s, mounts, outside: VmSandboxPool(reply_timeout_s, mounts),
    "process": lambda reply_timeout_s, mounts, outside: ProcessSandboxPool(mounts),
}


def _e2b(reply_timeout_s: float, mounts: Sequence[Mount]) -> SandboxPool:
    from etude.sandbox.e2b import E2bSandboxPool

    _refuse_mounts(mounts, "e2b", "the template")
    return E2bSandboxPool(reply_timeout_s)


def _kubernetes(reply_timeout_s: float, mounts: Sequence[Mount]) -> SandboxPool:
    from etude.sandbox.kubernetes import KubernetesSandboxPool

    _refuse_mounts(mounts, "kubernetes", "the image")
    return KubernetesSandboxPool(reply_timeout_s)


def _refuse_mounts(mounts: Sequence[Mount], isolation: str, place: str) -> None:
    if mounts:
        raise EtudeError(
            f"sandbox.mounts are directories of this machine, which isolation {isolation} "
            f"cannot show: put them into {place} that sandbox.image names"
        )


_NO_LIMITS = Limits()
_QUIET = Outside()


def open_sandbox_pool(
    isolation: str,
    reply_timeout_s: float = REPLY_TIMEOUT_S,
    *,
    mounts: Sequence[str] = (),
    limits: Limits = _NO_LIMITS,
    hosts: Sequence[str] = (),
    image: str = "",
    outside: Outside = _QUIET,
    budget: Need | None = None,
) -> SandboxPool:
    """Open a pool, after a trial sandbox; raises EtudeError if this machine cannot hold one. The
    isolation is never weaker than the one asked for. The caller closes the pool.

    `mounts`: directories of the host, as `sandbox.mounts` of a run's file names them. `limits` and
    `image`: defaults for tasks that do not set their own. `hosts`: URLs of machines on which
    sandboxes are opened instead of here; they have mounts of their own at the same places.
    `outside`: the network, for tasks that name hosts. `budget`: limit for all sandboxes together.
    """
    pool: SandboxPool
    if hosts:
        from etude.sandbox.remote import TOKEN_VARIABLE, RemoteSandboxPool

        token = os.environ.get(TOKEN_VARIABLE)
        pool = RemoteSandboxPool(
            hosts,
            isolation,
            places=mount_places(mounts),
            token=token,
            reply_timeout_s=reply_timeout_s,
        )
    else:
        pool = ISOLATION[isolation](reply_timeout_s, find_mounts(mounts), outside)
    if budget:
        pool = with_budget(pool, budget)
    default = SandboxSpec(limits=limits, image=image)
    pool.check(default)
    if default != SandboxSpec():
        pool = _DefaultPool(pool, default)
    return BytecodePool(pool) if VENVS in mount_places(mounts) else pool


class _DefaultPool:
    """A `core.sandbox.SandboxPool` that gives sandboxes these limits and this image if their task
    sets none."""

    def __init__(self, pool: SandboxPool, default: SandboxSpec) -> None:
        self._pool = pool
        self._default = default

    @property
    def tier(self) -> Tier:
        return self._pool.tier

    def check(self, spec: SandboxSpec) -> None:
        self._pool.check(self._filled(spec))

    def open(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        return self._pool.open(self._filled(spec))

    def _filled(self, spec: SandboxSpec) -> SandboxSpec:
        limits = spec.limits.over(self._default.limits)
        return replace(spec, limits=limits, image=spec.image or self._default.image)

    def owing(self) -> dict[str, float]:
        return self._pool.owing()

    async def close(self) -> None:
        await self._pool.close()


def check_tier(pool: SandboxPool, lowest: Tier) -> None:
    """Raise EtudeError if the sandboxes of this pool are of a weaker tier."""
    if TIERS.index(pool.tier) < TIERS.index(lowest):
        raise EtudeError(
            f"the sandboxes of this machine reach only tier {pool.tier}, but "
            f"sandbox.min_isolation requires {lowest}: run `etude doctor` to see what is missing"
        )
