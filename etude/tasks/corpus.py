"""Text for mid-training: correct, documented modules, as a repository of such code would hold them, bare and as the
harness lists them. Only functions of the training side; held-out programs never occur."""

from __future__ import annotations

from random import Random

from etude.core.seeds import derive
from etude.tasks.demos import numbered
from etude.tasks.factory import functions


def documents(count: int, seed: int) -> list[str]:
    rng = Random(derive("corpus", seed))
    stream = functions("train", rng)
    texts = []
    for _ in range(count):
        module = "\n".join(next(stream).source for _ in range(rng.choice((1, 1, 2))))
        texts.append(numbered(module) if rng.random() < 0.5 else module)
    return texts
