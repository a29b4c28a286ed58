"""The configuration of a run: TOML text in, one frozen tree out. No component sees a value that was
not validated.

Components receive plain values from the tree, or one of its tables, never the tree itself.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from etude.core.errors import EtudeError
from etude.core.eval_config import EvalConfig
from etude.core.harness_config import CODING_AGENT, HarnessConfig
from etude.core.lend_config import LendConfig
from etude.core.model_config import ModelConfig
from etude.core.placement_config import PlacementConfig
from etude.core.realtime_config import RealtimeConfig
from etude.core.rewards_config import RewardsConfig
from etude.core.sandbox_config import SandboxConfig
from etude.core.schema import (
    OLD_KEYS,
    Config,
    Count,
    CountOrZero,
    Name,
    NonNegative,
    Place,
    Positive,
    StoreUrl,
    Url,
)
from etude.core.stages import (
    DistillConfig,
    DpoConfig,
    MidtrainConfig,
    RlConfig,
    RolloutStageConfig,
    SftConfig,
    StageConfig,
)
from etude.core.tasks_config import TasksConfig
from etude.core.trainer_config import TrainerConfig


class EngineConfig(Config):
    """The inference workers and the gateway in front of them."""

    regions: Annotated[tuple[Name, ...], Field(min_length=1, strict=False)] = ("east", "west")
    """The regions of the run, with one inference worker in each."""
    max_num_seqs: Count = 32
    """Requests that a worker decodes together."""
    threads: Count = 1
    """CPU threads of each worker. Those of the trainer are `threads` of its stage."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The dtype that the workers compute in; auto: bfloat16 on a CUDA device, float32 on the
    CPU."""
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """The device of the workers; auto: a CUDA device if there is one, in bf16. On the CPU they
    compute in fp32, where their log-probs are closest to those of a trainer on the CPU."""
    vllm_urls: dict[Name, str] = {}
    """Regions served by a vLLM server instead of our engine, with the server's URL
    (docs/serve.md)."""
    relays: dict[Name, Url] = {}
    """Regions with a relay, which downloads weights once for all workers there, and its URL
    (docs/clusters.md)."""
    quarantine_k3_ratio: NonNegative = 10.0
    """The ratio of a region's k3 to that of the others, over the last steps, above which the region
    gets no more requests; 0: no limit."""
    lend: LendConfig | None = None
    """Capacity that the workers lend to RL while they serve users; None: none."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """The port of the gateway, on the loopback interface; 0 chooses a free one. Its tokens are
    signed with ETUDE_SECRET; if that is not set, every launch makes a secret of its own."""
    public_url: Url | None = None
    """The URL at which other machines reach the gateway, such as that of a proxy in front of its
    port; remote services are given this URL. None: the port itself."""

    @field_validator("regions")
    @classmethod
    def _distinct(cls, regions: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(regions)) < len(regions):
            raise ValueError("two regions have the same name")
        return regions

    @model_validator(mode="after")
    def _vllm_regions(self) -> EngineConfig:
        if unknown := sorted(self.vllm_urls.keys() - set(self.regions)):
            raise ValueError(
                f"vllm_urls names {unknown[0]}, which is not one of the regions "
                f"{', '.join(self.regions)}"
            )
        return self


AnyStage = MidtrainConfig | SftConfig | RlConfig | DpoConfig | DistillConfig
STAGES: dict[str, type[StageConfig]] = {
    "midtrain": MidtrainConfig,
    "sft": SftConfig,
    "rl": RlConfig,
    "dpo": DpoConfig,
    "distill": DistillConfig,
}


class RunConfig(Config):
    """The whole configuration of a run."""

    name: Name
    """The run's name, and that of its directory under `runs/`."""
    seed: CountOrZero = 0
    """The seed of fresh weights, tasks and sampling."""
    folder: Annotated[str | None, Place.PATH] = None
    """The folder that relative paths start from and that modules are imported from, itself relative
    to the folder of this file. None: the folder of this file."""
    store: StoreUrl | None = None
    """The store of the run: `s3://BUCKET/RUN`, `gs://..`, `az://..` or `file:/PATH`. None: the
    folder `runs/NAME` under the directory in which `etude` is started. `--dir` takes precedence."""
    deterministic: bool = False
    """Every run with this seed produces the same weights, bit for bit. Slower; requires one region
    and max_lag = 0."""
    batch_invariant: bool = False
    """The log-prob of a token has the same bits regardless of the rest of the batch, in the engine
    and in the trainer, so at equal weights they agree exactly. Slower."""
    quantization: Literal["fp8"] | None = None
    """`fp8`: multiply the matrices of attention and dense MLPs in FP8 (e4m3, a scale for each token
    and each output), in the engine and in the trainer's forward pass. The trained and the published
    weights keep their dtypes (docs/training.md)."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """`fp8`: round keys and values to FP8 (e4m3, a scale for each token and head), in the engine,
    which also stores them in FP8, and in the trainer's forward pass. `auto`: no rounding."""
    heartbeat_timeout_s: Positive = 10.0
    """Time without a heartbeat after which a process of the run is reported on the screen, a worker
    gets no requests until its next heartbeat, and a sandbox has failed. A step of an engine may
    take ten times as long."""
    model: ModelConfig = ModelConfig()
    tasks: TasksConfig = TasksConfig()
    harness: HarnessConfig = HarnessConfig()
    rewards: RewardsConfig = RewardsConfig()
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    sandbox: SandboxConfig = SandboxConfig()
    placement: PlacementConfig = PlacementConfig()
    eval: EvalConfig = EvalConfig()
    realtime: RealtimeConfig | None = None
    trackers: Annotated[
        tuple[Literal["tensorboard", "wandb", "trackio"], ...], Field(strict=False)
    ] = ()
    """Trackers that the run's metrics are sent to, in addition to its own store."""
    stage: Annotated[
        tuple[Annotated[AnyStage, Field(discriminator="kind")], ...],
        Field(min_length=1, strict=False),
    ]
    """The stages, in order: the first starts from fresh weights or from model.path, every other one
    from the weights of the previous stage."""

    def located(self, folder: Path) -> RunConfig:
        """The same config for a file in this folder: relative paths become absolute."""
        start = os.path.normpath(folder / (self.folder or "."))
        return self.model_copy(update={"folder": start}).seen_from(Path(start))

    def as_written(self, place: str) -> str:
        """A path, or a reference to code, in the form that it has in the run's file."""
        return place.removeprefix(f"{self.folder}/")

    @property
    def evaluates_start(self) -> bool:
        """True if version 0 is evaluated. Fresh weights never are."""
        return self.model.path is not None and self.eval.before

    @model_validator(mode="after")
    def _lineage(self) -> RunConfig:
        names = [stage.name for stage in self.stage]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"two stages are called {twice[0]}: give one of them a name = of its own"
            )
        for number, stage in enumerate(self.stage):
            if (
                isinstance(stage, MidtrainConfig)
                and stage.rope_scaling
                and (number or self.model.path is None)
            ):
                raise ValueError(
                    f"stage.{stage.name}.rope_scaling stretches the model of model.path from "
                    "the first stage on: set model.path, and put this stage first (to "
                    "continue from another run, export its model and give that as path)"
                )
        return self

    @model_validator(mode="after")
    def _adapts(self) -> RunConfig:
        if (lora := self.trainer.lora) is not None:
            fresh = self.model.path is None
            lora.check(self.stage, fresh=fresh, optimizer=self.trainer.optimizer)
        return self

    @model_validator(mode="after")
    def _one_agent(self) -> RunConfig:
        is_named = self.harness.agent_class != CODING_AGENT
        if self.tasks.is_remote and (is_named or self.harness.command):
            raise ValueError(
                f"tasks.environment = {self.tasks.environment!r} runs its own sessions: "
                "leave out harness.agent, harness.code and harness.command"
            )
        if self.harness.summaries and (self.tasks.is_remote or self.harness.command):
            raise ValueError(
                f"harness.{next(iter(self.harness.summaries))} only works with an agent that "
                "runs here: a program or a service summarises by itself"
            )
        if is_named and self.harness.command:
            raise ValueError(
                "harness.command and harness.agent or harness.code name two agents: leave "
                f"out one (the default agent, {CODING_AGENT}, does not count)"
            )
        return self

    @model_validator(mode="after")
    def _evaluates_here(self) -> RunConfig:
        if self.eval.every_steps and (self.tasks.is_remote or self.engine.vllm_urls):
            raise ValueError(
                "eval.every_steps evaluates beside the run, with its own engine and "
                "sandboxes: leave it out with engine.vllm_urls or an environment that runs "
                "elsewhere"
            )
        return self

    @model_validator(mode="after")
    def _learns_from_users(self) -> RunConfig:
        if self.realtime is None:
            return self
        if not isinstance(self.stage[-1], RlConfig):
            raise ValueError(
                "[realtime] trains in the last stage: end with a [[stage]] of kind rl, whose "
                "steps limit the number of updates"
            )
        if not self.tasks.heldout:
            raise ValueError(
                "[realtime] needs tasks.heldout: a version is deployed only if it passes them"
            )
        if self.tasks.is_remote or self.engine.vllm_urls or self.trainer.ranks > 1:
            raise ValueError(
                "[realtime] evaluates with its own engine and trains on one rank: leave out "
                "engine.vllm_urls, trainer.ranks and environments that run elsewhere"
            )
        return self

    @model_validator(mode="after")
    def _summarises_in_time(self) -> RunConfig:
        room = self.model.max_context - self.harness.max_tokens
        if self.harness.summarise_at is not None and self.harness.summarise_at >= room:
            raise ValueError(
                f"harness.summarise_at = {self.harness.summarise_at} leaves no room for a summary "
                f"of harness.max_tokens = {self.harness.max_tokens} tokens in model.max_context = "
                f"{self.model.max_context}: lower it"
            )
        return self

    @model_validator(mode="after")
    def _repeatable(self) -> RunConfig:
        lags = [stage.max_lag for stage in self.stage if isinstance(stage, RolloutStageConfig)]
        if self.deterministic and (any(lags) or len(self.engine.regions) > 1):
            raise ValueError(
                "deterministic = true needs max_lag = 0 in every stage and one name in "
                "engine.regions"
            )
        return self

    @model_validator(mode="after")
    def _agrees(self) -> RunConfig:
        threads = {
            self.engine.threads,
            *(stage.threads for stage in self.stage if isinstance(stage, RlConfig)),
        }
        if self.engine.vllm_urls and (self.batch_invariant or self.deterministic):
            raise ValueError(
                "a vLLM server does not guarantee bitwise results: leave out "
                "engine.vllm_urls, or batch_invariant and deterministic"
            )
        if self.engine.vllm_urls and (self.quantization or self.kv_cache_dtype != "auto"):
            raise ValueError(
                "quantization on a vLLM server is set by the server's own options: leave out "
                "engine.vllm_urls, or quantization and kv_cache_dtype"
            )
        if self.batch_invariant and len(threads) > 1:
            # A product that several threads share is summed in another order than one that a single
            # thread computes.
            raise ValueError(
                "batch_invariant = true needs the same value for engine.threads and "
                "stage.rl.threads"
            )
        if self.batch_invariant and "bfloat16" in {self.engine.dtype, self.trainer.compute_dtype}:
            raise ValueError(
                "batch_invariant = true computes in float32 on the CPU and in bfloat16 on "
                "CUDA: leave out engine.dtype and trainer.compute_dtype"
            )
        for key, work in (
            ("context_parallel", "compute each row"),
            ("expert_parallel", "hold the experts of a layer"),
        ):
            if self.trainer.ranks % (size := getattr(self.trainer, key)):
                raise ValueError(
                    f"trainer.{key} = {size} does not divide trainer.ranks = "
                    f"{self.trainer.ranks}: groups of {size} ranks {work} together"
                )
        if (self.trainer.published_dtype, self.trainer.compute_dtype) == ("float32", "bfloat16"):
            raise ValueError(
                'trainer.compute_dtype = "bfloat16" already rounds the weights: leave out '
                "trainer.published_dtype"
            )
        devices = {self.engine.device, self.trainer.device}
        if self.batch_invariant and devices not in ({"cpu"}, {"cuda"}):
            raise ValueError(
                'batch_invariant = true needs the same device, "cpu" or "cuda", for engine '
                "and trainer"
            )
        plain = (self.engine.dtype, self.trainer.compute_dtype, self.trainer.published_dtype)
        if (
            self.batch_invariant
            and devices == {"cuda"}
            and (plain != ("auto", "auto", "bfloat16") or self.trainer.ranks > 1)
        ):
            raise ValueError(
                "batch_invariant = true on CUDA computes in bfloat16 on one rank: leave out "
                "engine.dtype, trainer.compute_dtype, trainer.published_dtype and trainer.ranks"
            )
        return self


