"""A record of every file that is written for a cluster, and of every program of a Ray cluster.

After a change of them, write `clusters.json` again, and read the changes in it:

    ETUDE_WRITE_ANSWERS=1 python -m pytest tests/launch/test_written_clusters.py
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from etude.cli import main
from etude.core.config import parse
from etude.core.placement_config import PlacementConfig, deal
from etude.launch import launcher
from etude.launch.ray_plan import Node, cluster_programs, placement_groups

CLUSTERS = Path(__file__).with_name("clusters.json")
SMALL = """
name = "My_run.1"
store = "s3://bucket/runs/mine"
[[stage]]
kind = "rl"
steps = 3
"""
LARGE = """
name = "large"
store = "s3://bucket/runs/large"
[engine]
device = "cuda"
regions = ["east", "west"]
[trainer]
device = "cuda"
ranks = 4
[eval]
every_steps = 2
[[stage]]
kind = "rl"
steps = 3
threads = 3
"""
EXPORTS: dict[str, tuple[str, list[str]]] = {
    "kubernetes small": ("k8s", ["--worker-gpus", "0", "--trainer-gpus", "0"]),
    "slurm small": ("slurm", ["--worker-gpus", "0", "--trainer-gpus", "0"]),
    "kubernetes large": (
        "k8s",
        [
            "--workers",
            "2",
            "--trainer-nodes",
            "3",
            "--trainer-min-nodes",
            "2",
            "--image",
            "reg/x:1",
        ],
    ),
    "slurm large": ("slurm", ["--workers", "2", "--trainer-nodes", "3", "--trainer-gpus", "4"]),
}


def written(name: str, kind: str, options: list[str], folder: Path) -> dict[str, list[str]]:
    toml, target = folder / f"{name}.toml", folder / name
    toml.write_text(LARGE if "large" in name else SMALL)
    assert main(["export", kind, str(toml), str(target), *options]) == 0
    return {
        path.name: path.read_text().replace(str(folder), "HERE").splitlines()
        for path in sorted(target.iterdir())
    }


def planned(text: str, *overrides: str) -> dict[str, Any]:
    programs = cluster_programs(parse(text, overrides), "s3://bucket/mine", 2)
    nodes = [Node(cpus=8.0, gpus=4.0, region=region) for region in ("", "east", "west")]
    groups = placement_groups(programs, nodes)
    return {
        "programs": [asdict(program) for program in programs],
        "groups": [
            {
                "name": group.name,
                "spread": group.spread,
                "programs": [program.name for program in group.programs],
                "labels": dict(group.labels),
                "bundles": group.bundles,
            }
            for group in groups
        ],
    }


def on_one_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(launcher, "free_ports", lambda count: list(range(9000, 9000 + count)))
    monkeypatch.setattr(launcher.sys, "executable", "python")
    told = {}
    for name, config in (("small", parse(SMALL)), ("large", parse(LARGE))):
        placement = deal(7, 2, config.engine.regions) if name == "large" else PlacementConfig()
        servers, url = launcher.server_programs("S", config.engine, placement)
        ranks = config.trainer.ranks
        trainers = launcher.trainer_programs("S", ranks, Path("/meet"), placement.trainer)
        evaluators = launcher.evaluator_programs("S", config.eval.every_steps, placement)
        told[name] = {
            "url": url,
            "programs": [asdict(each) for each in (*servers, *trainers, *evaluators)],
        }
    return told


def test_every_line_is_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {
        name: written(name, kind, options, tmp_path) for name, (kind, options) in EXPORTS.items()
    }
    told["ray small"] = planned(SMALL)
    told["ray large"] = planned(LARGE)
    told["one machine"] = on_one_machine(tmp_path, monkeypatch)
    found = json.loads(json.dumps(told, default=str))
    if os.environ.get("ETUDE_WRITE_ANSWERS"):
        CLUSTERS.write_text(json.dumps(found, indent=1) + "\n")
    expected = json.loads(CLUSTERS.read_text())
    for name, each in found.items():
        assert each == expected[name], name
    assert found.keys() == expected.keys()
