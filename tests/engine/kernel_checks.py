"""Expected results of each kernel, in plain float64 torch, on fresh random inputs of any device.

`test_kernels` runs the checks on the CPU through Triton's interpreter; on a machine with a GPU run
them with `python -m tests.engine.kernel_checks`. A check returns relative errors by name; outputs
start as NaN, so that elements that a kernel leaves unwritten show.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F

from etude.engine.engine import Engine
from etude.engine.kernels import experts, head, linear, norm
from etude.engine.kernels.gated_delta import delta_chunks
from etude.model.config import ExpertsConfig, LatentConfig, ModelConfig
from etude.model.recurrence import Chunks, DeltaRule, Span, delta_step
from tests.engine.adapter_checks import check_adapters
from tests.engine.attention_checks import check_decode, check_prefill
from tests.engine.engine_checks import ENGINES, check_engine
from tests.engine.fp8_checks import check_fp8
from tests.engine.kernel_inputs import Inputs, error, gated, rms_norm
from tests.small_model import add, drain, request, sharp


def check_norm(new: Inputs, size: int) -> dict[str, float]:
    table, drawn = new.normal(50, size), new.ints([7, 3, 9])
    tokens, x = new.ints([4, -2, 49]), new.poison(3, size)
    norm.embed(tokens, drawn, table, x)
    assert torch.equal(x, table[[4, 3, 49]])
    parts, gain, normed = (
        new.normal(3, 4, size).transpose(0, 1).float(),
        new.normal(size),
        new.poison(3, size),
    )
    expected = x.double() + parts.double().sum(0)
    norm.add_norm(x, parts, gain, normed, 1e-6)
    alone = new.poison(3, size)
    norm.add_norm(x, None, gain, alone, 1e-6)
    assert torch.equal(alone, normed)
    return {"sum": error(x, expected), "norm": error(normed, rms_norm(expected, gain, 1e-6))}


def check_linear(new: Inputs, rows: int, outputs: int, inner: int) -> dict[str, float]:
    x, w = new.normal(rows, inner), new.normal(2 * outputs, inner, scale=inner**-0.5)
    plain = x.double() @ w[:outputs].double().T
    both = gated(x.double() @ w.double().T)
    bias = new.normal(outputs)
    found: dict[str, float] = {}
    if rows == 1:
        gain, kept = new.normal(inner), new.normal(outputs)
        out, pair, added = new.poison(outputs), new.poison(outputs), kept.clone()
        linear.gemv(x[0], w[:outputs], out, bias_N=bias)
        linear.gemv(x[0], w, pair, norm=(gain, 1e-6), gated=True)
        linear.gemv(x[0], w[:outputs], added, add=True)
        found["gemv"] = error(out, plain[0] + bias.double())
        found["gemv gated"] = error(pair, gated(rms_norm(x, gain, 1e-6) @ w.double().T)[0])
        found["gemv add"] = error(added, kept.double() + plain[0])
    cut = linear.gemm_config(rows, outputs, inner, split=True)
    parts, out = (
        new.poison(cut.split_k, rows, outputs, dtype=torch.float32),
        new.poison(rows, outputs),
    )
    linear.gemm(x, w[:outputs], parts, config=cut)
    found[f"gemm in {cut.split_k}"] = error(parts.sum(0), plain)
    whole = linear.gemm_config(rows, outputs, inner, gated=True)
    linear.gemm(x, w, out, config=whole, gated=True)
    found["gemm gated"] = error(out, both)
    linear.gemm(x, w[:outputs], out, config=whole, bias_N=bias)
    found["gemm bias"] = error(out, plain + bias.double())
    return found


def check_head(new: Inputs, rows: int, size: int, vocabulary: int) -> dict[str, float]:
    x, w = new.normal(rows, size), new.normal(vocabulary, size, scale=2 * size**-0.5)
    temperature = torch.rand(rows, device=new.device, generator=new.generator) + 0.5
    temperature[0] = 0
    u = torch.rand(rows, device=new.device, generator=new.generator, dtype=torch.float64)
    logits = new.poison(rows, vocabulary, dtype=torch.float32)
    stats = new.poison(rows, head.num_tiles(vocabulary), 2, dtype=torch.float32)
    tokens = torch.full((rows,), -1, dtype=torch.int32, device=new.device)
    logprobs = new.poison(rows, dtype=torch.float32)
    head.logits(x, w, temperature, logits, stats)
    head.sample(logits, stats, temperature, u, tokens, logprobs)
    scaled = logits.double() / torch.where(temperature == 0, 1.0, temperature).double()[:, None]
    reference = torch.log_softmax(scaled, -1)
    reached = reference.exp().cumsum(-1)
    drawn = torch.searchsorted(reached, u[:, None], right=True)[:, 0]
    expected = torch.where(temperature == 0, logits.argmax(-1), drawn)
    # At a boundary of the distribution rounding may decide; anywhere else the token is fixed.
    here = reached.gather(1, tokens.long()[:, None])[:, 0]
    near = torch.minimum(
        (here - u).abs(), (here - reference.gather(1, tokens.long()[:, None])[:, 0].exp() - u).abs()
    )
    assert bool(((tokens == expected) | (near < 1e-6)).all())
    return {
        "logits": error(logits, x.double() @ w.double().T),
        "logprobs": error(logprobs, reference.gather(1, tokens.long()[:, None])[:, 0]),
    }


def check_experts(
    new: Inputs, rows: int, num: int, top: int, size: int, inner: int
) -> dict[str, float]:
    x = new.normal(rows, size)
    # fp32, so that no two are equal
    logits = torch.randn(rows, num, device=new.device, generator=new.generator)
    slots = new.shuffled(rows).int()
    slots[-1] = -1
    ids = torch.full((rows, top), -7, dtype=torch.int32, device=new.device)
    shares = new.poison(rows, top, dtype=torch.float32)
    record = torch.zeros(rows, 2, top, dtype=torch.uint8, device=new.device)
    experts.route(logits, ids, shares, record[:, 1], slots, renormalise=True)
    expected_shares, expected_ids = torch.softmax(logits.double(), -1).topk(top, -1)
    assert torch.equal(ids[:-1].long(), expected_ids[:-1]) and bool((ids[-1] == -1).all())
    assert (
        torch.equal(record[slots[:-1].long(), 1].long(), expected_ids[:-1])
        and not record[:, 0].any()
    )
    counts = torch.full((num,), -1, dtype=torch.int32, device=new.device)
    choices = torch.full((num, rows), -1, dtype=torch.int32, device=new.device)
    experts.group_by_expert(ids, counts, choices)
    for expert in range(num):
        mine = (ids.flatten() == expert).nonzero()[:, 0]
        assert counts[expert] == len(mine) and torch.equal(
            choices[expert, : len(mine)].long(), mine
        )
    up, down = (
        new.normal(num, 2 * inner, size, scale=size**-0.5),
        new.normal(num, size, inner, scale=inner**-0.5),
    )
    act, out = new.poison(rows * top, inner), new.poison(rows * top, size, dtype=torch.float32)
    experts.grouped_gemm(x, up, counts, choices, shares, act, gated=True)
    experts.grouped_gemm(act, down, counts, choices, shares, out, gated=False)
    expected_shares = expected_shares / expected_shares.sum(-1, keepdim=True)
    picked = ids[:-1].long()
    hidden = gated(torch.einsum("be,bkne->bkn", x[:-1].double(), up.double()[picked]))
    expected = torch.einsum("bki,bkei,bk->be", hidden, down.double()[picked], expected_shares[:-1])
    return {
        "shares": error(shares, expected_shares),
        "hidden": error(act[: (rows - 1) * top], hidden.flatten(0, 1)),
        "sum": error(out.unflatten(0, (rows, top))[:-1].sum(1), expected),
    }


def check_few_experts(
    new: Inputs, rows: int, num: int, top: int, size: int, inner: int, *, add: bool = False
) -> dict[str, float]:
    """Check experts of few tokens, some of which share them. `add`: with the norm before and the
    sum after; otherwise the last of several rows is padding. Experts that no token uses are NaN."""
    x, gain, kept = new.normal(rows, size), new.normal(size), new.normal(rows, size)
    if rows > 3:
        x[2] = x[1]
    real = slice(rows if add or rows == 1 else rows - 1)
    slots = new.shuffled(rows).int()
    slots[real.stop :] = -1
    router = new.normal(num, size, scale=size**-0.5)
    up = new.normal(num, 2 * inner, size, scale=size**-0.5)
    down = new.normal(num, size, inner, scale=inner**-0.5)
    logits, normed = new.poison(rows, num, dtype=torch.float32), x
    if add:
        normed = new.poison(rows, size)
        experts.router_logits(x, router, logits, normed, norm=(gain, 1e-6))
    else:
        experts.router_logits(x, router, logits, normed)
    expected_normed = rms_norm(x, gain, 1e-6) if add else x.double()
    found = {
        "normed": error(normed, expected_normed),
        "logits": error(logits, expected_normed @ router.double().T),
    }
    logits[0, 1] = math.nan  # counts as 0, as in `route`
    shares, ids = torch.softmax(logits.double().nan_to_num(), -1).topk(top, -1)
    unused = torch.ones(num, dtype=torch.bool, device=new.device)
    unused[ids[real].flatten()] = False
    up[unused], down[unused], logits[real.stop :] = math.nan, math.nan, math.nan
    act, out = new.poison(rows, top, inner), kept.clone() if add else new.poison(rows, size)
    record = torch.full((rows, 2, top), 255, dtype=torch.uint8, device=new.device)
    experts.chosen_gated(normed, up, logits, slots, act)
    experts.chosen_down(act, down, logits, slots, record[:, 1], out, renormalise=add, add=add)
    assert torch.equal(record[slots[real].long(), 1].long(), ids[real])
    assert bool((record[:, 0] == 255).all())
    assert bool(out[real.stop :].isnan().all()) and bool(act[real.stop :].isnan().all())
    if add:
        shares = shares / shares.sum(-1, keepdim=True)
    picked = ids[real]
    hidden = gated(torch.einsum("be,bkne->bkn", normed[real].double(), up.double()[picked]))
    expected = torch.einsum("bki,bkei,bk->be", hidden, down.double()[picked], shares[real])
    if add:
        expected += kept.double()
    return found | {"hidden": error(act[real], hidden), "sum": error(out[real], expected)}


def check_delta(
    new: Inputs, key_size: int, value_size: int, block_size: int, spans: list[tuple[int, int]]
) -> dict[str, float]:
    """`spans`: position of the first new token, and the number of new tokens. Every second token
    has the key of the one before, hardly fades and puts all of its value in."""
    heads, key_heads, count = 4, 2, sum(count for _, count in spans)
    generator = {"device": new.device, "generator": new.generator}
    mixed = torch.randn(count, 2 * key_heads * key_size + heads * value_size, **generator)  # type: ignore[call-overload]
    keys = slice(key_heads * key_size, 2 * key_heads * key_size)
    decay = -torch.rand(count, heads, **generator)  # type: ignore[call-overload]
    beta = torch.rand(count, heads, **generator)  # type: ignore[call-overload]
    mixed[1::2, keys] = mixed[: count // 2 * 2 : 2, keys]
    decay[1::2] = -1e-4
    beta[1::2] = 1 - 1e-4
    memories = torch.randn(len(spans), heads, key_size, value_size, **generator)  # type: ignore[call-overload]
    rule = DeltaRule(mixed, key_heads, key_size, value_size, F.silu)

    ends = torch.tensor([count for _, count in spans]).cumsum(0).tolist()
    own = [
        Span(end - count, end, first, range(1000 * b, 1000 * (b + 1)), block_size)
        for b, ((first, count), end) in enumerate(zip(spans, ends, strict=True))
    ]
    read, kept = delta_chunks(Chunks(own, mixed.device), rule, mixed, decay, beta, memories)
    parts = [x.double() for x in (*rule.heads(mixed), decay, beta)]
    expected_read, expected_kept = [], []
    for b, span in enumerate(own):
        memory, kept_at = memories[b : b + 1].double(), {upto for _, upto in span.written}
        for n in range(span.start, span.end):
            one, memory = delta_step(*(x[n : n + 1] for x in parts), memory)
            expected_read.append(one)
            if n + 1 - span.start in kept_at:
                expected_kept.append(memory)
    return {
        "read": error(read, torch.cat(expected_read)),
        "kept": error(kept, torch.cat(expected_kept)),
    }


SMALL: dict[str, Callable[[Inputs], dict[str, float]]] = {
    "norm": lambda new: check_norm(new, 96),
    "linear, one row": lambda new: check_linear(new, 1, 72, 192),
    "linear, a few": lambda new: check_linear(new, 5, 72, 320),
    "linear, split": lambda new: check_linear(new, 17, 40, 520),
    "fp8": lambda new: check_fp8(new.normal(5, 96), new.normal(72, 96), new.normal(72)),
    "decode": lambda new: check_decode(new, 4, 2, 32, [1, 0, 33, 16, 70, 129], 1),
    "decode, split": lambda new: check_decode(new, 6, 2, 32, [1, 0, 33, 17, 70, 330], 4),
    "prefill": lambda new: check_prefill(new, 4, 2, 32, [40, 75, 3], [40, 70, 2]),
    "decode, odd": lambda new: check_decode(new, 4, 2, 32, [1, 0, 38, 70], 1, True),
    "decode, odd, split": lambda new: check_decode(new, 6, 1, 32, [37, 130], 4, True),
    "decode, many splits": lambda new: check_decode(new, 4, 2, 32, [700, 1, 330], 16),
    "prefill, odd": lambda new: check_prefill(new, 4, 1, 32, [40, 95], [3, 40], True),
    "decode, fp8": lambda new: check_decode(new, 4, 2, 32, [1, 0, 33, 16, 70], 1, False, True, 64),
    "decode, fp8, small": lambda new: check_decode(new, 4, 2, 32, [1, 33, 70], 1, False, True),
    "decode, fp8, split": lambda new: check_decode(new, 6, 2, 32, [17, 330], 4, False, True, 64),
    "decode, fp8, odd": lambda new: check_decode(new, 6, 1, 32, [37, 130], 1, True, True, 64),
    "decode, fp8, odd, split": lambda new: check_decode(
        new, 6, 1, 32, [38, 200], 4, True, True, 64
    ),
    "prefill, fp8": lambda new: check_prefill(
        new, 4, 2, 32, [40, 75, 3], [40, 70, 2], False, True, 64
    ),
    "prefill, fp8, small": lambda new: check_prefill(new, 4, 2, 32, [75], [20], False, True),
    "prefill, fp8, odd": lambda new: check_prefill(new, 4, 1, 32, [175], [40], True, True, 64),
    "head": lambda new: check_head(new, 5, 96, 500),
    "experts": lambda new: check_experts(new, 9, 8, 4, 96, 80),
    "experts, three of ten": lambda new: check_experts(new, 9, 10, 3, 96, 80),
    "experts, five of nine": lambda new: check_few_experts(new, 2, 9, 5, 30, 24, add=True),
    "experts, one row": lambda new: check_few_experts(new, 1, 8, 4, 96, 80, add=True),
    "experts, two rows": lambda new: check_few_experts(new, 2, 6, 2, 270, 264, add=True),
    **{
        f"experts, {rows} of few": partial(
            check_few_experts, rows=rows, num=9, top=4, size=20, inner=24
        )
        for rows in range(1, 9)
    },
    "delta": lambda new: check_delta(new, 6, 5, 16, [(0, 37), (19, 1), (30, 2)]),
    "adapters": lambda new: check_adapters(new, [1] * 18 + [0, 2], {"a": 48, "b": 48}, 72, 5),
    "adapters, 8": lambda new: check_adapters(
        new, [3, 1, 0, 2] * 3 + [1] * 30, {"a": 64, "b": 32, "c": 32}, 72, 8
    ),
    "adapters, 24": lambda new: check_adapters(new, [1, 2, 1], {"a": 32, "b": 32}, 600, 24),
}

LARGE: dict[str, Callable[[Inputs], dict[str, float]]] = {
    "norm": lambda new: check_norm(new, 4096),
    "linear 1": lambda new: check_linear(new, 1, 3072, 1024),
    "linear 1, 8B": lambda new: check_linear(new, 1, 4096, 12288),
    "linear 3": lambda new: check_linear(new, 3, 1024, 3072),
    "linear 64": lambda new: check_linear(new, 64, 1024, 2048),
    "linear 200": lambda new: check_linear(new, 200, 3072, 1024),
    "fp8 3": lambda new: check_fp8(new.normal(3, 3072), new.normal(1024, 3072), new.normal(1024)),
    "fp8 200": lambda new: check_fp8(new.normal(200, 96), new.normal(6144, 96), new.normal(6144)),
    "decode": lambda new: check_decode(new, 16, 8, 128, [1, 0, 300, 16, 1000, 129] * 10, 1),
    "decode, split": lambda new: check_decode(new, 32, 4, 128, [1, 0, 300, 17, 5000, 330], 16),
    "decode, one": lambda new: check_decode(new, 16, 8, 128, [333], 16),
    "prefill": lambda new: check_prefill(new, 32, 8, 128, [256, 700, 300, 33], [256, 200, 20, 33]),
    "prefill, 0.6B": lambda new: check_prefill(new, 16, 8, 128, [256, 700], [256, 130]),
    "decode, odd": lambda new: check_decode(new, 64, 8, 64, [1, 0, 300, 38, 900], 1, True),
    "decode, odd, split": lambda new: check_decode(new, 8, 4, 256, [1, 0, 37, 3300], 16, True),
    "prefill, odd": lambda new: check_prefill(new, 64, 8, 64, [400, 175], [300, 100], True),
    "prefill, odd, wide": lambda new: check_prefill(new, 8, 4, 256, [400, 75], [300, 5], True),
    "decode, fp8": lambda new: check_decode(
        new, 32, 8, 128, [1, 0, 300, 999] * 10, 1, False, True, 64
    ),
    "decode, fp8, many": lambda new: check_decode(
        new, 32, 8, 128, [300, 999] * 70, 1, False, True, 64
    ),
    "decode, fp8, split": lambda new: check_decode(
        new, 32, 4, 128, [17, 5000], 16, False, True, 64
    ),
    "decode, fp8, odd": lambda new: check_decode(new, 8, 4, 256, [37, 3300], 16, True, True, 64),
    "prefill, fp8": lambda new: check_prefill(
        new, 32, 8, 128, [256, 700], [256, 130], False, True, 64
    ),
    "prefill, fp8, odd": lambda new: check_prefill(
        new, 64, 8, 64, [400, 175], [300, 100], True, True, 64
    ),
    "head 1": lambda new: check_head(new, 1, 1024, 151936),
    "head 70": lambda new: check_head(new, 70, 1024, 151936),
    "experts": lambda new: check_experts(new, 64, 128, 8, 2048, 768),
    "experts, one": lambda new: check_experts(new, 2, 128, 8, 2048, 768),
    "experts, 6 of 160": lambda new: check_experts(new, 64, 160, 6, 2048, 512),
    "experts, 6 of 64": lambda new: check_few_experts(new, 1, 64, 6, 2048, 1408, add=True),
    "experts, one row": lambda new: check_few_experts(new, 1, 128, 8, 2048, 768, add=True),
    **{
        f"experts, {rows} of few": partial(
            check_few_experts, rows=rows, num=128, top=8, size=2048, inner=768
        )
        for rows in range(1, 9)
    },
    "delta": lambda new: check_delta(new, 128, 128, 1024, [(0, 700), (1000, 300), (64, 64)]),
    "delta, odd": lambda new: check_delta(new, 96, 80, 64, [(1, 200), (63, 2)]),
    "adapters, 64": lambda new: check_adapters(new, [*range(64)], {"a": 3072, "b": 3072}, 1024, 16),
    "adapters, mixed": lambda new: check_adapters(
        new, [*range(64)] * 4, {"a": 3072, "b": 3072}, 1024, 8
    ),
    "adapters, parts": lambda new: check_adapters(
        new, [*range(9)] * 5, {"a": 2048, "b": 1024, "c": 1024}, 1024, 24
    ),
    "adapters, few": lambda new: check_adapters(
        new, [1] * 40 + [0] * 3 + [2] * 5, {"a": 4096, "b": 4096}, 3072, 8
    ),
}


def check_operators() -> dict[str, float]:
    """A model that the kernels do not support runs on a GPU too: its log-probs against those of the
    CPU."""
    config = ModelConfig(
        model_type="deepseek_v3",
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=48,
        max_position_embeddings=160,
        latent=LatentConfig(kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=10),
        experts=ExpertsConfig(
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            layers=(1, 2),
            sigmoid=True,
            n_group=3,
            topk_group=2,
            n_shared_experts=1,
            norm_topk_prob=True,
        ),
    )
    model = sharp(config, seed=0, factor=3.0)
    found = []
    for device in ("cpu", "cuda"):
        engine = Engine(model.to(device), max_num_seqs=4, max_batched_tokens=20)
        for i in range(6):
            add(
                engine,
                request(str(i), [5, 9, 20] * (1 + 3 * i), max_tokens=5 + i, temperature=i % 2),
            )
        found.append(drain(engine))
    differences = []
    for id, sample in found[0].items():
        assert sample.tokens == found[1][id].tokens and sample.experts == found[1][id].experts
        differences += [
            abs(a - b) for a, b in zip(sample.logprobs, found[1][id].logprobs, strict=True)
        ]
    return {"largest": max(differences)}


def main() -> None:
    for name, check in LARGE.items():
        found = check(Inputs("cuda", torch.bfloat16))
        print(f"{name:16}", *(f"{what} {value:.1e}" for what, value in found.items()), flush=True)
        assert all(value < 1e-2 for value in found.values())  # NaN fails too
    for name, config in ENGINES.items():
        print("engine", name, check_engine(config), flush=True)
    print("engine without kernels", check_operators(), flush=True)


if __name__ == "__main__":
    main()
