"""The small files of a Hugging Face directory, as bytes by name. No torch: processes that never
compute use it too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etude.model.config_json import pin_context
from etude.model.tokenizer import ChatTokenizer, chat_template, read_config

TEMPLATE = "chat_template.jinja"
MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", TEMPLATE)
"""Files that a run needs."""
GENERATION = "generation_config.json"
"""Optional; names the tokens that end an answer."""
SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def missing_files(path: Path) -> list[str]:
    """The required files that a model directory lacks."""
    weights = INDEX if (path / INDEX).is_file() else SINGLE_FILE
    return [
        name for name in ("config.json", "tokenizer.json", weights) if not (path / name).is_file()
    ]


def weight_files(path: Path) -> list[str]:
    """The names of the weight files. Raises ValueError for an index that does not name files of
    this directory."""
    if not (path / INDEX).is_file():
        return [SINGLE_FILE]
    try:
        names = set(json.loads((path / INDEX).read_bytes())["weight_map"].values())
        is_sound = all(map(_is_inside, names))
    except (ValueError, TypeError, KeyError, AttributeError):  # no JSON, or of another shape
        is_sound = False
    if not is_sound:
        raise ValueError(
            f"{INDEX} does not list the tensor files of the directory: download it again"
        )
    return sorted(names)


def _is_inside(name: object) -> bool:
    return isinstance(name, str) and not Path(name).is_absolute() and ".." not in Path(name).parts


def check_weights(path: Path) -> None:
    """Check the headers of the weight files. Raises ValueError for missing or incomplete files."""
    from safetensors import SafetensorError, safe_open

    for name in weight_files(path):
        try:
            with safe_open(path / name, framework="numpy"):
                pass
        except (OSError, SafetensorError) as e:
            raise ValueError(f"{name} cannot be read ({e}): download it again") from e


def read_model_files(path: Path) -> dict[str, bytes]:
    """Read the model files that exist; a template within tokenizer_config.json becomes a file of
    its own."""
    names = (*MODEL_FILES, GENERATION)
    small = {name: (path / name).read_bytes() for name in names if (path / name).is_file()}
    if TEMPLATE not in small and (
        template := chat_template(read_config(small, "tokenizer_config.json"))
    ):
        small[TEMPLATE] = template.encode()
    return small


def cut_context(files: Mapping[str, bytes], max_context: int) -> dict[str, bytes]:
    """The files with the context cut to `max_context`, if the model's is longer."""
    shape = read_config(files, "config.json")
    own = shape["max_position_embeddings"]
    pin_context(shape)
    shape["max_position_embeddings"] = min(max_context, own)
    return {**files, "config.json": _as_json(shape)}


def with_stop_tokens(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files with all tokens that end an answer written where other programs look for them, in
    generation_config.json and config.json."""
    stops = list(ChatTokenizer(files).stop_token_ids)
    said = {"eos_token_id": stops if len(stops) > 1 else stops[0]}
    return {
        **files,
        **{name: _as_json(read_config(files, name) | said) for name in ("config.json", GENERATION)},
    }


def _as_json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2).encode()
