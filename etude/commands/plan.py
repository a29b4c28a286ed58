"""`etude plan`: the best split of a number of GPUs between trainer and engines of a run, and the
resulting step time."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from rich.console import Console

from etude.commands.terminal import counted, say
from etude.core.config import RunConfig
from etude.core.errors import EtudeError
from etude.core.placement import (
    GPUS,
    WANTED_RATIO,
    ModelSize,
    Placement,
    Workload,
    plan_placement,
)
from etude.core.stages import RolloutStageConfig
from etude.core.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Figures that the run's file lacks, or that replace its own."""

    gpus: int
    gpu: str
    parameters: float | None
    """Replaces the size of the file's model."""
    active: float | None
    kv_bytes: float | None
    weight_bytes: float
    tool_s: float
    """Time of a session in tools and grading."""


def plan(config: RunConfig, options: Options, console: Console) -> dict[str, Json]:
    """Print the plan, and return the data for `--json`."""
    model, work = model_size(config, options), workload(config, options)
    found = place(model, work, options)
    told = lines(model, work, found, options)
    if config.harness.command:
        told.append(
            "turns      half of harness.max_turns, but a program can ask any number of times: "
            "set it to twice the number your program takes"
        )
    for line in told:
        say(console, line, indent=len("model      "))
    return asdict(found) | {"ratio": found.ratio, "advice": found.advice}


def place(model: ModelSize, work: Workload, options: Options) -> Placement:
    try:
        return plan_placement(model, work, GPUS[options.gpu], options.gpus)
    except ValueError as e:
        raise EtudeError(
            f"{e}; add GPUs with --gpus, choose a larger kind with --gpu ({', '.join(GPUS)}), or "
            "pass --weight-bytes 1 for engines in FP8"
        ) from e


def model_size(config: RunConfig, options: Options) -> ModelSize:
    """The size of the file's model, or of the model that the options describe."""
    given = (options.parameters, options.kv_bytes)
    if None in given and any(given):
        raise EtudeError("--parameters and --kv-bytes describe another model together: pass both")
    if options.parameters is None or options.kv_bytes is None:
        from etude.trainer.estimate import size_of_model  # imports torch

        return replace(size_of_model(config), weight_bytes=options.weight_bytes)
    return ModelSize(
        parameters=options.parameters,
        active=options.active or options.parameters,
        kv_bytes=options.kv_bytes,
        weight_bytes=options.weight_bytes,
    )


def rollout_stage(config: RunConfig) -> RolloutStageConfig:
    for stage in config.stage:
        if isinstance(stage, RolloutStageConfig):
            return stage
    raise EtudeError("the run has no stage of kind rl or distill, so it samples nothing")


def workload(config: RunConfig, options: Options) -> Workload:
    """The workload of a step. Sessions are assumed to be half as long as they may be, as in `etude
    run --dry-run`."""
    stage = rollout_stage(config)
    harness = config.harness
    turns = max(1, harness.max_turns // 2)
    length = max(2, config.model.max_context // 2)
    sampled = min(turns * harness.max_tokens, length // 2)
    return Workload(
        sessions=stage.groups_per_step * stage.group_size,
        turns=turns,
        sampled=sampled,
        read=length - sampled,
        tool_s=options.tool_s,
        max_lag=stage.max_lag,
        max_num_seqs=config.engine.max_num_seqs,
    )


def lines(model: ModelSize, work: Workload, found: Placement, options: Options) -> list[str]:
    name = options.gpu.upper()
    gpu = GPUS[options.gpu]
    sparse = f", {model.active / 1e9:.3g} B active" if model.active < 0.9 * model.parameters else ""
    split = (
        f"all {found.gpus} take turns (colocated)"
        if found.colocated
        else f"{found.trainer_gpus} for the trainer, {counted(found.engines, 'engine')} of "
        f"{found.engine_gpus}"
    )
    activations = "without activations"
    if found.activation_bytes:
        activations = f"{found.activation_bytes / 1e9:.3g} GB more for the activations of a pass"
    told = [
        f"model      {model.parameters / 1e9:.3g} B parameters{sparse}; "
        f"{model.kv_bytes / 1e3:.3g} kB of keys and values a token",
        f"a step     {work.sessions} sessions of {work.length} tokens, {work.sampled} of them "
        f"sampled in {counted(work.turns, 'turn')}",
        f"placement  {options.gpus} {name}: {split}",
        f"memory     {found.trainer_bytes / 1e9:.3g} GB a GPU of the trainer for weights, "
        f"gradients and state ({activations}), "
        f"{found.engine_bytes / 1e9:.3g} GB a GPU of an engine with "
        f"{counted(found.seqs, 'request')}; each has {gpu.memory_bytes / 1e9:.0f} GB",
        f"step       {found.step_s:.3g} s: training {found.train_s:.3g} s, sampling "
        f"{found.rollout_s:.3g} s, one session {found.session_s:.3g} s over "
        f"{counted(work.max_lag + 1, 'step')}",
        f"ratio      {found.ratio:.2f} GPUs of engines for each of the trainer (wanted: "
        f"{WANTED_RATIO:.2f} at most)",
    ]
    return told + [f"change     {each}" for each in found.advice]
