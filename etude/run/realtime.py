"""The loop of real-time RL, which learns from users (docs/realtime.md).

`realtime.cycle` decides on the next action from the contents of the store, and this module executes
it, one action at a time. There is no other state. Users do not depend on this process: gateways
follow the traffic changes that it writes, and continue without it.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from etude.core.ledger import Batched, Entry, Ledger, Trained
from etude.core.realtime_config import CanaryConfig, GateConfig, RealtimeConfig
from etude.core.traffic import HELDOUT, Change, Traffic, decided, refuse, start
from etude.core.updates import Forgotten, UpdateRecord, is_of_user, versions_that_saw
from etude.realtime.canary import CanaryPlan, Metric, MetricFigures, decide
from etude.realtime.collect import Rules, Sorted, Update, make_update, mixed, samples_of, sort_out
from etude.realtime.credit import BASELINE, Baseline, CreditSample
from etude.realtime.cycle import (
    Collect,
    Compare,
    Done,
    Evaluate,
    Facts,
    Gate,
    Next,
    Refuse,
    Start,
    after_gate,
    after_look,
    lineage,
    next_action,
    user_outcomes,
)
from etude.realtime.gate import Outcomes, Suite, Verdict, judge
from etude.realtime.probes import PROBE_SUITES
from etude.realtime.robust import Caps, admit
from etude.run.evaluate import Report, report_name
from etude.run.journal import group_of
from etude.run.realtime_probes import suite_of
from etude.run.realtime_sessions import UserSessions
from etude.run.realtime_simulated import Simulated, issued, list_rollouts
from etude.store.realtime import (
    Life,
    TrafficLog,
    UpdateLog,
    create_update,
    forget_user,
    forgotten,
)
from etude.store.runs import Run

Tell = Callable[[str], None]
CHEATS = "cheats"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The settings of the run that the loop needs: its steps, limits and held-out splits."""

    first: int
    last: int
    max_tokens: int
    """Tokens of a row, at most."""
    splits: tuple[str, ...]
    """Splits of held-out tasks, and suites of probes, that a version must pass."""


