"""A worker without a model, as a process: it answers every request with tokens that follow from the
request's seed and the length of its prompt, at a fixed pace. It serves benchmarks of what runs in
front of workers, and tests that kill workers.

    python -m etude.serve.fake_worker --port 0 --gateway URL --words 5,6,7 --end 2

It implements the protocol between workers and the gateway, and also answers `POST
/v1/chat/completions` with a stream at the same pace, for other programs that run in front of
workers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import aiohttp
import msgspec

from etude.core.sampling import Request, Sample, Token, VersionSpan
from etude.serve import process
from etude.serve.worker_protocol import GenerateFrame, GenerateRequest, JoinRequest, WorkerStatus
from etude.store.decoding import decode_msgpack

JSON = b"application/json"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The tokens of an answer and the speed at which they come."""

    words: tuple[int, ...]
    """The tokens that answers are made of."""
    end: int
    """The token that ends them."""
    num_tokens: int
    first_s: float
    """Before the first token."""
    each_s: float
    """Between two tokens."""


def fake_sample(pace: Pace, request: Request) -> Sample:
    """The answer to a request, which is always the same."""
    begin = zlib.crc32(b"%d %d" % (request.seed, len(request.prompt)))
    count = min(pace.num_tokens, request.max_tokens)
    tokens = [pace.words[(begin + 7 * n) % len(pace.words)] for n in range(count)]
    if count == pace.num_tokens:
        tokens[-1] = pace.end
    return Sample(
        tokens=tuple(tokens),
        logprobs=tuple(-(token % 64) / 64 for token in tokens),
        versions=(VersionSpan(0, count),),
        finish_reason="stop" if tokens[-1] == pace.end else "length",
    )


class FakeWorker(asyncio.Protocol):
    """One connection. It uses a bare asyncio protocol, since it must cost less than what is
    measured."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._received[:end])
            length = _content_length(head)
            if len(self._received) < end + 4 + length:
                return
            body = bytes(self._received[end + 4 : end + 4 + length])
            del self._received[: end + 4 + length]
            self._answer(head.split(b" ", 2)[1], body)

    def _answer(self, path: bytes, body: bytes) -> None:
        match path:
            case b"/generate":
                asked = decode_msgpack(body, GenerateRequest)
                sample = fake_sample(self._pace, asked.request)
                if asked.stream:
                    self._stream(
                        b"application/msgpack",
                        _frames(sample, len(asked.request.begun)),
                    )
                else:
                    whole = msgspec.msgpack.encode(sample)
                    seconds = self._pace.first_s + self._pace.each_s * (len(sample.tokens) - 1)
                    self._loop.call_later(seconds, self._respond, whole, b"application/msgpack")
            case b"/v1/chat/completions":
                self._stream(b"text/event-stream", _chunks(self._pace.num_tokens))
            case b"/load":
                self._respond(body)
            case _:
                status = WorkerStatus(
                    region="fake", version=0, running=0, waiting=0, busy_s=0.0, wall_s=0.0, tokens=0
                )
                self._respond(msgspec.json.encode(status))

    def _respond(self, body: bytes, kind: bytes = JSON) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n"
        self._transport.write(head % (kind, len(body)) + body)

    def _stream(self, kind: bytes, parts: Sequence[bytes]) -> None:
        """Send the parts at the worker's pace; the end goes along with the last part."""
        *parts, last, end = parts
        pieces = [_chunk(part) for part in (*parts, last + end)]
        pieces[0] = CHUNKED % kind + pieces[0]
        pieces[-1] += b"0\r\n\r\n"
        self._send(iter(pieces).__next__, len(pieces), self._pace.first_s)

    def _send(self, take: Callable[[], bytes], left: int, seconds: float) -> None:
        def tick() -> None:
            if not self._transport.is_closing():
                self._transport.write(take())
                if left > 1:
                    self._send(take, left - 1, self._pace.each_s)

        self._loop.call_later(seconds, tick)


def _content_length(head: bytes) -> int:
    found = head.lower().partition(b"content-length:")[2]
    return int(found.partition(b"\r\n")[0]) if found else 0


def _frames(sample: Sample, begun: int) -> list[bytes]:
    pairs = list(zip(sample.tokens, sample.logprobs, strict=True))[begun:]
    frames = [GenerateFrame(token=Token(token, logprob, 0)).packed() for token, logprob in pairs]
    whole = GenerateFrame(sample=sample).packed()
    return [*frames, whole] if frames else [b"", whole]


def _chunks(count: int) -> list[bytes]:
    event = (
        b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"fake",'
        b'"choices":[{"index":0,"delta":{"role":"assistant","content":%b},"finish_reason":%b}]}\n\n'
    )
    words = [event % (b'"word "', b"null")] * (count - 1)
    return [*words, event % (b'""', b'"stop"'), b"data: [DONE]\n\n"]


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def keep_joined(url: str, gateway: str, every_s: float) -> None:
    body = msgspec.json.encode(JoinRequest(url=url, region="fake", version=0))
    timeout = aiohttp.ClientTimeout(total=max(every_s, 1.0))
    async with aiohttp.ClientSession(timeout=timeout) as http:
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with http.post(f"{gateway}/workers", data=body):
                    pass
            await asyncio.sleep(every_s)


async def serve(port: int, gateways: Sequence[str], pace: Pace, join_s: float) -> None:
    listener = process.bind("127.0.0.1", port, None)
    server = await asyncio.get_running_loop().create_server(
        lambda: FakeWorker(pace), sock=listener, backlog=2048
    )
    url = process.url_of(listener)
    print(f"worker at {url}", flush=True)
    async with server, process.meanwhile(*(keep_joined(url, each, join_s) for each in gateways)):
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m etude.serve.fake_worker", description="A worker without a model."
    )
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--gateway", default="", help="gateways to join, comma-separated")
    parser.add_argument("--join-s", type=float, default=1.0, help="seconds between joins")
    parser.add_argument(
        "--words", required=True, help="token ids to make answers of, comma-separated"
    )
    parser.add_argument(
        "--end", type=int, required=True, help="id of the token that ends an answer"
    )
    parser.add_argument("--tokens", type=int, default=8, help="length of an answer")
    parser.add_argument("--first-s", type=float, default=0.0, help="seconds before the first token")
    parser.add_argument("--each-s", type=float, default=0.0, help="seconds between two tokens")
    a = parser.parse_args()
    pace = Pace(
        words=tuple(map(int, a.words.split(","))), end=a.end, num_tokens=a.tokens,
        first_s=a.first_s, each_s=a.each_s,
    )  # fmt: skip
    gateways = [url for url in a.gateway.split(",") if url]
    process.run(lambda: serve(a.port, gateways, pace, a.join_s))


if __name__ == "__main__":
    main()
