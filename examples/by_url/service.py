"""A toy product as an environment by URL: a jukebox that asks a model for songs, and likes vowels.

python examples/by_url/service.py [PORT]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "clients" / "python"))

from etude_environment import Result, Rollout, Service

COUNTS = {"train": 32, "heldout": 16}


def tasks(split: str) -> list[dict[str, str]]:
    return [{"id": f"{split}-{n}", "prompt": f"sing {n}"} for n in range(COUNTS.get(split, 0))]


def rollout(asked: Rollout) -> Result:
    answer = asked.chat([{"role": "user", "content": asked.task["prompt"]}])
    song = answer["content"] or ""
    vowels = sum(letter in "aeiou" for letter in song.lower())
    return Result(
        reward=min(1.0, 2 * vowels / max(1, len(song))),
        parts=[{"name": "vowels", "value": vowels}],
        artifacts=[{"name": "song", "text": song}],
    )


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8700
    Service(rollout, tasks=tasks, capacity=16).serve(port=port)
