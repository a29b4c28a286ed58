"""From a published version to tensors that may be served. Nothing comes out unchecked."""

from __future__ import annotations

import safetensors.torch
import torch
from safetensors import SafetensorError

from etude.core.errors import EtudeError
from etude.store.objects import Missing, Objects
from etude.weights.digest import digests
from etude.weights.manifest import file_key, read_manifest


class CorruptWeights(EtudeError):
    """What lies in the store is not what the manifest promises. The version must not be served."""


def fetch(objects: Objects, version: int) -> dict[str, torch.Tensor]:
    """All tensors of a version, on the CPU. Blocks for the download and the digests: call it in a thread."""
    manifest = read_manifest(objects, version)
    assert manifest.base is None, "differences between versions are not understood yet"
    tensors: dict[str, torch.Tensor] = {}
    for name in manifest.files:
        key = file_key(version, name)
        try:
            tensors |= safetensors.torch.load(objects.get(key))
        except (SafetensorError, Missing) as e:
            raise CorruptWeights(_refusal(objects, version, f"{key}: {e}")) from e
    found = digests(tensors)
    for name in sorted(found.keys() | manifest.digests.keys()):
        if name not in found:
            raise CorruptWeights(_refusal(objects, version, f"tensor {name} is missing"))
        if name not in manifest.digests:
            raise CorruptWeights(_refusal(objects, version, f"tensor {name} is not in the manifest"))
        if found[name] != manifest.digests[name]:
            raise CorruptWeights(_refusal(objects, version, f"tensor {name} has another digest"))
    return tensors


def _refusal(objects: Objects, version: int, what: str) -> str:
    return (
        f"{objects.url}: weight version {version} is not what was published ({what}); it is not served. Restore "
        f"{file_key(version, '')} from a copy, or delete it so that the trainer can publish it again"
    )
