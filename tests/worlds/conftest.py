from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from etude.core.seams import Worlds
from etude.worlds.namespaces import NamespaceWorlds
from etude.worlds.pool import open_worlds


@pytest.fixture(params=["namespaces", "process"])
async def worlds(request: pytest.FixtureRequest) -> AsyncIterator[Worlds]:
    opened = open_worlds(request.param)
    yield opened
    await opened.close()


@pytest.fixture
async def walled() -> AsyncIterator[NamespaceWorlds]:
    opened = NamespaceWorlds()
    yield opened
    await opened.close()
