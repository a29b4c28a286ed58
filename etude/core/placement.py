"""Placement: the number of GPUs for the trainer and the engines, and the resulting time of a step.
Pure arithmetic over the sizes of a model and the data sheet of a GPU; every assumption is a
constant here.

A step trains on `sessions` sessions. Training is bound by arithmetic, decoding by memory bandwidth:
an engine reads its weights once for every token that its requests get together, and the keys and
values of each request.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

TRAIN_MFU = 0.35
"""Share of a GPU's arithmetic that training reaches, including communication."""
PREFILL_MFU = 0.5
DECODE_MFU = 0.4
DECODE_BANDWIDTH = 0.6
"""Share of the memory's bandwidth that decoding reaches."""
TRAIN_BYTES = 16
"""Bytes for each weight: bf16 weight and the remainder of its master, fp32 gradient and two
moments."""
MEMORY_USED = 0.85
"""Share of a GPU's memory for weights, state, keys and values; activations use the rest."""
WANTED_RATIO = 1 / 3
"""GPUs of engines for each GPU of the trainer, at most, so that most of the cost goes into
training."""
SMALL_FLEET = 16
"""The number of GPUs above which the trainer gets whole machines."""
MACHINE = 8
LESS_MEMORY = "lower stage.rl.microbatch_tokens, or set trainer.gradient_checkpointing = true"
"""Advice for a trainer with too little memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    memory_bytes: float
    flops: float
    """Dense bf16 FLOPs per second."""
    bandwidth: float
    """Memory bandwidth, in bytes per second."""


GPUS = {
    "a100": Gpu(memory_bytes=80e9, flops=312e12, bandwidth=2.0e12),
    "h100": Gpu(memory_bytes=80e9, flops=989e12, bandwidth=3.35e12),
    "h200": Gpu(memory_bytes=141e9, flops=989e12, bandwidth=4.8e12),
    "b200": Gpu(memory_bytes=180e9, flops=2250e12, bandwidth=8.0e12),
}
"""From the manufacturers' data sheets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    parameters: float
    active: float
    """Parameters that a token is multiplied with; fewer than all in a sparse model."""
    kv_bytes: float
    """Bytes of the keys and values of one token."""
    weight_bytes: float = 2.0
    """Bytes of one weight in an engine."""
    activation_bytes: float = 0.0
    """Bytes of the activations of one forward and backward pass in training; 0 if not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The work of one step of rl."""

    sessions: int
    turns: int
    sampled: int
    """Tokens of a session that the model samples."""
    read: int
    """Tokens of a session that the model reads: prompts, and answers of tools."""
    tool_s: float
    """Time of a session in tools and grading."""
    max_lag: int
    max_num_seqs: int

    @property
    def length(self) -> int:
        return self.sampled + self.read


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    gpus: int
    gpu_bytes: float
    """Memory of each GPU."""
    trainer_gpus: int
    engines: int
    engine_gpus: int
    """GPUs of each engine."""
    colocated: bool
    """True if trainer and engines take turns on the same GPUs."""
    trainer_bytes: float
    """Weights, gradients and state on each GPU of the trainer."""
    activation_bytes: float
    """Activations on each GPU of the trainer."""
    engine_bytes: float
    """Memory on each GPU of an engine: weights, and the keys and values of `seqs` requests."""
    seqs: int
    """Requests that an engine decodes together."""
    train_s: float
    rollout_s: float
    """Time of all sessions of a step, by all engines."""
    session_s: float
    """Time of one session, from its prompt to its grade."""
    turn_s: float
    step_s: float

    @property
    def ratio(self) -> float:
        """GPUs of engines for each GPU of the trainer."""
        return self.engines * self.engine_gpus / self.trainer_gpus

    @property
    def advice(self) -> list[str]:
        """The changes to make, the most useful first."""
        found = []
        if self.trainer_bytes + self.activation_bytes > self.gpu_bytes:
            found.append(
                f"the trainer needs {(self.trainer_bytes + self.activation_bytes) / 1e9:.3g} "
                f"GB of a GPU: {LESS_MEMORY}"
            )
        if self.colocated:
            found.append(
                "trainer and engines take turns, so one always idles while the other works: "
                "with more GPUs they work at the same time"
            )
        elif self.gpus < (fewest := ceil(self.engine_gpus * (1 + 1 / WANTED_RATIO))):
            found.append(
                f"{self.gpus} GPUs cannot be split as wanted (engines: {WANTED_RATIO:.2f} for each "
                f"of the trainer): that takes {fewest}"
            )
        elif self.ratio > WANTED_RATIO:
            found.append(
                f"engines have {self.ratio:.2f} GPUs for each of the trainer's (wanted: at "
                f"most {WANTED_RATIO:.2f}): shorten sessions (harness.max_turns, "
                "harness.max_tokens), store the engines' weights in fewer bytes "
                "(--weight-bytes), or serve on GPUs with more bandwidth"
            )
        if not self.colocated and self.train_s < self.step_s / 2:
            found.append(
                f"the trainer is busy {self.train_s / self.step_s:.0%} of the time: raise "
                "stage.rl.groups_per_step, or give the run fewer GPUs"
            )
        if not self.colocated and self.session_s > self.rollout_s and self.step_s > self.train_s:
            found.append(
                f"one session takes {self.session_s:.3g} s, longer than all engines together "
                "need for one step: raise max_lag, or shorten the longest sessions"
            )
        return found


