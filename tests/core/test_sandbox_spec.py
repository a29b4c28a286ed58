"""What a task may ask of its sandbox."""

from __future__ import annotations

from dataclasses import fields

import pytest

from etude.core.sandbox import Limits, Service


@pytest.mark.parametrize("name", [field.name for field in fields(Limits)])
def test_a_limit_is_above_0(name: str) -> None:
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=f"limits.{name} is {wrong}: it must be above 0"):
            Limits(**{name: wrong})
    assert getattr(Limits(**{name: 1}), name) == 1


def test_what_a_task_says_goes_over_what_the_run_says() -> None:
    run = Limits(cpus=2.0, memory_bytes=100, processes=50)
    task = Limits(memory_bytes=7, disk_bytes=9)
    assert task.over(run) == Limits(cpus=2.0, memory_bytes=7, disk_bytes=9, processes=50)
    assert Limits().over(run) == run == run.over(Limits())


@pytest.mark.parametrize("name", ["", "a b", "../db", "db.local", "db\n", "dß"])
def test_a_service_is_named_as_a_host_may_be(name: str) -> None:
    with pytest.raises(ValueError, match="letters, digits and hyphens only"):
        Service(name=name, argv=("serve",), port=1)
    assert Service(name="Db-2", argv=("serve",), port=1).name == "Db-2"
