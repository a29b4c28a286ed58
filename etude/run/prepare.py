"""The first thing in a new run: the small files of its model (shape, vocabulary, chat template) go into the store.

`config.json` is written last, so the model is either there or not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from etude.core.config import RunConfig
from etude.core.errors import EtudeError
from etude.store.runs import Run


def is_prepared(run: Run) -> bool:
    return run.objects.exists("model/config.json")


def model_directory(path: str) -> Path:
    from etude.model.directory import SMALL, lacking, read_small

    directory = Path(path)
    missing = lacking(directory)
    if not missing:
        missing = [name for name in SMALL if name not in read_small(directory)]
    if missing:
        raise EtudeError(
            f"model.path = {path!r} is no model to start from: {', '.join(missing)} missing there; "
            f"give a Hugging Face directory, or remove model.path to start from fresh weights"
        )
    return directory


def given_files(path: str, max_context: int) -> dict[str, bytes]:
    """The files of a model directory, its context cut to what the run needs."""
    from etude.model.directory import read_small

    directory = model_directory(path)
    files = read_small(directory)
    try:
        shape = json.loads(files["config.json"])
        if stretched := shape.get("rope_parameters") or shape.get("rope_scaling"):
            # What it says is relative to the context that the model was made for, not to the one that it is cut to.
            stretched.setdefault("original_max_position_embeddings", shape["max_position_embeddings"])
        shape["max_position_embeddings"] = min(max_context, shape["max_position_embeddings"])
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise EtudeError(
            f"{directory / 'config.json'} does not describe a model ({type(e).__name__}: {e}): fetch it again, or give "
            f"another model.path"
        ) from e
    return files | {"config.json": json.dumps(shape, indent=2).encode()}


def fresh_files(config: RunConfig) -> dict[str, bytes]:
    from etude.model.fresh import tokenizer_files
    from etude.model.tokenizer import ChatTokenizer
    from etude.model.transformer import ModelConfig
    from etude.run import data

    shape = config.model
    files = tokenizer_files(data.vocabulary_texts(config), shape.vocab_size)
    model = ModelConfig(
        vocab_size=ChatTokenizer(files).vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        intermediate_size=shape.intermediate_size,
        max_position_embeddings=shape.max_context,
    )
    return files | {"config.json": model.to_json().encode()}


def store_files(run: Run, files: Mapping[str, bytes]) -> None:
    for name in sorted(files, key=lambda name: name == "config.json"):
        run.objects.put(f"model/{name}", files[name])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="etude.run.prepare", description="Put the files of a run's model in its store."
    )
    parser.add_argument("--store", required=True, help="the run's store")
    args = parser.parse_args()
    try:
        run = Run.open(args.store, create=False)
        config = run.config()
        path = config.model.path
        store_files(run, fresh_files(config) if path is None else given_files(path, config.model.max_context))
    except EtudeError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
