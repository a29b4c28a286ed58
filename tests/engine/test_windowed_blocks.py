"""Layers with a window in their own blocks, under random schedules: every token finds what it sees,
in as few windowed blocks as the engine asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random

import pytest
from torch import Tensor

from etude.engine.batch import ForwardBatch, Ints, SamplerOutput
from etude.engine.blocks import num_windowed_blocks
from etude.engine.engine import Engine, FinishedRequest
from etude.model.lora import Adapter
from etude.model.transformer import Transformer
from tests.small_model import add, config, request

SIZE = 4
VOCABULARY = 5


def following(tokens: tuple[int, ...]) -> int:
    """The next token of these tests' model; it repeats itself, so that drafts are right now and
    then."""
    return (sum(tokens[-3:]) * 7 + len(tokens) // 9) % VOCABULARY


class Remembering:
    """A runner without a model. A slot remembers the tokens up to the one that was written there,
    and the version of the weights; in each group of layers a token must find all tokens that it
    sees."""

    block_size = SIZE

    def __init__(self, num_blocks: int, window: int, num_windowed: int, *, overlaps: bool) -> None:
        self.num_blocks = num_blocks
        self.num_windowed_blocks = num_windowed
        self.overlaps = overlaps
        self.version = 0
        self._window = window
        self._slots: list[dict[int, tuple[int, tuple[int, ...]]]] = [{}, {}]
        self._before: list[int] = []

    def launch(self, batch: ForwardBatch) -> Callable[[], SamplerOutput]:
        tokens = [
            int(token) if token >= 0 else self._before[-1 - int(token)] for token in batch.tokens_N
        ]
        ends = [*batch.query_starts_B[1:].tolist(), len(tokens)]
        seen: dict[int, tuple[int, ...]] = {}
        rows = list(zip(batch.query_starts_B.tolist(), ends, strict=True))
        for b, (start, end) in enumerate(rows):  # all slots are written before any is read
            for n in range(start, end):
                position = int(batch.positions_N[n])
                before = self._at(0, batch, b, position - 1)[1] if position else ()
                seen[n] = (*before, tokens[n])
                for group, slots in enumerate(self._slots):
                    slots[int(batch.slot_mapping_GN[group, n])] = self.version, seen[n]
        for b, (start, end) in enumerate(rows):
            for n in range(start, end):
                position = int(batch.positions_N[n])
                for place in range(max(0, position - self._window + 1), position + 1):
                    assert self._at(1, batch, b, place) == self._at(0, batch, b, place)
                    assert self._at(0, batch, b, place)[1] == seen[n][: place + 1]
        self._before = [following(seen[int(n)]) for n in batch.logits_indices_R]
        drawn = SamplerOutput(tokens=self._before, logprobs=[-1.0] * len(self._before))
        return lambda: drawn

    def _at(
        self, group: int, batch: ForwardBatch, b: int, position: int
    ) -> tuple[int, tuple[int, ...]]:
        block = int(batch.block_table_GBM[group, b, position // SIZE])
        return self._slots[group][block * SIZE + position % SIZE]

    def routed_experts(self, blocks: Ints, length: int) -> bytes | None:
        return None

    def prepare_weights(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        def swap() -> None:
            self.version += 1

        return swap

    def prepare_adapter(self, slot: int, adapter: Adapter | None) -> Callable[[], None]:
        raise NotImplementedError

    def weights(self) -> dict[str, Tensor]:
        return {}


@pytest.mark.parametrize("seed", range(12))
def test_every_token_finds_what_it_sees(seed: int) -> None:
    rng = Random(seed)
    window, max_num_seqs = rng.choice([1, 3, 4, 5, 9, 17]), rng.randint(2, 6)
    batched, num_blocks = rng.randint(3, 40), rng.randint(24, 40)
    few = num_windowed_blocks(window, SIZE, max_num_seqs=max_num_seqs, max_batched_tokens=batched)
    shape = replace(config(VOCABULARY, context=80), sliding_window=window, sliding_layers=(0,))
    model = Transformer(shape)
    runner = Remembering(num_blocks, window, few, overlaps=bool(seed % 2))
    engine = Engine(model, runner=runner, max_num_seqs=max_num_seqs, max_batched_tokens=batched)
    asked = {
        str(id): request(
            str(id), [rng.randrange(2) for _ in range(rng.choice([1, 5, 20, 45]))],
            max_tokens=rng.randint(1, 30), stop_token_ids=(),
            prediction=rng.choice([None, tuple(rng.randrange(VOCABULARY) for _ in range(20))]),
            priority=rng.choice(["interactive", "standard", "batch"]),
        )
        for id in range(24)
    }  # fmt: skip
    waiting, done = list(asked), set[str]()
    while waiting or not engine.idle:
        if waiting and rng.random() < 0.4:
            add(engine, asked[waiting.pop()])
        if rng.random() < 0.02:
            engine.load_weights(engine.version + 1, {})
        if rng.random() < 0.02:
            engine.abort(rng.choice(list(asked)))
        for event in engine.step():
            assert isinstance(event, FinishedRequest)
            said = asked[event.id].prompt
            for token in event.sample.tokens:
                assert token == following(tuple(said))
                said = (*said, token)
            done.add(event.id)
    manager = engine._block_manager
    assert manager.num_free == num_blocks and manager.num_windowed_free == few
    assert done
