"""A scenario: the parts of a simulated run, their durations, and the faults."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Mean time between two faults of each kind, anywhere in the run; 0: none. Also shares of
    messages."""

    worker_crash_s: float = 0.0
    worker_hang_s: float = 0.0
    """A worker stops for a while, without a sign."""
    partition_s: float = 0.0
    """A whole region is cut off for a while."""
    slow_disk_s: float = 0.0
    """A worker loads ten times as slowly for a while."""
    bad_download_s: float = 0.0
    """A worker's download differs from the published weights."""
    gateway_crash_s: float = 0.0
    controller_crash_s: float = 0.0
    trainer_crash_s: float = 0.0
    lost: float = 0.0
    """Share of answers and heartbeats that are lost."""
    duplicate: float = 0.0
    """Share of answers and finished groups that arrive twice."""
    clock_skew: float = 0.0
    """Workers' clocks are faster or slower by up to this share."""
    lasting_s: float = 30.0
    """Longest duration of hangs, partitions and slow disks."""
    restart_s: float = 5.0
    """Time from the end of a process to its restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Times are means; each is varied by `spread`, and those of turns also by `task_spread`."""

    steps: int
    groups_per_step: int
    group_size: int
    max_lag: int
    reorder_window: int = 1
    concurrency: int
    """Sessions at the same time."""

    regions: int
    workers_per_region: int
    max_num_seqs: int
    """Requests that a worker handles at full speed; with more, each takes longer."""
    heartbeat_s: float = 1.0
    heartbeat_timeout_s: float = 10.0

    turns: int
    turn_s: float
    """Time of a request at a full worker, from its first token to its last."""
    tool_s: float
    """Time between two turns, for tools; and once more at the end, for grading."""
    train_s: float
    """Time of an optimizer step."""
    publish_s: float
    """Time from the end of a step to its weights in the store."""
    download_s: float
    """Time for one copy of a version, over the link of a region."""
    swap_s: float
    """Time to decode, check and load the downloaded weights."""
    delta_bytes: int
    relays: bool = True
    """One download per region; otherwise each worker makes its own."""
    with_signal: float = 1.0
    """Share of the groups that have something to learn from."""
    spread: float = 0.3
    task_spread: float = 0.0
    """Variation that the turns of one group share: a long task is long in all of its sessions."""
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
"""A few workers, short steps, and constant faults of every kind: for schedules of faults."""
