"""A relay: downloads each object of the weights once for all workers of its region.

    python -m etude.serve.relay --store RUN --port 8200

Workers find it by `engine.relays` of the run's file, or by `--relay URL`. It holds nothing that the
store does not have, so it may be killed, moved or missing at any time; workers then use the store.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from pathlib import Path

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from etude.core.types import VersionRef
from etude.serve import heartbeat, process
from etude.serve.access import SignedTokens
from etude.serve.http import ApiError, create_app
from etude.serve.tokens import SECRET_VARIABLE, TokenAuthority, read_secret
from etude.store.objects import Missing
from etude.store.runs import Run
from etude.weights.cache import HostCache, cache_folder
from etude.weights.manifest import Chain
from etude.weights.signing import Corrupt


class ShardRelay:
    """The routes of a relay. It has a cache of its own: in the cache of the workers on its host,
    relay and workers would wait for each other."""

    def __init__(self, chain: Chain, cache: HostCache) -> None:
        self._chain = chain
        self._cache = cache
        self._downloads: dict[str, asyncio.Task[bytes]] = {}

    def routes(self) -> list[Route]:
        return [Route("/shards/{epoch:int}/{version:int}/{hash}", self.shard)]

    async def shard(self, http: HttpRequest) -> Response:
        hash = http.path_params["hash"]
        if not re.fullmatch("[0-9a-f]{64}", hash):
            raise ApiError(f"{hash!r} is not a hash", status=404, code="unknown_object")
        epoch, version = http.path_params["epoch"], http.path_params["version"]
        target = VersionRef(epoch=epoch, version=version, hash="")
        try:
            data = await self._data(target, hash)
        except (Missing, Corrupt) as e:
            raise ApiError(str(e), status=404, code="unknown_object") from e
        return Response(data, media_type="application/octet-stream")

    async def _data(self, target: VersionRef, hash: str) -> bytes:
        """The data of an object. All requests that come while it is downloaded wait for the same
        download, without a thread each."""
        if (task := self._downloads.get(hash)) is None:
            task = asyncio.create_task(
                asyncio.to_thread(self._cache.get, hash, lambda: self._chain.shard(target, hash))
            )
            self._downloads[hash] = task
            task.add_done_callback(lambda _: self._downloads.pop(hash, None))
        return await asyncio.shield(task)


async def serve_relay(
    *, store_url: str, port: int, host: str = "127.0.0.1", cache: Path | None = None
) -> None:
    secret = read_secret()
    listener = process.bind(host, port, secret, SECRET_VARIABLE)
    chain = Chain(Run.open(store_url, create=False).objects)
    relay = ShardRelay(chain, HostCache(cache or cache_folder() / "relay"))
    access = SignedTokens(TokenAuthority(secret)) if secret else None
    async with process.serving(create_app(relay.routes(), access), listener) as running:
        print(f"relay at {process.url_of(listener)}", flush=True)
        async with process.meanwhile(heartbeat.send_heartbeats()):
            await running


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m etude.serve.relay",
        description="Downloads weights once for all workers of a region.",
    )
    parser.add_argument("--store", required=True, help="the run's store")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--cache", type=Path, help="directory for downloaded weights")
    a = parser.parse_args()
    process.run(lambda: serve_relay(store_url=a.store, port=a.port, host=a.host, cache=a.cache))


if __name__ == "__main__":
    main()
