"""The table `[sandbox]` of a run's config."""

from __future__ import annotations

from typing import Annotated, Literal, cast

from pydantic import Field, model_validator

from etude.core.sandbox import TIERS, Limits, Tier
from etude.core.schema import Config, Count, Place, Positive, of_form

_NESTED = dict.fromkeys(("container", "e2b", "kubernetes"), "namespaces")
"""Isolations that are no tier of their own -> the tier of the sandbox in there."""


class BudgetConfig(Config):
    """The most that all sandboxes of a run may take together; those for which there is no room
    wait. None: no bound."""

    cpus: Positive | None = None
    """Processors. A sandbox without a limit of its own counts as one."""
    memory_mib: Count | None = None
    """Memory, by the limits of the sandboxes, whatever they use of it."""
    disk_mib: Count | None = None
    """Working copies and temporary files, by their limits."""


class SandboxConfig(Config):
    """The isolation of sandboxes, what they show of this machine, and their limits."""

    isolation: Literal[
        "namespaces", "container", "gvisor", "vm", "e2b", "kubernetes", "process"
    ] = "namespaces"
    """The isolation of a sandbox. `container` is the same in a container of podman or docker, and
    takes images that the engine has; `gvisor` has a kernel of its own, in a program (runsc), `vm` a
    virtual machine (QEMU), and both fork with their processes; `e2b` has one of a service that
    speaks E2B's API (E2B_API_KEY, E2B_API_URL), `kubernetes` a pod of a cluster that has
    agent-sandbox, found as kubectl finds it (KUBECONFIG). `process` isolates nothing: only for
    machines whose kernel refuses namespaces, and code you trust."""
    hosts: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """URLs of sandbox hosts (`etude sandboxes serve`) that sandboxes are opened at, instead of on
    this machine, each at the one with the fewest of this run. Their token is taken from
    ETUDE_SANDBOX_TOKEN."""
    min_isolation: Tier = "process"
    """The weakest isolation that this run accepts, whatever `isolation` says: it does not start
    where the sandboxes of a machine hold less."""
    mounts: Annotated[tuple[str, ...], Field(strict=False), Place.PATH] = ()
    """Directories of this machine that every sandbox shows, read-only: `PATH`, at the same place,
    or `PATH:PLACE`. A `bin` in one is searched first for programs, so with `.venv` the commands
    `python` and `pytest` are those of the virtual environment."""
    image: str = ""
    """Image of sandboxes whose task names none (`etude images build`), by name or by
    `NAME@sha256:DIGEST`; with `isolation = "container"`, an image that the engine has, with
    `"kubernetes"` one that the cluster can pull, and with `"e2b"` a template of the service. Empty:
    the programs of this machine, `python:3.12-slim`, or the template `base`."""
    network_log: Annotated[str | None, Place.PATH] = None
    """File for a line of JSON about each request that sandboxes make to hosts of their task's
    `network`. Without a list of hosts a task has no network."""
    mirrors: dict[str, Annotated[str, of_form(r"[^:]+:\d+", "HOST:PORT")]] = {}
    """Hosts in place of which a server of your own is asked, such as a package index frozen at a
    date: `{"pypi.org" = "10.0.0.5:443"}`. The one way to a private address."""
    cpus: Positive | None = None
    """Processors that a sandbox may use; this and the next three hold for tasks that do not say
    otherwise, and None is what the backend gives by default (docs/sandboxes.md)."""
    memory_mib: Count | None = None
    """Memory of each process, and where a cgroup is writable of all together."""
    disk_mib: Count | None = None
    """Size of the working copy, and of the temporary files."""
    max_processes: Count | None = None
    """Processes of a sandbox at the same time."""
    budget: BudgetConfig = BudgetConfig()
    """What all sandboxes of the run may take together."""

    @model_validator(mode="after")
    def _isolation_holds_the_tier(self) -> SandboxConfig:
        held = _NESTED.get(self.isolation, self.isolation)
        if TIERS.index(cast(Tier, held)) < TIERS.index(self.min_isolation):
            raise ValueError(
                f'isolation "{self.isolation}" holds less than min_isolation '
                f'"{self.min_isolation}": choose another isolation, or a lower min_isolation'
            )
        return self

    @model_validator(mode="after")
    def _hosts_are_other_machines(self) -> SandboxConfig:
        if self.hosts and self.mounts:
            raise ValueError(
                "mounts are directories of this machine, and hosts are others: give them to "
                "etude sandboxes serve --mount there"
            )
        for name in ("network_log", "mirrors"):
            if self.hosts and getattr(self, name):
                raise ValueError(
                    f"{name} is for sandboxes of this machine, and hosts are others: leave out one "
                    "of the two"
                )
        return self

    @property
    def limits(self) -> Limits:
        return Limits(
            cpus=self.cpus,
            memory_bytes=self.memory_mib and self.memory_mib << 20,
            disk_bytes=self.disk_mib and self.disk_mib << 20,
            processes=self.max_processes,
        )
