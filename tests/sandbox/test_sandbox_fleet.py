"""Admission, placement and leases, over random schedules; and a pool with a budget."""

from __future__ import annotations

import asyncio
import random
from typing import cast

import pytest

from etude.core.errors import EtudeError
from etude.core.sandbox import Limits, SandboxSpec, Tier
from etude.sandbox.fake import FakeSandboxPool
from etude.sandbox.fleet import LEASE_S, Fleet, Need, Placed
from etude.sandbox.fleet_pool import FleetPool, need_of, with_budget


def need(cpus: float = 1.0, memory: float = 1.0, disk: float = 1.0) -> Need:
    return Need(cpus=cpus, memory_bytes=memory, disk_bytes=disk)


def fleet_of(hosts: int, size: float = 4.0, starts_at_once: int = 32) -> Fleet:
    fleet = Fleet()
    for number in range(hosts):
        fleet.join(f"h{number}", need(size, size, size), 0.0, starts_at_once=starts_at_once)
    return fleet


def test_no_host_promises_more_than_it_has_and_the_first_comes_first() -> None:
    fleet = fleet_of(2)
    numbers = [fleet.want("me", need(2.0), 0.0) for _ in range(6)]
    placed = fleet.place()
    assert [each.sandbox for each in placed] == numbers[:4]
    assert sorted(each.host for each in placed) == ["h0", "h0", "h1", "h1"]
    small = fleet.want("me", need(0.1), 0.0)
    assert fleet.place() == []  # it does not overtake those that wait
    fleet.closed(numbers[0])
    fleet.closed(numbers[1])
    assert [each.sandbox for each in fleet.place()] == [*numbers[4:]]
    fleet.closed(numbers[2])
    assert [each.sandbox for each in fleet.place()] == [small]


def test_the_least_pressed_host_is_next_and_one_that_is_pressed_hard_gets_nothing() -> None:
    fleet = fleet_of(3, size=100.0)
    fleet.report("h0", 0.99, 0.0)
    fleet.report("h1", 0.50, 0.0)
    fleet.report("h2", 0.10, 0.0)
    for _ in range(20):
        fleet.want("me", need(), 0.0)
    assert {each.host for each in fleet.place()} == {"h2"}
    fleet.report("h2", 0.96, 0.0)
    fleet.want("me", need(), 0.0)
    assert [each.host for each in fleet.place()] == ["h1"]


def test_so_many_start_at_once() -> None:
    fleet = fleet_of(1, size=100.0, starts_at_once=4)
    for _ in range(10):
        fleet.want("me", need(), 0.0)
    first = fleet.place()
    assert len(first) == 4 and fleet.place() == []
    fleet.up(first[0].sandbox)
    assert len(fleet.place()) == 1
    fleet.failed(first[1].sandbox)
    assert [each.sandbox for each in fleet.place()] == [first[1].sandbox]
    assert fleet.counts() == {"waiting": 5, "starting": 4, "up": 1}
    # reports about a sandbox that was closed meanwhile change nothing
    fleet.closed(first[1].sandbox)
    for say in (fleet.failed, fleet.up, fleet.closed):
        say(first[1].sandbox)
    assert fleet.counts() == {"waiting": 5, "starting": 3, "up": 1}


def test_what_a_silent_owner_had_is_closed_and_what_a_silent_host_had_waits_again() -> None:
    fleet = fleet_of(2)
    mine, others = fleet.want("me", need(), 0.0), fleet.want("you", need(), 0.0)
    where = {each.sandbox: each.host for each in fleet.place()}
    for time in (20.0, 40.0, 59.0):
        fleet.renew("you", time)
        for host in ("h0", "h1"):
            fleet.report(host, 0.0, time)
        assert fleet.expire(time) == fleet.expire(time)
    ended = fleet.expire(LEASE_S)
    assert [(each.sandbox, each.host) for each in ended.to_close] == [(mine, where[mine])]
    assert fleet.expire(LEASE_S).to_close == ()
    other = {"h0": "h1", "h1": "h0"}[where[others]]
    fleet.report(other, 0.0, 100.0)
    fleet.renew("you", 100.0)
    assert fleet.expire(59.0 + LEASE_S).lost == (others,)
    assert [(each.sandbox, each.host) for each in fleet.place()] == [(others, other)]


