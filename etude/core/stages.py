"""The configuration of stages, one table for each kind. A run is a list of stages, each starting
from the weights of the previous one.

`midtrain`, `sft` and `dpo` learn from files and end in one version of the weights. `rl` and
`distill` are loops: the engines sample sessions while the trainer learns from them, and every step
makes a version.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from etude.core.advantage import ADVANTAGE
from etude.core.schema import (
    OLD_ESTIMATORS,
    Config,
    Count,
    CountOrZero,
    Name,
    NonNegative,
    Place,
    Positive,
)
from etude.core.window import Window

BUILT_IN = "built-in"
"""The path that stands for the corpus of the built-in tasks."""


class StageConfig(Config):
    """The keys common to all stages."""

    name: Name
    """The stage's name in the run; by default its kind, so only a second one of a kind needs a
    name."""
    threads: Count = 1
    """CPU threads of each rank of the trainer in this stage. In a stage without sessions (midtrain,
    sft, dpo) the workers are idle, so the trainer may take all cores."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        return (
            {"name": given["kind"], **given}
            if isinstance(given, dict) and "kind" in given
            else given
        )


class SourceConfig(Config):
    """Documents for mid-training."""

    path: Annotated[str, Place.PATH]
    """Files, with `*`, `?` and `**` as wildcards. In .jsonl and .parquet every line or row is a
    document; any other file is one document. `built-in`: the corpus of the tasks that ship with
    Etude."""
    field: str = "text"
    """The key or column that holds the text of a document."""
    weight: Positive = 1.0
    """Share of the tokens read, relative to the other sources; a small source is read
    repeatedly."""

    def seen_from(self, folder: Path) -> SourceConfig:
        return self if self.path == BUILT_IN else super().seen_from(folder)


class RopeScalingConfig(Config):
    """RoPE scaling: more positions than the model was trained with."""

    type: Literal["linear", "yarn"]
    """The method of stretching the positions."""
    factor: Annotated[float, Field(gt=1, allow_inf_nan=False)]
    """Factor on the model's own context; model.max_context sets how much of the result is used."""


class MidtrainConfig(StageConfig):
    """Next-token prediction on the product's own text."""

    kind: Literal["midtrain"]
    steps: Count
    """Optimizer steps."""
    batch_tokens: Count = 8192
    """Tokens of one optimizer step."""
    lr: Positive = 3e-3
    """Learning rate."""
    weight_decay: NonNegative = 0.1
    """Weight decay of the optimizer."""
    warmup_steps: CountOrZero = 20
    """Steps of learning-rate warm-up."""
    seq_len: Annotated[int, Field(ge=2)] = 256
    """Tokens of a row: documents are joined and cut into rows of this length."""
    document_mask: bool = True
    """Mask attention between the documents of a row."""
    sources: Annotated[tuple[SourceConfig, ...], Field(min_length=1, strict=False)] = (
        SourceConfig(path=BUILT_IN),
    )
    """The documents to learn from, each source a table `[[stage.sources]]`."""
    heldout_frac: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the documents that is never trained on, selected by the hash of their text; their
    loss is reported."""
    heldout_path: Annotated[str | None, Place.PATH] = None
    """Held-out files, instead of a share of the sources; their documents are removed from all
    sources."""
    heldout_every: Count = 100
    """Steps between two evaluations of the held-out loss; it is always evaluated after the last
    step."""
    rope_scaling: RopeScalingConfig | None = None
    """RoPE scaling, for the first stage of a run that starts from model.path."""

    @model_validator(mode="after")
    def _one_heldout(self) -> MidtrainConfig:
        if self.heldout_frac and self.heldout_path is not None:
            raise ValueError(
                "heldout_frac takes a share of the sources and heldout_path another source: "
                "leave out one of them"
            )
        return self


class SftConfig(StageConfig):
    """Supervised fine-tuning on demonstrated sessions, until the loss on held-out sessions stops
    falling."""

    kind: Literal["sft"]
    demonstrations: CountOrZero = 0
    """The number of demonstrations by the built-in scripted agent."""
    path: Annotated[str | None, Place.PATH] = None
    """Files of sessions (.jsonl; `*` is a wildcard): every line has `messages`, and `tools` if
    there were any, in the format of OpenAI's API. The assistant's messages are imitated, except
    those with `weight` 0."""
    overlong: Literal["error", "drop"] = "error"
    """The treatment of a session that does not fit into the model's context."""
    max_epochs: Count = 10
    """Passes over the sessions, at most."""
    patience: Count = 2
    """Epochs without a lower held-out loss before the stage stops."""
    batch_tokens: Count = 8192
    """Tokens of one optimizer step."""
    lr: Positive = 1e-3
    """Learning rate."""

    @model_validator(mode="after")
    def _something(self) -> SftConfig:
        if not self.demonstrations and self.path is None:
            raise ValueError(
                "there is nothing to imitate: set demonstrations, or the path of recorded sessions"
            )
        return self


