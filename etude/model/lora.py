"""LoRA: a product with a frozen matrix plus a product of two thin ones, y = W x + scale B A x.

An adapter has such a pair for some of the linear layers of a model. Hugging Face's PEFT names them
`X.lora_A.weight` [rank, inputs] and `X.lora_B.weight` [outputs, rank] for a matrix `X.weight`, and
`adapter_config.json` has the rest; here they have the same names without PEFT's prefix. A layer
that fuses several matrices also has one A and one B, in which the pairs of its parts are stacked.

Training adds the pair to the layer as parameters (`add_adapter`). In inference the layer has a
function instead, which knows the adapter of each token of the pass (`engine.adapters`).

Shapes: N tokens, C inputs of a layer, M outputs, R rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from etude.core.errors import EtudeError
from etude.model.layers import ADAPTER_KINDS, Fused, Linear
from etude.model.transformer import Transformer

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
UNSUPPORTED = (
    "use_dora",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "fan_in_fan_out",
    "lora_bias",
    "alora_invocation_tokens",
)
"""Keys of adapter_config.json that change the computation; refused if they are set."""


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""As in `numerics.Arithmetic.linear`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """The contents of `adapter_config.json`."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Last names of the matrices that have a pair, such as q_proj."""
    by_root: bool = False
    """PEFT's use_rslora: the scale is alpha over the square root of the rank."""

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.by_root else self.rank)

    @classmethod
    def from_json(cls, data: bytes) -> LoraConfig:
        """Parse adapter_config.json. Raises ValueError if it does not describe a LoRA adapter, or
        one that is not supported."""
        said = json.loads(data)
        if not isinstance(said, dict) or said.get("peft_type") != "LORA":
            raise ValueError(f"{CONFIG_FILE} does not describe a LoRA adapter")
        if odd := [key for key in UNSUPPORTED if said.get(key)]:
            raise ValueError(f"{CONFIG_FILE}: {', '.join(odd)} is not supported")
        if said.get("bias", "none") != "none":
            raise ValueError(f"{CONFIG_FILE}: bias = {said['bias']!r} is not supported")
        targets = said.get("target_modules")
        if not isinstance(targets, list):
            raise ValueError(f"{CONFIG_FILE}: target_modules must be a list of module names")
        rank, alpha = int(said["r"]), float(said["lora_alpha"])
        if rank < 1 or not math.isfinite(alpha):
            raise ValueError(
                f"{CONFIG_FILE}: r = {rank} must be at least 1, and lora_alpha = {alpha} finite"
            )
        return cls(
            rank=rank,
            alpha=alpha,
            targets=tuple(sorted(targets)),
            by_root=bool(said.get("use_rslora")),
        )

    def to_json(self, base: str = "") -> bytes:
        """The JSON that PEFT would write; `base`: the model that the adapter is for."""
        told: dict[str, Any] = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": list(self.targets),
            "use_rslora": self.by_root,
            "lora_dropout": 0.0,
            "bias": "none",
            "inference_mode": True,
        }
        return json.dumps(told, indent=2).encode()


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter: its tensors by their names without PEFT's prefix."""

    config: LoraConfig
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Pair:
    """One layer's pair of an adapter, with the A and B of its parts stacked."""

    a: Tensor
    b: Tensor
    scale: float
    widths: tuple[tuple[int, bool], ...]
    """For each part, its number of outputs and whether it has a pair."""

    def added(self, product: Product, x: Tensor, y: Tensor) -> Tensor:
        """y + scale B A x."""
        widths = [width for width, has_pair in self.widths if has_pair]
        rank = self.a.shape[0] // len(widths)
        low = iter(product(x, self.a, None).split_with_sizes([rank] * len(widths), -1))
        high = iter(self.b.split_with_sizes(widths))
        pieces = y.split_with_sizes([width for width, _ in self.widths], -1)
        sums = [
            piece + self.scale * product(next(low), next(high), None) if has_pair else piece
            for piece, (_, has_pair) in zip(pieces, self.widths, strict=True)
        ]
        return sums[0] if len(sums) == 1 else torch.cat(sums, -1)


