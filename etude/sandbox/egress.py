"""Network access of a sandbox to the hosts that its task names, and to nothing else.

Within the sandbox, /etc/hosts gives each of these hosts an address on the loopback interface. The
sockets that listen there were opened by the sandbox's first process and handed to this one, which
forwards every connection, whatever program made it. There is no route to anywhere else, and no name
server.

Names are resolved here, on the host. We connect only to public addresses, never to a private or
link-local one or to this machine's own, whatever a name server answers. The traffic must be for
that host, by the name in the TLS handshake or the header of a plain request. A redirect to
elsewhere leads to a name that the sandbox does not know.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from etude.core.errors import EtudeError

PORTS = (80, 443)
"""Ports of a host that is named without one: plain HTTP, and TLS."""
_CONNECTIONS = 64
"""Most connections of one sandbox at the same time."""
_HOSTS = 60
_CHUNK = 1 << 16
_HEAD_BYTES = 1 << 14
_CONNECT_S = 30.0
_FIRST_BYTES_S = 30.0
_REQUEST = re.compile(r"[A-Za-z-]+ /[^\x00-\x20\x7f]* HTTP/1\.[01]")
_HEADER = re.compile(r"[A-Za-z0-9_-]+:[^\r\n\0]*")
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME = 22, 1, 0

Address = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """One request of a sandbox, for the log."""

    sandbox: int
    host: str
    port: int
    asked: str
    """The request line of a plain request, or the server name of a TLS handshake."""
    refused: str = ""
    """The reason why it was refused; empty: it was let through."""
    sent_bytes: int = 0
    received_bytes: int = 0
    seconds: float = 0.0


Log = Callable[[Passage], None]


def forget(passage: Passage) -> None:
    """A `Log` that keeps nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """Treatment of the requests that a pool's sandboxes make to the network."""

    log: Log = forget
    mirrors: Mapping[str, Address] = field(default_factory=dict)
    """Servers of the user's own that are contacted in place of hosts, such as package indexes as of
    a given day. This is the only way to a private address."""


def log_to(path: str) -> Log:
    """A `Log` that appends one line of JSON per request to a file."""

    def log(passage: Passage) -> None:
        line = json.dumps({"time": time.time(), **asdict(passage)})
        with open(path, "a") as file:
            file.write(f"{line}\n")

    return log


class Refused(Exception):
    """A connection that is not allowed, with the reason."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts that a task names, each with its ports and its address in the sandbox."""

    places: dict[str, tuple[int, ...]]

    @classmethod
    def parse(cls, names: Sequence[str]) -> Hosts:
        """Parse `HOST` or `HOST:PORT`. EtudeError for anything else, and for an address, whose
        meaning cannot be looked up."""
        places: dict[str, tuple[int, ...]] = {}
        for name in names:
            host, _, port = name.partition(":")
            numbers = PORTS if not port else (int(port),) if port.isdigit() else ()
            if (
                not _HOST.fullmatch(host)
                or _is_address(host)
                or not all(0 < n < 65536 for n in numbers)
                or not numbers
            ):
                raise EtudeError(
                    f"network: {name!r} is not a host: give names such as pypi.org or "
                    f"git.example.org:8080, without wildcards"
                )
            places[host] = (*places.get(host, ()), *numbers)
        if len(places) > _HOSTS:
            raise EtudeError(f"network: {len(places)} hosts are too many: at most {_HOSTS}")
        return cls(places)

    def address(self, host: str) -> str:
        """The address of a host within the sandbox."""
        return f"127.0.3.{list(self.places).index(host) + 1}"

    def listeners(self) -> list[tuple[str, str, int]]:
        """Host, address and port of each listening socket."""
        return [
            (host, self.address(host), port)
            for host, ports in self.places.items()
            for port in ports
        ]


