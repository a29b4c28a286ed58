"""Models as the files of a Hugging Face directory: config.json, tokenizer.json, model.safetensors
and so on.

The small files are passed as a dict (name -> bytes), because a run keeps them in the object store,
not on a disk. Outside `model/` tensors are known only by their Hugging Face names; `hf_tensors`
maps these to our own parameters, some of which hold several such tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from etude.model.checkpoint import Checkpoint
from etude.model.directory import INDEX, MODEL_FILES, SINGLE_FILE, missing_files, read_model_files
from etude.model.layers import ADAPTER_KINDS, FusedModule
from etude.model.quantization import without_quantization
from etude.model.transformer import ModelConfig, Transformer

__all__ = [
    "MODEL_FILES",
    "build_model",
    "check_fit",
    "load_weights",
    "hf_tensors",
    "read_directory",
    "hf_rows",
    "hf_state_dict",
    "write_directory",
]

SHARD_BYTES = 5 * 10**9


def hf_tensors(model: Transformer, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The model's tensors by their Hugging Face names: views, so that writing to them writes to the
    model. `state`: tensors to use instead, by the names of the model's own parameters, such as
    gradients or master weights."""
    state = model.state_dict() if state is None else state
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        names = [
            name
            for name, _ in [
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            ]
        ]
        own = {name: state[f"{path}.{name}"] for name in names if f"{path}.{name}" in state}
        if isinstance(module, FusedModule):
            found |= {f"{path.rpartition('.')[0]}.{name}": view for name, view in module.parts(own)}
        else:
            found |= {f"{path}.{name}": tensor for name, tensor in own.items()}
    return {_their_name(name, model.config): tensor for name, tensor in found.items()}


def _their_name(name: str, config: ModelConfig) -> str:
    for ours, theirs in config.family.renames:
        name = name.replace(ours, theirs)
    return f"{name}.weight" if name.endswith(ADAPTER_KINDS) else name


Rows = tuple[Tensor, int, int, torch.dtype]
"""Rows of a tensor, the index of the first one, the number of rows of the whole tensor, and the
dtype in which it is published."""


def hf_rows(
    model: Transformer,
    held: Mapping[str, tuple[int, Tensor]],
    dtype: torch.dtype = torch.bfloat16,
    *,
    counts: Mapping[str, int] | None = None,
) -> dict[str, Rows]:
    """The tensor rows of a rank that holds some rows of each parameter, as views by Hugging Face
    name. `held`: name of a parameter or buffer -> index of its first row on this rank, and the
    rows; other parameters are left out. `counts`: the number of rows of a whole parameter, if it
    differs from the model's."""
    counts = counts or {}
    whole = {
        name: torch.empty(
            (counts.get(name, len(t)), *t.shape[1:]) if t.ndim else t.shape,
            dtype=t.dtype,
            device="meta",
        )
        for name, t in model.state_dict().items()
        if name in held
    }
    names = {id(tensor): name for name, tensor in whole.items()}
    found: dict[str, Rows] = {}
    for name, view in hf_tensors(model, whole).items():
        base = view if view._base is None else view._base
        first, own = held[names[id(base)]]
        assert view.is_contiguous()  # parts are split along the first dimensions of a parameter
        # offset of the rank's rows, counted from the start of the view
        begin = first * base[:1].numel() - view.storage_offset()
        low, high = max(0, begin), min(view.numel(), begin + own.numel())
        if low < high:
            data = own.detach().reshape(-1)[low - begin : high - begin].view(-1, *view.shape[1:])
            published = view.dtype if _is_exact(name) else dtype
            found[name] = data, low // view[:1].numel(), view.shape[0], published
    return found


