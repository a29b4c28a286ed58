"""The store of a run that learns from users, written by the loop itself, without weights.

python -m tests.dash.realtime_store STORE
"""

from __future__ import annotations

import sys

from etude.core import traffic
from etude.core.config import parse
from etude.realtime.cycle import Compare, Evaluate
from etude.store.objects import Objects
from etude.store.realtime import TrafficLog
from tests.run.realtime_world import World

CONFIG = """
name = "users"
[realtime]
production = "production.toml"
[[stage]]
kind = "rl"
steps = 3
"""


def write_realtime(objects: Objects) -> str:
    """Write a run in which one update is live, one was refused, and a third was in its canary when
    an operator stopped it. Return the pseudonym of a deleted user."""
    world = World(objects, num_users=40, solves=lambda version: 200 if version == 2 else 300)
    world.run.put_config(parse(CONFIG))
    loop = world.loop(per_user=1)
    world.follow(loop, until=Evaluate(1))
    gone = world.run.batch(1).rows[0].sample.partition(".")[0]
    world.delete(gone)
    world.follow(loop, until=Compare(new=3, old=1))
    assert TrafficLog(objects).append(traffic.hold(loop.last, world.now, "stopped by hand"))
    return gone


if __name__ == "__main__":
    write_realtime(Objects.open(sys.argv[1]))
