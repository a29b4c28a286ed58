"""Every family in the engine: in batches, in chunks, from the cache, after preemption and across a
weight swap, a token has the log-prob of the model definition."""

from __future__ import annotations

import itertools
import json
from random import Random

import pytest
import torch

from etude.core.errors import EtudeError
from etude.core.sampling import Sample
from etude.engine import native, select
from etude.engine.batch_invariant import BatchInvariantTorchRunner
from etude.engine.blocks import num_windowed_blocks
from etude.engine.engine import Engine, EngineStats, FinishedRequest
from etude.engine.runner import TorchRunner
from etude.model.attention import CausalAttention
from etude.model.config import ModelConfig
from etude.model.experts import Routing, read_ids
from etude.model.files import hf_state_dict
from etude.model.numerics import INVARIANT
from etude.model.rounding import StepwiseCausal
from etude.model.transformer import Transformer, init_from_scratch
from etude.run.operators import SingleRowAttention
from tests.engine.invariance_checks import Watching, differing, serve, trained
from tests.engine.reference import Overlapping
from tests.model.test_families import MODELS, SHAPE
from tests.small_model import ROUNDING, Asked, add, request

SERVED = [
    *("llama biases", "llama longrope", "qwen2 window", "mistral", "mixtral window", "qwen2_moe"),
    *("smollm3 window", "phi3 window", "granite", "olmo3 yarn", "gemma2", "gemma3_text linear"),
    *("glm4_moe large", "gpt_oss", "deepseek_v2 groups", "olmo2", "seed_oss", "qwen3_next"),
    *("qwen3_moe window", "deepseek_v3"),
]
BIT_BY_BIT = ["olmo3 yarn", "gemma2", "gemma3_text", "gpt_oss"]


def random_model(name: str, seed: int = 0) -> Transformer:
    """A model with biases, sinks and gains that matter."""
    said = SHAPE | MODELS[name] | {"model_type": name.split()[0]}
    model = init_from_scratch(ModelConfig.from_json(json.dumps(said)), seed).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in model.named_parameters():
        if parameter.ndim == 1 or key.endswith("bias"):
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
        elif "embed" not in key:
            parameter.mul_(2.0)
    return model


def run(engine: Engine, asked: list[Asked]) -> dict[str, Sample]:
    waiting, done = list(asked), dict[str, Sample]()
    while waiting or not engine.idle:
        if waiting and engine.num_waiting < 3:
            add(engine, waiting.pop())
        done |= {e.id: e.sample for e in engine.step() if isinstance(e, FinishedRequest)}
    return done


def windowed_blocks(model: Transformer, max_num_seqs: int, max_batched_tokens: int) -> int:
    """The most windowed blocks that running sequences may need, and no more."""
    if (window := model.config.sliding_window) is None or not model.config.windowed_layers:
        return 0
    return num_windowed_blocks(
        window, 16, max_num_seqs=max_num_seqs, max_batched_tokens=max_batched_tokens
    )


def expected(model: Transformer, asked: Asked, sample: Sample) -> list[float]:
    row, experts = (asked.prompt + sample.tokens)[:-1], model.config.experts
    routing = None
    if experts:
        assert sample.experts is not None
        routing = Routing(read_ids(sample.experts, experts)[None])
    hidden = model(torch.tensor([row]), torch.arange(len(row))[None], CausalAttention(), routing)
    logp = torch.log_softmax(model.logits(hidden)[0], -1)
    begin = len(asked.prompt) - 1
    return [float(logp[begin + n, token]) for n, token in enumerate(sample.tokens)]


@pytest.mark.parametrize("name", SERVED)
def test_a_token_has_the_logprob_of_the_model_definition(name: str) -> None:
    """Four requests at a time, in chunks of 9 tokens, with room for two; those that come last go
    first. Then the same with other weights."""
    models = [random_model(name, seed) for seed in range(2)]
    asked = [
        request(
            str(id), [1 + n % 5 for n in range((34, 16, 0)[id % 3])] + [9 + id],
            max_tokens=30 + id % 4, stop_token_ids=(), seed=id,
            priority="interactive" if id < 3 else "standard",
        )
        for id in range(7)
    ]  # fmt: skip
    runner = TorchRunner(models[0], 9, num_windowed_blocks=windowed_blocks(models[0], 4, 9))
    engine = Engine(models[0], runner=runner, max_num_seqs=4, max_batched_tokens=9)
    for version, model in enumerate(models):
        if version:
            engine.load_weights(version, hf_state_dict(model, torch.float32))
        done = run(engine, asked)
        for each in asked:
            found = expected(model, each, done[each.id])
            assert list(done[each.id].logprobs) == pytest.approx(found, abs=ROUNDING)
    stats = engine.stats()
    assert stats.preemptions > 0 and stats.cached_tokens > 0


@pytest.mark.parametrize("name", BIT_BY_BIT)
def test_invariant_bits_of_windows_sinks_and_capped_scores(name: str) -> None:
    model, rng = random_model(name).compute_with(INVARIANT), Random(name)
    windowed = windowed_blocks(model, 6, 16)
    runner = Watching(BatchInvariantTorchRunner(model, 14, num_windowed_blocks=windowed))
    sessions = serve(model, runner, rng, 25)
    assert len(sessions) > 3 and differing(sessions, trained(model, sessions, rng)) == 0


