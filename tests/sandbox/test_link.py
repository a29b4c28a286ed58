"""The host's end of a sandbox's socket."""

from __future__ import annotations

import asyncio
import gc
import socket
from typing import Any

from etude.sandbox.link import Link


async def test_an_answer_that_nobody_waits_for_any_more_is_not_reported() -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, about: reported.append(about))
    own, sandboxes = socket.socketpair()
    with own, sandboxes:
        link = Link(own)
        link.connection_lost(None)
        assert link.ready.done()
        del link
        gc.collect()
    assert reported == []
