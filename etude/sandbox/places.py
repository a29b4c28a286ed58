"""Paths in a sandbox with walls. Standard library only."""

from __future__ import annotations

WORK = "/work"
"""The working copy."""
WORKDIRS = ("/app", "/workspace", "/testbed", "/repo")
"""Other names of it, as images of others use them."""
LINKS = {
    **dict.fromkeys(WORKDIRS, WORK),
    "/tests": "/tmp/tests",
    "/solution": "/tmp/solution",
    "/logs": "/tmp/logs",
}
"""Names in the root at which Harbor's tasks expect directories, and their targets. Targets that do
not exist at first are for the grader: an agent finds neither tests nor solution."""
