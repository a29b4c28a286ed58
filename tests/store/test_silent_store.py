"""A store that accepts connections and never answers: one error that names it, and soon."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from etude.store.objects import CLIENT, RETRY_S, Objects, Unreachable
from etude.store.runs import Run
from etude.weights.manifest import Chain


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[socket.socket]]:
    """The connections that it has accepted."""
    server = socket.create_server(("127.0.0.1", 0))
    settings = {
        "AWS_ENDPOINT": f"http://127.0.0.1:{server.getsockname()[1]}", "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1", "AWS_SKIP_SIGNATURE": "true", "AWS_READ_TIMEOUT": "100ms",
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("etude.store.objects.RETRY_S", 0.15)
    accepted: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                accepted.append(server.accept()[0])
            except OSError:
                return

    thread = threading.Thread(target=accept)
    thread.start()
    yield accepted
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join()
    for connection in accepted:
        connection.close()


ACTS: dict[str, Callable[[Objects], object]] = {
    "get": lambda objects: objects.get("a"),
    "exists": lambda objects: objects.exists("a"),
    "list": lambda objects: objects.list("a"),
    "put": lambda objects: objects.put("a", b""),
    "create": lambda objects: objects.create("a", b""),
    "delete": lambda objects: objects.delete("a"),
    "config": lambda objects: Run(objects).config(),
    "ledger": lambda objects: Run(objects).ledger.records(),
    "newest": lambda objects: Chain(objects).newest(),
}


@pytest.mark.parametrize("act", ACTS)
def test_a_store_that_never_answers_is_named(asked: list[socket.socket], act: str) -> None:
    with pytest.raises(
        Unreachable,
        match=r"cannot \w+ .* in s3://weights/run: the store does not answer .*; check the",
    ):
        ACTS[act](Objects.open("s3://weights/run"))
    assert 1 <= len(asked) <= 4, "nobody asks again and again on top of the library"


def test_that_takes_tens_of_seconds() -> None:
    assert float(CLIENT["connect_timeout"][:-1]) <= float(CLIENT["read_timeout"][:-1]) <= 30
    assert RETRY_S <= 60
