"""What is checked before a run starts anything."""

from __future__ import annotations

import pytest

from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.trainer.prepare import check_training


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["trainer.expert_parallel=2"], "expert_parallel = 2 divides experts, and the model has"),
        (["trainer.context_parallel=2", "batch_invariant=true"], "not know invariant arithmetic"),
    ],
)
def test_ranks_that_cannot_share_the_work_are_refused(settings: list[str], said: str) -> None:
    text = 'name = "a"\n[[stage]]\nkind = "rl"\nsteps = 2\n'
    with pytest.raises(EtudeError, match=said):
        check_training(parse(text, ["trainer.ranks=2", *settings]), resumed=False)