def parts_of(path: str, layer: Linear) -> dict[str, int]:
    """The matrices of a layer by their last names, with the number of outputs of each."""
    return (
        layer.sizes if isinstance(layer, Fused) else {path.rpartition(".")[2]: layer.out_features}
    )


def adaptable_layers(model: Transformer) -> dict[str, Linear]:
    """The layers that can have adapters, by path. Raises EtudeError for a model that cannot have
    any."""
    c = model.config
    if c.latent or c.linear:
        kind = "latent attention (MLA)" if c.latent else "recurrent layers"
        raise EtudeError(f"LoRA is not available for {c.model_type}: {kind} cannot have adapters")
    within = ("self_attn",) if c.experts else ("self_attn", "mlp")
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, Linear) and path.split(".")[-2:][0] in within
    }


def check_targets(model: Transformer, targets: Sequence[str]) -> None:
    known = {
        name for path, layer in adaptable_layers(model).items() for name in parts_of(path, layer)
    }
    if not targets or (unknown := sorted(set(targets) - known)):
        experts = "; experts take no adapters" if model.config.experts else ""
        raise EtudeError(
            f"LoRA: {model.config.model_type} has no adaptable layer named "
            f"{', '.join(unknown) if targets else '(none was named)'}; adaptable layers: "
            f"{', '.join(sorted(known))}{experts}"
        )


class _TrainedPair:
    """The pair of a layer whose A and B are parameters of the layer."""

    def __init__(self, parts: Mapping[str, int], config: LoraConfig) -> None:
        self.scale = config.scale
        self.widths = tuple((size, name in config.targets) for name, size in parts.items())

    def __call__(self, layer: Linear, x: Tensor, y: Tensor) -> Tensor:
        pair = Pair(layer.lora_A, layer.lora_B, self.scale, self.widths)
        return pair.added(layer.arithmetic.linear, x, y)


def add_adapter(model: Transformer, config: LoraConfig, seed: int) -> Transformer:
    """Freeze the model and add a fresh adapter to train: A random, B zero, so that nothing changes
    at first. Return the model."""
    check_targets(model, config.targets)
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for path, layer in adaptable_layers(model).items():
        parts = parts_of(path, layer)
        if not (own := {name: size for name, size in parts.items() if name in config.targets}):
            continue
        bound = 1 / math.sqrt(layer.in_features)
        a = torch.empty(len(own) * config.rank, layer.in_features, device="cpu")
        a.uniform_(-bound, bound, generator=generator)
        layer.lora_A = nn.Parameter(a.to(layer.weight))
        layer.lora_B = nn.Parameter(layer.weight.new_zeros(sum(own.values()), config.rank))
        layer.adapted_parts = own
        layer.adapter = _TrainedPair(parts, config)
    return model


def is_adapter_tensor(name: str) -> bool:
    return name.endswith(tuple(f".{kind}.weight" for kind in ADAPTER_KINDS))


