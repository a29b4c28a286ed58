"""Boundaries of a sandbox, by tables: hosts, requests, names, addresses, limits and specs."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from etude.core.errors import EtudeError
from etude.core.sandbox import Limits, SandboxSpec, Service
from etude.sandbox import cgroups
from etude.sandbox.cgroups import find, limits
from etude.sandbox.egress import (
    Hosts,
    Passage,
    Refused,
    is_public,
    log_to,
    plain_request,
    resolve,
    server_name,
)
from etude.sandbox.limits import LEAST_MEMORY_BYTES
from etude.sandbox.places import WORK, WORKDIRS
from etude.sandbox.spec import (
    check_env,
    check_machine,
    check_spec,
    from_message,
    given_within_walls,
    opening_tree,
    to_message,
)
from etude.sandbox.tree import FILE, Entry


def test_hosts_have_addresses_of_their_own() -> None:
    hosts = Hosts.parse(["pypi.org", "git.example.org:8080", "pypi.org:8443", "a"])
    assert hosts.places == {"pypi.org": (80, 443, 8443), "git.example.org": (8080,), "a": (80, 443)}
    assert hosts.listeners() == [
        ("pypi.org", "127.0.3.1", 80),
        ("pypi.org", "127.0.3.1", 443),
        ("pypi.org", "127.0.3.1", 8443),
        ("git.example.org", "127.0.3.2", 8080),
        ("a", "127.0.3.3", 80),
        ("a", "127.0.3.3", 443),
    ]
    assert Hosts.parse(["a:1", "b:65535"]).places == {"a": (1,), "b": (65535,)}
    Hosts.parse([f"h{n}" for n in range(60)])
    with pytest.raises(EtudeError, match="61 hosts are too many: at most 60"):
        Hosts.parse([f"h{n}" for n in range(61)])


@pytest.mark.parametrize(
    "name",
    [
        "", "*.org", "-a.org", "a.org-", "PyPI.org", "1.2.3.4", "127.1", "0x7f.1", "::1", "a:b",
        "a:0", "a:65536", "a b", "a/b", "a:80:80",
    ],
)  # fmt: skip
def test_what_is_no_host(name: str) -> None:
    with pytest.raises(EtudeError, match="is not a host"):
        Hosts.parse([name])


def request(line: str = "GET /x HTTP/1.1", *headers: str) -> bytes:
    return "\r\n".join([line, *headers, "", ""]).encode("latin-1")


def test_a_plain_request_is_sent_on_as_the_only_one_of_its_connection() -> None:
    head = request(
        "POST /a?b=c HTTP/1.1", "Host: A.org:80", "X-A: \xe9", "Connection: keep-alive",
        "Proxy-Connection: x", "Keep-Alive: 1", "Upgrade: h2c", "Accept: */*",
    )  # fmt: skip
    line, sent = plain_request(head, "a.org", 80)
    assert line == "POST /a?b=c HTTP/1.1"
    assert sent == request(line, "Host: A.org:80", "X-A: \xe9", "Accept: */*", "Connection: close")
    assert plain_request(request("GET / HTTP/1.0", "host:a.org"), "a.org", 8080)[0]


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (request(), "for no host, not for a.org"),
        (request("GET / HTTP/1.1", "Host: b.org"), "for b.org, not for a.org"),
        (request("GET / HTTP/1.1", "Host: a.org:81"), "for a.org:81, not for a.org"),
        (request("GET / HTTP/1.1", "Host: a.org", "Host: a.org"), "for a.org, a.org, not"),
        (request("GET http://b.org/ HTTP/1.1", "Host: a.org"), "not a plain request"),
        (request("CONNECT a.org:80 HTTP/1.1", "Host: a.org"), "not a plain request"),
        (request("GET / HTTP/2", "Host: a.org"), "not a plain request"),
        (request("GET /\x7f HTTP/1.1", "Host: a.org"), "not a plain request"),
        (request("GET / HTTP/1.1", "Host: a.org", " folded: b.org"), "cannot be read"),
        (request("GET / HTTP/1.1", "Host : a.org"), "cannot be read"),
        (request("GET / HTTP/1.1", "Host: a.org", "X: \0"), "cannot be read"),
        (request("GET / HTTP/1.1", "Host: a.org", "X: " + "x" * (1 << 14)), "too long"),
    ],
)
def test_a_request_for_elsewhere_is_refused(head: bytes, why: str) -> None:
    with pytest.raises(Refused, match=why):
        plain_request(head, "a.org", 80)


def test_a_head_may_be_as_long_as_it_may_be() -> None:
    short = request("GET / HTTP/1.1", "Host: a.org", "X: ")
    filling = "x" * ((1 << 14) - len(short))
    plain_request(request("GET / HTTP/1.1", "Host: a.org", f"X: {filling}"), "a.org", 80)
    with pytest.raises(Refused):
        plain_request(request("GET / HTTP/1.1", "Host: a.org", f"X: {filling}x"), "a.org", 80)


def sized(data: bytes, width: int, more: int = 0) -> bytes:
    return (len(data) + more).to_bytes(width) + data


def hello(
    *names: bytes, kind: int = 1, behind: bytes = b"", after: bytes = b"", more: int = 0,
    others: bytes = b"", beyond: bytes = b"",
) -> bytes:  # fmt: skip
    """A TLS 1.2 client hello, with an extension before the names and one after them."""
    extensions = b"\x00\x0b" + sized(b"\x01\x00", 2)
    for name in names:
        entries = b"\x00" + sized(name, 2) + others
        extensions += b"\x00\x00" + sized(sized(entries, 2) + beyond, 2)
    extensions += b"\x00\x17" + sized(b"", 2)
    body = b"\x03\x03" + bytes(32) + sized(b"s" * 7, 1) + sized(b"\x13\x01", 2) + sized(b"\x00", 1)
    body += sized(extensions, 2) + behind
    return bytes([kind]) + sized(body, 3, more) + after


def test_the_name_that_tls_asks_for() -> None:
    assert server_name(hello(b"pypi.org")) == "pypi.org"
    for other in (
        hello(),
        hello(b"a.org", b"b.org"),
        hello(b"a.org", b"a.org"),
        hello(b"a.org", kind=2),
        hello(b"a.org", behind=b"x"),
        hello(b"a.org", after=b"x"),
        hello(b"a.org", more=1),
        hello(b"a.org", others=b"\x00" + sized(b"b.org", 2)),
        hello(b"a.org", beyond=b"x"),
        hello(b"\xff.org"),
    ):
        assert server_name(other) == ""


def test_a_hello_that_is_cut_short_names_nobody() -> None:
    whole = hello(b"pypi.org")
    for size in range(1, len(whole)):
        assert server_name(whole[:size]) == ""


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True), ("2606:4700::1111", True), ("10.0.0.1", False), ("127.0.0.1", False),
        ("169.254.169.254", False), ("192.168.1.1", False), ("172.16.0.1", False),
        ("100.64.0.1", False), ("0.0.0.0", False), ("224.0.0.1", False), ("240.0.0.1", False),
        ("255.255.255.255", False), ("::1", False), ("::", False), ("fe80::1%eth0", False),
        ("fc00::1", False), ("fec0::1", False), ("ff02::1", False), ("::ffff:8.8.8.8", True),
        ("::ffff:10.0.0.1", False), ("2002:0808:0808::1", True), ("2002:0a00:0001::1", False),
        ("64:ff9b::8.8.8.8", True), ("64:ff9b::10.0.0.1", False), ("64:ff9b::a9fe:a9fe", False),
    ],
)  # fmt: skip
def test_addresses_of_the_internet(address: str, public: bool) -> None:
    assert is_public(address) is public


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (["8.8.8.8", "1.1.1.1"], ""),
        (["8.8.8.8", "10.0.0.1"], "leads to 10.0.0.1, which is not a public address"),
        (["127.0.0.1"], "leads to 127.0.0.1"),
        ([], "has no address"),
    ],
)
async def test_all_addresses_of_a_host_are_public(
    found: list[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lookup(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in found]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    if why:
        with pytest.raises(Refused, match=why):
            await resolve("a.org", 443)
    else:
        assert await resolve("a.org", 443) == (found[0], 443)


def test_every_request_is_a_line_of_the_log(tmp_path: Path) -> None:
    log = log_to(str(tmp_path / "log"))
    log(Passage(sandbox=3, host="a.org", port=80, asked="GET /", sent_bytes=7, received_bytes=9))
    log(Passage(sandbox=4, host="b.org", port=443, asked="b.org", refused="no", seconds=1.5))
    first, second = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert first.pop("time") > 0 and second["refused"] == "no"
    assert first == {
        "sandbox": 3, "host": "a.org", "port": 80, "asked": "GET /", "refused": "",
        "sent_bytes": 7, "received_bytes": 9, "seconds": 0.0,
    }  # fmt: skip


def test_limits_in_both_generations_of_cgroups() -> None:
    assert limits("v1", 1 << 20, None) == {
        "memory.limit_in_bytes": "1048576", "memory.memsw.limit_in_bytes": "1048576"
    }  # fmt: skip
    assert list(limits("v1", 1, None)) == ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]
    assert limits("v2", 1 << 20, None) == {"memory.max": "1048576", "memory.swap.max": "0"}
    assert limits("v1", None, 1.5) == {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "150000"}
    assert limits("v2", None, 0.5) == {"cpu.max": "50000 100000"}
    assert limits("v1", None, None) == limits("v2", None, None) == {}


V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw"
MEMORY = "31 23 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
CPU = "32 23 0:28 /docker/x /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,cpu,cpuacct"


@pytest.mark.parametrize(
    ("own", "mounts", "found"),
    [
        ("0::/user/a", V2, ("v2", dict.fromkeys(("memory", "cpu"), "/sys/fs/cgroup/user/a"))),
        ("0::/", V2, ("v2", dict.fromkeys(("memory", "cpu"), "/sys/fs/cgroup"))),
        (
            "4:memory:/m\n3:cpu,cpuacct:/docker/x/y:z\n0::/",
            f"{MEMORY}\n{CPU}\n{V2}",
            ("v1", {"memory": "/sys/fs/cgroup/memory/m", "cpu": "/sys/fs/cgroup/cpu/y:z"}),
        ),
        (
            "4:memory:/m\n0::/a",
            f"{MEMORY}\n{CPU}\n{V2}",
            ("v2", dict.fromkeys(("memory", "cpu"), "/sys/fs/cgroup/a")),
        ),
    ],
)
def test_where_cgroups_are(own: str, mounts: str, found: Any) -> None:
    assert find(own, mounts) == found


@pytest.mark.parametrize(
    ("own", "mounts"), [("", V2), ("0::/", ""), ("4:memory:/m", f"{MEMORY}\n{CPU}")]
)
def test_where_there_are_no_cgroups(own: str, mounts: str) -> None:
    with pytest.raises(OSError, match="no cgroup file system"):
        find(own, mounts)


def test_the_cgroup_above_is_taken_where_our_own_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[str, str]] = []
    busy = [16]

    def write(place: str, name: str, value: str) -> None:
        if place == "/a/b" and busy:
            raise OSError(busy[0], "busy")
        written.append((place, value))

    monkeypatch.setattr(cgroups, "_write", write)
    assert cgroups._enable("memory", "/a/b") == "/a" and written == [("/a", "+memory")]
    busy[0] = 13
    with pytest.raises(OSError, match="/a/b: busy"):
        cgroups._enable("memory", "/a/b")
    busy.clear()
    assert cgroups._enable("cpu", "/a/b") == "/a/b"


def test_what_a_backend_does_not_give_is_named() -> None:
    service = Service(name="db", port=5, argv=("postgres",))
    spec = SandboxSpec(
        image="i", services=(service,), network=("a.org",), user="user", env={"A": "b"},
        limits=Limits(cpus=1.0, processes=3),
    )  # fmt: skip
    everything = {"image", "services", "network", "user"}
    check_spec(spec, backend="x", gives=everything, limits={"cpus", "processes"})
    with pytest.raises(
        EtudeError, match="^x sandboxes do not support .* needs: image, network, limits.cpus"
    ):
        check_spec(spec, backend="x", gives={"services", "user"}, limits={"processes"})
    check_spec(SandboxSpec(files={"a": "b"}), backend="x", gives=())
    with pytest.raises(ValueError, match="'A=B' is not a valid name"):
        check_spec(SandboxSpec(env={"A=B": ""}), backend="x", gives=())


@pytest.mark.parametrize(("name", "value"), [("", "x"), ("A=", "x"), ("A\0", "x"), ("A", "\0")])
def test_what_is_no_variable(name: str, value: str) -> None:
    with pytest.raises(ValueError, match="is not a valid name of an environment variable"):
        check_env({name: value})


def test_what_walls_give() -> None:
    assert given_within_walls(SandboxSpec(user="user")) == {"repository", "user", "services"}
    assert given_within_walls(SandboxSpec(user="root")) == {"repository", "services"}
    for place in (WORK, *WORKDIRS):
        assert "workdir" in given_within_walls(SandboxSpec(workdir=place))
    assert "workdir" not in given_within_walls(SandboxSpec(workdir="/nowhere"))
    pictured = Service(name="db", port=5, argv=("x",), image="i")
    assert "services" not in given_within_walls(SandboxSpec(services=(pictured,)))


def test_a_machine_needs_some_memory() -> None:
    for size in (None, LEAST_MEMORY_BYTES):
        spec = SandboxSpec(limits=Limits(memory_bytes=size))
        check_machine(spec, backend="x", limits={"memory_bytes"})
    small = SandboxSpec(limits=Limits(memory_bytes=LEAST_MEMORY_BYTES - 1))
    with pytest.raises(EtudeError, match="memory_bytes must be at least"):
        check_machine(small, backend="x", limits={"memory_bytes"})


async def test_a_spec_is_the_same_on_another_machine() -> None:
    spec = SandboxSpec(
        image="i", files={"a/b": "text", "c": b"\0"}, workdir="/app", network=("a.org",),
        services=(Service(name="db", port=5, argv=("x", "y"), check=("z",)),), env={"A": "b"},
        user="user",
        limits=Limits(cpus=0.5, memory_bytes=1 << 30),
    )  # fmt: skip
    message = json.loads(json.dumps(await to_message(spec, max_bytes=1000, max_entries=9)))
    found = from_message(message)
    for name in ("image", "workdir", "network", "services", "env", "user", "limits"):
        assert getattr(found, name) == getattr(spec, name), name
    assert found.files == {} and found.repository is None
    assert found.tree == {"a/b": Entry(FILE, b"text"), "c": Entry(FILE, b"\0")}
    assert await opening_tree(found, max_bytes=1000, max_entries=9) == found.tree
    for wrong in (
        {},
        message | {"services": 3},
        message | {"limits": {"cups": 1}},
        {**message, "x": 1},
    ):
        with pytest.raises(ValueError, match="not a valid sandbox spec"):
            from_message(wrong)
