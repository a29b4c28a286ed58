"""Check for the namespaces that sandboxes need. It does not use our own code: if that is broken,
tests must fail and not be skipped."""

from __future__ import annotations

import functools
import shutil
import subprocess

import pytest


@functools.cache
def refusal() -> str | None:
    """The kernel's error message; None if it allows namespaces."""
    if shutil.which("unshare") is None:  # part of util-linux; without it the tests just try
        return None
    kinds = ("--user", "--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup")
    argv = ["unshare", *kinds, "--map-root-user", "--fork", "--mount-proc", "true"]
    tried = subprocess.run(argv, capture_output=True, text=True, check=False)
    return (
        None if tried.returncode == 0 else tried.stderr.strip() or f"exit code {tried.returncode}"
    )


def need_namespaces() -> None:
    if (why := refusal()) is not None:
        pytest.skip(f"this machine does not allow the namespaces that sandboxes need:  {why}")
