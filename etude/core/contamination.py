"""A probe for contamination: can a model complete file names and files that it should not know?

The model receives a task as an agent sees it, with the beginning of a path or the first half of a
file, and continues at temperature 0. A model that completes the rest letter by letter has most
likely read it. Text that already appears in the beginning proves nothing and is not probed. Some
text can be predicted by anyone who writes code, so training tasks are probed too: the evidence is
the gap between the two, and the gap to weights before training.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from etude.core.seeds import derive
from etude.core.statistics import wilson
from etude.core.types import Task, plain_text

Kind = Literal["path", "test", "source"]

EXPECTED = 32
"""Characters of a file that the model has to complete."""
FEWEST = 8
"""Letters and digits that an expected text must have, of a file or of a path; fewer can be
guessed."""
PREFIX = 2000
"""Characters of a file that are shown before the expected ones."""
_TEST = re.compile(r"(?:^|/)(?:tests?/|test_[^/]*$|[^/]*_test\.\w+$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A text to continue, and the text that follows it in the task."""

    task: str
    kind: Kind
    prefix: str
    expected: str

    def is_completed(self, said: str) -> bool:
        return said.startswith(self.expected)


def find_probes(task: Task, *, most: int, seed: int = 0) -> list[Probe]:
    """At most `most` probes of a task, the same for the same seed."""
    found = [*_paths(task), *_texts(task)]
    Random(derive(seed, "probes", task.id)).shuffle(found)
    return found[:most]


def _texts_of(task: Task) -> dict[str, str]:
    files = task.sandbox.files.items()
    return {path: text for path, text in files if isinstance(text, str)}


def _asked(task: Task) -> str:
    return "\n\n".join(plain_text(message.get("content")) for message in task.opening)


def _paths(task: Task) -> Iterator[Probe]:
    """Probes for file names, given their folder and first two letters."""
    told = f"{_asked(task)}\n\nFiles:\n"
    for path in sorted(task.sandbox.files):
        shown = path[: path.rfind("/") + 3]
        expected, stem = path[len(shown) :], path.rpartition("/")[2].partition(".")[0]
        words = [word for word in re.split(r"[^a-zA-Z0-9]+", stem) if len(word) > 3]
        if _letters(expected) >= FEWEST and not any(word in told for word in words):
            yield Probe(task=task.id, kind="path", prefix=told + shown, expected=expected)


def _texts(task: Task) -> Iterator[Probe]:
    """Probes for the second half of files, given the first half."""
    for path, text in sorted(_texts_of(task).items()):
        half = len(text) // 2
        begin, expected = text[:half][-PREFIX:], text[half : half + EXPECTED]
        if _letters(expected) >= FEWEST and len(expected) == EXPECTED and expected not in begin:
            kind: Kind = "test" if _TEST.search(path) else "source"
            prefix = f"{_asked(task)}\n\n{path}:\n{begin}"
            yield Probe(task=task.id, kind=kind, prefix=prefix, expected=expected)


def _letters(text: str) -> int:
    return sum(map(str.isalnum, text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The number of completed probes of a kind, with one example."""

    completed: int
    total: int
    example: Probe | None = None

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.completed, self.total)


def count(answers: Sequence[tuple[Probe, str]]) -> Mapping[Kind, Completion]:
    """Count the completed probes of each kind. `answers`: each probe with the model's answer."""
    kinds: tuple[Kind, ...] = ("path", "test", "source")
    told: dict[Kind, Completion] = {}
    for kind in kinds:
        of_kind = [(probe, said) for probe, said in answers if probe.kind == kind]
        right = [probe for probe, said in of_kind if probe.is_completed(said)]
        if of_kind:
            example = right[0] if right else None
            told[kind] = Completion(completed=len(right), total=len(of_kind), example=example)
    return told
