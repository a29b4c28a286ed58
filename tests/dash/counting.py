"""A proxy in front of an S3 server that records requests and the sizes of their answers."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass(frozen=True, slots=True)
class Asked:
    kind: str
    """GET, HEAD, PUT, or LIST."""
    key: str
    """Key below the bucket; for a listing, its prefix."""
    bytes: int


@dataclass(slots=True)
class Counter:
    port: int
    asked: list[Asked] = field(default_factory=list)

    def take(self) -> list[Asked]:
        """The requests since the last call."""
        taken, self.asked = self.asked, []
        return taken


@contextlib.contextmanager
def counted(target: int) -> Iterator[Counter]:
    """Run the proxy. `target` is the server's port on loopback."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *told: object) -> None:
            pass

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            far = http.client.HTTPConnection("127.0.0.1", target, timeout=60)
            far.request(self.command, self.path, body, dict(self.headers))
            answer = far.getresponse()
            data = answer.read()
            far.close()
            counter.asked.append(_asked(self.command, self.path, len(data)))
            self.send_response_only(answer.status)
            lengths = {"content-length", "transfer-encoding", "connection"}
            for name, value in answer.getheaders():
                if name.lower() not in lengths or self.command == "HEAD":
                    self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    counter = Counter(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield counter
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _asked(method: str, path: str, size: int) -> Asked:
    parts = urlsplit(path)
    query = parse_qs(parts.query)
    if method == "GET" and "list-type" in query:
        return Asked("LIST", query.get("prefix", [""])[0], size)
    return Asked(method, unquote(parts.path).split("/", 2)[-1], size)