def hf_state_dict(
    model: Transformer,
    dtype: torch.dtype = torch.bfloat16,
    state: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """A copy of the tensors by their Hugging Face names, as they are published, saved and served.
    `state` as in `hf_tensors`."""
    with torch.no_grad():
        found = hf_tensors(model, state)
        return {
            name: t.to(t.dtype if _is_exact(name) else dtype, copy=True)
            for name, t in found.items()
        }


def load_weights(model: Transformer, tensors: Mapping[str, Tensor]) -> None:
    """Copy values in place, so that every holder of the model uses the new ones."""
    with torch.no_grad():
        for name, view in fitting_views(model, tensors).items():
            view.copy_(tensors[name])


def fitting_views(model: Transformer, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's views that `tensors` belong in. Raises ValueError if they do not fit."""
    own = hf_tensors(model)
    _check_fit(own, tensors)
    return own


def check_fit(config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError if these are not exactly the tensors of such a model."""
    _check_fit(hf_tensors(Transformer(config)), tensors)


def write_directory(
    path: Path,
    small: Mapping[str, bytes],
    tensors: Mapping[str, Tensor],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, data in small.items():
        (path / name).write_bytes(data)
    shards = list(_shards(tensors, shard_bytes))
    files = [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    if len(shards) == 1:
        files = [SINGLE_FILE]
    else:
        where = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        size = sum(tensor.nbytes for tensor in tensors.values())
        (path / INDEX).write_text(
            json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=2)
        )
    for file, shard in zip(files, shards, strict=True):
        (path / file).touch()
        # keep the mode given by the umask; safetensors makes files readable for the owner only
        mode = (path / file).stat().st_mode
        save_file(shard, path / file, metadata={"format": "pt"})
        (path / file).chmod(mode)


def read_directory(path: Path) -> tuple[dict[str, bytes], Checkpoint]:
    """Read the small files and the tensors of a model directory. Tensors are read one by one, and
    are returned in bf16 if they are stored in FP8 or MXFP4; config.json then no longer mentions
    quantization."""
    if missing := missing_files(path):
        raise FileNotFoundError(f"{path} is not a model directory: {', '.join(missing)} missing")
    small = read_model_files(path)
    small["config.json"] = without_quantization(small["config.json"])
    return small, Checkpoint(path)


def build_model(
    small: Mapping[str, bytes], tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32
) -> Transformer:
    config = ModelConfig.from_json(small["config.json"])
    model = Transformer(config).to(dtype)
    own = hf_tensors(model)
    _check_names(own, {name for name in tensors if not _is_unused(name, config)})
    with torch.no_grad():
        for name, view in own.items():
            tensor = tensors[name]
            _check_shape(name, view, tensor)
            view.copy_(tensor)
    return model


def _is_exact(name: str) -> bool:
    """True for tensors that are never rounded, because they decide between scores that are close
    together."""
    return name.endswith("e_score_correction_bias")


def _is_unused(name: str, config: ModelConfig) -> bool:
    """True for tensors that some models' files contain and that are not used here: tables, a copy
    of the embedding, layers that predict further tokens."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return (
        name.endswith("rotary_emb.inv_freq")
        or name.startswith("mtp.")
        or (name == "lm_head.weight" and config.tie_word_embeddings)
        or (layer is not None and int(layer[1]) >= config.num_hidden_layers)
    )


def _check_fit(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    _check_names(own, tensors.keys())
    for name, view in own.items():
        _check_shape(name, view, tensors[name])


def _check_names(own: Mapping[str, Tensor], names: Set[str]) -> None:
    if own.keys() != names:
        raise ValueError(
            f"the tensors do not fit the model: missing {_some(own.keys() - names)}, unknown "
            f"{_some(names - own.keys())}"
        )


def _check_shape(name: str, view: Tensor, tensor: Tensor) -> None:
    if view.shape != tensor.shape:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, but the model needs {tuple(view.shape)}"
        )


def _some(names: Set[str]) -> str:
    first = sorted(names)[:8]
    return f"{first}{f' and {len(names) - 8} more' if len(names) > 8 else ''}"


def _shards(tensors: Mapping[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > limit:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard
