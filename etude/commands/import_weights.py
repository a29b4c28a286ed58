"""`etude weights import`: convert a model file of another format to a Hugging Face directory, which
is written completely or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from etude.core.errors import EtudeError


def import_model(source: Path, target: Path, console: Console) -> None:
    if target.exists():
        raise EtudeError(f"{target} already exists: choose another directory, or remove it first")
    if not source.is_file():
        why = "is a folder" if source.is_dir() else "does not exist"
        raise EtudeError(f"{source} {why}: pass the path of a GGUF file")
    from etude.model.files import write_directory
    from etude.model.from_gguf import convert

    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"reading {source.name}", total=None)
        model = convert(
            source, lambda done, total: progress.update(task, completed=done, total=total)
        )
        progress.update(task, description=f"writing {target}", total=None)
        staging = target.with_name(f".{target.name}.part")
        shutil.rmtree(staging, ignore_errors=True)
        write_directory(staging, model.small, model.tensors)
        staging.rename(target)
    size = sum(tensor.numel() for tensor in model.tensors.values())
    console.print(
        f"{target}: {len(model.tensors)} tensors, {size / 1e6:.1f} M parameters, bf16",
        highlight=False,
    )
