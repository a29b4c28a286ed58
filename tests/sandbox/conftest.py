from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from etude.core.sandbox import SandboxPool
from etude.sandbox.namespaces import NamespaceSandboxPool
from etude.sandbox.pool import open_sandbox_pool
from tests.namespaces import need_namespaces
from tests.sandbox.hosts import sandbox_host

OTHERS = [pytest.param("remote", marks=pytest.mark.tiers)]


@pytest.fixture(scope="session")
def host_url() -> Iterator[str]:
    need_namespaces()
    with sandbox_host("namespaces") as (url, _):
        yield url


@pytest.fixture(params=["namespaces", "process", *OTHERS])
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[SandboxPool]:
    """One of each kind: the same is expected of all."""
    if request.param == "remote":
        url = request.getfixturevalue("host_url")
        opened = open_sandbox_pool("namespaces", hosts=[url])
    else:
        if request.param == "namespaces":
            need_namespaces()
        opened = open_sandbox_pool(request.param)
    yield opened
    await opened.close()


@pytest.fixture
async def walled() -> AsyncIterator[NamespaceSandboxPool]:
    need_namespaces()
    opened = NamespaceSandboxPool()
    yield opened
    await opened.close()
