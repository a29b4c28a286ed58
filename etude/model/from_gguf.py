"""Converter from a GGUF file, llama.cpp's format for whole models, to a Hugging Face directory:
config, tokenizer, template, weights.

Quantised weights become bf16. Three differences between the formats silently give a worse model if
they are forgotten:

- For `llama`, rows of queries and keys are stored in the order of another way to rotate
  (`_unrotate`).
- The file only names how text is split before the vocabulary is applied; `CUTS` has the patterns.
- Numbers are float32: 1e-5 reads as 0.00000999999975.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from torch import Tensor

from etude.core.errors import EtudeError
from etude.model.config import ModelConfig
from etude.model.directory import with_stop_tokens
from etude.model.files import check_fit

try:
    import gguf
except ModuleNotFoundError as e:
    raise EtudeError("reading GGUF files needs the package gguf: pip install 'etude[gguf]'") from e

ARCHITECTURES = ("llama", "qwen2", "qwen3")

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _by_pattern(digits: str) -> list[Any]:
    split = pre_tokenizers.Split(Regex(_WORDS.replace("DIGITS", digits)), "isolated")
    return [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


CUTS: dict[str, Callable[[], list[Any]]] = {
    "gpt-2": lambda: [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": lambda: [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
    "qwen2": lambda: _by_pattern(r"\p{N}"),
    "llama-bpe": lambda: _by_pattern(r"\p{N}{1,3}"),
}
"""`tokenizer.ggml.pre` -> how a text is split into pieces, within which the vocabulary is
applied."""

CONTROL, USER_DEFINED = 3, 4  # kinds of token that are found in a text before it is split


@dataclass(frozen=True, slots=True)
class Converted:
    small: dict[str, bytes]
    tensors: dict[str, Tensor]


def convert(
    path: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> Converted:
    """Convert the file. `progress` is called with the number of tensors done and their total."""
    reader, said = _open(path)
    if (kind := said.get("general.architecture")) not in ARCHITECTURES:
        raise EtudeError(
            f"{path}: architecture {kind!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    try:
        config = _config(
            said, tied=all(tensor.name != "output.weight" for tensor in reader.tensors)
        )
        small = (
            {"config.json": config.to_json().encode()}
            | _tokenizer_files(said)
            | _notes(said, path.name)
        )
        if "tokenizer.ggml.eos_token_id" in said:
            small = with_stop_tokens(small)
        tensors: dict[str, Tensor] = {}
        for tensor in reader.tensors:
            progress(len(tensors), len(reader.tensors))
            tensors[_name(tensor.name)] = _values(tensor, config)
        progress(len(tensors), len(reader.tensors))
        check_fit(config, tensors)
    except KeyError as e:
        raise EtudeError(
            f"{path} has no {e}, so it is not a complete language model; use another file"
        ) from e
    # all but the first: sizes, ids and kinds that no model has
    except (ValueError, TypeError, IndexError, ZeroDivisionError, RuntimeError) as e:
        raise EtudeError(f"{path} cannot be imported: {e}") from e
    return Converted(small, tensors)


def _open(path: Path) -> tuple[gguf.GGUFReader, dict[str, Any]]:
    """Open the file; return the reader and the file's metadata."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise EtudeError(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
        reader = gguf.GGUFReader(path)
        return reader, {name: field.contents() for name, field in reader.fields.items()}
    except OSError as e:
        raise EtudeError(f"cannot read {path}: {e.strerror or e}") from e
    except (ValueError, IndexError, KeyError, OverflowError) as e:
        raise EtudeError(f"{path} is damaged or incomplete ({e}): download it again") from e


def _config(said: Mapping[str, Any], tied: bool) -> ModelConfig:
    kind: str = said["general.architecture"]
    own = {
        name.removeprefix(f"{kind}."): value
        for name, value in said.items()
        if name.startswith(f"{kind}.")
    }
    if own.get("rope.scaling.type", "none") != "none":
        raise ValueError(f"rope scaling {own['rope.scaling.type']!r} is not supported")
    heads = own["attention.head_count"]
    return ModelConfig(
        model_type=kind,
        vocab_size=len(said["tokenizer.ggml.tokens"]),
        hidden_size=own["embedding_length"],
        num_hidden_layers=own["block_count"],
        num_attention_heads=heads,
        num_key_value_heads=own.get("attention.head_count_kv", heads),
        head_dim=own.get("attention.key_length", own["embedding_length"] // heads),
        intermediate_size=own["feed_forward_length"],
        max_position_embeddings=own["context_length"],
        rms_norm_eps=_shortest(own["attention.layer_norm_rms_epsilon"]),
        rope_theta=_shortest(own.get("rope.freq_base", 10_000.0)),
        tie_word_embeddings=tied,
    )


def _shortest(value: float) -> float:
    """The decimal number from before rounding to float32."""
    return float(str(np.float32(value)))


def _name(name: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in NAMES:
        raise ValueError(f"unknown tensor {name!r}")
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{NAMES[match[2]]}.{match[3]}"


def _values(tensor: gguf.ReaderTensor, config: ModelConfig) -> Tensor:
    values = torch.from_numpy(
        np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    )
    # GGUF lists the fastest axis first
    values = values.view([int(size) for size in reversed(tensor.shape)])
    if config.model_type == "llama" and re.search(r"\.attn_[qk]\.", tensor.name):
        values = _unrotate(values, config.head_dim)
    return values.to(torch.bfloat16)


def _unrotate(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder rows from llama.cpp's adjacent pairs to the two halves of a head."""
    return rows.view(-1, head_dim // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _tokenizer_files(said: Mapping[str, Any]) -> dict[str, bytes]:
    kind = said["tokenizer.ggml.model"]
    cut = said.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or cut not in CUTS:
        raise ValueError(
            f"tokenizer {kind!r} ({cut!r}) is not supported; supported: gpt2 with one of "
            f"{', '.join(CUTS)}"
        )
    tokens: list[str] = said["tokenizer.ggml.tokens"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in said["tokenizer.ggml.merges"]]
    if not all(len(pair) == 2 and {*pair, "".join(pair)} <= vocabulary.keys() for pair in merges):
        raise ValueError("the merges of its tokenizer use tokens that are not in its vocabulary")
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=cut == "llama-bpe"))
    if cut == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(CUTS[cut]())
    tokenizer.decoder = decoders.ByteLevel()
    for token, sort in zip(tokens, said["tokenizer.ggml.token_type"], strict=True):
        if sort in (CONTROL, USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=sort == CONTROL, normalized=False)])
    special = dict(_special(said, tokens))
    if said.get("tokenizer.ggml.add_bos_token") and "bos_token" in special:
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            f"{bos} $A", None, [(bos, vocabulary[bos])]
        )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special,
    }
    files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config, indent=2).encode(),
    }
    if template := said.get("tokenizer.chat_template"):
        files["chat_template.jinja"] = template.encode()
    return files


def _special(said: Mapping[str, Any], tokens: list[str]) -> Iterator[tuple[str, str]]:
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (number := said.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            yield f"{name}_token", tokens[number]


def _notes(said: Mapping[str, Any], source: str) -> dict[str, bytes]:
    """Files for other readers of the directory, and a note on the origin of the weights."""
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {name: said.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    card = f"# {said.get('general.name', source)}\n\nConverted from `{source}` to bf16.\n"
    if licence := said.get("general.license"):
        card = f"---\nlicense: {licence}\n---\n\n{card}"
    known = {name: number for name, number in ids.items() if number is not None}
    return {
        "generation_config.json": json.dumps(known, indent=2).encode(),
        "README.md": card.encode(),
    }