class DpoConfig(StageConfig):
    """Direct preference optimization against the weights that the stage starts from."""

    kind: Literal["dpo"]
    path: Annotated[str, Place.PATH]
    """Files of pairs (.jsonl; `*` is a wildcard): every line has `prompt` (messages), `chosen` and
    `rejected` (a message, several, or the text of one), and `tools` if there were any."""
    overlong: Literal["error", "drop"] = "error"
    """The treatment of a pair that does not fit into the model's context."""
    epochs: Count = 1
    """Passes over the pairs."""
    batch_pairs: Count = 32
    """Pairs of one optimizer step."""
    beta: Positive = 0.1
    """Strength of the KL constraint to the weights that the stage starts from: a larger value stays
    closer."""
    length_normalised: bool = False
    """Divide log-probs by the number of tokens, so that a long answer does not count more than a
    short one."""
    lr: Positive = 1e-5
    """Learning rate."""
    warmup_steps: CountOrZero = 5
    """Steps of learning-rate warm-up."""


class RolloutStageConfig(StageConfig):
    """The keys common to stages that train on rollouts, which the engines sample while the stage
    runs."""

    steps: Count
    """Optimizer steps; each makes a version of the weights."""
    groups_per_step: Count = 16
    """Groups that one optimizer step consumes."""
    group_size: Count = 4
    """Sessions of one task."""
    max_lag: CountOrZero = 2
    """The most steps between the weights that sampled a token and those that train on it
    (staleness, off-policy steps). 0 is synchronous training."""
    reorder_window: Count = 1
    """The number of oldest groups among which finished ones may be taken out of order, so that a
    straggler does not hold up the rest. 1: strictly in order."""
    lr: Positive = 3e-4
    """Learning rate."""
    warmup_steps: CountOrZero = 10
    """Steps of learning-rate warm-up: the first steps of Adam are as large as the rate allows."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning-rate schedule: linear and cosine fall to 0 by the last step."""
    temperature: Positive = 1.0
    """Sampling temperature of the built-in agent, and of every request of a program that sets none.
    A harness may send another temperature with any request: the trainer recomputes each token at
    the temperature that it was sampled at."""
    microbatch_tokens: Count | None = None
    """Tokens of one forward and backward pass; a longer session gets a pass of its own. Affects
    memory only, not the step. None: 1024 on the CPU, 16384 on a CUDA device."""
    router_replay: bool = True
    """Router replay, for models with routed experts: the trainer uses the experts that the engine
    used instead of its own choice."""
    router_replay_min_score: Annotated[float, Field(ge=0, le=1)] = 0.5
    """A replayed expert is replaced by the best remaining one if its score is less than this share
    of the lowest score among the trainer's own choices."""
    router_balance: bool = False
    """Balance the load of the experts by the method of the model's family: the routers' biases, or
    an auxiliary loss. That loss is computed for each microbatch, and so depends slightly on how
    rows are cut and distributed over ranks."""

    @model_validator(mode="after")
    def _window(self) -> RolloutStageConfig:
        Window[None](
            per_step=self.groups_per_step, max_lag=self.max_lag, reorder_window=self.reorder_window
        )
        return self


class DistillConfig(RolloutStageConfig):
    """On-policy distillation: a teacher scores the student's own sessions, token by token."""

    kind: Literal["distill"]
    teacher: Annotated[str, Place.PATH]
    """A Hugging Face directory with the same vocabulary."""


