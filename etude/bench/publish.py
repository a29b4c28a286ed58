"""What it costs to keep followers current with a real model: many small steps, published and followed.

`--model DIR` is a Hugging Face directory (`make model` fetches SmolLM2-135M); without one, random weights of that size.
The masters take `STEPS` steps of the size that Adam takes at a learning rate of 1e-6; each is rounded to bf16,
published to a local store, and fetched by two followers, whose tensors are compared bit for bit:

    ratio          bytes of the model for a byte that was published, over all steps after the first
    ratio_least    the same for the step with the most bytes
    stall_ms       that the trainer waits in `publish`, mean
    publish_ms     until the version is committed, mean
    fetch_ms       download, decode and check, mean
    pause_ms       to copy the new tensors into the model that serves, worst
    late_ratio     bytes that a late joiner downloads, over those of the model
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import mean

import torch

from etude.core.errors import EtudeError
from etude.model.files import read_directory
from etude.store.objects import Objects
from etude.weights.follow import Follower
from etude.weights.manifest import Chain
from etude.weights.publish import Publisher

STEPS = 50
LR, MEAN_UPDATE = 1e-6, 0.2
SHIFTS = 1 << 20  # places in the noise that a tensor's update may start at

Tensors = dict[str, torch.Tensor]


def run(model: str | None = None) -> dict[str, float]:
    torch.manual_seed(0)
    masters = {name: t.float() for name, t in (read_directory(Path(model))[1] if model else made()).items()}
    noise = torch.randn(max(t.numel() for t in masters.values()) + SHIFTS)
    serving = {name: t.bfloat16() for name, t in masters.items()}
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as scratch:
        chain = Chain(Objects.open(scratch))
        publisher, followers = Publisher(chain), [Follower(chain), Follower(chain)]
        published, fetched, pauses = [], [], []
        for step in range(STEPS + 1):
            move(masters, noise, step)
            tensors = {name: t.bfloat16() for name, t in masters.items()}
            began = time.monotonic()
            publisher.publish(step, tensors, stage="bench", step=step)
            publisher.wait()
            published.append(time.monotonic() - began)
            for follower in followers:
                began = time.monotonic()
                found = follower.fetch(step)
                fetched.append(time.monotonic() - began)
                check(tensors, found)
            began = time.monotonic()
            for name, tensor in found.items():
                serving[name].copy_(tensor)
            pauses.append(time.monotonic() - began)
        loads: list[int] = []
        check(tensors, Follower(chain, progress=lambda done, total: loads.append(total)).fetch(STEPS))
        manifests = [chain.find(version)[1] for version in range(1, STEPS + 1)]
        publisher.close()
    sizes = [manifest.route.bytes for manifest in manifests]
    return {
        "ratio": manifests[0].bytes / mean(sizes),
        "ratio_least": manifests[0].bytes / max(sizes),
        "stall_ms": 1e3 * publisher.stalled_s / (STEPS + 1),
        "publish_ms": 1e3 * mean(published[1:]),
        "fetch_ms": 1e3 * mean(fetched[2:]),
        "pause_ms": 1e3 * max(pauses[1:]),
        "late_ratio": loads[-1] / manifests[0].bytes,
    }


def made() -> Tensors:
    """The shapes of SmolLM2-135M, with weights of the size that larger models have."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (49152, 576)}
    for layer in range(30):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (576, 576), "self_attn.k_proj": (192, 576), "self_attn.v_proj": (192, 576),
                "self_attn.o_proj": (576, 576), "mlp.gate_proj": (1536, 576), "mlp.up_proj": (1536, 576),
                "mlp.down_proj": (576, 1536), "input_layernorm": (576,),
            }.items()
        }  # fmt: skip
    return {name: 0.02 * torch.randn(shape) for name, shape in shapes.items()}


def move(masters: Tensors, noise: torch.Tensor, step: int) -> None:
    for number, tensor in enumerate(masters.values()):
        at = 7919 * (step * len(masters) + number) % SHIFTS
        tensor.view(-1).add_(noise[at : at + tensor.numel()], alpha=-LR * MEAN_UPDATE * 1.25)


def check(given: Tensors, found: Tensors) -> None:
    for name, tensor in given.items():
        if not torch.equal(tensor.view(torch.int16), found[name].view(torch.int16)):
            raise EtudeError(f"a follower holds other bits in {name} than were published")
