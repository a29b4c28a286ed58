"""Checks before a run starts anything."""

from __future__ import annotations

import pytest

from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.store.runs import Run
from etude.trainer.prepare import check_training, is_prepared, store_files
from tests.small_model import small_files


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["trainer.expert_parallel=2"], "expert_parallel = 2: the model has no experts"),
        (
            ["trainer.context_parallel=2", "batch_invariant=true"],
            "not support invariant arithmetic",
        ),
    ],
)
def test_ranks_that_cannot_share_the_work_are_refused(settings: list[str], said: str) -> None:
    text = 'name = "a"\n[[stage]]\nkind = "rl"\nsteps = 2\n'
    with pytest.raises(EtudeError, match=said):
        check_training(parse(text, ["trainer.ranks=2", *settings]), resumed=False)


def test_files_of_the_model_that_are_lost_are_named_before_anything_starts() -> None:
    run = Run.open("memory:")
    store_files(run, small_files(context=64))
    assert is_prepared(run)
    run.objects.delete("model/tokenizer.json")
    with pytest.raises(EtudeError, match=r"model/tokenizer\.json is missing: restore it"):
        is_prepared(run)
    run.objects.delete("model/config.json")
    assert not is_prepared(run), "it was never whole"
