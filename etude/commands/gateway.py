"""`etude gateway`: one URL in front of the workers of a run, for the users of a product."""

from __future__ import annotations

from pathlib import Path

from etude.commands.weights import find_version, open_chain
from etude.serve import process
from etude.serve.gateway import serve_gateway


def gateway(
    run: str, *, host: str, port: int, version: int | None, production: Path | None,
) -> None:  # fmt: skip
    """Serve until the process is told to stop. Workers are told to load the version."""
    found = find_version(open_chain(run), version)[1].version
    process.run(
        lambda: serve_gateway(
            store_url=run,
            port=port,
            host=host,
            version=found,
            production=production,
        )
    )
