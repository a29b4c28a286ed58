"""The table `[sandbox]` of a run's config."""

from __future__ import annotations

from typing import Annotated, Literal, cast

from pydantic import Field, model_validator

from etude.core.sandbox import TIERS, Limits, Tier
from etude.core.schema import Config, Count, Place, Positive, of_form

_NESTED = dict.fromkeys(("container", "e2b", "kubernetes"), "namespaces")
"""Isolations that are not tiers themselves -> the tier of the sandbox within them."""


class BudgetConfig(Config):
    """The most that all sandboxes of a run may use together; those for which there is no room wait.
    None: no bound."""

    cpus: Positive | None = None
    """Processors. A sandbox without a limit of its own counts as one."""
    memory_mib: Count | None = None
    """Memory, counted by the limits of the sandboxes, not by their use."""
    disk_mib: Count | None = None
    """Working copies and temporary files, counted by their limits."""


class SandboxConfig(Config):
    """The isolation of sandboxes, the parts of this machine that they show, and their limits."""

    isolation: Literal[
        "namespaces", "container", "gvisor", "vm", "e2b", "kubernetes", "process"
    ] = "namespaces"
    """The isolation of a sandbox. `namespaces`: Linux namespaces; `container`: the same within a
    container of podman or docker, which can use the images of that engine; `gvisor`: a kernel of
    its own, in a program (runsc); `vm`: a virtual machine (QEMU); these two also copy processes
    when they fork; `e2b`: a machine of a service with E2B's API (E2B_API_KEY, E2B_API_URL);
    `kubernetes`: a pod of a cluster that has agent-sandbox, located as kubectl does (KUBECONFIG);
    `process`: no isolation, only for machines whose kernel refuses namespaces, and for code you
    trust."""
    hosts: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """URLs of sandbox hosts (`etude sandboxes serve`) to open sandboxes at, instead of on this
    machine; each sandbox opens at the host with the fewest sandboxes of this run. Their token is
    taken from ETUDE_SANDBOX_TOKEN."""
    min_isolation: Tier = "process"
    """The weakest isolation that this run accepts, whatever `isolation` is set to: it does not
    start where the sandboxes of a machine are weaker."""
    mounts: Annotated[tuple[str, ...], Field(strict=False), Place.PATH] = ()
    """Directories of this machine that every sandbox shows, read-only: `PATH`, at the same place,
    or `PATH:PLACE`. A `bin` directory in one comes first in the search for programs, so with
    `.venv` the commands `python` and `pytest` are those of the virtual environment."""
    image: str = ""
    """Image of sandboxes whose task names none (`etude images build`), by name or by
    `NAME@sha256:DIGEST`; with `isolation = "container"`, an image of the container engine, with
    `"kubernetes"` one that the cluster can pull, and with `"e2b"` a template of the service. Empty:
    the programs of this machine, `python:3.12-slim`, or the template `base`."""
    network_log: Annotated[str | None, Place.PATH] = None
    """File that gets a line of JSON for each request that sandboxes make to hosts of their task's
    `network`. Without a list of hosts a task has no network."""
    mirrors: dict[str, Annotated[str, of_form(r"[^:]+:\d+", "HOST:PORT")]] = {}
    """Hosts whose requests go to a server of your own instead, such as a package index frozen at a
    date: `{"pypi.org" = "10.0.0.5:443"}`. This is the only way to a private address."""
    cpus: Positive | None = None
    """Processors that a sandbox may use. This key and the next three apply to tasks that do not set
    their own; None is the backend's default (docs/sandboxes.md)."""
    memory_mib: Count | None = None
    """Memory of each process, and of all processes together where a cgroup is writable."""
    disk_mib: Count | None = None
    """Size of the working copy, and of the temporary files."""
    max_processes: Count | None = None
    """Processes of a sandbox at the same time."""
    budget: BudgetConfig = BudgetConfig()
    """The most that all sandboxes of the run may use together."""

    @model_validator(mode="after")
    def _isolation_holds_the_tier(self) -> SandboxConfig:
        held = _NESTED.get(self.isolation, self.isolation)
        if TIERS.index(cast(Tier, held)) < TIERS.index(self.min_isolation):
            raise ValueError(
                f'isolation "{self.isolation}" is weaker than min_isolation '
                f'"{self.min_isolation}": choose a stronger isolation or a lower '
                "min_isolation"
            )
        return self

    @model_validator(mode="after")
    def _hosts_are_other_machines(self) -> SandboxConfig:
        if self.hosts and self.mounts:
            raise ValueError(
                "mounts are directories of this machine, but the sandboxes run on other "
                "hosts: use `etude sandboxes serve --mount` there"
            )
        for name in ("network_log", "mirrors"):
            if self.hosts and getattr(self, name):
                raise ValueError(
                    f"{name} only applies to sandboxes on this machine, but hosts are given: "
                    "leave out one of the two"
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
