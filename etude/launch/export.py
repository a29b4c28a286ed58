"""A run as parts that a cluster's own scheduler starts: the programs, the number of each, and their
arguments. Pure; `launch.kubernetes` and `launch.slurm` write them down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["job", "server", "workers", "trainer"]
PYTHON = ("python", "-P", "-m")
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
"""The variable that gives torchrun a store of its own. If its ranks share the store, a rank that
stayed does not tell a returning node the place of the rendezvous, and both wait in vain (torch
2.13)."""
GATEWAY_PORT, WORKER_PORT, RELAY_PORT, TRAINER_PORT = 8100, 8101, 8200, 29400


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The programs to run, and their resources."""

    name: str
    text: str
    """The text of the run's file."""
    store: str
    regions: tuple[str, ...]
    workers: int
    """Workers in each region."""
    worker_gpus: int
    trainer_nodes: int
    trainer_min_nodes: int
    """The trainer waits until it has this many nodes."""
    trainer_gpus: int
    """GPUs of each node; 0: on the CPU, one process per node."""
    evaluates: bool
    """True if versions are evaluated while loops run (`eval.every_steps`)."""
    asks_for_pods: bool = False
    """True if its sandboxes are pods of the cluster (`sandbox.isolation = "kubernetes"`)."""
    image: str
    folder: str
    """The folder that relative paths of the run's file start from; empty: that of the file."""
    config_path: str = "/etc/etude/run.toml"
    gateway: str = ""
    """The gateway's URL for the other programs."""
    relays: Mapping[str, str] = field(default_factory=dict)
    """Region -> the URL of the relay for its workers; regions that are not named have none."""
    advertise: str = ""
    """A worker's URL for the gateway."""
    rendezvous: str = ""
    """HOST:PORT of the trainers' rendezvous by torchrun; empty: the launcher assigns the ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One program of a run."""

    name: str
    kind: Kind
    argv: tuple[str, ...]
    replicas: int = 1
    gpus: int = 0
    """GPUs of each replica."""
    port: int = 0
    region: str = ""
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Variable -> the name of the secret for its value."""


def parts(export: Export, *, host: str) -> list[Part]:
    """All programs; those that others need come first. `host`: the address that servers listen
    on."""
    store = ("--store", export.store)
    folder = ("--folder", export.folder) if export.folder else ()
    made = [
        Part(
            name="prepare",
            kind="job",
            argv=(*PYTHON, "etude.launch.start", export.config_path, *store, *folder),
        ),
        Part(
            name="gateway",
            kind="server",
            argv=(
                *(*PYTHON, "etude.serve.gateway", *store, "--host", host, "--await-load"),
                *("--port", str(GATEWAY_PORT)),
            ),
            port=GATEWAY_PORT,
            secrets={"ETUDE_SECRET": "secret"},
        ),
    ]
    for region in export.regions:
        made += _region_parts(export, region, host)
    made.append(
        Part(
            name="trainer",
            kind="trainer",
            argv=_trainer(export),
            replicas=export.trainer_nodes,
            gpus=export.trainer_gpus,
            port=TRAINER_PORT,
        )
    )
    if export.evaluates:
        made.append(
            Part(
                name="evaluator",
                kind="job",
                argv=(*PYTHON, "etude.run.evaluator", *store),
                gpus=min(1, export.worker_gpus),
            )
        )
    made.append(
        Part(
            name="controller",
            kind="job",
            argv=(*PYTHON, "etude.run.controller", *store, "--gateway", export.gateway),
            secrets={"ETUDE_TOKEN": "admin-token"},
        )
    )
    return made


def _trainer(export: Export) -> tuple[str, ...]:
    trainer = ("etude.trainer.trainer", "--store", export.store)
    if not export.rendezvous:
        return (*PYTHON, *trainer)
    fewest, most = export.trainer_min_nodes, export.trainer_nodes
    return (
        *(
            "env",
            OWN_STORE,
            "torchrun",
            "--nnodes",
            f"{fewest}:{most}" if fewest < most else str(most),
        ),
        *("--nproc-per-node", str(max(1, export.trainer_gpus)), "--max-restarts", "100"),
        *("--rdzv-backend", "c10d", "--rdzv-id", export.name),
        *("--rdzv-endpoint", export.rendezvous, "-m", *trainer),
    )


def _region_parts(export: Export, region: str, host: str) -> list[Part]:
    """The relay of a region, and its workers."""
    store = ("--store", export.store)
    relay = ("--relay", export.relays[region]) if region in export.relays else ()
    made: list[Part] = []
    if relay:
        made.append(
            Part(
                name=f"relay-{region}",
                kind="server",
                argv=(
                    *(*PYTHON, "etude.serve.relay", *store, "--host", host),
                    *("--port", str(RELAY_PORT)),
                ),
                port=RELAY_PORT,
                region=region,
                secrets={"ETUDE_SECRET": "secret"},
            )
        )
    made.append(
        Part(
            name=f"worker-{region}",
            kind="workers",
            argv=(
                *(*PYTHON, "etude.serve.worker", *store, "--host", host, "--region", region),
                *("--port", str(WORKER_PORT), "--gateway", export.gateway),
                *(*relay, "--advertise", export.advertise),
            ),
            replicas=export.workers,
            gpus=export.worker_gpus,
            port=WORKER_PORT,
            region=region,
            secrets={"ETUDE_TOKEN": "worker-token"},
        )
    )
    return made
