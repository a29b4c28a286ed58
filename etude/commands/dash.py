"""`etude dash`: a dashboard of runs in a browser, from their stores alone."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.dash.guard import Access
from etude.dash.recorded import RecordedRun
from etude.dash.server import create_app
from etude.serve import process
from etude.store.runs import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    runs: Sequence[str]
    """Directories or store URLs."""
    host: str
    port: int
    token_file: Path | None


def dash(options: Options) -> None:
    """Serve the dashboard until the process is told to stop."""
    process.run(lambda: _serve(options))


async def _serve(options: Options) -> None:
    token = process.token(options.token_file)
    runs = open_runs(options.runs)
    listener = process.bind(options.host, options.port, token)
    await _answer(runs, listener, Access(host=options.host, token=token))


async def serve_beside(store: str, listener: socket.socket) -> None:
    """Serve the dashboard of the run in a store, which may still be empty, on a port that the run's
    launcher has opened."""
    run = RecordedRun(_name(store), Run.open(store, create=False))
    await _answer([run], listener, Access(host="127.0.0.1", token=process.token()))


async def _answer(runs: Sequence[RecordedRun], listener: socket.socket, access: Access) -> None:
    async with process.serving(create_app(runs, access), listener) as running:
        # The part of a URL after # is neither sent to a server nor written to its log.
        secret = f"#token={access.token}" if access.token else ""
        print(f"dashboard at {process.url_of(listener)}/{secret}", flush=True)
        await running


def _name(url: str) -> str:
    """The last part of a URL. Commas are replaced, since they separate runs in the page's URLs."""
    return url.rstrip("/").rpartition("/")[2].replace(",", "_") or "run"


def open_runs(urls: Sequence[str]) -> list[RecordedRun]:
    """Open runs, each named by the last part of its URL, with a number if names collide."""
    found: dict[str, RecordedRun] = {}
    for url in urls:
        run = Run.open(url, create=False)
        if not run.processes() and not run.objects.exists("config.json"):
            run.check_is_run()
        stem = _name(url)
        names = [stem, *(f"{stem}-{number}" for number in range(2, len(urls) + 1))]
        name = next(name for name in names if name not in found)
        found[name] = RecordedRun(name, run)
    return list(found.values())


if __name__ == "__main__":
    store, descriptor = sys.argv[1:]
    process.run(lambda: serve_beside(store, socket.socket(fileno=int(descriptor))))
