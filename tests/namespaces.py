"""Whether this machine can make the namespaces that sandboxes are made of, asked without our own
code: where that is broken, tests are to fail, not to be skipped."""

from __future__ import annotations

import functools
import shutil
import subprocess

import pytest


@functools.cache
def refusal() -> str | None:
    """What the kernel says to it; None if it agrees."""
    if shutil.which("unshare") is None:  # of util-linux; without it we can only try
        return None
    kinds = ("--user", "--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup")
    argv = ["unshare", *kinds, "--map-root-user", "--fork", "--mount-proc", "true"]
    tried = subprocess.run(argv, capture_output=True, text=True, check=False)
    return (
        None if tried.returncode == 0 else tried.stderr.strip() or f"exit code {tried.returncode}"
    )


def need_namespaces() -> None:
    if (why := refusal()) is not None:
        pytest.skip(f"this machine refuses the namespaces that sandboxes are made of: {why}")