class EffortConfig(Config):
    """A penalty on the effort of an attempt: `scale` times a concave function of tokens, calls and
    turns (`core.effort`)."""

    scale: Positive
    """Factor on the penalty, in units of reward."""
    k: Positive = 1.0
    """Rate at which effort starts to count: the penalty of effort x is scale * ((1 + k x)^(1 - q) -
    1) / (k (1 - q))."""
    q: NonNegative = 0.5
    """Concavity of the penalty: 0 is linear, 1 logarithmic."""
    tokens: NonNegative = 0.0
    """Weight of a sampled token."""
    calls: NonNegative = 0.0
    """Weight of a tool call."""
    turns: NonNegative = 0.0
    """Weight of a turn of the model."""

    @model_validator(mode="after")
    def _counts_something(self) -> EffortConfig:
        if not (self.tokens or self.calls or self.turns):
            raise ValueError("it counts nothing: give tokens, calls or turns a weight")
        return self


LOSSES = ("reinforce", "ppo_clip", "grpo", "dr_grpo", "dapo", "gspo", "cispo")
"""The names of the losses in `train.loss`."""


class RlConfig(RolloutStageConfig):
    """Asynchronous reinforcement learning on rollouts."""

    kind: Literal["rl"]
    group_size: Annotated[int, Field(ge=2)] = 8
    """Attempts at one task; they are each other's baseline."""
    fresh_frac: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of the groups that go to tasks in turn, each task once before any is repeated. The
    other groups return to tasks whose last attempts differed, so that there is something to learn
    from them (docs/stages.md). 1: all tasks alike, in random order."""
    advantage: str = "dr_grpo"
    """The advantage estimator, which turns the rewards of a group into advantages. One of dr_grpo,
    rloo, grpo, reinforce_plus_plus_baseline, self_imitation, by_turn (docs/glossary.md)."""
    effort_penalty: EffortConfig | None = None
    """A penalty on the effort of an attempt, subtracted from its reward before advantages are
    estimated."""
    train_summaries: bool = True
    """Train summaries with the reward of their session, like everything that the model samples.
    false: the last answer of a context that another one continues is not trained on."""
    loss: Annotated[str, Place.CODE] = "reinforce"
    """The policy loss: reinforce, ppo_clip, grpo, dr_grpo, dapo, gspo, cispo, or your own as
    "file.py:name" or "module:name" (docs/your-own-loss.md). `advantage` is a separate key: a
    paper's method needs both."""
    loss_aggregation: Literal["token", "sequence", "constant"] | None = None
    """Aggregation of token losses: the mean over all tokens, the mean of the attempts' means, or a
    sum divided by a constant. None: the loss's own."""
    clip_low: NonNegative | None = None
    """Ratios below 1 - clip_low and above 1 + clip_high are clipped. None: the loss's own. Refused
    where it would have no effect: `reinforce` does not clip, and a correction replaces the
    ratio."""
    clip_high: NonNegative | None = None
    """See clip_low."""
    correction: (
        Literal["none", "truncated", "masked", "sequence_truncated", "sequence_masked"] | None
    ) = None
    """The importance-sampling correction for tokens that other weights sampled
    (`train.correction`). None: the loss's own."""
    correction_cap: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 2.0
    """The cap of importance weights: the truncated corrections cut larger weights to it, the masked
    ones drop tokens above it or below its inverse."""
    kl_coef: NonNegative = 0.0
    """Coefficient of the KL penalty, subtracted from the reward; the reference is the weights that
    the stage started from."""

    @field_validator("advantage")
    @classmethod
    def _advantage(cls, estimator: str) -> str:
        if estimator in OLD_ESTIMATORS and estimator not in ADVANTAGE:
            raise ValueError(f"{estimator} is now called {OLD_ESTIMATORS[estimator]}")
        if estimator not in ADVANTAGE:
            raise ValueError(f"must be one of {', '.join(ADVANTAGE)}")
        return estimator

    @field_validator("loss")
    @classmethod
    def _loss(cls, loss: str) -> str:
        if loss not in LOSSES and ":" not in loss:
            raise ValueError(f"must be one of {', '.join(LOSSES)}, or your own as file.py:name")
        return loss

    @model_validator(mode="after")
    def _clip_acts(self) -> RlConfig:
        if self.clip_low is None and self.clip_high is None:
            return self
        if self.loss == "reinforce":
            raise ValueError('loss = "reinforce" does not clip: leave out clip_low and clip_high')
        if self.correction not in (None, "none"):
            raise ValueError(
                f'correction = "{self.correction}" already weights tokens by their ratio, so '
                "there is nothing to clip: leave out clip_low and clip_high, or set "
                'correction = "none"'
            )
        return self
