"""The routed experts of a sparse model, from the engine through worker, gateway and store to a
learner."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import msgspec

from etude.core.advantage import to_rows
from etude.core.sampling import Request, Sample
from etude.core.types import Batch, Score, Segment, Trajectory
from etude.model.config import ExpertsConfig
from etude.model.experts import read_ids
from etude.serve.gateway import Gateway
from etude.serve.http import create_app
from etude.serve.router import Router
from etude.serve.worker_protocol import GenerateRequest
from etude.store.experts import get_experts
from etude.store.runs import Run
from etude.train.learner import Learner
from tests.serve.client import converse, post, segments, until_up
from tests.serve.conftest import Store, served
from tests.serve.test_gateway import worker

FEW = ExpertsConfig(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=8, layers=(0, 1))
MANY = ExpertsConfig(num_experts=257, num_experts_per_tok=4, moe_intermediate_size=2, layers=(1,))
TOKEN_BYTES = 4 * 2  # experts, bytes of an id


def store_of(path: Path, experts: ExpertsConfig) -> Store:
    return Store(path, versions=(0,), model_type="qwen3_moe", experts=experts)


async def test_a_learner_routes_a_whole_session_as_the_engine_did(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    sparse = store_of(tmp_path, FEW)
    made = Gateway(
        Router(http),
        sparse.objects,
        sparse.files,
        max_context=sparse.config.max_position_embeddings,
    )
    async with served(create_app(made.routes(), None)) as gateway, worker(sparse, "east", gateway):
        await post(http, f"{gateway}/load", {"version": 0})
        await until_up(http, gateway, 1)
        await asyncio.gather(*(converse(http, gateway, f"s{n}", turns=4) for n in range(3)))
        (plain,) = await segments(http, gateway, "s0")
        assert plain.experts is None and not sparse.objects.list("experts")
        async with http.get(f"{gateway}/s/s0/segments", params={"experts": "true"}) as response:
            body = await response.read()
    (segment,) = msgspec.msgpack.decode(body, type=tuple[Segment, ...])
    # The controller gets only a name, however long the session is.
    assert len(body) <= len(msgspec.msgpack.encode([plain])) + 40
    assert sparse.objects.list("experts") == [f"experts/{segment.experts}"]
    ids = read_ids(get_experts(sparse.objects, segment.experts or ""), FEW)
    assert ids.shape == (len(segment.prompt + segment.tokens) - 1, 2, 2)

    run = Run(sparse.objects)
    trajectory = Trajectory(
        id="g.0", task="t", group="g", segments=(segment,), score=Score(1.0), status="done"
    )
    run.put_batch(Batch(step=1, rows=tuple(to_rows(trajectory, 1.0)), oldest=0))
    learner = Learner(sparse.model(0).requires_grad_(True))
    stats = learner.rl_step(
        run.batch(1),
        lr=1e-3,
        router_replay_min_score=1.0,
        fetch_experts=lambda name: get_experts(sparse.objects, name),
    )
    assert stats.router_mismatch_frac == 0.0 and stats.mismatch.k3 < 1e-9


async def test_on_the_wire_an_expert_takes_two_bytes_at_most(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with worker(store_of(tmp_path, MANY), "east") as (_, url):
        await post(http, f"{url}/load", {"version": 0})

        async def asked(experts_from: int | None) -> bytes:
            request = Request(prompt=(1, 2, 3, 4), max_tokens=30, seed=1, experts_from=experts_from)
            body = msgspec.msgpack.encode(GenerateRequest(request, 0))
            async with http.post(f"{url}/generate", data=body) as response:
                return await response.read()

        without, whole, later = [await asked(first) for first in (None, 0, 20)]
    samples = [msgspec.msgpack.decode(body, type=Sample) for body in (without, whole, later)]
    num_read = 4 + 30 - 1
    assert samples[0].experts is None and samples[1].experts and samples[2].experts
    assert len(samples[1].experts) == num_read * TOKEN_BYTES
    assert samples[2].experts == samples[1].experts[20 * TOKEN_BYTES :]
    assert len(whole) - len(without) <= 2 * num_read * 4 + 20  # and the name of the field
