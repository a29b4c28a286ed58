"""The model, its key/value cache, and one forward pass over rows of it. B rows, T new tokens (padded), V vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from etude.engine.scheduler import Running
from etude.model.attention import Cached, KVCache
from etude.model.files import load_weights
from etude.model.transformer import Transformer


class Runner:
    def __init__(self, model: Transformer, max_batch: int) -> None:
        self.model = model.eval()
        self.cache = KVCache(model.config, max_batch, model.config.max_position_embeddings)

    @torch.inference_mode()
    def forward(self, batch: Sequence[Running]) -> Tensor:
        """Reads what the cache does not hold yet of each sequence, and returns the logits after its last token.

        The sequences stand on neighbouring rows: all that run (one new token each), or the newcomers behind them.
        """
        new = [sequence.tokens[sequence.num_cached :] for sequence in batch]
        longest = max(map(len, new))
        tokens_BT = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in new])
        start_B = torch.tensor([sequence.num_cached for sequence in batch])
        attend = Cached(self.cache, start_B, longest, first_row=batch[0].row)
        hidden_BTE = self.model(tokens_BT, attend.positions_BT, attend)
        if longest == 1:
            return self.model.logits(hidden_BTE[:, 0])
        last_B = torch.tensor([len(tokens) - 1 for tokens in new])
        return self.model.logits(hidden_BTE[torch.arange(len(batch)), last_B])

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        load_weights(self.model, tensors)
