"""Faults in a simulated run: each kind strikes again and again, at times and places that follow
from the seed."""

from __future__ import annotations

from collections.abc import Callable

from etude.simulate.scenario import Scenario
from etude.simulate.simulation import Simulation
from etude.simulate.state import Outcome


def play(scenario: Scenario, seed: int) -> Outcome:
    """Simulate a run from its first step to its last, with its faults."""
    simulation = Simulation(scenario, seed)
    FaultInjector(simulation).plan()
    return simulation.run()


class FaultInjector:
    def __init__(self, simulation: Simulation) -> None:
        self.sim = simulation

    def plan(self) -> None:
        faults = self.sim.s.faults
        for mean_s, strike in (
            (faults.worker_crash_s, self._crash_worker),
            (faults.worker_hang_s, self._hang_worker),
            (faults.partition_s, self._cut_region),
            (faults.slow_disk_s, self._slow_disk),
            (faults.bad_download_s, self._bad_download),
            (faults.gateway_crash_s, self._crash_gateway),
            (faults.controller_crash_s, self._crash_controller),
            (faults.trainer_crash_s, self._crash_trainer),
        ):
            if mean_s:
                self._strike_again(mean_s, strike)

    def _strike_again(self, mean_s: float, strike: Callable[[], None]) -> None:
        def now() -> None:
            self.sim.outcome.faults[strike.__name__.strip("_").replace("_", " ")] += 1
            strike()
            self._strike_again(mean_s, strike)

        self.sim.after(self.sim.rng.expovariate(1.0 / mean_s), now)

    def _crash_worker(self) -> None:
        process = self.sim.rng.choice(self.sim.processes)
        process.alive, process.version, process.loading = False, -1, None
        process.life += 1
        for worker in self.sim.fleet.workers:
            if worker.url == process.url:
                self.sim.failed(worker)  # its connections are closed

        def back() -> None:
            process.alive = True

        self.sim.after(self.sim.vary(self.sim.s.faults.restart_s), back)

    def _hang_worker(self) -> None:
        process = self.sim.rng.choice(self.sim.processes)
        process.hung_until = self.sim.now + self._lasting_s()

    def _cut_region(self) -> None:
        region = self.sim.rng.randrange(self.sim.s.regions)
        self.sim.cut_until[region] = self.sim.now + self.sim.rng.uniform(
            0, self.sim.s.faults.lasting_s
        )

    def _slow_disk(self) -> None:
        process = self.sim.rng.choice(self.sim.processes)
        process.slow_until = self.sim.now + self._lasting_s()

    def _bad_download(self) -> None:
        self.sim.rng.choice(self.sim.processes).bad_download = True

    def _crash_gateway(self) -> None:
        """Crash the gateway, which forgets the workers; its sessions are restored from its journal,
        and repeat their requests."""
        self.sim.gateway_up = False
        self.sim.fleet = self.sim.new_fleet()
        asking = list(self.sim.requests.values())
        self.sim.requests.clear()

        def back() -> None:
            self.sim.gateway_up = True

        for session in asking:
            session.worker = None
            self.sim.waiting.append(session)
        self.sim.after(self.sim.vary(self.sim.s.faults.restart_s), back)

    def _crash_controller(self) -> None:
        """Crash the controller, and with it its sessions; the gateway forgets them when it is told
        to."""
        for session in self.sim.running:
            if session.worker is not None:
                self.sim.fleet.done(session.worker)
            self.sim.fleet.forget(session.sample)
        self.sim.start_controller()

    def _crash_trainer(self) -> None:
        """Crash the trainer, which resumes from its checkpoint: the step starts over, with the same
        batch."""
        self.sim.trainer_life += 1
        if self.sim.trainer_since is not None:
            self.sim.trainer_since = None
            self.sim.after(self.sim.vary(self.sim.s.faults.restart_s), self.sim.train)

    def _lasting_s(self) -> float:
        return self.sim.rng.uniform(0, self.sim.s.faults.lasting_s)
