"""Both ends of a tunnel: what happens to it when its forwarder ends, and to the forwarder when the
tunnel does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from etude.core.errors import RolloutFailure
from etude.harness.tunnel import _CHUNK, _FRAME, _Frames, tunnel_to


class Forwarder:
    """Sends the given chunks, then ends."""

    def __init__(self, *said: bytes) -> None:
        self.said = list(said)
        self.reads_after_its_end = 0
        self.killed = False

    async def read(self) -> bytes:
        await asyncio.sleep(0)
        if self.said:
            return self.said.pop(0)
        self.reads_after_its_end += 1
        return b""

    async def write(self, data: bytes) -> None: ...

    async def kill(self) -> None:
        self.killed = True


class Box:
    """The sandbox in which the forwarder is started."""

    def __init__(self, forwarder: Forwarder) -> None:
        self.forwarder = forwarder

    async def start(self, argv: Sequence[str]) -> Forwarder:
        return self.forwarder


async def nothing(request: web.BaseRequest) -> web.Response:
    return web.Response()


async def test_a_forwarder_that_has_ended_is_not_read_any_more() -> None:
    forwarder = Forwarder(b"80", b"80\n")
    box: Any = Box(forwarder)
    async with tunnel_to(nothing, box) as url:
        assert url == "http://127.0.0.1:8080"
        for _ in range(50):
            await asyncio.sleep(0)
        assert forwarder.reads_after_its_end == 1


@pytest.mark.parametrize("said", [b"8080\n", b"no python here\n"], ids=["serves", "cannot"])
async def test_no_forwarder_is_left_in_the_sandbox(said: bytes) -> None:
    """The agent continues in the sandbox, and must not reach the model outside of its session."""
    forwarder = Forwarder(said)
    box: Any = Box(forwarder)
    try:
        async with tunnel_to(nothing, box):
            assert not forwarder.killed
    except RolloutFailure as e:
        assert "no python here" in str(e)
    assert forwarder.killed


async def frames_of(*said: bytes) -> list[tuple[int, bytes]]:
    texts = iter([*said, b""])

    async def read() -> bytes:
        return next(texts)

    process: Any = SimpleNamespace(read=read)
    return [frame async for frame in _Frames(process)]


async def test_frames_are_whole_however_they_come() -> None:
    whole = _FRAME.pack(7, 5) + b"hello" + _FRAME.pack(8, 0) + _FRAME.pack(7, 2) + b"hi"
    expected = [(7, b"hello"), (8, b""), (7, b"hi")]
    for cut in range(1, len(whole)):
        assert await frames_of(whole[:cut], whole[cut:]) == expected
    largest = _FRAME.pack(1, _CHUNK) + bytes(_CHUNK)
    assert await frames_of(largest) == [(1, bytes(_CHUNK))]
    assert await frames_of(_FRAME.pack(1, _CHUNK + 1) + bytes(_CHUNK + 1)) == []


async def test_a_forwarder_that_says_nothing_was_not_started() -> None:
    async def read() -> bytes:
        return b""

    process: Any = SimpleNamespace(read=read)
    with pytest.raises(RolloutFailure, match="^no forwarder could be started in the sandbox$"):
        await _Frames(process).first_line()
