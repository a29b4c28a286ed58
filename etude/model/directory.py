"""The small files of a Hugging Face directory, as bytes by name. No torch: processes that never
compute use it too."""

from __future__ import annotations

from pathlib import Path

from etude.model.tokenizer import chat_template, read_config

TEMPLATE = "chat_template.jinja"
MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", TEMPLATE)
"""What a run needs; `generation_config.json` may be there too, and says which tokens end an
answer."""
SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def missing_files(path: Path) -> list[str]:
    """The required files that a model directory lacks."""
    weights = INDEX if (path / INDEX).is_file() else SINGLE_FILE
    return [
        name for name in ("config.json", "tokenizer.json", weights) if not (path / name).is_file()
    ]


def read_model_files(path: Path) -> dict[str, bytes]:
    """Those that are there; a template within tokenizer_config.json is given a file of its own."""
    names = (*MODEL_FILES, "generation_config.json")
    small = {name: (path / name).read_bytes() for name in names if (path / name).is_file()}
    if TEMPLATE not in small and (
        template := chat_template(read_config(small, "tokenizer_config.json"))
    ):
        small[TEMPLATE] = template.encode()
    return small