def test_parts_of_a_processor_add_up_to_a_whole_one_again() -> None:
    fleet = fleet_of(1, size=1.0)
    parts = [fleet.want("o", need(cpus, 0, 0), 0.0) for cpus in (0.1, 0.2, 0.3)]
    assert len(fleet.place()) == 3
    for number in parts:
        fleet.closed(number)
    whole = fleet.want("o", need(1.0, 0, 0), 0.0)
    assert fleet.place() == [Placed(whole, "h0")]
    fleet.want("o", need(0.1, 0, 0), 0.0)
    assert fleet.place() == []


def test_what_can_never_be_is_refused() -> None:
    fleet = fleet_of(2)
    with pytest.raises(EtudeError, match=r"more than any host has.*\[sandbox.budget\]"):
        fleet.want("me", need(5.0), 0.0)


@pytest.mark.parametrize("seed", range(10))
def test_nothing_is_lost_and_nothing_overfull_whatever_happens(seed: int) -> None:
    """To repeat one: pytest tests/sandbox/test_sandbox_fleet.py -k "whatever_happens and SEED"."""
    rng, now = random.Random(seed), 0.0
    fleet = fleet_of(5, starts_at_once=3)
    alive: dict[int, str] = {}
    needs: dict[int, Need] = {}
    for _ in range(250):
        now += rng.random() * 5
        action = rng.choice(["want", "want", "up", "fail", "close", "report", "join", "expire"])
        some = rng.choice(list(alive)) if alive else None
        if action == "want":
            wanted = need(rng.choice([0.5, 1, 2]), rng.choice([0.5, 1, 3]))
            owner = rng.choice(["a", "b"])
            number = fleet.want(owner, wanted, now)
            alive[number], needs[number] = owner, wanted
        elif action == "up" and some:
            fleet.up(some)
        elif action == "fail" and some:
            fleet.failed(some)
        elif action == "close" and some:
            fleet.closed(some)
            del alive[some]
        elif action == "report":
            fleet.report(f"h{rng.randrange(5)}", rng.random(), now)
        elif action == "join":
            fleet.join(f"h{rng.randrange(5)}", need(4, 4, 4), now, starts_at_once=3)
        elif action == "expire":
            fleet.renew("a", now)
            fleet.expire(now)
            heard = {fleet._sandboxes[number].owner for number in fleet._sandboxes}
            alive = {number: owner for number, owner in alive.items() if number in fleet._sandboxes}
            assert heard <= {"a", "b"}
        fleet.place()
        counts = fleet.counts()
        assert sum(counts.values()) == len(alive) == len(fleet._sandboxes)
        for host in (f"h{number}" for number in range(5)):
            there = fleet.on(host)
            assert sum(needs[number].cpus for number in there) <= 4
            assert sum(needs[number].memory_bytes for number in there) <= 4


async def test_a_pool_with_a_budget_lets_the_rest_wait() -> None:
    spec = SandboxSpec(limits=Limits(cpus=2.0))
    one = need_of(spec)
    budget = Need(cpus=5.0, memory_bytes=10 * one.memory_bytes, disk_bytes=10 * one.disk_bytes)
    pool = with_budget(FakeSandboxPool(), budget)
    opened = most = done = 0

    async def use() -> None:
        nonlocal opened, most, done
        async with pool.open(spec):
            opened += 1
            most = max(most, opened)
            await asyncio.sleep(0)
            opened -= 1
            done += 1

    users = [asyncio.create_task(use()) for _ in range(20)]
    users[7].cancel()
    await asyncio.gather(*users, return_exceptions=True)
    assert (most, done) == (2, 19)
    with pytest.raises(EtudeError, match="more than any host has"):
        pool.check(SandboxSpec(limits=Limits(cpus=6.0)))


def test_a_pool_over_many_hosts_holds_what_the_weakest_holds() -> None:
    pools = {tier: FakeSandboxPool() for tier in ("gvisor", "process", "vm")}
    for tier, pool in pools.items():
        pool.tier = cast(Tier, tier)
    assert FleetPool(pools, dict.fromkeys(pools, need())).tier == "process"


async def test_a_pool_over_many_hosts_uses_all_of_them() -> None:
    spec = SandboxSpec()
    pools = {name: FakeSandboxPool() for name in ("a", "b", "c")}
    pool = FleetPool(pools, dict.fromkeys(pools, need_of(spec)))
    async with pool.open(spec) as one, pool.open(spec) as two, pool.open(spec):
        late = asyncio.create_task(pool.open(spec).__aenter__())
        await asyncio.sleep(0)
        assert not late.done() and one is not two
    await late
