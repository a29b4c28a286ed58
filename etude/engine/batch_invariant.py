"""The batch-invariant runner, for any device: a token has the same bits whatever else is in the
batch.

It runs the trainer's model definition over a KV cache. For models that the CUDA kernels support,
`CudaRunner` with `invariant` is faster and gives the same guarantee.

Shapes: N new tokens, R sampled rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from etude.engine.adapters import OWN_SLOT, TorchAdapters
from etude.engine.batch import ForwardBatch, Ints, SamplerOutput, SamplingBatch
from etude.engine.runner import BLOCK_SIZE, RoutedExpertsCache
from etude.engine.sampler import cuts_off, sample
from etude.model.attention import KVCache
from etude.model.files import hf_state_dict, load_weights
from etude.model.lora import Adapter
from etude.model.tiled_attention import TiledPagedAttention
from etude.model.transformer import Transformer


class BatchInvariantTorchRunner:
    """A batch-invariant runner for any device, on the trainer's torch operators over a KV cache."""

    overlaps = False
    block_size = BLOCK_SIZE

    def __init__(
        self,
        model: Transformer,
        num_blocks: int,
        *,
        num_windowed_blocks: int = 0,
        with_adapters: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_windowed_blocks = num_windowed_blocks
        self._adapters = TorchAdapters(model) if with_adapters else None
        self._model = model
        self._model.quantise()
        weight = model.model.embed_tokens.weight.detach()
        self._device = weight.device
        self._cache = KVCache(
            model.config, num_blocks, BLOCK_SIZE, weight, self.num_windowed_blocks,
            fp8=model.arithmetic.fp8_kv,
        )  # fmt: skip
        self._used = RoutedExpertsCache(model.config, num_blocks, BLOCK_SIZE, self._device)

    @torch.inference_mode()
    def launch(self, batch: ForwardBatch) -> Callable[[], SamplerOutput]:
        attend = TiledPagedAttention(
            self._cache,
            self._model.config.num_attention_heads,
            slot_mapping_GN=batch.slot_mapping_GN,
            starts_B=batch.query_starts_B,
            lengths_B=batch.seq_lens_B,
            block_table_GBM=batch.block_table_GBM,
        )
        tokens_N, positions_N, slot_mapping_N, rows_R = (
            torch.from_numpy(x).to(self._device)
            for x in (
                batch.tokens_N,
                batch.positions_N,
                batch.slot_mapping_N,
                batch.logits_indices_R,
            )
        )
        if self._adapters:
            self._adapters.use(batch.adapters_N)
        with self._used.recorded(slot_mapping_N) as routing:
            hidden_NE = self._model(tokens_N, positions_N, attend, routing)
        sampled = SamplerOutput(tokens=[], logprobs=[])
        if len(rows_R):
            sampled = sample_with_trainer_logprobs(
                self._model.logits(hidden_NE[rows_R]), batch.sampling
            )
        return lambda: sampled

    def routed_experts(self, blocks: Ints, length: int) -> bytes | None:
        return self._used.read(blocks, length)

    def prepare_weights(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        like = self._model.model.embed_tokens.weight
        model = Transformer(self._model.config).to(like.device, like.dtype).requires_grad_(False)
        load_weights(model.compute_with(self._model.arithmetic), tensors)
        model.quantise()
        if self._adapters:
            self._adapters.attach(model)

        def swap() -> None:
            self._model = model

        return swap

    def prepare_adapter(self, slot: int, adapter: Adapter | None) -> Callable[[], None]:
        assert self._adapters is not None
        return self._adapters.prepare(slot, adapter)

    def weights(self) -> dict[str, Tensor]:
        own = self._adapters.tensors(OWN_SLOT) if self._adapters else {}
        return own or hf_state_dict(self._model)


def sample_with_trainer_logprobs(logits_RV: Tensor, sampling: SamplingBatch) -> SamplerOutput:
    """Like `sample`, with log-probs computed as the trainer computes them. The trainer has no
    top-k, top-p or min-p: rows that use these keep the log-prob of `sample`."""
    sampled = sample(logits_RV, sampling)
    temperature_R = sampling.temperature_R
    divisor_R = torch.from_numpy(np.where(temperature_R == 0, np.float32(1), temperature_R)).to(
        logits_RV.device
    )
    logp_RV = torch.log_softmax(logits_RV / divisor_R[:, None], -1)
    tokens_R = torch.tensor(sampled.tokens, device=logits_RV.device)
    whole_R = [not cuts_off(params) for params in sampling.params_R]
    logprobs_R = np.where(
        whole_R, logp_RV.gather(1, tokens_R[:, None])[:, 0].cpu().numpy(), sampled.logprobs
    )
    return replace(sampled, logprobs=logprobs_R.tolist())
