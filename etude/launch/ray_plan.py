"""A run on a Ray cluster: its programs, their needs, and whether the cluster can meet them. Pure;
`launch.ray` acts.

The programs are the parts of `launch.export`. The address of a program is known only when it runs,
so the arguments have placeholders: `@host@` and `@port@` are its own address, `@gateway@` is that
of another program, which must be up before it; if that one moves, the program is restarted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from etude.core.config import RunConfig
from etude.core.errors import EtudeError
from etude.launch.export import Export, Part, parts
from etude.launch.launcher import RESTARTS, Needs, Program
from etude.serve.tokens import Scope

REGION_LABEL = "ray.io/availability-region"
"""Ray's own label for the region of a node."""
HOLE = re.compile(r"@([\w.-]+)@")
HOST, PORT = "@host@", "@port@"
SCOPES = {"worker-token": Scope.WORKER, "admin-token": Scope.ADMIN}


@dataclass(frozen=True, slots=True, kw_only=True)
class RayCluster:
    """The cluster to run on, and the share of it to use."""

    address: str
    workers: int
    """Workers in each region."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The total resources of a node, in use or not."""

    cpus: float
    gpus: float = 0.0
    region: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementGroup:
    """Programs that are placed together: a bundle of resources for each."""

    name: str
    spread: bool
    """True: spread over as many nodes as possible; False: packed on as few as possible."""
    programs: tuple[Program, ...]
    labels: Mapping[str, str]
    """Labels that their nodes must have."""

    @property
    def bundles(self) -> list[dict[str, float]]:
        return [
            {"CPU": float(program.needs.cpus)}
            | ({"GPU": float(program.needs.gpus)} if program.needs.gpus else {})
            for program in self.programs
        ]


def cluster_programs(config: RunConfig, store: str, workers: int) -> list[Program]:
    """All programs of a prepared run. `workers`: in each region."""
    regions, ranks = config.engine.regions, config.trainer.ranks
    export = Export(
        name=config.name,
        text="",
        store=store,
        regions=regions,
        workers=workers,
        worker_gpus=int(config.engine.device == "cuda"),
        trainer_nodes=ranks,
        trainer_min_nodes=ranks,
        trainer_gpus=int(config.trainer.device == "cuda"),
        evaluates=config.eval.every_steps > 0,
        image="",
        folder="",
        gateway="@gateway@",
        relays={region: f"@relay-{region}@" for region in regions if workers > 1},
        advertise=f"http://{HOST}:{PORT}",
    )
    threads = max(stage.threads for stage in config.stage)
    return [
        program
        for part in parts(export, host=HOST)
        if part.name != "prepare"
        for program in _programs(part, threads if part.name == "trainer" else config.engine.threads)
    ]


def _programs(part: Part, threads: int) -> list[Program]:
    computes = part.kind in ("trainer", "workers")
    group = {"trainer": "trainer", "workers": f"region {part.region}"}.get(part.kind, "control")
    ranks = part.kind == "trainer" and part.replicas > 1
    numbered = part.kind == "workers" or ranks
    return [
        Program(
            f"{part.name}-{number}" if numbered else part.name,
            tuple(PORT if part.port and word == str(part.port) else word for word in part.argv),
            serves=part.kind in ("server", "workers"),
            restarts=RESTARTS if part.kind in ("server", "workers") else 0,
            scope=next((SCOPES[key] for key in part.secrets.values() if key in SCOPES), None),
            makes_tokens="secret" in part.secrets.values(),
            needs=Needs(
                cpus=threads if computes else 1,
                gpus=part.gpus,
                region=part.region,
                group=group,
                rank=number if ranks else None,
            ),
        )
        for number in range(part.replicas)
    ]


def placement_groups(programs: Sequence[Program], nodes: Sequence[Node]) -> list[PlacementGroup]:
    """The placement groups of the programs. Workers are spread, so that a lost node takes few of
    them with it; ranks are packed, because they communicate. If a region has no node, its programs
    may run anywhere."""
    there = {node.region for node in nodes}
    ordered = sorted(programs, key=lambda program: program.needs.group)
    made = []
    for name, found in groupby(ordered, key=lambda program: program.needs.group):
        members = tuple(found)
        region = members[0].needs.region
        made.append(
            PlacementGroup(
                name=name,
                spread=name.startswith("region "),
                programs=members,
                labels={REGION_LABEL: region} if region and region in there else {},
            )
        )
    return made


def check_room(groups: Sequence[PlacementGroup], nodes: Sequence[Node]) -> None:
    """Refuse programs that the cluster can never have room for: Ray would wait silently."""
    kinds: dict[str, Callable[[Node], float]] = {
        "CPU": lambda node: node.cpus,
        "GPU": lambda node: node.gpus,
    }
    for key, has in kinds.items():
        wanted = sum(bundle.get(key, 0) for group in groups for bundle in group.bundles)
        there = sum(has(node) for node in nodes)
        if wanted > there:
            raise EtudeError(
                f"the run needs {wanted:g} {key}s but the Ray cluster has {there:g}: add nodes, "
                "or lower --workers"
            )
        for group in groups:
            region = group.labels.get(REGION_LABEL)
            here = [node for node in nodes if region in (None, node.region)]
            most = max((has(node) for node in here), default=0)
            largest = max(bundle.get(key, 0) for bundle in group.bundles)
            if largest > most:
                raise EtudeError(
                    f"a process of {group.name} needs {largest:g} {key}s on one node, but no "
                    f"node of the Ray cluster has more than {most:g} available: lower threads, "
                    "or add a larger node"
                )


def awaited(program: Program, others: Collection[str]) -> set[str]:
    """The programs among the others whose addresses it needs."""
    named = {name for word in program.argv for name in HOLE.findall(word)}
    return named.intersection(others)


def filled(program: Program, address: tuple[str, int], urls: Mapping[str, str]) -> tuple[str, ...]:
    """The program's arguments with all addresses filled in."""
    host, port = address
    known = {"host": host, "port": str(port), **urls}
    return tuple(
        HOLE.sub(lambda found: known.get(found[1], found[0]), word) for word in program.argv
    )


def rank_environment(program: Program, ranks: int, first: tuple[str, int]) -> dict[str, str]:
    """The variables that torchrun would set for a rank; each rank has a node, or a share of one, to
    itself. `first`: the address of rank 0."""
    if program.needs.rank is None:
        return {}
    return {
        "RANK": str(program.needs.rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": first[0],
        "MASTER_PORT": str(first[1]),
    }