def parse(text: str, overrides: Sequence[str] = (), *, source: str = "config") -> RunConfig:
    """Parse and validate a config. `overrides` are `a.b=value`; a stage is addressed by its name
    (`stage.rl.steps=3`). `source` names the text in errors."""
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise EtudeError(f"{source}: not valid TOML: {e}{_shown_line(text, str(e))}") from e
    given = {_apply(tree, override, source): override for override in overrides}
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as e:
        # A list whose items are all wrong counts as empty too; that error would add nothing.
        within = {error["loc"][:1] for error in e.errors() if len(error["loc"]) > 1}
        told = [
            error
            for error in e.errors()
            if error["type"] != "too_short" or error["loc"] not in within
        ]
        raise EtudeError(
            "\n".join(
                f"{_origin(error['loc'], tree, given, source)}: {_explain(dict(error), tree)}"
                for error in told
            )
        ) from e


def _origin(
    loc: tuple[str | int, ...], tree: dict[str, Any], given: Mapping[str, str], source: str
) -> str:
    """The place of the mistake: an override, or the text."""
    names = [str(part) for part in loc]
    if len(loc) > 2 and loc[0] == "stage":  # ("stage", number, kind, key)
        stage = tree["stage"][loc[1]]
        names = ["stage", str(stage.get("name", stage.get("kind"))), *names[3:]]
    prefixes = (".".join(names[:size]) for size in range(len(names), 0, -1))
    if override := next((given[prefix] for prefix in prefixes if prefix in given), None):
        return f"--set {override}"
    # a rule between the keys of one table, or of several
    table = "".join(f"{name}." for name in names)
    within = [told for key, told in given.items() if key.startswith(table)]
    return f"{source} with {' '.join(f'--set {told}' for told in within)}" if within else source


