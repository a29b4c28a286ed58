"""Output of a benchmark's figures, as text or as JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping


def tell_figures(name: str, figures: Mapping[str, float], *, as_json: bool) -> None:
    for figure, value in figures.items():
        print(f"{figure:32} {value:.6g}", file=sys.stderr if as_json else sys.stdout)
    if not as_json:
        return
    from etude.store.checkpoints import git_commit

    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    told = {"bench": name, "machine": machine, "commit": git_commit(), "figures": dict(figures)}
    print(json.dumps(told))
