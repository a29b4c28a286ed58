from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from etude.core.seams import Worlds
from etude.worlds.namespaces import NamespaceWorlds
from etude.worlds.pool import open_worlds
from tests.namespaces import need_namespaces


@pytest.fixture(params=["namespaces", "process"])
async def worlds(request: pytest.FixtureRequest) -> AsyncIterator[Worlds]:
    if request.param == "namespaces":
        need_namespaces()
    opened = open_worlds(request.param)
    yield opened
    await opened.close()


@pytest.fixture
async def walled() -> AsyncIterator[NamespaceWorlds]:
    need_namespaces()
    opened = NamespaceWorlds()
    yield opened
    await opened.close()
