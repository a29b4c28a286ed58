"""Changes of a config between two launches of a run. Pure. The keys that control how a machine
carries out the run may change, and so may the number of remaining steps; the definition of the
experiment may not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from etude.core.config import RunConfig
from etude.core.lineage import stage_spans
from etude.core.stages import RolloutStageConfig

OPERATIONAL: dict[str, set[str]] = {
    "": {"trackers", "heartbeat_timeout_s", "folder", "store"},
    "engine": {
        "port",
        "public_url",
        "threads",
        "max_num_seqs",
        "device",
        "vllm_urls",
        "relays",
        "lend",
    },
    "tasks": {"timeout_s"},
    "realtime": {
        "every_minutes",
        "min_sessions",
        "look_s",
        "per_user",
        "per_organisation_share",
        "production",
        "gate",
        "canary",
    },
    "harness": {"concurrency", "timeout_s"},
    "trainer": {
        "device",
        "ranks",
        "context_parallel",
        "expert_parallel",
        "gradient_checkpointing",
        "checkpoint_every_s",
        "timeout_s",
    },
    "rewards.judge": {"url", "timeout_s"},
    "placement": {"trainer", "engines", "sandbox_cpus"},
    "sandbox": {
        "isolation",
        "hosts",
        "min_isolation",
        "mounts",
        "cpus",
        "memory_mib",
        "disk_mib",
        "max_processes",
    },
    "stage": {"threads", "microbatch_tokens"},
}
"""Keys that do not change the experiment, only how a machine carries it out."""


def refused_changes(there: RunConfig, here: RunConfig, *, version: int) -> list[str]:
    """The changes that a run which has made `version` refuses, each with its old and new value. A
    batch for a version counts as the version."""
    old, new = _experiment(there), _experiment(here)
    allowed = set(_open_steps(there, here, version))
    done = {
        f"stage.{span.name}.steps": f" ({min(version, span.end) - span.start} done or begun)"
        for span in stage_spans(there.stage)
        if isinstance(span.stage, RolloutStageConfig) and version > span.start
    }
    return [
        f"{key}: {old.get(key, 'absent')} -> {new.get(key, 'absent')}{done.get(key, '')}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and key not in allowed
    ]


def _experiment(config: RunConfig) -> dict[str, str]:
    """Key -> value without the operational keys; a stage is listed under its name. A folder that
    was moved together with its contents counts as unchanged."""
    tree = config.model_dump(mode="json")
    tree["stages"] = [stage["name"] for stage in tree["stage"]]
    tree["stage"] = {stage["name"]: stage for stage in tree["stage"]}
    for section, keys in OPERATIONAL.items():
        for table in tree["stage"].values() if section == "stage" else [_table(tree, section)]:
            for key in keys & table.keys():  # not every kind of stage has all of them
                del table[key]
    start = f'"{config.folder}/'
    return {key: told.replace(start, '"') for key, told in _flat(tree)}


def _table(tree: dict[str, Any], section: str) -> dict[str, Any]:
    """The table of a section; empty if the config has none."""
    for name in section.split(".") if section else ():
        tree = tree[name] or {}
    return tree


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}")
    else:
        yield path.removeprefix("."), json.dumps(value)


def _open_steps(there: RunConfig, here: RunConfig, version: int) -> Iterator[str]:
    """`stage.NAME.steps` of the stages whose number of steps may change. Version numbers run
    through the whole run: a stage that later stages have started from keeps its number, the last
    one can always be extended, and no step that was taken is undone."""
    spans = stage_spans(there.stage)
    steps = {stage.name: getattr(stage, "steps", 0) for stage in here.stage}
    for span in spans:
        is_loop = isinstance(span.stage, RolloutStageConfig)
        is_open = version < span.end or (is_loop and span is spans[-1])
        if is_open and (not is_loop or span.start + steps.get(span.name, 0) >= version):
            yield f"stage.{span.name}.steps"
