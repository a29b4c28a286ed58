from __future__ import annotations

import pytest
import torch

from etude.core.errors import EtudeError
from etude.train.checkpoint import from_bytes, to_bytes

WHOLE = to_bytes({"a": torch.arange(64.0)})


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", WHOLE[:-1], WHOLE[:40]],
    ids=["empty", "junk", "cut", "head"],
)
def test_what_is_not_a_whole_checkpoint_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(EtudeError, match=r"runs/x/000004 is not a whole part of a checkpoint"):
        from_bytes(data, "runs/x/000004")
