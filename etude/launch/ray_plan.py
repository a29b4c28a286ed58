"""A run on a Ray cluster: which programs, what each needs of it, and whether it has that. Pure;
`launch.ray` acts.

The programs are the parts that `launch.export` names. Where one of them will run is known when it
does, so their arguments have holes: `@host@` and `@port@` are its own address, `@gateway@` is that
of another program, which has to be up before, and which it is started again for when that moves.
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
"""Ray's own label of a node's region."""
HOLE = re.compile(r"@([\w.-]+)@")
HOST, PORT = "@host@", "@port@"
SCOPES = {"worker-token": Scope.WORKER, "admin-token": Scope.ADMIN}


@dataclass(frozen=True, slots=True, kw_only=True)
class RayCluster:
    """The cluster that a run is to be on, and how much of it."""

    address: str
    workers: int
    """In each region."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What a node of the cluster has, whoever uses it now."""

    cpus: float
    gpus: float = 0.0
    region: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementGroup:
    """Programs that get their places together: a bundle of resources for each."""

    name: str
    spread: bool
    """Over as many nodes as there are; else on as few as can be."""
    programs: tuple[Program, ...]
    labels: Mapping[str, str]
    """Of the nodes that they may have."""

    @property
    def bundles(self) -> list[dict[str, float]]:
        return [
            {"CPU": float(program.needs.cpus)}
            | ({"GPU": float(program.needs.gpus)} if program.needs.gpus else {})
            for program in self.programs
        ]


def cluster_programs(config: RunConfig, store: str, workers: int) -> list[Program]:
    """All programs of a run that is prepared. `workers`: in each region."""
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
    """Where the programs are to run. Workers are spread, so that a node takes few of them with it;
    ranks are kept together, for they talk. A region that no node is in may be anywhere."""
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
    """Refuse what the cluster can never have room for: Ray would wait, and say nothing."""
    kinds: dict[str, Callable[[Node], float]] = {
        "CPU": lambda node: node.cpus,
        "GPU": lambda node: node.gpus,
    }
    for key, has in kinds.items():
        wanted = sum(bundle.get(key, 0) for group in groups for bundle in group.bundles)
        there = sum(has(node) for node in nodes)
        if wanted > there:
            raise EtudeError(
                f"the run needs {wanted:g} {key}s of the Ray cluster, which has {there:g}: add "
                f"nodes, or give fewer --workers"
            )
        for group in groups:
            region = group.labels.get(REGION_LABEL)
            here = [node for node in nodes if region in (None, node.region)]
            most = max((has(node) for node in here), default=0)
            largest = max(bundle.get(key, 0) for bundle in group.bundles)
            if largest > most:
                raise EtudeError(
                    f"a program of {group.name} needs {largest:g} {key}s on one node, and no node "
                    f"of the Ray cluster has more than {most:g} for it: lower threads, or add one"
                )


def awaited(program: Program, others: Collection[str]) -> set[str]:
    """Those of the others whose addresses it is told."""
    named = {name for word in program.argv for name in HOLE.findall(word)}
    return named.intersection(others)


def filled(program: Program, address: tuple[str, int], urls: Mapping[str, str]) -> tuple[str, ...]:
    """Its arguments at this address, the others being there."""
    host, port = address
    known = {"host": host, "port": str(port), **urls}
    return tuple(
        HOLE.sub(lambda found: known.get(found[1], found[0]), word) for word in program.argv
    )


def rank_environment(program: Program, ranks: int, first: tuple[str, int]) -> dict[str, str]:
    """What torchrun would tell a rank; it has a node, or a share of one, of its own. `first`: the
    address of rank 0."""
    if program.needs.rank is None:
        return {}
    return {
        "RANK": str(program.needs.rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": first[0],
        "MASTER_PORT": str(first[1]),
    }