class RealtimeLoop:
    """The loop of real-time RL: from users' sessions to a batch, a version, its gate and its
    canary.

    `published`: the newest version, or -1. `evaluate`: returns when the report of a version on a
    split, with a number of attempts, is in the store. `simulate`: has a version attempt tasks for a
    step."""

    def __init__(
        self,
        run: Run,
        users: UserSessions,
        config: RealtimeConfig,
        stage: Stage,
        *,
        published: Callable[[], int],
        evaluate: Callable[[int, str, int], Awaitable[None]],
        simulate: Callable[[int, int], Awaitable[Simulated]],
        tell: Tell = lambda text: None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.run = run
        self.users = users
        self.config = config
        self.stage = stage
        self.plan = canary_plan(config.canary)
        self.traffic = TrafficLog(run.objects)
        self.updates = UpdateLog(run)
        self.ledger = Ledger(run.ledger.records())
        self._published = published
        self._evaluate = evaluate
        self._simulate = simulate
        self._tell = tell
        self._now = now
        self._life: Life | None = None
        self._forgotten: dict[str, float] = {}
        self._told_short = -1
        """The last step that was reported to wait because of the caps."""

    async def follow(self, *, once: bool = False) -> None:
        """Return when all steps of the stage are taken; with `once`, when one update is
        complete."""
        begun = max(self.stage.first, decided(self.traffic.changes()))
        before: Next | None = None
        while not isinstance(action := await self.step(), Done):
            if once and begun < decided(self.traffic.changes()) and self.is_idle:
                return
            if action == before:
                await asyncio.sleep(self.config.look_s)
            before = action

    async def step(self) -> Next:
        """Execute the next action, if that is already possible, and return it."""
        if self._life is None:
            self._life = Life(self.run.objects)
            # only now, since another loop may have written until then
            self.ledger = Ledger(self.run.ledger.resume())
        self._life.check()
        self._enter_batches()
        self._forget_deleted()
        facts = self.facts()
        action = next_action(facts)
        match action:
            case Start(version):
                self._change(start(version, self._now(), self.config.heldout_share))
            case Collect():
                await self.collect(action)
            case Evaluate(version):
                for split in self.stage.splits:
                    if not self._has_report(version, split):
                        await self._evaluate(version, split, self.config.gate.samples)
            case Refuse(version, why):
                self._change(refuse(_known(facts), version, self._now(), why))
            case Gate(candidate, live):
                verdict, last = self.judge(candidate, live), _known(facts)
                self._change(after_gate(last, candidate, verdict, self.plan, self._now()))
            case Compare():
                self.compare(action, _known(facts))
            case _:
                pass
        self.users.close(self.ledger.has_fate, self._now())
        return action

    def next(self) -> Next:
        return next_action(self.facts())

    @property
    def last(self) -> Change:
        newest = self.traffic.newest()
        assert newest is not None
        return newest

    @property
    def is_idle(self) -> bool:
        return self.last.traffic.beside is None

    def facts(self) -> Facts:
        changes = self.traffic.changes()
        stage = self.stage
        names = {
            version: {
                report_name(version, split, self.config.gate.samples) for split in stage.splits
            }
            for version in range(stage.first, stage.last + 1)
        }
        there = set(self.run.evals())
        batched = max([stage.first, *self.run.batches()])
        made = self.updates.records()[batched] if batched > stage.first else None
        return Facts(
            first=stage.first,
            last=stage.last,
            published=self._published(),
            batched=batched,
            base=made.base if made else batched,
            is_abandoned=made is not None and not made.answers,
            change=changes[-1] if changes else None,
            decided=decided(changes),
            evaluated=frozenset(version for version, wanted in names.items() if wanted <= there),
        )

    # From sessions to a batch

    def sort_out(self, base: int, traffic: Traffic) -> Sorted:
        bases = {step: record.base for step, record in self.updates.records().items()}
        rules = Rules(
            versions=lineage(base, bases, max_lag=self.config.max_versions_back),
            is_heldout=traffic.is_heldout,
        )
        self.users.look()
        return sort_out(self.users.outcomes(), self.ledger, rules, now=self._now())

    async def collect(self, action: Collect) -> None:
        if (made := self._make_update(action)) is None:
            return
        share = self.config.simulated_share
        simulated = None
        if share:
            simulated = await self._simulate(action.base, action.step)
            # that took minutes: another loop may have started, and users may have been deleted
            assert self._life is not None
            self._life.check()
            if (made := self._make_update(action)) is None:
                return
        batch, dropped = made.batch, made.dropped
        assert batch is not None
        if simulated is not None:
            for group in simulated.groups:
                self.run.put_group(group)
            dropped += simulated.dropped
            if simulated.batch is not None:
                batch = mixed(batch, simulated.batch, share)
        create_update(
            self.run,
            UpdateRecord(
                step=action.step,
                base=action.base,
                time=self._now(),
                answers=made.answers,
                dropped=dropped,
            ),
        )
        self.run.put_batch(batch)
        self._enter_batches()
        self._tell(
            f"version {action.step}: {len(made.samples)} sessions, "
            f"mean worth {batch.reward:+.3f}, from version {action.base}"
        )

    def _make_update(self, action: Collect) -> Update | None:
        """Make the next update; None if it is too early, or if there are too few sessions."""
        config = self.config
        found = self.sort_out(action.base, self.last.traffic)
        self._write(*found.issued, *found.dropped)
        if self._now() < self.last.time + 60 * config.every_minutes or not found.ready:
            return None
        made = make_update(
            found.ready,
            step=action.step,
            base=action.base,
            caps=self._caps,
            baseline=self._baseline(),
            max_tokens=self.stage.max_tokens,
        )
        if made.batch is None or len(made.samples) < config.min_sessions:
            if len(found.ready) >= config.min_sessions and self._told_short != action.step:
                self._told_short = action.step
                self._tell(f"version {action.step} waits: {self.settled(action.step, found)}")
            return None
        return made

    @property
    def _caps(self) -> Caps:
        config = self.config
        return Caps(per_user=config.per_user, per_organisation_share=config.per_organisation_share)

    def settled(self, step: int, found: Sorted) -> str:
        """The number of sessions that are ready for a batch, in words."""
        settled = len(found.ready)
        wanted = self.config.min_sessions
        left = len(admit(found.ready, self._caps, salt=f"update {step}").kept)
        capped = f", {left} within the caps of users and organisations," if left < settled else ""
        text = (
            f"{settled} sessions are settled{capped or ','} of {wanted} needed for a batch; "
            f"{found.pending} pending"
        )
        if left < wanted <= settled:
            text += (
                "; more users, or other values of realtime.per_user or per_organisation_share, "
                "would fill it"
            )
        return text

    def _baseline(self) -> Baseline:
        """A baseline that has observed the worth of the answers in earlier updates."""
        baseline = BASELINE[self.config.baseline]()
        for record in self._made().values():
            for number, one in enumerate(record.answers):
                id = f"{record.step}.{number}"
                baseline.observe(
                    CreditSample(id=id, session=one.sample, context=one.context), one.worth
                )
        return baseline

    def _made(self) -> dict[int, UpdateRecord]:
        """The updates whose batch exists. An update without a batch is from a loop that was killed,
        and is made again."""
        batched = max(self.run.batches(), default=0)
        return {step: each for step, each in self.updates.records().items() if step <= batched}

    def _enter_batches(self) -> None:
        """Enter the fates of sessions into the ledger, and the steps that the trainer has finished
        since."""
        batches = self.run.batches()
        for step in batches:
            if step > self.ledger.trained_step and not self.ledger.has_batch(step):
                samples = samples_of(self.run.batch(step))
                dropped = self.updates.records()[step].dropped
                named = {*samples, *(sample for drop in dropped for sample in drop.samples)}
                ids = sorted({group_of(each) for each in named if not is_of_user(each)})
                if groups := [self.run.group(id) for id in ids]:
                    list_rollouts(self.run, step, groups, dropped)
                begun = map(issued, groups)
                self._write(*begun, *dropped, Batched(step=step, samples=samples))
        done = max((step for step in batches if step <= self._published()), default=0)
        if done > self.ledger.trained_step:
            self._write(Trained(step=done))

    def _write(self, *entries: Entry) -> None:
        for entry in entries:
            self.ledger.apply(entry)
        if entries:
            self.run.ledger.append(*entries)

    def _forget_deleted(self) -> None:
        """Remove deleted users from the batches, including those that are still to be trained on.
        Sessions that are in no batch are already gone from the store."""
        stones = [
            stone
            for stone in self.users.tombstones().values()
            if self._forgotten.get(stone.user, 0.0) < stone.time
        ]
        if not stones:
            return
        self.users.look()
        records = self._made()
        bases = {step: record.base for step, record in records.items()}
        for stone in stones:
            self._forgotten[stone.user] = stone.time
            if (told := forgotten(self.run, stone.user)) is not None and told.time >= stone.time:
                continue
            held = {
                step
                for step, record in records.items()
                if any(one.sample.startswith(f"{stone.user}.") for one in record.answers)
            }
            steps = tuple(sorted(held.union(told.steps if told else ())))
            record = Forgotten(user=stone.user, time=stone.time, steps=steps)
            forget_user(self.run, record)
            seen = ", ".join(map(str, versions_that_saw(steps, bases))) or "none"
            self._tell(
                f"user {stone.user} was deleted; versions that learnt from their data: {seen}"
            )

    # From a version to a decision

    def _has_report(self, version: int, split: str) -> bool:
        return report_name(version, split, self.config.gate.samples) in self.run.evals()

    def judge(self, candidate: int, live: int) -> Verdict:
        """Judge the candidate against the live version, and against the first one: otherwise the
        losses that each update is allowed would add up."""
        gate, splits = self.config.gate, self.stage.splits
        suites, outcomes = gate_suites(gate, splits), self._outcomes(live, candidate)
        if (first := self.stage.first) != live:
            since = f" since version {first}"
            suites += tuple(replace(each, name=each.name + since) for each in suites)
            before = self._outcomes(first, candidate)
            outcomes |= {suite + since: found for suite, found in before.items()}
        return judge(outcomes, suites)

    def _outcomes(self, *versions: int) -> dict[str, Outcomes]:
        samples = self.config.gate.samples
        reports = {
            split: [
                self.run.eval(report_name(version, split, samples), Report) for version in versions
            ]
            for split in self.stage.splits
        }
        return gate_outcomes(reports, samples)

    def compare(self, action: Compare, last: Change) -> None:
        """Compare the two versions on users. `last`: the change that the action follows from."""
        now = self._now()
        self.users.look()
        seen = [one for one in self.users.figures() if not last.traffic.is_heldout(one.user)]
        users = user_outcomes(
            seen,
            new=action.new,
            old=action.old,
            first_seen=self._first_seen(action.new),
            since=last.time,
            until=now - 60 * self.config.canary.delay_minutes,
        )
        if last.action == "canary":
            # if the ramp was changed since, the nearest stage above
            stage = bisect_left(self.plan.ramp[:-2], last.traffic.share)
            decision = decide(self.plan, stage, users)
        else:  # most users see it: no more slack
            decision = decide(replace(self.plan, first_slack=1.0), 0, users)
        control = self.config.canary.control_share
        if (change := after_look(last, decision, now, control_share=control)) is not None:
            self._change(change)

    def against_heldout(self) -> tuple[MetricFigures, ...]:
        """The effect of all updates together: users of the live version since it went live,
        compared with held-out users. Held-out users who were answered by another version, because
        their pool was down, are left out. Empty if there is nothing to compare yet."""
        traffic = self.last.traffic
        changes = self.traffic.changes()
        first = traffic.pools.get(HELDOUT)
        if first is None or first == traffic.version:
            return ()
        began = min(change.time for change in changes if change.action == "canary")
        since = max(
            change.time
            for change in changes
            if change.action == "promote" and change.version == traffic.version
        )
        self.users.look()
        seen = [
            one
            for one in self.users.figures()
            if one.started < began or traffic.is_heldout(one.user) == (one.versions == (first,))
        ]
        users = user_outcomes(
            seen, new=traffic.version, old=first, first_seen=began, since=since, until=self._now()
        )
        return decide(replace(self.plan, first_slack=1.0), 0, users).figures

    def _first_seen(self, version: int) -> float:
        return min(
            change.time
            for change in self.traffic.changes()
            if change.action == "canary" and change.version == version
        )

    def _change(self, change: Change) -> None:
        """Append a change. If somebody else has decided meanwhile, the next look will see it."""
        if self.traffic.append(change):
            self._tell(f"{change.action} version {change.version}: {change.why or 'the first one'}")


def _known(facts: Facts) -> Change:
    """The change that the decision was based on, so that decisions made meanwhile are not
    overruled."""
    assert facts.change is not None
    return facts.change


def canary_plan(config: CanaryConfig) -> CanaryPlan:
    return CanaryPlan(
        metrics=(
            Metric(name="kept", margin=config.kept_margin),
            Metric(name="dissatisfied", margin=config.dissatisfied_margin, higher_is_better=False),
            Metric(name="judged", margin=config.judged_margin),
        ),
        ramp=config.ramp,
        confidence=config.confidence,
        false_alarms=config.false_alarms,
        min_users=config.min_users,
        max_sessions=config.max_sessions,
        stage_sessions=config.stage_sessions,
        first_slack=config.first_slack,
    )


def gate_suites(config: GateConfig, splits: tuple[str, ...]) -> tuple[Suite, ...]:
    margins = {"safety": config.safety_margin, CHEATS: config.cheats_margin}
    return tuple(
        Suite(name=suite, margin=margins.get(suite, config.margin), confidence=config.confidence)
        for suite in map(suite_of, splits)
    )


def gate_outcomes(reports: Mapping[str, Sequence[Report]], attempts: int) -> dict[str, Outcomes]:
    """The outcomes by suite, from the reports on the previous version and on the candidate.
    Attempts at tasks count among the traps as well, as honest or not, if both reports record it: a
    policy that cheats does so at work, too."""
    found = {}
    for name, pair in reports.items():
        live, candidate = (dict(report.solved_by_task) for report in pair)
        if suite_of(name) == CHEATS:
            for split in (each for each in reports if suite_of(each) not in PROBE_SUITES):
                before, after = (report.honest_by_task for report in reports[split])
                for id in before.keys() & after.keys():
                    live[f"{split}/{id}"] = before[id]
                    candidate[f"{split}/{id}"] = after[id]
        found[suite_of(name)] = Outcomes(attempts=attempts, live=live, candidate=candidate)
    return found
