"""From the trainer's tensors to a version that every region can load."""

from __future__ import annotations

from collections.abc import Mapping

import safetensors.torch
import torch

from etude.core.errors import EtudeError
from etude.core.types import Manifest
from etude.store.objects import Missing, Objects
from etude.weights.digest import digests
from etude.weights.manifest import create_manifest, file_key, read_manifest

SNAPSHOT = "model.safetensors"


def publish(objects: Objects, version: int, tensors: Mapping[str, torch.Tensor], *, stage: str, step: int) -> Manifest:
    """Stores CPU tensors as `version`. A trainer that died after it published may publish the same bits again."""
    manifest = Manifest(version=version, base=None, files=(SNAPSHOT,), digests=digests(tensors), stage=stage, step=step)
    # Look before writing: the file of a published version is never touched again.
    if (published := _published(objects, version)) is None:
        objects.put(file_key(version, SNAPSHOT), safetensors.torch.save(dict(tensors)))
        if create_manifest(objects, manifest):
            return manifest
        published = read_manifest(objects, version)
    if published.digests != manifest.digests:
        raise EtudeError(
            f"{objects.url}: weight version {version} is published already, with other weights "
            f"(stage {published.stage}, step {published.step}); "
            f"stop the other trainer that works on this run, or start a new run"
        )
    return published


def _published(objects: Objects, version: int) -> Manifest | None:
    try:
        return read_manifest(objects, version)
    except Missing:
        return None
