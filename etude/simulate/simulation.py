"""One run under virtual time. Window, ledger and fleet are those of a real run; the processes
around them are as simple as possible, and die, hang and lose messages as the seed determines.

The invariants are checked after every event, and any breach is a violation. A schedule is
determined by its scenario and seed alone.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable

from etude.core.fleet import Fleet, Worker
from etude.core.ledger import Batched, Dropped, Entry, Issued, Ledger, Trained, Unbalanced
from etude.core.window import Window
from etude.simulate.scenario import Scenario
from etude.simulate.state import GroupState, Outcome, Process, Session

LOOK_S = 0.5
"""Time between two looks at leases and new versions, as in `serve.router`."""
SLOW = 10.0
MAX_STEP_S = 50.0
"""A run is stuck if its steps take this many times their computing time."""


class Simulation:
    """A simulated run; `run` plays it to its end."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.s = scenario
        self.rng = random.Random(seed)
        self.now = 0.0
        self.outcome = Outcome()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

        self.processes = [
            Process(
                f"{region}/{number}",
                region,
                1.0 + self.rng.uniform(-1, 1) * scenario.faults.clock_skew,
            )
            for region in range(scenario.regions)
            for number in range(scenario.workers_per_region)
        ]
        self._by_url = {process.url: process for process in self.processes}
        self.cut_until = [0.0] * scenario.regions
        self._relayed: dict[tuple[int, int], float] = {}  # (region, version) -> when it has arrived
        self.published = 0
        self.verified = {0}

        self.fleet = self.new_fleet()
        self.gateway_up = True
        self.requests: dict[int, Session] = {}
        self._ids = itertools.count(1)
        self.waiting: deque[Session] = deque()

        self.entries: list[Entry] = []
        self.ledger = Ledger()
        self.stored: dict[int, tuple[int, GroupState, tuple[str, ...]]] = {}
        """Slot -> (admitted, state, samples) of finished groups that are in no batch yet."""
        self.window: Window[int] | None = None
        self.slots = 0
        self.live = 0
        self.loading_version: int | None = None
        self.groups: dict[int, GroupState] = {}
        self.queued: deque[Session] = deque()
        self.running: set[Session] = set()
        self.controller_life = 0
        self.batch: list[int] = []

        self.batches: set[int] = set()
        self.trained = 0
        self.trainer_life = 0
        self.trainer_since: float | None = None

    # Time.

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), do))

    def every(self, seconds: float, do: Callable[[], None]) -> None:
        def again() -> None:
            do()
            self.after(seconds, again)

        self.after(seconds, again)

    def vary(self, seconds: float) -> float:
        return seconds * self._factor(self.s.spread)

    def _factor(self, spread: float) -> float:
        return self.rng.uniform(1.0 - spread, 1.0 + spread)

    def run(self) -> Outcome:
        s = self.s
        sessions = s.groups_per_step * s.group_size / max(0.05, s.with_signal)
        sampling = sessions * s.turns * (s.turn_s + s.tool_s) / s.concurrency
        longest = MAX_STEP_S * s.steps * (s.train_s + s.publish_s + sampling + 60.0)
        self.start_controller()
        self._beat()
        self.every(s.heartbeat_s, self._beat)
        self.every(LOOK_S if s.heartbeat_s <= 1.0 else s.heartbeat_s / 2, self._look)
        try:
            while self.live < s.steps and self._queue:
                self.now, _, do = heapq.heappop(self._queue)
                do()
                if self.now > longest:
                    self.outcome.stuck = self._waits_for()
                    break
        except (AssertionError, Unbalanced) as e:
            self._violation(f"{type(e).__name__}: {e}")
        self._close_books()
        self.outcome.seconds, self.outcome.steps = self.now, self.trained
        self.outcome.versions_read = len({version for _, version in self._relayed})
        return self.outcome

    def _waits_for(self) -> str:
        return (
            f"version {self.live} of {self.s.steps} live, {self.published} published, "
            f"{len(self.running)} sessions under way, {len(self.waiting)} without a worker, "
            f"{len(self.fleet.up)} of {len(self.processes)} workers up"
        )

    def _violation(self, what: str) -> None:
        self.outcome.violations.append(f"{self.now:.1f} s: {what}")

    # The controller: the loops of `run.loop`, and its recovery after a restart.

    def start_controller(self) -> None:
        """Start the controller like `Controller.run_loop`: open samples are interrupted, the newest
        weights are loaded, and the window is restored."""
        self.controller_life += 1
        opened = tuple(
            sample for sample in self.ledger.open_samples() if not self._is_stored(sample)
        )
        if opened:
            self._write(Dropped(samples=opened, reason="interrupted"))
        self.window = None
        self.groups = {}
        self.batch = []
        self.queued.clear()
        self.running.clear()
        self.waiting.clear()
        self.requests.clear()
        self.loading_version = max(self.published, self.live)

    def _is_stored(self, sample: str) -> bool:
        return any(sample in samples for _, _, samples in self.stored.values())

    def _resume_window(self, version: int) -> None:
        s = self.s
        self.live = version
        if version > self.ledger.trained_step:
            self._write(Trained(step=version))
        self.window = Window(
            per_step=s.groups_per_step,
            max_lag=s.max_lag,
            reorder_window=s.reorder_window,
            live=version,
        )
        self.window.restore(
            step=max([*self.batches, version]) + 1,
            slots=self.slots,
            finished=[(slot, admitted, slot) for slot, (admitted, _, _) in self.stored.items()],
        )
        self._feed()
        self._pack()

    def _feed(self) -> None:
        if self.window is None:
            return
        while (slot := self.window.admit()) is not None:
            self.slots = max(self.slots, slot + 1)
            samples = tuple(f"{slot}.{number}" for number in range(self.s.group_size))
            self._write(
                Issued(group=str(slot), task="t", samples=samples, version=self.window.live)
            )
            pace = self._factor(self.s.task_spread) if self.s.task_spread else 1.0
            self.groups[slot] = GroupState(self.window.live, set(samples), pace)
            self.queued.extend(Session(sample, slot, self.s.turns) for sample in samples)
        while self.queued and len(self.running) < self.s.concurrency:
            session = self.queued.popleft()
            self.running.add(session)
            self._ask(session)

    def _session_done(self, session: Session) -> None:
        self.running.discard(session)
        self.fleet.forget(session.sample)
        group = self.groups[session.group]
        group.open.discard(session.sample)
        assert session.oldest is not None
        group.oldest = min(group.oldest, session.oldest)
        if not group.open:
            self._group_done(session.group)
        self._feed()

    def _group_done(self, slot: int) -> None:
        assert self.window is not None
        group = self.groups.pop(slot)
        samples = tuple(f"{slot}.{number}" for number in range(self.s.group_size))
        if self.rng.random() < self.s.with_signal:
            self.stored[slot] = (group.admitted, group, samples)
            assert self.window.finish(slot, slot)
        else:
            self._write(Dropped(samples=samples, reason="no_signal"))
            assert self.window.drop(slot)
        if self.rng.random() < self.s.faults.duplicate:
            self.outcome.faults["duplicate"] += 1
            assert not self.window.finish(slot, slot), "a second delivery counts"
        self._pack()

    def _pack(self) -> None:
        assert self.window is not None
        while self.window.step <= self.s.steps or self.batch:
            step = self.window.step
            if (slot := self.window.take()) is None:
                return
            self.batch.append(slot)
            if len(self.batch) == self.s.groups_per_step:
                self._batched(step)

    def _batched(self, step: int) -> None:
        taken = [self.stored.pop(slot) for slot in self.batch]
        self.batch = []
        lag = step - 1 - min(state.oldest for _, state, _ in taken)
        self.outcome.lag_max = max(self.outcome.lag_max, lag)
        if lag > self.s.max_lag:
            self._violation(f"step {step} trains on tokens that are {lag} steps old")
        if step in self.batches:
            self._violation(f"step {step} has two batches")
        self._write(Batched(step=step, samples=tuple(s for _, _, ss in taken for s in ss)))
        self.batches.add(step)
        self.train()

    def _write(self, entry: Entry) -> None:
        self.ledger.apply(entry)
        self.entries.append(entry)

    # The trainer.

    def train(self) -> None:
        step = self.trained + 1
        if self.trainer_since is not None or step not in self.batches:
            return
        self.trainer_since, life = self.now, self.trainer_life

        def done() -> None:
            if life != self.trainer_life:
                return  # it died, and starts the step over
            assert self.trainer_since is not None
            self.outcome.trainer_busy_s += self.now - self.trainer_since
            self.trainer_since = None
            self.trained = step
            self.after(self.vary(self.s.publish_s), lambda: self.publish(step))
            self.train()

        self.after(self.vary(self.s.train_s), done)

    def publish(self, version: int) -> None:
        self.verified.add(version)
        self.published = max(self.published, version)

    # The gateway: the part of the router, over the real fleet.

    def new_fleet(self) -> Fleet:
        return Fleet(heartbeat_timeout_s=self.s.heartbeat_timeout_s, awaits_floor=True)

    def _look(self) -> None:
        """Check leases and new versions, like `Router.watch`, `RolloutLoop.follow` and
        `Router.load`."""
        self._count_engines(LOOK_S if self.s.heartbeat_s <= 1.0 else self.s.heartbeat_s / 2)
        if not self.gateway_up:
            return
        for worker in self.fleet.expire(self.now):
            self._ask_elsewhere(worker)
        if self.loading_version is None and self.window is not None:
            newest = min(self.published, self.s.steps)
            # a restarted gateway knows of no weights until it is told
            if newest > self.live or self.fleet.floor < self.live:
                self.loading_version = max(newest, self.live)
        if (version := self.loading_version) is not None:
            for worker in self.fleet.behind(version):
                self._load(self._by_url[worker.url], version)
            if self.fleet.workers and self.fleet.may_raise_floor(version, self.now):
                self.fleet.raise_floor(version)
                self.loading_version = None
                self._went_live(version)
        self._retry_waiting()

    def _went_live(self, version: int) -> None:
        if self.window is None:
            self._resume_window(version)
        elif version > self.live:
            self._write(Trained(step=version))
            self.live = version
            self.window.advance(version)
            self._feed()

    def _count_engines(self, seconds: float) -> None:
        slots = self.s.max_num_seqs
        for worker in self.fleet.workers:
            self.outcome.engine_busy_s += seconds * min(1.0, worker.active / slots)
        self.outcome.engine_s += seconds * len(self.processes)

    def _beat(self) -> None:
        """Send the heartbeats of all workers, each by its own clock."""
        if not self.gateway_up:
            return
        for process in self.processes:
            if process.beat > self.now or not self._is_heard(process):
                continue
            process.beat = self.now + self.s.heartbeat_s * (process.pace - 1.0)
            if self.rng.random() < self.s.faults.lost:
                continue
            worker = self.fleet.join(process.url, str(process.region), process.version, self.now)
            if worker.version < self.fleet.floor:
                self._load(process, self.fleet.floor)

    def _is_heard(self, process: Process) -> bool:
        """True if the process is alive and running, and its region is connected."""
        return (
            process.alive
            and self.now >= process.hung_until
            and self.now >= self.cut_until[process.region]
        )

    def _load(self, process: Process, version: int) -> None:
        if process.loading is not None or not self._is_heard(process) or process.version >= version:
            return
        process.loading = version
        life = process.life
        slow = SLOW if self.now < process.slow_until else 1.0

        def done() -> None:
            if life != process.life:
                return
            if self.now < process.hung_until:
                self.after(process.hung_until - self.now, done)
                return
            process.loading = None
            if process.bad_download:  # its digests differ from those of the manifest
                process.bad_download = False
                self.outcome.faults["bad download"] += 1
                return
            process.version = max(process.version, version)
            lost = self.rng.random() < self.s.faults.lost
            for worker in self.fleet.workers:
                if worker.url == process.url and self._is_heard(process) and not lost:
                    worker.version = max(worker.version, version)

        self.after(slow * self._fetch_s(process, version) + self.vary(self.s.swap_s), done)

    def _fetch_s(self, process: Process, version: int) -> float:
        """Time until the worker has the delta: from the relay of its region, which downloads it
        once."""
        there = self._relayed.get((process.region, version))
        if not self.s.relays or there is None:
            self.outcome.store_bytes += self.s.delta_bytes
            there = self.now + self.vary(self.s.download_s)
            self._relayed[process.region, version] = there
        return max(0.0, there - self.now)

    def _ask(self, session: Session) -> None:
        worker = self.fleet.pick(session.sample) if self.gateway_up else None
        if worker is None:
            self.waiting.append(session)
            return
        request = next(self._ids)
        session.request, session.worker = request, worker
        self.requests[request] = session
        process = self._by_url[worker.url]
        self._check_served(session, process)
        life, begun_by = process.life, self.controller_life
        load = max(1.0, worker.active / self.s.max_num_seqs)

        def answer() -> None:
            if begun_by != self.controller_life or self.requests.get(request) is not session:
                return  # nobody waits for it any more
            if life != process.life or not self._is_heard(process):
                return  # another worker is asked when its lease is over, or was already
            if self.rng.random() < self.s.faults.lost:
                self.outcome.faults["lost"] += 1
                self.failed(worker)
                return
            self._answered(session, worker)
            if self.rng.random() < self.s.faults.duplicate:
                answer()

        pace = self.groups[session.group].pace
        self.after(self.vary(self.s.turn_s * load * pace), answer)

    def _check_served(self, session: Session, process: Process) -> None:
        """Check that the worker serves no request for newer weights than it has, as `/generate`
        does."""
        version = process.version
        if version not in self.verified:
            self._violation(f"{process.url} serves version {version}, which nobody has verified")
        session.oldest = version if session.oldest is None else min(session.oldest, version)

    def _answered(self, session: Session, worker: Worker) -> None:
        del self.requests[session.request]
        self.fleet.done(worker)
        session.worker = None
        session.turns_left -= 1
        then = self._session_done if session.turns_left == 0 else self._ask
        life = self.controller_life

        def go_on() -> None:
            if life == self.controller_life:
                then(session)

        self.after(self.vary(self.s.tool_s), go_on)

    def failed(self, worker: Worker) -> None:
        """Take out a worker that failed until its next heartbeat; its requests go to others."""
        self.fleet.leave(worker)
        self._ask_elsewhere(worker)

    def _ask_elsewhere(self, worker: Worker) -> None:
        for request, session in list(self.requests.items()):
            if session.worker is worker:
                del self.requests[request]
                self.fleet.done(worker)
                session.worker = None
                self._ask(session)

    def _retry_waiting(self) -> None:
        for _ in range(len(self.waiting) if self.fleet.up else 0):
            self._ask(self.waiting.popleft())

    # Conditions that must hold at the end.

    def _close_books(self) -> None:
        """Audit the entries alone: every sample is settled once, or in flight."""
        try:
            ledger = Ledger(self.entries)
        except Unbalanced as e:
            self._violation(f"the ledger does not balance: {e}")
            return
        if (ledger.issued, ledger.trained) != (self.ledger.issued, self.ledger.trained):
            self._violation("the audit's balance differs from the ledger's")
        known = {sample for _, _, samples in self.stored.values() for sample in samples}
        known |= {sample for group in self.groups.values() for sample in group.open}
        for slot in self.groups:
            known |= {f"{slot}.{number}" for number in range(self.s.group_size)}
        if lost := set(ledger.open_samples()) - known:
            self._violation(f"{len(lost)} samples are lost, such as {min(lost)}")