def test_fast_paths_take_only_what_they_say_they_can() -> None:
    """A feature that a path does not support keeps a model off it, and the reason is reported."""
    plain = {"head_dim": 32, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}
    on_native = {"llama", "llama tied", "llama dynamic", "llama yarn to its context", "qwen2"}
    on_native |= {"llama llama3", "llama linear", "qwen2 yarn", "qwen3", "mistral whole", "phi3"}
    for name, keys in MODELS.items():
        if "rope_scaling" in keys and keys["rope_scaling"]["rope_type"] == "longrope":
            continue  # needs another head size
        said = SHAPE | keys | plain | {"num_key_value_heads": 2, "model_type": name.split()[0]}
        if "kv_lora_rank" in keys:
            del said["head_dim"]
        found = native.unsupported(ModelConfig.from_json(json.dumps(said)), torch.float32)
        found = [why for why in found if why != "no compiled native.c"]
        assert (not found) == (name in on_native), (name, found)


def test_a_model_that_no_fast_path_takes_says_why() -> None:
    model = random_model("gpt_oss")
    with pytest.warns(RuntimeWarning, match=r"native\.c does not support .*sinks True"):
        runner = select.select_runner(model, 4, 1 << 20)
    assert isinstance(runner, TorchRunner)


def test_a_state_is_found_behind_a_beginning_that_the_same_pass_computes() -> None:
    """Sequences that share it wait for no other pass; drafts are not used, since they could not be
    taken back."""
    model = random_model("qwen3_next")
    beginning = [1 + n % 7 for n in range(70)]
    asked = [
        request(str(id), [*beginning, 9 + id], max_tokens=12, seed=id, prediction=(1, 2, 3))
        for id in range(3)
    ]
    engine = Engine(model, runner=TorchRunner(model, 40), max_num_seqs=4, max_batched_tokens=400)
    for each in asked:
        add(engine, each)
    engine.step()
    assert engine.stats().cached_tokens == 2 * 64
    done = run(engine, [])
    for each in asked:
        found = expected(model, each, done[each.id])
        assert list(done[each.id].logprobs) == pytest.approx(found, abs=ROUNDING)
    assert engine.stats().draft_tokens == 0


def test_invariant_arithmetic_is_refused_where_it_cannot_be_kept() -> None:
    model = random_model("qwen3_next").compute_with(INVARIANT)
    with pytest.raises(EtudeError, match="recurrent layers"):
        select.select_runner(model, 4, 1 << 20)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_blocks_that_no_window_reaches_are_given_up(name: str, prefix_cache: bool) -> None:
    """Some layers see 11 tokens, which lie in two blocks of 16 at most; one block is being filled,
    and one may wait until it is cached."""
    model = random_model(name)
    asked = [
        request(str(id), [5, 7 + id] * 9, max_tokens=62, seed=id, stop_token_ids=())
        for id in range(2)
    ]
    runner = TorchRunner(model, 14, num_windowed_blocks=12)
    engine = Engine(
        model, runner=runner, max_num_seqs=2, max_batched_tokens=20, prefix_cache=prefix_cache
    )
    for each in asked:
        add(engine, each)
    used, done = [], dict[str, Sample]()
    while not engine.idle:
        done |= {e.id: e.sample for e in engine.step() if isinstance(e, FinishedRequest)}
        used.append(12 - engine._block_manager.num_windowed_free)
    assert 2 * 2 <= max(used[3:]) <= 2 * 3  # each has 80 tokens, 5 blocks, at the end
    assert used[-1] == 0
    for each in asked:
        found = expected(model, each, done[each.id])
        assert len(found) == 62
        assert list(done[each.id].logprobs) == pytest.approx(found, abs=ROUNDING)


def test_bits_are_the_same_whether_or_not_layers_with_a_window_give_up_blocks() -> None:
    """A random schedule: shared prefixes, forks, drafts, preemption, priorities, aborted requests,
    and new versions in between. The versions have the same weights, since fewer cache hits shift
    the token at which a version begins."""

    model = random_model("gpt_oss").compute_with(INVARIANT)

    def served(num_windowed_blocks: int) -> tuple[dict[str, list[object]], EngineStats]:
        rng = Random(0)
        own = BatchInvariantTorchRunner(model, 12, num_windowed_blocks=num_windowed_blocks)
        engine = Engine(model, runner=Overlapping(own), max_num_seqs=4, max_batched_tokens=23)
        waiting = [
            request(
                str(10 * id + fork), [1 + n % (2 + id % 3) for n in range(rng.randint(1, 70))],
                max_tokens=rng.randint(1, 30), stop_token_ids=(),
                temperature=rng.choice([0.0, 1.0]), prediction=rng.choice([None, (1, 2) * 9]),
                priority=rng.choice(["interactive", "standard"]),
            )
            for id in range(6)
            for fork in range(rng.randint(1, 3))
        ]  # fmt: skip
        done = dict[str, list[object]]()
        swaps = rng.sample(range(60), 2)
        aborted = rng.choice(waiting).id
        for step in itertools.count():
            if waiting and rng.random() < 0.5:
                add(engine, waiting.pop())
            if step in swaps:
                engine.load_weights(step + 1, hf_state_dict(model, torch.float32))
            if step == 30:
                engine.abort(aborted)
            if engine.idle and not waiting:
                break
            done |= {
                e.id: [e.sample.tokens, e.sample.logprobs, e.sample.experts]
                for e in engine.step()
                if isinstance(e, FinishedRequest) and e.id != aborted
            }
        return done, engine.stats()

    kept, _ = served(0)
    given_up, stats = served(windowed_blocks(model, 4, 23))
    assert stats.preemptions and stats.cached_tokens and stats.accepted_tokens
    # Cache hits differ, answers do not.
    assert given_up == kept and len(kept) > 7


def test_whoever_compares_engine_and_trainer_sees_recurrent_layers_too() -> None:
    model, row = random_model("qwen3_next"), torch.arange(40) % 11
    positions = torch.arange(40)
    found = [
        model(row, positions, attend)
        for attend in (
            CausalAttention([40]),
            SingleRowAttention(model, 40),
            StepwiseCausal([40]),
        )
    ]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-4, rtol=1e-4)
