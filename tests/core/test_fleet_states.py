"""The states of workers under random schedules: the workers that are sent requests, and the promise
of the floor."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from etude.core.fleet import GONE_AFTER, Fleet, Worker, WorkerState

TIMEOUT_S = 10.0
URLS = st.sampled_from(["a", "b", "c", "d"])

NEXT = {
    WorkerState.UNKNOWN: {WorkerState.SYNCING, WorkerState.LIVE},
    WorkerState.SYNCING: {
        WorkerState.LIVE, WorkerState.SUSPECT, WorkerState.DRAINING, WorkerState.GONE
    },
    WorkerState.LIVE: {
        WorkerState.SYNCING, WorkerState.SUSPECT, WorkerState.DRAINING, WorkerState.GONE
    },
    WorkerState.SUSPECT: {WorkerState.SYNCING, WorkerState.LIVE, WorkerState.GONE},
    WorkerState.DRAINING: {WorkerState.SYNCING, WorkerState.LIVE, WorkerState.GONE},
    WorkerState.GONE: {WorkerState.SYNCING, WorkerState.LIVE, WorkerState.DRAINING},
}  # fmt: skip


@dataclass
class Process:
    """The actual state of a worker."""

    version: int = -1
    talks: bool = True


@dataclass
class Request:
    worker: Worker
    floor: int
    """The floor when the request was started."""


class FleetMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(heartbeat_timeout_s=TIMEOUT_S)
        self.now = 0.0
        self.published = 0
        self.processes: dict[str, Process] = {}
        self.requests: list[Request] = []
        self.states = dict.fromkeys("abcd", WorkerState.UNKNOWN)

    def look(self) -> None:
        """Check that every change of a state is in the diagram."""
        for url, before in self.states.items():
            after = self.fleet.state(url)
            assert after is before or after in NEXT[before], (url, before, after)
            self.states[url] = after

    @rule(url=URLS)
    def start(self, url: str) -> None:
        self.processes[url] = Process()
        self.fleet.join(url, "r", -1, self.now)
        self.look()

    @rule(seconds=st.sampled_from([0.5, 3.0, TIMEOUT_S, GONE_AFTER * TIMEOUT_S]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for url, process in self.processes.items():
            if process.talks:
                self.fleet.join(url, "r", process.version, self.now)
        self.look()
        for worker in self.fleet.expire(self.now):
            assert not self.processes[worker.url].talks, "only who is silent is suspect"
        self.look()

    @rule(url=URLS)
    def stop_or_go_on(self, url: str) -> None:
        if url in self.processes:
            self.processes[url].talks = not self.processes[url].talks

    @rule()
    def publish(self) -> None:
        self.published += 1

    @rule(url=URLS)
    def load(self, url: str) -> None:
        """Its answer arrives, if the worker is still known."""
        for worker in self.fleet.behind(self.published):
            if worker.url == url and self.processes[url].talks:
                self.processes[url].version = worker.version = self.published
        self.look()

    @rule(seconds=st.sampled_from([0.0, TIMEOUT_S]))
    def go_live(self, seconds: float) -> None:
        """The shell asks again and again: a quorum may suffice, all workers certainly do."""
        before = self.fleet.floor
        if not self.fleet.may_raise_floor(self.published, self.now):
            self.pass_time(seconds)
            if not self.fleet.may_raise_floor(self.published, self.now):
                return
        self.fleet.raise_floor(self.published)
        assert self.fleet.floor >= before, "a promise is never taken back"
        able = [worker for worker in self.fleet.workers if not worker.draining]
        # workers that have just started are not waited for while others have weights
        wanted = [worker for worker in able if worker.version >= 0] or able
        ready = [worker for worker in wanted if worker.version >= self.published]
        assert len(ready) * 2 >= len(wanted), "who is left behind is a minority"
        assert ready or not wanted
        self.look()

    @rule(url=URLS, draining=st.booleans())
    def drain(self, url: str, draining: bool) -> None:
        found = self.fleet.drain(url, draining)
        assert (found is None) == (url not in {worker.url for worker in self.fleet.workers})
        self.look()

    @rule(url=URLS)
    def fail(self, url: str) -> None:
        for worker in self.fleet.workers:
            if worker.url == url:
                self.fleet.leave(worker)
                assert self.fleet.state(url) is WorkerState.GONE
        self.look()

    @rule(session=st.sampled_from(["", "s", "t"]))
    def ask(self, session: str) -> None:
        worker = self.fleet.pick(session)
        assert (worker is None) == (not self.fleet.up)
        if worker is not None:
            assert self.fleet.state(worker.url) is WorkerState.LIVE
            assert self.processes[worker.url].version >= max(self.fleet.floor, 0)
            self.requests.append(Request(worker, self.fleet.floor))

    @rule()
    def answer(self) -> None:
        if self.requests:
            request = self.requests.pop(0)
            self.fleet.done(request.worker)

    @invariant()
    def begun_with_what_was_promised(self) -> None:
        for request in self.requests:
            assert request.worker.version >= max(request.floor, 0)

    @invariant()
    def requests_are_counted(self) -> None:
        for worker in self.fleet.workers:
            assert worker.active == sum(each.worker is worker for each in self.requests)


FleetMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, database=None, derandomize=True
)
TestFleet = FleetMachine.TestCase


def test_a_slow_worker_is_left_behind_and_catches_up() -> None:
    fleet = Fleet(heartbeat_timeout_s=TIMEOUT_S)
    quick, other, slow = (fleet.join(url, "r", 0, 0.0) for url in ("a", "b", "c"))
    quick.version = 1
    assert not fleet.may_raise_floor(1, 100.0), "one of three is no quorum"
    other.version = 1
    assert not fleet.may_raise_floor(1, 100.0) and not fleet.may_raise_floor(1, 109.9)
    assert fleet.may_raise_floor(1, 110.0)
    fleet.raise_floor(1)
    assert fleet.state("c") is WorkerState.SYNCING and fleet.behind(1) == [slow]
    assert {fleet.pick(), fleet.pick()} == {quick, other}
    slow.version = 1
    assert fleet.state("c") is WorkerState.LIVE and fleet.pick() is slow


def test_nobody_waits_for_one_that_has_just_begun() -> None:
    """It loads a whole model, while the others only change to the next version."""
    fleet = Fleet(heartbeat_timeout_s=TIMEOUT_S)
    ready, begun = fleet.join("a", "r", 1, 0.0), fleet.join("b", "r", -1, 0.0)
    assert fleet.behind(1) == [begun] and fleet.may_raise_floor(1, 0.0)
    begun.version = 0
    assert not fleet.may_raise_floor(1, 0.0), "it follows, and is waited for"
    ready.version = begun.version = -1
    assert not fleet.may_raise_floor(1, 0.0), "nobody else could serve"


def test_those_that_start_together_are_waited_for() -> None:
    """Otherwise all sessions start at the first worker that is ready, and stay there."""
    fleet = Fleet(heartbeat_timeout_s=TIMEOUT_S, awaits_floor=True)
    first, second, third = (fleet.join(url, "r", -1, 0.0) for url in "abc")
    first.version = 0
    assert not fleet.may_raise_floor(0, 0.0)
    second.version = 0
    assert not fleet.may_raise_floor(0, 0.0) and fleet.may_raise_floor(0, TIMEOUT_S)
    third.version = 0
    assert fleet.may_raise_floor(0, 0.0)
    fleet.raise_floor(0)
    fleet.join("d", "r", -1, 0.0)
    assert fleet.may_raise_floor(0, 0.0), "the others can go on"


def test_nobody_waits_for_who_refuses() -> None:
    fleet = Fleet(heartbeat_timeout_s=TIMEOUT_S)
    ready, refusing = fleet.join("a", "r", 1, 0.0), fleet.join("b", "r", 0, 0.0)
    assert not fleet.may_raise_floor(1, 0.0)
    assert fleet.may_raise_floor(1, 0.0, refused={refusing}) and ready.version == 1


def test_a_drained_worker_finishes_what_it_has_and_goes() -> None:
    fleet = Fleet(heartbeat_timeout_s=TIMEOUT_S)
    only = fleet.join("a", "r", 0, 0.0)
    assert fleet.pick("s") is only
    fleet.drain("a")
    assert fleet.pick("s") is None and only.active == 1, "not even its own sessions"
    fleet.join("a", "r", 0, 5.0)
    assert fleet.state("a") is WorkerState.DRAINING, "a heartbeat does not end it"
    fleet.done(only)
    fleet.drain("a", draining=False)
    assert fleet.pick("s") is only
    fleet.drain("a")
    assert fleet.expire(15.0) == [only] and fleet.state("a") is WorkerState.GONE


def test_a_failure_does_not_end_a_drain_and_the_end_of_the_lease_does() -> None:
    fleet = Fleet(heartbeat_timeout_s=TIMEOUT_S)
    for now in (0.0, 5.0):
        failed = fleet.join("a", "r", 0, now)
        fleet.drain("a")
        fleet.leave(failed)
        fleet.expire(now + 4.0)
        fleet.join("a", "r", 0, now + 4.0)
        assert fleet.state("a") is WorkerState.DRAINING and fleet.pick() is None
    fleet.leave(fleet.join("a", "r", 0, 10.0))
    fleet.expire(20.0)
    fleet.join("a", "r", 0, 21.0)
    assert fleet.state("a") is WorkerState.LIVE, "another one at its address"


def test_the_last_suspects_are_not_forgotten() -> None:
    fleet = Fleet(heartbeat_timeout_s=TIMEOUT_S)
    fleet.join("a", "r", 0, 0.0)
    fleet.expire(10_000.0)
    assert fleet.state("a") is WorkerState.SUSPECT, "what waits for it has nobody else"
    fleet.join("b", "r", 0, 10_000.0)
    fleet.expire(10_001.0)
    assert fleet.state("a") is WorkerState.GONE


def test_the_last_workers_are_not_spared() -> None:
    fleet = Fleet(0)
    for url in ("a", "b"):
        fleet.join(url, "east", 0, 0.0)
    assert fleet.spares("a", keep=1) and not fleet.spares("a", keep=2)
    fleet.drain("b")
    assert not fleet.spares("a", keep=1)
    assert fleet.spares("b", keep=1), "it is not one of those that answer"


def test_a_drain_that_was_taken_back_does_not_return() -> None:
    """Neither another failure nor a restart brings it back."""
    for restarted in (False, True):
        fleet = Fleet(heartbeat_timeout_s=TIMEOUT_S)
        fleet.join("a", "r", 0, 0.0)
        fleet.drain("a")
        fleet.leave(fleet.workers[0])
        again = fleet.join("a", "r", 0, 1.0)
        assert fleet.state("a") is WorkerState.DRAINING
        fleet.drain("a", draining=False)
        if restarted:
            fleet.join("a", "r", -1, 2.0)
        else:
            fleet.leave(again)
        fleet.join("a", "r", 0, 3.0)
        assert fleet.state("a") is WorkerState.LIVE


def test_a_restart_does_not_end_a_drain() -> None:
    fleet = Fleet(heartbeat_timeout_s=TIMEOUT_S)
    fleet.join("a", "r", 1, 0.0)
    fleet.drain("a")
    fleet.join("a", "r", 0, 1.0)
    assert fleet.state("a") is WorkerState.DRAINING
