"""`etude production`: export recordings of production mode for training, and delete users."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from etude.core.consent import Tombstone, pseudonym
from etude.core.exports import Export, dpo_lines, sft_lines, trajectories
from etude.core.types import Trajectory
from etude.serve.production.place import Place
from etude.store.codec import pack, seal, unpack, unseal
from etude.store.objects import Objects
from etude.store.rollouts import RolloutLog

SESSIONS = "sessions.msgpack"
"""The file of an export for rl: a tuple of trajectories, sealed as in a run's store."""


def export(
    place: Place, kind: str, target: Path, *, min_score: float, console: Console
) -> Mapping[str, Any]:
    """Export recordings. `target`: a .jsonl file for sft and dpo, a directory for rl; existing
    content is replaced."""
    sessions, joined = place.read()
    makers: dict[str, Callable[[], Export]] = {
        "sft": lambda: sft_lines(sessions.sessions, joined.by_answer, min_score=min_score),
        "dpo": lambda: dpo_lines(sessions.sessions, joined.by_answer),
        "rl": lambda: trajectories(sessions.sessions, joined.by_answer),
    }
    made = makers[kind]()
    if kind == "rl":
        _write_trajectories(target, made.made)
    else:
        _write_lines(target, made.made)
    left_out = {**sessions.dropped, **made.dropped}
    left_out |= {f"feedback {why}": len(found) for why, found in joined.dropped.items()}
    if joined.pending:
        left_out["feedback pending"] = len(joined.pending)
    console.print(
        f"{len(made.made)} exported from {len(sessions.sessions)} sessions -> {target}",
        highlight=False,
        soft_wrap=True,
    )
    for reason, count in sorted(left_out.items()):
        console.print(f"left out: {reason} {count}", highlight=False)
    return {"made": len(made.made), "sessions": len(sessions.sessions), "left_out": left_out}


def delete(place: Place, user: str, console: Console) -> int:
    """Delete a user, and verify that nothing of the user is left."""
    name = pseudonym(user, place.key)
    deleted = place.store.delete_user(name)
    count, found = place.store.scan([name.encode(), user.encode()])
    console.print(f"{deleted} objects deleted; {count} others searched, {len(found)} name the user")
    for key in found:
        console.print(f"still names the user: {key}", highlight=False, markup=False)
    return 1 if found else 0


def purge(place: Place, targets: Iterable[Path], console: Console) -> int:
    """Remove recordings from exports if they were deleted since."""
    tombstones = place.store.tombstones()
    for target in targets:
        if target.is_dir():
            kept = [t for t in read_trajectories(target) if not _is_gone_id(t.id, tombstones)]
            gone = len(read_trajectories(target)) - len(kept)
            _write_trajectories(target, kept)
        else:
            lines = [json.loads(line) for line in target.read_bytes().splitlines()]
            left = [line for line in lines if not _is_gone(line, tombstones)]
            gone = len(lines) - len(left)
            _write_lines(target, left)
        console.print(f"{target}: {gone} removed", highlight=False)
    return 0


def sweep(place: Place, console: Console) -> int:
    config = place.config
    counts = place.store.sweep(retention_s=config.retention_s, horizon_s=config.horizon_s)
    for reason, count in sorted(counts.items()):
        console.print(f"deleted: {reason} {count}", highlight=False)
    return 0


def status(place: Place, console: Console) -> int:
    sessions, joined = place.read()
    answers = sum(len(session.turns) for session in sessions.sessions)
    console.print(
        f"{len(place.store.users())} users, {len(sessions.sessions)} sessions, {answers} "
        f"answers, {sum(map(len, joined.by_answer.values()))} events on {len(joined.by_answer)} "
        f"answers, {len(joined.pending)} pending",
        highlight=False,
    )
    dropped = {**place.store.dropped(), **{f"sessions {k}": v for k, v in sessions.dropped.items()}}
    for reason, count in sorted(dropped.items()):
        console.print(f"dropped: {reason} {count}", highlight=False)
    return 0


def read_trajectories(directory: Path) -> tuple[Trajectory, ...]:
    path = directory / SESSIONS
    return unpack(unseal(path.read_bytes(), str(path)), tuple[Trajectory, ...], str(path))


def _write_trajectories(directory: Path, made: Iterable[Trajectory]) -> None:
    found = tuple(made)
    directory.mkdir(parents=True, exist_ok=True)
    _replace(directory / SESSIONS, seal(pack(found)))
    RolloutLog(Objects.open(str(directory))).put_evaluation(
        "000000.production", found, stage="production", split="production", object=SESSIONS
    )


def _write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    _replace(path, text.encode())


def _replace(path: Path, data: bytes) -> None:
    """Replace a file atomically."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(data)
    part.replace(path)


def _is_gone(line: Mapping[str, Any], tombstones: Mapping[str, Tombstone]) -> bool:
    tombstone = tombstones.get(line["user"])
    return tombstone is not None and float(line["recorded"]) <= tombstone.time


def _is_gone_id(id: str, tombstones: Mapping[str, Tombstone]) -> bool:
    """True if a trajectory is of a deleted user. A session's name begins with its start time in
    milliseconds."""
    user, _, session = id.partition(".")
    return _is_gone({"user": user, "recorded": int(session[:13]) / 1000}, tombstones)
