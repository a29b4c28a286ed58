"""Sandboxes of a service of others that has only documented endpoints of E2B."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from etude.core.errors import EtudeError, RolloutFailure
from etude.core.sandbox import Limits, SandboxSpec
from etude.core.sandbox_config import SandboxConfig
from etude.sandbox.e2b import E2bSandboxPool, E2bService
from etude.sandbox.pool import open_sandbox_pool
from tests.namespaces import need_namespaces
from tests.sandbox.e2b_stand_in import KEY, StandIn, stand_in

LONG_S = 60.0


@pytest.fixture
async def served() -> AsyncIterator[tuple[E2bSandboxPool, StandIn]]:
    need_namespaces()
    with stand_in() as (url, service):
        pool = E2bSandboxPool(service=E2bService(url, KEY, "e2b.app", url))
        yield pool, service
        await pool.close()
        assert not service.sandboxes, "all were killed"


async def test_the_whole_protocol_over_the_documented_endpoints(
    served: tuple[E2bSandboxPool, StandIn],
) -> None:
    pool, service = served
    service.full = 1
    files = {"a": "1\n", "big": "x" * 700_000}
    async with pool.open(SandboxSpec(image="mine", files=files, env={"B": "2"})) as sandbox:
        ran = await sandbox.run(["sh", "-c", "cat a; echo $B; id -u; exit 3"], timeout_s=LONG_S)
        assert (ran.exit_code, ran.output) == (3, "1\n2\n1000\n")
        await sandbox.run(["mkdir", "inner"], timeout_s=LONG_S)
        place = await sandbox.run(["pwd"], timeout_s=LONG_S, cwd="inner")
        assert place.output.endswith("/inner\n")
        reports = await sandbox.run(
            ["sh", "-c", "echo good > $ETUDE_REPORT"], timeout_s=LONG_S, report=True
        )
        assert reports.report == b"good\n"
        echo = await sandbox.start(["cat"])
        await echo.write(b"back")
        assert await echo.read() == b"back"
        await sandbox.write("a", "2\n")
        fork = await sandbox.fork()
        assert await fork.diff() == await sandbox.diff() != ""
        await fork.write("a", "3\n")
        assert await sandbox.read("a") == "2\n"
        patch = await fork.patch()
        assert patch == {"a": (0o100644, b"3\n")}
        await sandbox.apply(patch)
        assert await sandbox.read("a") == "3\n"
        reach = "import socket; socket.create_connection(('127.0.0.1', 1), 1)"
        out = await sandbox.run(["python3", "-c", reach.replace("127.0.0.1", "192.0.2.1")],
                                timeout_s=LONG_S)  # fmt: skip
        assert "unreachable" in out.output.lower()
    assert [each["templateID"] for each in service.created] == ["mine", "mine"]
    assert all(each["allow_internet_access"] is False for each in service.created)
    assert service.asked == {"sandboxes", "files", "process.Process"}


async def test_one_that_the_service_ended_is_a_failure(
    served: tuple[E2bSandboxPool, StandIn],
) -> None:
    pool, service = served
    async with pool.open(SandboxSpec()) as sandbox:
        waiting = asyncio.create_task(sandbox.run(["sleep", "1000"], timeout_s=LONG_S))
        await sandbox.write("a", "1")
        for started in service._processes.values():
            started.kill()
        with pytest.raises(RolloutFailure):
            await waiting


async def test_a_service_that_refuses_says_why() -> None:
    with stand_in() as (url, _):
        pool = E2bSandboxPool(service=E2bService(f"{url}/nowhere", KEY, "e2b.app", url))
        with pytest.raises(RolloutFailure, match="returned 404"):
            async with pool.open(SandboxSpec()):
                pass
        await pool.close()


def test_where_a_service_is() -> None:
    found = E2bService.from_environment({"E2B_API_KEY": "k", "E2B_DOMAIN": "sandboxes.example"})
    assert found == E2bService("https://api.sandboxes.example", "k", "sandboxes.example", "")
    with pytest.raises(EtudeError, match="export E2B_API_KEY"):
        E2bService.from_environment({})


async def test_what_a_template_decides_is_refused() -> None:
    pool = object.__new__(E2bSandboxPool)
    with pytest.raises(EtudeError, match="e2b sandboxes do not support.*: limits.cpus"):
        pool.check(SandboxSpec(limits=Limits(cpus=2)))


def test_mounts_are_of_this_machine() -> None:
    with pytest.raises(EtudeError, match="put them into the template"):
        open_sandbox_pool("e2b", mounts=["/usr"])
    SandboxConfig(isolation="e2b", min_isolation="namespaces")
    with pytest.raises(ValueError, match='isolation "e2b" is weaker'):
        SandboxConfig(isolation="e2b", min_isolation="vm")
