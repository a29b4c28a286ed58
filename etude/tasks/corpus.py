"""Text for mid-training: correct, documented modules with line numbers, as the harness lists them.
They teach the model which code goes with which words. All functions are from the training split;
held-out programs never occur."""

from __future__ import annotations

from random import Random

from etude.core.seeds import derive
from etude.tasks.demos import numbered
from etude.tasks.factory import functions


def documents(count: int, seed: int) -> list[str]:
    rng = Random(derive("corpus", seed))
    stream = functions("train", rng)
    return [
        numbered("\n".join(next(stream).source for _ in range(rng.choice((1, 1, 1, 2)))))
        for _ in range(count)
    ]
