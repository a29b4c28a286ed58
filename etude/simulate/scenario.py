"""A scenario: what a simulated run consists of, how long its parts take, and what goes wrong."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Mean time between two faults of each kind, anywhere in the run; 0: none. And shares of
    messages."""

    worker_crash_s: float = 0.0
    worker_hang_s: float = 0.0
    """It stops for a while, and says nothing."""
    partition_s: float = 0.0
    """A whole region is cut off for a while."""
    slow_disk_s: float = 0.0
    """A worker loads ten times as slowly for a while."""
    bad_download_s: float = 0.0
    """What a worker downloads is not what was published."""
    gateway_crash_s: float = 0.0
    controller_crash_s: float = 0.0
    trainer_crash_s: float = 0.0
    lost: float = 0.0
    """Share of answers and heartbeats that are lost."""
    duplicate: float = 0.0
    """Share of answers and finished groups that arrive twice."""
    clock_skew: float = 0.0
    """Workers' clocks go faster or slower by up to this share."""
    lasting_s: float = 30.0
    """How long hangs, partitions and slow disks last at most."""
    restart_s: float = 5.0
    """From the end of a process to its next life."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Times are means; each is varied by `spread`, those of turns by `task_spread`, too."""

    steps: int
    groups_per_step: int
    group_size: int
    max_lag: int
    reorder_window: int = 1
    concurrency: int
    """Sessions at once."""

    regions: int
    workers_per_region: int
    max_num_seqs: int
    """Requests that a worker works on at full speed; with more, each takes longer."""
    heartbeat_s: float = 1.0
    heartbeat_timeout_s: float = 10.0

    turns: int
    turn_s: float
    """Of a request at a worker that is full, from its first token to its last."""
    tool_s: float
    """Between two turns, for tools; and once more at the end, for grading."""
    train_s: float
    """An optimizer step."""
    publish_s: float
    """From the end of a step to its weights in the store."""
    download_s: float
    """One copy of a version, over the link of a region."""
    swap_s: float
    """To decode, check and take up what is downloaded."""
    delta_bytes: int
    relays: bool = True
    """One download a region; otherwise each worker makes its own."""
    with_signal: float = 1.0
    """Share of the groups that there is something to learn from."""
    spread: float = 0.3
    task_spread: float = 0.0
    """What the turns of one group have in common: a long task is long for all of its sessions."""
    faults: Faults = field(default_factory=Faults)


SMALL = Scenario(
    steps=6,
    groups_per_step=3,
    group_size=2,
    max_lag=1,
    reorder_window=2,
    concurrency=12,
    regions=4,
    workers_per_region=2,
    max_num_seqs=2,
    heartbeat_timeout_s=10.0,
    turns=2,
    turn_s=4.0,
    tool_s=2.0,
    train_s=10.0,
    publish_s=1.0,
    download_s=2.0,
    swap_s=1.0,
    delta_bytes=1000,
    with_signal=0.8,
    spread=0.9,
    faults=Faults(
        worker_crash_s=40.0,
        worker_hang_s=40.0,
        partition_s=80.0,
        slow_disk_s=60.0,
        bad_download_s=60.0,
        gateway_crash_s=90.0,
        controller_crash_s=120.0,
        trainer_crash_s=120.0,
        lost=0.03,
        duplicate=0.05,
        clock_skew=0.2,
    ),
)
"""A few workers, short steps, and everything goes wrong all the time: for schedules of faults."""
