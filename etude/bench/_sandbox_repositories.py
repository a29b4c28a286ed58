"""Real packages as images: opened, tested, forked, edited differently in each fork, and graded."""

from __future__ import annotations


async def forked_repositories(forks: int) -> dict[str, float]:
    return {}
