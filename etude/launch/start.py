"""The first program of a run that a cluster's scheduler starts: it puts the config into the store,
and prepares the model. Running it again changes nothing.

    python -m etude.launch.start RUN.toml --store URL [--folder PATH]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.launch.launcher import python
from etude.store.runs import Run
from etude.trainer.prepare import is_prepared


def start(config_file: Path, store: str, folder: Path | None = None) -> int:
    """Prepare the run. `folder`: the start of relative paths, if it is not the folder of the
    file."""
    written = parse(config_file.read_text(), source=str(config_file))
    config = written.located(folder or config_file.absolute().parent)
    run = Run.open(store)
    run.put_config(config)
    if is_prepared(run):
        return 0
    return subprocess.run(python("etude.trainer.prepare", "--store", store), check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m etude.launch.start", description="Put a run into its store."
    )
    parser.add_argument("config", type=Path, metavar="RUN.toml")
    parser.add_argument("--store", required=True)
    parser.add_argument("--folder", type=Path, metavar="PATH")
    args = parser.parse_args()
    try:
        return start(args.config, args.store, args.folder)
    except EtudeError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
