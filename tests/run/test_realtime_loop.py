"""The loop of real-time RL: a whole life, and every crash that may happen on the way."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from etude.core import traffic
from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.core.ledger import Batched, Ledger
from etude.core.sampling import VersionSpan
from etude.core.traffic import ENDS, Change
from etude.core.types import Batch
from etude.core.updates import (
    CreditedAnswer,
    Forgotten,
    UpdateRecord,
    is_of_user,
    versions_that_saw,
)
from etude.realtime.cycle import (
    AwaitVersion,
    Collect,
    Compare,
    Done,
    Evaluate,
    Facts,
    Gate,
    Held,
    Next,
    next_action,
    user_outcomes,
)
from etude.run.audit import audit
from etude.run.realtime import RealtimeLoop
from etude.run.realtime_fake import fake_rollouts
from etude.run.realtime_simulated import Simulated
from etude.store.codec import pack, seal
from etude.store.objects import Objects
from etude.store.production import digest
from etude.store.realtime import Life, TrafficLog, create_update, forget_user, forgotten, updates
from etude.store.rollouts import RolloutLog
from tests.run.fake_stage import Mortal
from tests.run.realtime_world import CANARY, MARGINS, STAGE, World, config, recorded


def told(world: World) -> list[tuple[str, int, int]]:
    changes = TrafficLog(world.objects).changes()
    return [(change.action, change.version, change.traffic.version) for change in changes]


def check(world: World) -> Ledger:
    """In any case: nothing deployed twice, nothing trained on twice, nothing lost."""
    ledger = Ledger(world.run.ledger.records())
    trained = [s for v in range(1, world.trainer.published() + 1) for s in world.trainer.samples(v)]
    assert len(trained) == len(set(trained)), "a sample is trained twice"
    entered = [e for e in world.run.ledger.records() if isinstance(e, Batched)]
    assert sorted(s for e in entered for s in e.samples) == sorted(trained)
    assert {sample for sample in ledger.samples() if is_of_user(sample)} <= world.asked
    assert ledger.issued == ledger.trained + ledger.dropped.total() + ledger.in_flight
    deployed = Counter((action, version) for action, version, _ in told(world))
    assert all(count == 1 for (action, _), count in deployed.items() if action != "canary")
    return ledger


def test_that_caps_leave_too_few_sessions_is_told_once() -> None:
    """All users belong to one organisation, and a batch takes a fifth from each."""
    world = World(Objects.open("memory:"), organisation=digest("acme"))
    loop = world.loop()
    for _ in range(8):
        action = asyncio.run(loop.step())
        world.tick()
    assert isinstance(action, Collect) and not world.run.batches()
    (line,) = (each for each in world.told if "waits" in each)
    assert ", 1 within the caps of users and organisations, of 12 needed for a batch" in line
    assert "other values of realtime.per_user or per_organisation_share" in line
    world.follow(world.loop(per_organisation_share=1.0), until=Evaluate(0))
    assert world.run.batches() == [1]


def test_updates_go_out_one_after_the_other() -> None:
    world = World(Objects.open("memory:"))
    world.follow(world.loop(), until=Done())
    one = [("canary", 0), ("promote", 1), ("settle", 1)]
    expected = [("start", 0, 0)] + [
        (action, version, version - 1 + new) for version in (1, 2, 3) for action, new in one
    ]
    assert told(world) == expected
    ledger = check(world)
    assert ledger.trained and set(ledger.dropped) >= {"heldout"}


def test_a_version_that_fails_the_gate_is_seen_by_nobody_and_not_built_on() -> None:
    world = World(Objects.open("memory:"), solves=lambda version: 200 if version == 2 else 300)
    world.follow(world.loop(), until=Done())
    assert [entry for entry in told(world) if entry[1] == 2] == [("refuse", 2, 1)]
    assert world.run.batch(3).base == 1
    sessions = world.sessions()
    sessions.look()
    assert {version for one in sessions.figures() for version in one.versions} == {0, 1, 3}
    check(world)


def test_a_version_that_users_dislike_is_taken_back_and_nothing_of_it_is_trained_on() -> None:
    world = World(Objects.open("memory:"), pleases=lambda version: version != 2, num_users=40)
    tight = {
        "canary": {"ramp": (0.5, 1.0), "min_users": 3, "delay_minutes": 0.0, "first_slack": 1.0}
    }
    loop = world.loop(**tight)
    world.follow(loop, until=Evaluate(3), most=2000)
    actions = [entry for entry in told(world) if entry[1] == 2]
    assert actions == [("canary", 2, 1), ("roll_back", 2, 1)]
    ledger = check(world)
    assert ledger.dropped["stale (version 2)"] > 0
    versions = {s.version for row in world.run.batch(3).rows for s in row.versions}
    assert versions == {1}


def test_wherever_it_is_killed_twice_it_ends_as_if_it_had_not_been() -> None:
    """The store fails at every write in turn, and again a few writes into the next life."""

    def life(writes: list[int]) -> tuple[World, int]:
        world = World(Objects.open("memory:"), num_users=8, solves=lambda v: 200 if v == 2 else 300)
        for limit in writes:
            mortal = Mortal(world.objects, limit)
            with pytest.raises(EtudeError, match="the store is gone"):
                world.follow(world.loop(mortal, **SMALL), until=Done())
        healthy = Mortal(world.objects, 10_000)
        world.follow(world.loop(healthy, **SMALL), until=Done())
        assert healthy.writes is not None
        return world, 10_000 - healthy.writes

    calm, count = life([])
    assert len(told(calm)) > 6 and count > 20
    assert check(calm).dropped["capped (user_cap)"] > 0
    for first in range(count):
        deaths = [first, first % 3]
        if sum(deaths) < count:
            killed, _ = life(deaths)
            check(killed)
            assert _history(killed) == _history(calm), f"killed after {deaths} writes"


def test_wherever_it_is_killed_the_audit_finds_nothing_wrong() -> None:
    """Also before the next life enters what this one could not."""
    for writes in range(1000):
        world = World(Objects.open("memory:"), num_users=8)
        world.run.put_config(parse(AUDITED))
        loop = world.loop(Mortal(world.objects, writes), **SMALL)
        try:
            world.follow(loop, until=Evaluate(0))
        except EtudeError:
            violations = audit(world.run).violations
            # the trainer is a fake, and publishes no weights
            assert not [each for each in violations if "newest published version" not in each]
        else:
            assert writes > 10 and RolloutLog(world.objects).rows()
            return


AUDITED = """
name = "mine"
[realtime]
production = "production.toml"
[[stage]]
kind = "rl"
steps = 3
"""
SMALL: dict[str, object] = {"min_sessions": 4, "per_user": 1, "simulated_share": 0.2}


def _history(world: World) -> tuple[list[Change], list[object]]:
    batches = [world.run.batch(step) for step in world.run.batches()]
    ledger = Ledger(world.run.ledger.records())
    rows = RolloutLog(world.objects).rows()
    return TrafficLog(world.objects).changes(), [*batches, ledger.issued, ledger.dropped, rows]


def test_a_deleted_user_is_not_in_the_next_batch_and_the_versions_that_saw_them_are_named() -> None:
    world = World(Objects.open("memory:"))
    loop = world.loop()
    world.follow(loop, until=Evaluate(0))
    (first,) = world.run.batches()
    user = world.run.batch(first).rows[0].sample.partition(".")[0]
    world.delete(user)
    world.follow(loop, until=Done())
    for step in world.run.batches():
        assert not any(row.sample.startswith(user) for row in world.run.batch(step).rows)
    record = forgotten(world.run, user)
    assert record is not None and record.steps == (1,)
    bases = {step: found.base for step, found in updates(world.run).items()}
    assert versions_that_saw(record.steps, bases) == (1, 2, 3), "2 and 3 are made from 1"
    assert any(reason == "deleted" for reason in Ledger(world.run.ledger.records()).dropped)


def test_a_deleted_user_leaves_a_batch_whatever_the_loop_waits_for() -> None:
    world = World(Objects.open("memory:"))
    loop = world.loop()
    world.follow(loop, until=Compare(new=1, old=0))
    user = world.run.batch(1).rows[0].sample.partition(".")[0]
    world.delete(user)
    for each in (loop, loop, world.loop()):
        asyncio.run(each.step())
    assert not any(row.sample.startswith(user) for row in world.run.batch(1).rows)
    record = forgotten(world.run, user)
    assert record is not None and record.steps == (1,)
    told = [line for line in world.told if "was deleted" in line]
    assert told == [f"user {user} was deleted; versions that learnt from their data: 1"]


@pytest.mark.parametrize("writes", range(4))
def test_a_death_while_a_user_is_forgotten_leaves_nothing_of_them(writes: int) -> None:
    """The crash may come after any of the writes."""
    world = World(Objects.open("memory:"))
    mortal = Mortal(world.objects, None)
    loop = world.loop(mortal)
    world.follow(loop, until=Compare(new=1, old=0))
    user = world.run.batch(1).rows[0].sample.partition(".")[0]
    world.run.put_recomputed(1, ())
    world.delete(user)
    mortal.writes = writes
    with pytest.raises(EtudeError, match="the store is gone"):
        asyncio.run(loop.step())
    asyncio.run(world.loop().step())
    assert not any(row.sample.startswith(user) for row in world.run.batch(1).rows)
    assert not any(one.sample.startswith(user) for one in updates(world.run)[1].answers)
    assert not world.objects.list("recomputed")
    record = forgotten(world.run, user)
    assert record is not None and record.steps == (1,) and record.time > 0


def test_an_update_that_nobody_is_left_of_is_passed_over() -> None:
    world = World(Objects.open("memory:"))
    loop = world.loop()
    world.follow(loop, until=AwaitVersion(1))
    taught = {row.sample.partition(".")[0] for row in world.run.batch(1).rows}
    for user in taught:
        world.delete(user)
    asyncio.run(loop.step())
    assert world.run.batch(1).rows == ()
    world.users += [digest(f"another {n}") for n in range(20)]
    world.follow(loop, until=Done())
    ends = [(action, version) for action, version, _ in told(world) if action in ENDS]
    assert ends == [("start", 0), ("refuse", 1), ("settle", 2), ("settle", 3)]
    why = next(each.why for each in TrafficLog(world.objects).changes() if each.version == 1)
    assert why == "all users whose sessions it was trained on were deleted"
    assert world.run.batch(2).base == 0
    record = forgotten(world.run, min(taught))
    assert record is not None and record.steps == (1,)


def test_a_batch_says_of_what_is_left_how_old_it_is() -> None:
    world = World(Objects.open("memory:"))
    world.follow(world.loop(), until=AwaitVersion(1))
    batch = world.run.batch(1)
    user = batch.rows[0].sample.partition(".")[0]
    newer = replace(batch.rows[1], versions=(VersionSpan(5, 2),))
    world.objects.put("batches/000001", seal(pack(replace(batch, rows=(batch.rows[0], newer)))))
    forget_user(world.run, Forgotten(user=user, time=1.0, steps=(1,)))
    left = world.run.batch(1)
    assert left.rows == (newer,) and left.oldest == 5


@pytest.mark.parametrize("once", [False, True])
def test_it_looks_again_after_a_while_only_if_there_is_nothing_to_do(
    once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(Objects.open("memory:"))
    log: list[Next | float] = []

    async def sleep(seconds: float) -> None:
        log.append(seconds)
        world.tick()

    monkeypatch.setattr(asyncio, "sleep", sleep)

    async def life() -> None:
        loop = world.loop(look_s=7.0)
        step = loop.step

        async def noted() -> Next:
            log.append(await step())
            return log[-1]  # type: ignore[return-value]

        loop.step = noted  # type: ignore[method-assign]
        await loop.follow(once=once)

    for version in (1, 2, 3) if once else (3,):
        log.clear()
        asyncio.run(life())
        assert told(world)[-1] == ("settle", version, version)
        actions = [each for each in log if each != 7.0]
        assert isinstance(actions[-1], Done) != once
        expected: list[Next | float] = actions[:1]
        for before, action in zip(actions, actions[1:], strict=False):
            expected += [action, 7.0] if action == before else [action]
        if expected[-1] == 7.0:
            expected.pop()  # it ends instead
        assert log == expected and 7.0 in log
    check(world)


def test_of_two_loops_the_one_that_began_last_works_on() -> None:
    world = World(Objects.open("memory:"))
    first = world.loop()
    world.follow(first, until=Evaluate(0))
    second = world.loop()
    world.follow(second, until=Evaluate(1))
    with pytest.raises(EtudeError, match="another real-time loop has started"):
        asyncio.run(first.step())
    world.follow(second, until=Done())
    check(world)


def test_two_loops_that_begin_at_once_do_not_share_a_life() -> None:
    """The second one asks before the first one has written."""

    class Late(Objects):
        def exists(self, key: str) -> bool:
            return False

    objects = Objects.open("memory:")
    first, second = Life(objects), Life(Late(objects._store, objects.url))
    with pytest.raises(EtudeError, match="another real-time loop has started"):
        first.check()
    second.check()
    names = [f"realtime/lives/{number:06d}.json" for number in (0, 1)]
    assert objects.list("realtime/lives") == names


def test_what_another_loop_wrote_before_this_one_began_is_not_entered_again() -> None:
    world = World(Objects.open("memory:"))
    first = world.loop()
    asyncio.run(first.step())
    world.tick()
    second = world.loop()
    asyncio.run(first.step())
    assert Ledger(world.run.ledger.records()).issued == world.num_users
    world.follow(second, until=Evaluate(0))
    check(world)


def test_what_another_loop_writes_after_this_one_began_is_found_out() -> None:
    """The first loop was in the middle of a step."""
    world = World(Objects.open("memory:"))
    first, second = world.loop(), world.loop()
    world.follow(first, until=Collect(step=1, base=0))
    asyncio.run(second.step())
    world.tick()
    asyncio.run(first.collect(Collect(step=1, base=0)))
    with pytest.raises(EtudeError, match="another process has written ledger"):
        asyncio.run(second.step())
    world.follow(world.loop(), until=Done())
    check(world)


def test_a_batch_is_in_the_ledger_at_once() -> None:
    world = World(Objects.open("memory:"))
    loop = world.loop()
    world.follow(loop, until=Collect(step=1, base=0))
    while 1 not in world.run.batches():
        world.tick()
        asyncio.run(loop.collect(Collect(step=1, base=0)))
    assert Ledger(world.run.ledger.records()).has_batch(1)


def simulating(world: World, meanwhile: Callable[[], Awaitable[None]]) -> RealtimeLoop:
    loop = world.loop(simulated_share=0.5)
    calls: list[int] = []

    async def simulate(version: int, step: int) -> Simulated:
        calls.append(step)
        if len(calls) == 1:
            await meanwhile()
        return await fake_rollouts(version, step)

    loop._simulate = simulate
    return loop


def test_nothing_is_made_if_too_few_are_left_while_tasks_are_attempted() -> None:
    world = World(Objects.open("memory:"))

    async def delete_all() -> None:
        for user in list(world.users):
            world.delete(user)

    loop = simulating(world, delete_all)
    actions = [asyncio.run(loop.step())]
    while world.users:
        world.tick()
        actions.append(asyncio.run(loop.step()))
    assert actions[-1] == asyncio.run(loop.step()) == Collect(step=1, base=0)
    assert updates(world.run) == {} and world.run.batches() == []


@pytest.mark.parametrize("at", [Gate(1, live=0), Compare(new=1, old=0)])
def test_who_stops_the_loop_while_it_decides_is_not_overruled(at: Next) -> None:
    """No user gets a version after somebody has stopped the loop, and no version is rolled back
    that is not being rolled out."""
    world = World(Objects.open("memory:"))
    loop = world.loop()
    log, look = TrafficLog(world.objects), loop.facts

    def facts() -> Facts:
        found = look()
        if next_action(found) == at and not loop.last.held:
            assert found.change is not None
            assert log.append(traffic.hold(found.change, world.now, "by hand"))
        return found

    loop.facts = facts  # type: ignore[method-assign]
    world.follow(loop, until=Held("by hand"))
    assert loop.last.held and loop.last.why == "by hand" and loop.last.traffic.beside is None


def test_who_is_deleted_while_tasks_are_attempted_is_in_no_batch() -> None:
    world = World(Objects.open("memory:"))
    there: list[str] = []

    async def delete() -> None:
        user = next(one for one in world.users if not loop.last.traffic.is_heldout(one))
        there.append(user)
        world.delete(user)

    loop = simulating(world, delete)
    world.follow(loop, until=AwaitVersion(1))
    (user,) = there
    rows = world.run.batch(1).rows
    assert rows and not any(row.sample.startswith(user) for row in rows)
    assert not any(one.sample.startswith(user) for one in updates(world.run)[1].answers)
    world.follow(loop, until=Done())
    check(world)
    record = forgotten(world.run, user)
    assert record is not None and record.steps == ()


def test_a_loop_that_was_overtaken_while_tasks_are_attempted_writes_nothing() -> None:
    world = World(Objects.open("memory:"))
    newer = world.loop(simulated_share=0.5)
    written: list[dict[int, UpdateRecord]] = []

    async def overtake() -> None:
        world.tick()
        assert await newer.step() == Collect(step=1, base=0)
        written.append(updates(world.run))

    with pytest.raises(EtudeError, match="another real-time loop has started"):
        world.follow(simulating(world, overtake), until=Done())
    assert [updates(world.run)] == written and world.run.batches() == [1]
    world.follow(newer, until=Done())
    check(world)


def test_the_record_of_a_batch_is_not_overwritten() -> None:
    world = World(Objects.open("memory:"))
    world.follow(world.loop(), until=AwaitVersion(1))
    record = updates(world.run)[1]
    with pytest.raises(EtudeError, match="another real-time loop has made the batch of"):
        create_update(world.run, replace(record, answers=()))
    assert updates(world.run)[1] == record


def test_a_user_is_deleted_after_a_death_between_a_record_and_its_batch() -> None:
    world = World(Objects.open("memory:"))
    user = world.users[0]
    answer = CreditedAnswer(sample=f"{user}.{0:013d}-{digest('x')}", context="", worth=1.0)
    create_update(world.run, UpdateRecord(step=1, base=0, time=world.now, answers=(answer,)))
    world.delete(user)
    world.follow(world.loop(), until=Done())
    assert answer not in updates(world.run)[1].answers
    record = forgotten(world.run, user)
    assert record is not None and record.steps == (), "no version has seen them"


def test_a_record_without_its_batch_is_no_part_of_the_baseline() -> None:
    """Its sessions are those of the update that is made again, and would count twice. Users like
    version 1 better, so the mean of both updates depends on how often each counts."""

    def batches(*, dies: bool) -> list[Batch]:
        world = World(Objects.open("memory:"), pleases=lambda version: version != 0)
        loop = world.loop()
        put = loop.run.put_batch

        def put_the_first(batch: Batch) -> None:
            if batch.step > 1:
                raise EtudeError("the store is gone")
            put(batch)

        if dies:
            loop.run.put_batch = put_the_first  # type: ignore[method-assign]
            with pytest.raises(EtudeError, match="the store is gone"):
                world.follow(loop, until=AwaitVersion(2))
            assert updates(world.run).keys() == {1, 2} and world.run.batches() == [1]
        world.follow(world.loop(), until=AwaitVersion(2))
        return [world.run.batch(step) for step in world.run.batches()]

    calm = batches(dies=False)
    assert len({row.advantages for row in calm[1].rows}) > 1
    assert batches(dies=True) == calm


def test_small_losses_do_not_add_up() -> None:
    """2 is about as good as 1, and 1 about as good as 0, but 2 is not as good as 0."""
    solved = {0: 300, 1: 295, 2: 290, 3: 296}
    world = World(Objects.open("memory:"), solves=lambda version: solved[version])
    world.follow(world.loop(gate={"safety": 0, "cheats": 0}), until=Done())
    ends = [(action, version) for action, version, _ in told(world) if action in ENDS]
    assert ends == [("start", 0), ("settle", 1), ("refuse", 2), ("settle", 3)]
    why = next(change.why for change in TrafficLog(world.objects).changes() if change.version == 2)
    assert why.startswith("heldout since version 0: 75.0 % -> 72.5 %")


def test_what_is_made_from_a_version_that_is_taken_back_meanwhile_is_refused() -> None:
    world = World(Objects.open("memory:"))
    loop = world.loop()
    world.follow(loop, until=Evaluate(2))
    log = TrafficLog(world.objects)
    back = traffic.roll_back(loop.last, world.now, "rolled back by hand", held=True)
    assert back.version == 1 and log.append(back)
    assert log.append(traffic.resume(back, world.now))
    world.follow(loop, until=Done())
    assert [entry for entry in told(world) if entry[1] == 2] == [("refuse", 2, 0)]
    assert world.run.batch(3).base == 0
    check(world)


def test_a_ramp_that_is_changed_during_a_canary_does_not_leave_it_alone() -> None:
    world = World(Objects.open("memory:"))
    world.follow(world.loop(), until=Compare(new=1, old=0))
    changed = world.loop(canary=CANARY | MARGINS | {"control_share": 0.3, "ramp": (0.1, 0.6, 1.0)})
    world.follow(changed, until=Evaluate(2))
    assert ("settle", 1, 1) in told(world)


def test_the_past_of_users_ends_when_an_update_is_first_seen() -> None:
    """At later stages it would otherwise hide the effect of the update on them."""
    world = World(Objects.open("memory:"))
    user = world.users[0]
    for time, version, kind in ((1.0, 0, "kept_5min"), (3.0, 1, "undone"), (5.0, 1, "undone")):
        name = f"{int(time):013d}-{digest(user)}"
        world.record(recorded(user, name, time, version), kind)
    sessions = world.sessions()
    sessions.look()
    (found,) = user_outcomes(sessions.figures(), new=1, old=0, first_seen=2.0, since=4.0, until=9.0)
    assert found.sessions == 1 and found.totals["kept"] == 0.0
    assert found.before["kept"] == 1.0


@pytest.mark.parametrize(
    "canary",
    [{"ramp": (1.0,)}, {"ramp": (0.5, 0.2, 1.0)}, {"ramp": (0.1, 0.5)}, {"control_share": 0}],
)
def test_a_canary_that_could_not_be_watched_is_refused_before_anything_runs(
    canary: dict[str, object],
) -> None:
    with pytest.raises(ValueError, match="ramp|control_share"):
        config(canary=canary)


def test_all_updates_together_are_compared_with_held_out_users() -> None:
    world = World(Objects.open("memory:"), num_users=100, pleases=lambda version: version >= 1)
    loop = world.loop()
    world.follow(loop, until=Evaluate(0))
    assert loop.against_heldout() == (), "no update is live"
    world.follow(loop, until=Evaluate(2))
    kept = loop.against_heldout()[0]
    assert kept.metric.name == "kept" and kept.candidate > 0.8 and kept.live < 0.2
    heldout = next(user for user in world.users if loop.last.traffic.is_heldout(user))
    strange = recorded(heldout, f"{int(world.now * 1000):013d}-{digest('x')}", world.now, 1)
    world.record(strange, "kept_5min")
    assert loop.against_heldout()[0] == kept, "its pool was down"


def test_rollouts_of_tasks_are_trained_on_beside_users_and_balance_in_the_ledger() -> None:
    world = World(Objects.open("memory:"))
    world.follow(world.loop(simulated_share=0.25), until=Done())
    ledger = check(world)
    assert ledger.dropped["no_signal"] == 2 * STAGE.last
    rows = RolloutLog(world.objects).rows()
    assert sorted((row.step or 0, row.dropped or "") for row in rows) == [(0, "no_signal")] * 6 + [
        (step, "") for step in (1, 1, 2, 2, 3, 3)
    ]
    for step in world.run.batches():
        rows = world.run.batch(step).rows
        simulated = [row for row in rows if not is_of_user(row.sample)]
        assert [row.sample for row in simulated] == [f"s{step:06d}-0000.{n}" for n in (0, 1)]
        assert len(rows) >= 12 + 2
        assert {span.version for row in simulated for span in row.versions} == {step - 1}


def test_nothing_is_trained_beyond_the_last_step() -> None:
    world = World(Objects.open("memory:"))
    world.follow(world.loop(), until=Done())
    assert max(world.run.batches()) == STAGE.last
