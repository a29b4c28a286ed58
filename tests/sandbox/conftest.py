from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from etude.core.sandbox import SandboxPool
from etude.sandbox.namespaces import NamespaceSandboxPool
from etude.sandbox.pool import open_sandbox_pool
from tests.namespaces import need_namespaces


@pytest.fixture(params=["namespaces", "process"])
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[SandboxPool]:
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