class Egress:
    """Forwarder of the connections of one sandbox."""

    def __init__(self, sandbox: int, outside: Outside) -> None:
        self._sandbox = sandbox
        self._outside = outside
        self._servers: list[asyncio.Server] = []
        self._free = _CONNECTIONS

    async def listen(self, host: str, port: int, listener: socket.socket) -> None:
        listener.setblocking(False)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._carry(host, port, reader, writer)

        self._servers.append(await asyncio.start_server(serve, sock=listener))

    def close(self) -> None:
        for server in self._servers:
            server.close()

    async def _carry(
        self, host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        began = time.monotonic()
        asked = ""
        why = ""
        counts = (0, 0)
        if self._free <= 0:
            writer.close()
            return
        self._free -= 1
        try:
            asked, first = await _first_words(reader, host, port)
            address = self._outside.mirrors.get(host) or await resolve(host, port)
            counts = await _exchange(reader, writer, address, first)
        except Refused as e:
            why = str(e)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as e:
            why = f"no connection: {e}"
        finally:
            self._free += 1
            writer.close()
            self._outside.log(
                Passage(
                    sandbox=self._sandbox,
                    host=host,
                    port=port,
                    asked=asked,
                    refused=why,
                    sent_bytes=counts[0],
                    received_bytes=counts[1],
                    seconds=time.monotonic() - began,
                )
            )


async def _first_words(reader: asyncio.StreamReader, host: str, port: int) -> tuple[str, bytes]:
    """The request line or server name, and the bytes read so far. Refused if they are for another
    host."""
    async with asyncio.timeout(_FIRST_BYTES_S):
        first = await reader.readexactly(1)
        if first[0] == _HANDSHAKE:
            head = await reader.readexactly(4)
            body = await reader.readexactly(int.from_bytes(head[2:4]))
            name = server_name(body)
            if name.lower() != host:
                raise Refused(f"TLS asks for {name or 'no name'}, not for {host}")
            return name, first + head + body
        if not first.isalpha():
            raise Refused("neither TLS nor a plain request")
        try:
            rest = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError as e:
            raise Refused("the head of the request is too long") from e
    return plain_request(first + rest, host, port)


def plain_request(head: bytes, host: str, port: int) -> tuple[str, bytes]:
    """The request line, and the head to send on. It closes the connection after this request, so
    that the next one is checked as well."""
    line, *headers = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    if len(head) > _HEAD_BYTES or not all(_HEADER.fullmatch(each) for each in headers):
        raise Refused("the head of the request is too long, or cannot be read")
    pairs = [each.split(":", 1) for each in headers]
    named = [value.strip().lower() for name, value in pairs if name.lower() == "host"]
    if named not in ([host], [f"{host}:{port}"]):
        raise Refused(f"the request is for {', '.join(named) or 'no host'}, not for {host}")
    if not _REQUEST.fullmatch(line):
        raise Refused(f"not a plain request: {line[:100]!r}")
    dropped = ("connection:", "proxy-connection:", "keep-alive:", "upgrade:")
    kept = [each for each in headers if not each.lower().startswith(dropped)]
    sent = "\r\n".join([line, *kept, "Connection: close", "", ""])
    return line, sent.encode("latin-1")


def server_name(hello: bytes) -> str:
    """The host in a TLS client hello; empty if it names none or cannot be parsed. The hello must
    come in one record and name the host once, with no length that is too short or too long for its
    content: otherwise a server could read another name than we do."""
    names = []
    try:
        body, after = _sized(hello[1:], 3)
        _, rest = _sized(body[2 + 32 :], 1)
        _, rest = _sized(rest, 2)
        _, rest = _sized(rest, 1)
        extensions, behind = _sized(rest, 2)
        while extensions:
            kind, (content, extensions) = extensions[:2], _sized(extensions[2:], 2)
            if int.from_bytes(kind) == _SERVER_NAME:
                entries, beyond = _sized(content, 2)
                name, others = _sized(entries[1:], 2)
                names.append(name.decode("ascii") if not (beyond or others) else "")
    except ValueError:
        return ""
    whole = hello[0] == _CLIENT_HELLO and len(names) == 1 and not (after or behind)
    return names[0] if whole else ""


def _sized(data: bytes, width: int) -> tuple[bytes, bytes]:
    """The bytes after a length field of this width, and the rest. ValueError if there are fewer
    bytes than the length says."""
    end = width + int.from_bytes(data[:width])
    if end > len(data):
        raise ValueError("cut short")
    return data[width:end], data[end:]


async def resolve(host: str, port: int) -> Address:
    """A public address of the host. All of its addresses must be public: an answer that mixes both
    kinds is an attack."""
    loop = asyncio.get_running_loop()
    answers = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    found = [str(each[4][0]) for each in answers]
    if bad := [each for each in found if not is_public(each)]:
        raise Refused(f"{host} leads to {bad[0]}, which is not a public address")
    if not found:
        raise Refused(f"{host} has no address")
    return found[0], port


def is_public(address: str) -> bool:
    """True for a public address of the internet that does not contain a private one."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = parsed.ipv4_mapped or parsed.sixtofour or (parsed.teredo or (None, None))[1]
        if parsed in _NAT64:
            inner = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if parsed.is_site_local:
            return False
    return parsed.is_global and not parsed.is_multicast and not parsed.is_reserved


_NAT64 = ipaddress.ip_network("64:ff9b::/96")


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: Address, first: bytes
) -> tuple[int, int]:
    """Forward in both directions. Return the number of bytes that went out and that came back."""
    async with asyncio.timeout(_CONNECT_S):
        back, out = await asyncio.open_connection(*address)
    try:
        out.write(first)
        sent, received = await asyncio.gather(_pump(reader, out), _pump(back, writer))
    finally:
        out.close()
    return sent + len(first), received


async def _pump(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> int:
    count = 0
    with contextlib.suppress(ConnectionError):
        while data := await source.read(_CHUNK):
            count += len(data)
            to.write(data)
            await to.drain()
        if to.can_write_eof():
            to.write_eof()
    return count


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return bool(re.fullmatch(r"[0-9.]+|0x[0-9a-f.x]+", host))  # libc takes these, too
    return True