def split_tensors(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of the base, and those of its adapter."""
    own = {name: tensor for name, tensor in tensors.items() if is_adapter_tensor(name)}
    return {name: tensor for name, tensor in tensors.items() if name not in own}, own


def layer_pairs(model: Transformer, adapter: Adapter, like: Tensor) -> Iterator[tuple[str, Pair]]:
    """Pairs (path of a layer, its `Pair`) of an adapter for this model, on the device and in the
    dtype of `like`. Raises ValueError if the adapter does not fit."""
    left = dict(adapter.tensors)
    rank = adapter.config.rank
    for path, layer in adaptable_layers(model).items():
        parent = path.rpartition(".")[0]
        lows: list[Tensor] = []
        highs: list[Tensor] = []
        widths: list[tuple[int, bool]] = []
        for name, size in parts_of(path, layer).items():
            names = [f"{parent}.{name}.{kind}.weight" for kind in ADAPTER_KINDS]
            found = [left.pop(name) for name in names if name in left]
            widths.append((size, bool(found)))
            if not found:
                continue
            wanted = [(rank, layer.in_features), (size, rank)]
            if (shapes := [tuple(tensor.shape) for tensor in found]) != wanted:
                raise ValueError(
                    f"A and B of {parent}.{name} have the shapes {shapes}, but the model needs "
                    f"{wanted}"
                )
            lows.append(found[0])
            highs.append(found[1])
        if lows:
            a, b = (torch.cat(each).to(like.device, like.dtype) for each in (lows, highs))
            yield path, Pair(a, b, adapter.config.scale, tuple(widths))
    if left:
        raise ValueError(
            f"the adapter has tensors that fit no adaptable layer of {model.config.model_type}: "
            f"{sorted(left)[0]} and {len(left) - 1} more"
        )


def pair_tensors(path: str, layer: Linear, pair: Pair) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a layer's pair by name, the inverse of `layer_pairs`."""
    parent = path.rpartition(".")[0]
    parts = parts_of(path, layer)
    own = [name for name, (_, has_pair) in zip(parts, pair.widths, strict=True) if has_pair]
    for kind, tensors in (
        ("lora_A", pair.a.chunk(len(own))),
        ("lora_B", pair.b.split_with_sizes([parts[name] for name in own])),
    ):
        for name, tensor in zip(own, tensors, strict=True):
            yield f"{parent}.{name}.{kind}.weight", tensor


def merged(tensors: Mapping[str, Tensor], config: LoraConfig) -> dict[str, Tensor]:
    """The tensors of the base with the contained adapter merged: W + scale B A, computed in fp32
    and rounded once to the dtype of W."""
    base, own = split_tensors(tensors)
    for name in own:
        stem, a_or_b = name.removesuffix(".weight").rsplit(".", 1)
        if a_or_b == "lora_A":
            weight = base[f"{stem}.weight"]
            low, high = own[name].float(), own[f"{stem}.lora_B.weight"].float()
            base[f"{stem}.weight"] = (weight.float() + config.scale * (high @ low)).to(weight.dtype)
    return base


def whole_model(files: Mapping[str, bytes], tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors of a whole model, from those of a version, which may be an adapter version.
    `files`: those of its run."""
    if not any(map(is_adapter_tensor, tensors)):
        return tensors
    return merged(tensors, LoraConfig.from_json(files[CONFIG_FILE]))


def write_adapter(path: Path, adapter: Adapter, base: str) -> None:
    """Write a directory that PEFT can read."""
    path.mkdir(parents=True, exist_ok=True)
    named = {f"{PEFT_PREFIX}{name}": t.contiguous() for name, t in adapter.tensors.items()}
    (path / CONFIG_FILE).write_bytes(adapter.config.to_json(base))
    (path / WEIGHTS_FILE).touch()
    mode = (path / WEIGHTS_FILE).stat().st_mode  # safetensors makes files owner-readable
    save_file(named, path / WEIGHTS_FILE, metadata={"format": "pt"})
    (path / WEIGHTS_FILE).chmod(mode)


def read_adapter(path: Path) -> Adapter:
    """The adapter in a directory written by PEFT or by `write_adapter`. Raises EtudeError."""
    try:
        config = LoraConfig.from_json((path / CONFIG_FILE).read_bytes())
        tensors = load_file(path / WEIGHTS_FILE)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as e:
        raise EtudeError(
            f"{path} has no readable adapter ({e}): give a directory with {CONFIG_FILE} and "
            f"{WEIGHTS_FILE}"
        ) from e
    return Adapter(config, {name.removeprefix(PEFT_PREFIX): t for name, t in tensors.items()})