def _apply(tree: dict[str, Any], override: str, source: str) -> str:
    """Apply an override to the tree and return the dotted key that it sets."""
    path, equals, text = override.partition("=")
    keys = [key.strip() for key in path.split(".")]
    if not equals or not all(keys):
        raise EtudeError(
            f"--set {override}: write it as key=value, for example --set stage.rl.steps=3"
        )
    if keys[0] == "stage":
        stages = _stages_in(tree)
        named = {str(stage.get("name", stage.get("kind"))): stage for stage in stages}
        if len(keys) != 3 or keys[1] not in named:
            raise EtudeError(
                f"--set {override}: address a stage as stage.NAME.KEY; the stages of "
                f"{source} are {', '.join(named) or '(none)'}"
            )
        named[keys[1]][keys[2]] = _value(text)
        return ".".join(keys)
    for depth, key in enumerate(keys[:-1], 1):
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise EtudeError(
                f"--set {override}: {'.'.join(keys[:depth])} is a value and has no keys"
            )
    tree[keys[-1]] = _value(text)
    return ".".join(keys)


def _stages_in(tree: dict[str, Any]) -> list[dict[str, Any]]:
    """The stages that are tables; validation reports the others."""
    given = tree.get("stage")
    return [each for each in given if isinstance(each, dict)] if isinstance(given, list) else []


