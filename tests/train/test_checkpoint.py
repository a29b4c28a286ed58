from __future__ import annotations

import pytest
import torch
from safetensors.torch import save

from etude.core.errors import EtudeError
from etude.train.checkpoint import Checkpoint, pack, unpack

WHOLE = pack(Checkpoint(stage="rl", step=1, version=4, lineage=(), cursor={}, tensors={"a": torch.arange(64.0)}))


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", WHOLE[:-1], WHOLE[:40], save({"a": torch.ones(2)})],
    ids=["empty", "junk", "cut", "head", "other"],
)
def test_what_is_not_a_whole_checkpoint_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(EtudeError, match=r"runs/x/000004 is not a whole checkpoint"):
        unpack(data, "runs/x/000004")