def plan_placement(model: ModelSize, work: Workload, gpu: Gpu, gpus: int) -> Placement:
    """The split of this many GPUs that makes steps shortest. ValueError if the model does not
    fit."""
    room = gpu.memory_bytes * MEMORY_USED
    least_trainer = max(1, ceil(model.parameters * TRAIN_BYTES / room))
    engine = _engine_gpus(model, work, room)
    if max(least_trainer, engine) > gpus:
        raise ValueError(
            f"{gpus} GPUs are too few: training needs {least_trainer} of this kind for "
            "weights, gradients and optimizer state "
            f"({model.parameters * TRAIN_BYTES / 1e9:.0f} GB), an engine {engine}"
        )
    unit = MACHINE if gpus > SMALL_FLEET else 1
    splits = range(ceil(least_trainer / unit) * unit, gpus - engine + 1, unit)
    found = [_placement(model, work, gpu, gpus, trainer, engine) for trainer in splits]
    found = found or [_colocated(model, work, gpu, gpus, engine)]
    return min(found, key=lambda each: (each.step_s, -each.trainer_gpus))


def _engine_gpus(model: ModelSize, work: Workload, room: float) -> int:
    """The smallest power of two that holds the weights and a few whole sessions."""
    needed = model.parameters * model.weight_bytes + 4 * work.length * model.kv_bytes
    gpus = 1
    while gpus * room < needed:
        gpus *= 2
    return gpus


def _placement(
    model: ModelSize, work: Workload, gpu: Gpu, gpus: int, trainer: int, engine: int,
    colocated: bool = False,
) -> Placement:  # fmt: skip
    engines = (gpus - (0 if colocated else trainer)) // engine
    seqs = _seqs(model, work, gpu, engine)
    token_s = decode_s(model, work, gpu, engine, seqs)
    read_s = work.read * 2 * model.active / (engine * gpu.flops * PREFILL_MFU)
    # prefill keeps the engine from its other requests; decoding is shared by all of them
    engine_s = work.sampled * token_s / seqs + read_s
    rollout_s = work.sessions * engine_s / engines
    session_s = work.sampled * token_s + read_s * seqs + work.tool_s
    flops = 6 * model.active * work.sessions * work.length
    train_s = flops / (trainer * gpu.flops * TRAIN_MFU)
    step_s = max(train_s, rollout_s, session_s / (work.max_lag + 1))
    held = model.parameters * model.weight_bytes + seqs * work.length * model.kv_bytes
    return Placement(
        gpus=gpus,
        gpu_bytes=gpu.memory_bytes,
        trainer_gpus=trainer,
        engines=engines,
        engine_gpus=engine,
        colocated=colocated,
        trainer_bytes=model.parameters * TRAIN_BYTES / trainer,
        activation_bytes=model.activation_bytes,
        engine_bytes=held / engine,
        seqs=seqs,
        train_s=train_s,
        rollout_s=rollout_s,
        session_s=session_s,
        turn_s=(session_s - work.tool_s) / work.turns,
        step_s=train_s + rollout_s if colocated else step_s,
    )


def _colocated(model: ModelSize, work: Workload, gpu: Gpu, gpus: int, engine: int) -> Placement:
    return _placement(model, work, gpu, gpus, gpus, engine, colocated=True)


def _seqs(model: ModelSize, work: Workload, gpu: Gpu, engine: int) -> int:
    """The number of requests that the config allows and memory holds."""
    room = engine * gpu.memory_bytes * MEMORY_USED - model.parameters * model.weight_bytes
    fit = int(room / (work.length * model.kv_bytes)) if model.kv_bytes else work.max_num_seqs
    return max(1, min(work.max_num_seqs, fit))


def decode_s(model: ModelSize, work: Workload, gpu: Gpu, engine: int, seqs: int) -> float:
    """Time to decode one token for each of `seqs` requests: the larger of memory reads and
    arithmetic. In a sparse model, many requests together read nearly all experts."""
    weights = min(model.parameters, model.active * seqs) * model.weight_bytes
    cache = seqs * work.length / 2 * model.kv_bytes
    read_s = (weights + cache) / (engine * gpu.bandwidth * DECODE_BANDWIDTH)
    compute_s = 2 * model.active * seqs / (engine * gpu.flops * DECODE_MFU)
    return max(read_s, compute_s)
