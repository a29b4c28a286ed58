"""Network access of a sandbox: only to the hosts of its task, never to private addresses, with
every request in the log."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator

import pytest

from etude.core.errors import EtudeError
from etude.core.sandbox import SandboxSpec
from etude.sandbox.egress import (
    Egress,
    Hosts,
    Outside,
    Passage,
    Refused,
    is_public,
    plain_request,
    server_name,
)
from etude.sandbox.namespaces import NamespaceSandboxPool
from tests.namespaces import need_namespaces

LONG_S = 60.0
ASK = """
import sys, http.client
host, port, name = sys.argv[1], int(sys.argv[2]), sys.argv[3]
try:
    connection = http.client.HTTPConnection(host, port, timeout=30)
    connection.request("GET", "/simple?q=1", headers={"Host": name} if name else {})
    answer = connection.getresponse()
    print(answer.status, answer.read().decode())
except OSError as e: print(type(e).__name__)
except http.client.HTTPException as e: print(type(e).__name__)
"""


class Server:
    """A plain HTTP server on this machine that records its requests."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.port = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.asked.append(head)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
        await writer.drain()
        writer.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    listening = await asyncio.start_server(made.answer, "127.0.0.1", 0)
    made.port = listening.sockets[0].getsockname()[1]
    yield made
    listening.close()


@pytest.fixture
def log() -> list[Passage]:
    return []


@pytest.fixture
async def pool(server: Server, log: list[Passage]) -> AsyncIterator[NamespaceSandboxPool]:
    need_namespaces()
    mirrors = {"index.test": ("127.0.0.1", server.port)}
    opened = NamespaceSandboxPool(outside=Outside(log=log.append, mirrors=mirrors))
    yield opened
    await opened.close()


async def ask(pool: NamespaceSandboxPool, hosts: tuple[str, ...], *argv: str) -> str:
    spec = SandboxSpec(network=hosts, files={"ask.py": ASK})
    async with pool.open(spec) as sandbox:
        return (await sandbox.run(["python", "ask.py", *argv], timeout_s=LONG_S)).output.strip()


async def test_a_host_of_the_task_is_reached_and_no_other(
    pool: NamespaceSandboxPool, server: Server, log: list[Passage]
) -> None:
    hosts = ("index.test",)
    assert await ask(pool, hosts, "index.test", "80", "") == "200 hello"
    assert await ask(pool, hosts, "other.test", "80", "") == "gaierror"
    assert await ask(pool, (), "index.test", "80", "") == "gaierror"
    assert await ask(pool, hosts, "127.0.0.1", str(server.port), "") == "ConnectionRefusedError"
    # traffic to one host does not reach another one behind the same address
    assert await ask(pool, hosts, "index.test", "80", "other.test") != "200 hello"
    assert len(server.asked) == 1 and "Connection: close" in server.asked[0]
    assert [(each.asked, bool(each.refused)) for each in log] == [
        ("GET /simple?q=1 HTTP/1.1", False),
        ("", True),
    ]
    assert log[0].received_bytes > 5


async def test_nobody_listens_for_a_sandbox_that_is_gone(log: list[Passage]) -> None:
    egress, listener = Egress(1, Outside(log=log.append)), socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    await egress.listen("index.test", 80, listener)
    _, writer = await asyncio.open_connection(*address)
    writer.close()
    while not log:
        await asyncio.sleep(0)
    egress.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*address)


async def test_a_name_that_leads_to_a_private_address_leads_nowhere(
    pool: NamespaceSandboxPool,
    server: Server,
    log: list[Passage],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even if the answer contains a public one, too."""
    answers = ["127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "fe80::1"]

    def lookup(host: str, port: int, *args: object, **kwargs: object) -> list[object]:
        number = int(host.partition(".")[0].removeprefix("rebind"))
        found = [("8.8.8.8", port), (answers[number], server.port)]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", each) for each in found]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    names = [f"rebind{number}.test" for number in range(len(answers))]
    spec = SandboxSpec(network=tuple(names), files={"ask.py": ASK})
    async with pool.open(spec) as sandbox:
        for name in names:
            ran = await sandbox.run(["python", "ask.py", name, "80", ""], timeout_s=LONG_S)
            assert ran.output != "200 hello\n"
    assert server.asked == []
    assert [answer in each.refused for answer, each in zip(answers, log, strict=True)] == [True] * 5


def test_what_is_public() -> None:
    assert is_public("8.8.8.8") and is_public("2606:4700::1111")
    for address in (
        "0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.1", "169.254.169.254", "172.16.0.1",
        "192.168.1.1", "198.18.0.1", "224.0.0.1", "255.255.255.255", "::", "::1", "fc00::1",
        "fec0::1", "fe80::1%eth0", "ff02::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254",
        "64:ff9b::7f00:1", "2002:7f00:1::",
    ):  # fmt: skip
        assert not is_public(address), address


@pytest.mark.parametrize(
    "name", ["*.test", "127.0.0.1", "::1", "0x7f.1", "2130706433", "a b", "", "a:0", "a:x", "A.b"]
)
def test_only_names_are_hosts(name: str) -> None:
    with pytest.raises(EtudeError, match="not a host"):
        Hosts.parse([name])


@pytest.mark.parametrize(
    "head",
    [
        "GET / HTTP/1.1\r\nHost: b\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\nHost : b\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\n b\r\n\r\n",
        "GET http://b/ HTTP/1.1\r\nHost: a\r\n\r\n",
        "CONNECT b:443 HTTP/1.1\r\nHost: a\r\n\r\n",
        "GET / HTTP/1.1\r\n\r\n",
        "GET / HTTP/1.1\nHost:b\n\nX:\r\nHost: a\r\n\r\n",
        "GET /\tx HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
)
def test_a_request_for_another_host_is_refused(head: str) -> None:
    with pytest.raises(Refused):
        plain_request(head.encode(), "a", 80)


def test_a_request_is_the_last_of_its_connection() -> None:
    line, sent = plain_request(
        b"GET /x HTTP/1.1\r\nhost: a:80\r\nConnection: keep-alive\r\n\r\n", "a", 80
    )
    assert line == "GET /x HTTP/1.1"
    assert sent == b"GET /x HTTP/1.1\r\nhost: a:80\r\nConnection: close\r\n\r\n"


def test_the_name_that_tls_asks_for_is_read() -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="pypi.org")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    hello = outgoing.read()[5:]
    assert server_name(hello) == "pypi.org"
    for cut in range(len(hello)):  # whatever a client sends, it is parsed without an error
        assert server_name(hello[:cut]) == ""
    # a name that continues in a second record, and one of two
    longer = hello.replace(b"pypi.org", b"pypi.org.evil.example")
    assert server_name(longer) == ""
    begin = hello.index(b"pypi.org") - 9
    twice = _with_extension(hello, hello[begin : begin + 17])
    assert server_name(_with_extension(hello, b"\x7f\x7f\0\0")) == "pypi.org"
    assert server_name(twice) == ""


def _with_extension(hello: bytes, extension: bytes) -> bytes:
    """The same ClientHello with one more extension at its end."""
    at = 4 + 2 + 32
    at += 1 + hello[at]
    at += 2 + int.from_bytes(hello[at : at + 2])
    at += 1 + hello[at]
    body = hello[4:at] + (len(hello) - at - 2 + len(extension)).to_bytes(2)
    body += hello[at + 2 :] + extension
    return hello[:1] + len(body).to_bytes(3) + body
