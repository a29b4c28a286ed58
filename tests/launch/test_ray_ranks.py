"""The end of several ranks that counts as the cause (`make test-ray`)."""

from __future__ import annotations

import asyncio

import pytest

from etude.launch.launcher import Program

pytestmark = pytest.mark.ray


@pytest.mark.parametrize(("others", "code"), [((None,), None), ((2, None), None), ((2,), 1)])
async def test_a_lost_node_is_the_cause_of_what_its_fellows_did(
    others: tuple[int | None, ...], code: int | None
) -> None:
    from etude.launch import ray as launch

    first = launch._Ended(Program("trainer-0", ()), 1, [])

    async def later(code: int | None) -> launch._Ended:
        await asyncio.sleep(0.01)
        return launch._Ended(Program("trainer-1", ()), code, [])

    async def at_once() -> launch._Ended:
        return first

    ranks = [asyncio.create_task(each) for each in (at_once(), *map(later, others))]
    assert (await launch._cause(first, ranks)).code == code
