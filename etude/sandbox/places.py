"""Where things are in a sandbox with walls. Standard library only."""

from __future__ import annotations

WORK = "/work"
"""The working copy."""
WORKDIRS = ("/app", "/workspace", "/testbed", "/repo")
"""Its other names, as the images of others have them."""
LINKS = {
    **dict.fromkeys(WORKDIRS, WORK),
    "/tests": "/tmp/tests",
    "/solution": "/tmp/solution",
    "/logs": "/tmp/logs",
}
"""Names in the root, where Harbor's tasks expect them, and where they lead. What is not there until
somebody makes it is for the grader: an agent finds neither tests nor solution."""
