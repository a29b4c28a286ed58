"""The sandbox specs that a task may have."""

from __future__ import annotations

import asyncio
from dataclasses import fields
from typing import Any

import pytest

from etude.core.sandbox import Limits, Service, close_on_failure
from etude.core.sandbox_config import SandboxConfig


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
    with pytest.raises(ValueError, match="only letters, digits and hyphens"):
        Service(name=name, argv=("serve",), port=1)
    assert Service(name="Db-2", argv=("serve",), port=1).name == "Db-2"


def test_the_limits_of_a_run_are_in_bytes() -> None:
    assert SandboxConfig().limits == Limits()
    config = SandboxConfig(cpus=1.5, memory_mib=2, disk_mib=3, max_processes=4)
    assert config.limits == Limits(
        cpus=1.5, memory_bytes=2 * 1024**2, disk_bytes=3 * 1024**2, processes=4
    )


@pytest.mark.parametrize(
    "more", [{"mounts": ("/opt",)}, {"network_log": "log"}, {"mirrors": {"pypi.org": "h:1"}}]
)
def test_what_is_of_this_machine_is_not_for_hosts(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(more))} .* hosts"):
        SandboxConfig(hosts=("http://h:1",), **more)
    SandboxConfig(**more)


async def test_a_sandbox_that_is_half_made_is_closed() -> None:
    closed = []

    class Half:
        async def close(self) -> None:
            closed.append(self)

    sandbox: Any = Half()
    async with close_on_failure(sandbox):
        pass
    assert closed == []
    for error in (ZeroDivisionError, asyncio.CancelledError):
        with pytest.raises(error):
            async with close_on_failure(sandbox):
                raise error
    assert closed == [sandbox, sandbox]