def _value(text: str) -> Any:
    """A TOML value. Text that is not valid TOML counts as a string without quotation marks."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text.strip()
    return parsed["value"] if len(parsed) == 1 else text.strip()


def _shown_line(text: str, error: str) -> str:
    """The line that a TOML error names."""
    at = re.search(r"\(at line (\d+)", error)
    line = text.splitlines()[int(at[1]) - 1].strip() if at else ""
    is_syntax = not error.startswith("Cannot")  # a key that is defined twice
    hint = ": a quote or a bracket may be missing" if is_syntax else ""
    return f", in `{line}`{hint}" if line else ""


def _explain(error: dict[str, Any], tree: dict[str, Any]) -> str:
    """One sentence: the key, its mistake, and the correction."""
    loc, given = error["loc"], error["input"]
    # a stage is named by its kind, not its number
    path = ".".join(str(part) for part in loc if not isinstance(part, int))
    match error["type"]:
        case "extra_forbidden":
            table = f"[{path.rpartition('.')[0]}]" if len(loc) > 1 else "the top level"
            renamed = OLD_KEYS.get(f"stage.{loc[-1]}" if loc[0] == "stage" else path)
            if renamed is not None:
                return f"unknown key {path} in {table}: it is now called {renamed}"
            return f"unknown key {path} in {table}: {_hint(str(loc[-1]), _table(loc[:-1]), tree)}"
        case "missing":
            why = "a run needs at least one [[stage]]" if path == "stage" else "it has no default"
            return f"{path} is missing: {why}"
        case "union_tag_invalid" | "union_tag_not_found":
            kind = given.get("kind") if isinstance(given, dict) else given
            near = difflib.get_close_matches(str(kind), STAGES)
            hint = f", did you mean {near[0]}?" if near else ""
            return (
                f"stage number {loc[1] + 1} needs kind = one of {', '.join(STAGES)}; it has "
                f"{kind!r}{hint}"
            )
        case "value_error":
            what = str(error["ctx"]["error"])
            return f"{path}: {what}" if path else what
        case "tuple_type" if _table(loc):
            table = ".".join(part for part in loc if isinstance(part, str) and part not in STAGES)
            written = f"[{table}]" if isinstance(given, dict) else f"{table} = {given!r}"
            return f"{path}: write [[{table}]], not {written}: there can be more than one"
        case "tuple_type":
            example = f", such as [{given!r}]" if isinstance(given, str) else ""
            return f"{path} = {given!r}: it must be a list{example}"
        case _:
            return f"{path} = {given!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _hint(key: str, table: type[BaseModel], tree: dict[str, Any]) -> str:
    """A suggestion for a key that the table does not have."""
    keys = list(table.model_fields)
    for stage in _stages_in(tree) if table is RunConfig else ():
        if (kind := stage.get("kind")) in STAGES and key in STAGES[kind].model_fields:
            return f"it is a key of a [[stage]], as stage.{stage.get('name', kind)}.{key}"
    if kinds := [kind for kind, stage in STAGES.items() if key in stage.model_fields]:
        return f"it is a key of a [[stage]] of kind {' or '.join(kinds)}, as stage.{kinds[0]}.{key}"
    near = difflib.get_close_matches(key, keys, n=1) or [k for k in keys if key in k.split("_")]
    if near:
        return f"did you mean {near[0]}?"
    return f"valid keys are {', '.join(keys)}"


def _table(loc: tuple[str | int, ...]) -> Any:
    """The model that holds the keys at this place: the top level, a section, ("stage", number,
    kind), or a table within these. None for a plain value."""
    is_in_stage = loc[:1] == ("stage",) and len(loc) > 2
    table, rest = (STAGES[str(loc[2])], loc[3:]) if is_in_stage else (RunConfig, loc)
    for key in rest:
        # the index of a list, or a name chosen in the file, has no field of its own
        if table and isinstance(key, str) and key in table.model_fields:
            table = _model_in(table.model_fields[key].annotation)
    return table


def _model_in(annotation: Any) -> Any:
    """The one model in a type such as `tuple[Model, ...] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := _model_in(part))), None)
