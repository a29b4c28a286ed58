"""The plan of a run, which `etude run` prints first: the remaining work, the resources that it
takes, and settings that are probably mistakes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from etude.core.config import AnyStage, RunConfig
from etude.core.harness_config import CODE_AGENT, CODING_AGENT
from etude.core.lineage import periodic_versions, stage_spans
from etude.core.placement import LESS_MEMORY
from etude.core.stages import MidtrainConfig, RolloutStageConfig
from etude.core.tasks_config import TasksConfig
from etude.core.types import EVAL_SPLITS, Json
from etude.launch.check import Findings
from etude.launch.devices import described_placement, placed
from etude.launch.place import RunPlace
from etude.run.audit import is_finished, wanted_reports


@dataclass(frozen=True, slots=True)
class Standing:
    """The point that a run resumes from."""

    version: int
    evaluations_left: float
    """The remaining share of all evaluations."""
    finished: bool

    @classmethod
    def of(cls, place: RunPlace, config: RunConfig) -> Standing | None:
        """The standing of a run; None if nothing has been done yet."""
        run = place.find()
        if run is None or (version := run.saved_version()) < 0:
            return None
        wanted = wanted_reports(config)
        left = len(wanted - set(run.evals())) / max(1, len(wanted))
        return cls(version, left, is_finished(run, config))


def plan(
    config: RunConfig,
    place: RunPlace,
    findings: Findings | None = None,
    standing: Standing | None = None,
    recorded: Mapping[str, int] | None = None,
) -> str:
    """The work that `etude run` would do. `findings`: of the check before a start; `recorded`: the
    number of tasks of each split that the run began with."""
    model, tasks, harness, engine = config.model, config.tasks, config.harness, config.engine
    counts = _described_tasks(tasks, findings.tasks if findings else recorded or {})
    lines = [
        f"run {config.name}, seed {config.seed}, in {place.absolute}",
        f"  model: {config.as_written(model.path or 'untrained weights')}, sessions of at most "
        f"{model.max_context} tokens" + (f"{_size_of_model(findings)}" if findings else ""),
        f"  environment: {config.as_written(tasks.environment)}; tasks: {counts}",
        f"  agent: {_described_agent(config)} within {harness.timeout_s:g} s",
        *_short_context(config, findings),
        *_nothing_held_out(tasks),
        *_never_evaluated(config),
    ]
    if standing is not None:
        version = standing.version
        is_over = f"finished at version {version}: nothing left to do"
        lines.append("  " + (is_over if standing.finished else f"resumes at version {version}"))
    reached = standing.version if standing else 0
    for span in stage_spans(config.stage):
        if span.end <= reached:
            continue
        values = ", ".join(f"{key} {value}" for key, value in _settings(span.stage).items())
        start = max(span.start, reached)
        lines.append(f"  {span.name}: version {start} -> {span.end} ({values})")
        lines += _long_warmup(span.stage)
    lines += [
        f"  workers: {', '.join(engine.regions)}, {engine.max_num_seqs} concurrent requests each",
        f"  sandboxes: {config.sandbox.isolation}, {harness.concurrency} concurrent sessions",
        *described_placement(placed(config)),
    ]
    if findings is not None:
        lines += _expected(_seconds_left(config, findings, standing), findings, place)
    return "\n".join(lines)


def _described_tasks(tasks: TasksConfig, there: Mapping[str, int]) -> str:
    """The tasks in words. An environment may have fewer tasks than requested."""
    told = []
    for split, name in {"train": "for training", "heldout": "held out", "novel": "novel"}.items():
        wanted = getattr(tasks, split)
        if not wanted:
            continue
        if split not in there:
            told.append(f"at most {wanted} {name}")
        elif there[split] < wanted:
            told.append(f"{there[split]} {name} ({wanted} asked for)")
        else:
            told.append(f"{wanted} {name}")
    return ", ".join(told)


def _described_agent(config: RunConfig) -> str:
    harness = config.harness
    if config.tasks.is_remote:
        return f"the environment's own, answers of at most {harness.max_tokens} tokens,"
    agent = " ".join(harness.command) or config.as_written(harness.agent_class)
    # A program makes as many calls as it likes; the user's own code gets a limit only if one is
    # set.
    are_counted = agent in (CODING_AGENT, CODE_AGENT) or "max_turns" in harness.model_fields_set
    if harness.command or not are_counted:
        return f"{agent}, answers of at most {harness.max_tokens} tokens,"
    return f"{agent}, {harness.max_turns} turns of at most {harness.max_tokens} tokens,"


def _short_context(config: RunConfig, findings: Findings | None) -> list[str]:
    """A warning that an answer may be longer than a session: allowed, but hardly intended."""
    context = config.model.max_context
    if findings is not None:
        context = min(context, findings.model_context)
    if config.harness.max_tokens <= context:
        return []
    return [
        f"  warning: harness.max_tokens = {config.harness.max_tokens} is more than the context "
        f"of a whole session, prompt included ({context} tokens): answers are cut off there; "
        "lower it, or raise model.max_context"
    ]


def _nothing_held_out(tasks: TasksConfig) -> list[str]:
    if any(getattr(tasks, split) for split in EVAL_SPLITS):
        return []
    return [
        "  warning: no tasks are held out (tasks.heldout and tasks.novel are 0): nothing is "
        "evaluated, and `etude compare` will have nothing to compare"
    ]


def _never_evaluated(config: RunConfig) -> list[str]:
    """A warning that evaluations within stages never happen: allowed, but hardly intended."""
    every = config.eval.every_steps
    if not every or (config.tasks.heldout and periodic_versions(config.stage, every)):
        return []
    why = (
        "no stage with rollouts continues after that many"
        if config.tasks.heldout
        else "no tasks are held out"
    )
    return [f"  warning: eval.every_steps = {every} evaluates nothing: {why}"]


def _long_warmup(stage: AnyStage) -> list[str]:
    """A warning that a stage ends before its learning rate is reached: allowed, but hardly
    intended."""
    if (
        not isinstance(stage, MidtrainConfig | RolloutStageConfig)
        or stage.warmup_steps < stage.steps
    ):
        return []
    reached = stage.lr * stage.steps / (stage.warmup_steps + 1)
    steps = "1 step" if stage.steps == 1 else f"{stage.steps} steps"
    return [
        f"  warning: stage.{stage.name}.warmup_steps = {stage.warmup_steps}, but the stage has "
        f"only {steps}: the learning rate reaches {reached:.2g}, never lr = {stage.lr:g}; lower "
        "warmup_steps"
    ]


def _settings(stage: AnyStage) -> dict[str, Json]:
    """The settings of a stage, without the defaults of those for sparse models only."""
    told = stage.model_dump(exclude={"name", "kind"} if stage.name == stage.kind else {"name"})
    changed = stage.model_dump(exclude_defaults=True)
    return {
        key: value
        for key, value in told.items()
        if value is not None and (not key.startswith("router_") or key in changed)
    }


def _seconds_left(
    config: RunConfig, findings: Findings, standing: Standing | None
) -> dict[str, float]:
    if standing is None:
        return findings.seconds
    left = {
        span.name: (span.end - max(span.start, min(standing.version, span.end)))
        / (span.end - span.start)
        for span in stage_spans(config.stage)
    }
    left["evaluations"] = standing.evaluations_left
    return {name: seconds * left.get(name, 1.0) for name, seconds in findings.seconds.items()}


def _size_of_model(findings: Findings) -> str:
    return f"; {findings.parameters / 1e6:.1f} M parameters, context {findings.model_context}"


def _expected(seconds: dict[str, float], findings: Findings, place: RunPlace) -> list[str]:
    directory = place.directory.absolute()
    there = next(path for path in (directory, *directory.parents) if path.exists())
    needed, free = findings.disk_bytes, shutil.disk_usage(there).free
    short = "" if needed < free else ", which is too little"
    parts = ", ".join(f"{name} {_duration(s)}" for name, s in seconds.items() if s)
    if not parts:
        return []
    whole = _duration(sum(seconds.values()))
    load = os.getloadavg()[0]
    cores = len(os.sched_getaffinity(0))
    busy = f"; this machine is busy now, load {load:.0f} on {cores} cores" if load > cores else ""
    return [
        f"  expected time: about {whole} of computing ({parts}), plus your tools and tests{busy}",
        f"  expected disk: about {needed / 1e9:.2g} GB; {free / 1e9:.3g} GB are free{short}",
        _expected_memory(findings),
    ]


def _expected_memory(findings: Findings) -> str:
    needed, free = findings.memory_bytes, findings.memory_free
    short = "" if needed < free else f", which is too little: {LESS_MEMORY}"
    return (
        f"  expected memory: about {needed / 1e9:.2g} GB for the trainer "
        f"({findings.activation_bytes / 1e9:.2g} GB of it activations), plus the engines; "
        f"{free / 1e9:.3g} GB are free{short}"
    )


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.2g} {unit}"
    return f"{max(1.0, seconds):.0f} s"
