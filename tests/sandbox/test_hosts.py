"""Sandbox hosts: leases, tokens, and the requests of other programs. `make test-tiers` checks that
their sandboxes behave like all others."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import struct
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from multidict import CIMultiDict

from etude.core.errors import EtudeError, RolloutFailure
from etude.core.sandbox import Limits, Sandbox, SandboxSpec, Service
from etude.sandbox.called import CalledProcess
from etude.sandbox.envd import _parts, envd_routes
from etude.sandbox.fake import FakeSandbox, FakeSandboxPool
from etude.sandbox.host import Full, Leases, SandboxHost
from etude.sandbox.mounts import mount_places
from etude.sandbox.pool import check_tier, open_sandbox_pool
from etude.sandbox.remote import RemoteSandboxPool, _answer
from etude.sandbox.spec import from_message, to_message
from tests.sandbox.hosts import sandbox_host

LONG_S = 60.0
TOKEN = "a token of this host"


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    with sandbox_host("process", token=TOKEN, max_sandboxes=2) as (url, _):
        yield url


@pytest.fixture
async def remote(guarded: str) -> AsyncIterator[RemoteSandboxPool]:
    pool = RemoteSandboxPool([guarded], "process", token=TOKEN)
    yield pool
    await pool.close()


def test_a_lease_ends_unless_it_is_renewed() -> None:
    leases = Leases()
    leases.renew("one", 90.0, 0.0)
    leases.renew("other", 90.0, 0.0)
    leases.renew("one", 90.0, 60.0)
    assert leases.over(89.0) == [] and leases.over(90.0) == ["other"]
    assert leases.left_s("one", 100.0) == 50.0
    leases.end("one")
    assert leases.over(1000.0) == ["other"]


async def test_the_sandboxes_of_a_dead_owner_are_gone_within_two_minutes() -> None:
    now = 0.0
    host = SandboxHost({"fake": FakeSandboxPool()}, max_sandboxes=3, clock=lambda: now)
    kept, left = [await host.open("fake", SandboxSpec()) for _ in range(2)]
    fork = await host.fork(left.name)
    while now < 120.0:
        assert host.renew([kept.name], 90.0) == []
        now += 15.0
        await host.close_abandoned()
    assert [each.name for each in host.all()] == [kept.name]
    assert host.renew([left.name, fork.name], 90.0) == [left.name, fork.name]
    assert not await host.kill(left.name) and await host.kill(kept.name)
    await host.close()


class _BadClosers(FakeSandboxPool):
    """Sandboxes that are hard to close: the first hangs, the second fails, the others close."""

    def __init__(self) -> None:
        super().__init__()
        self._opened = 0

    @contextlib.asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        self._opened += 1
        number = self._opened
        async with super().open(spec) as sandbox:
            yield sandbox
        if number == 1:
            await asyncio.Event().wait()
        if number == 2:
            raise OSError("no such device")


async def test_one_sandbox_that_cannot_be_closed_keeps_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("etude.sandbox.host._LOOK_S", 0.0)
    now = 0.0
    host = SandboxHost({"bad": _BadClosers()}, max_sandboxes=3, clock=lambda: now)
    for seconds in (10.0, 20.0, 30.0):
        await host.open("bad", SandboxSpec(), seconds)
    watching = asyncio.create_task(host.watch())
    for left in (2, 1, 0):
        now += 10.0
        async with asyncio.timeout(LONG_S):
            while len(host) > left:
                assert not watching.done()
                await asyncio.sleep(0)
    await host.open("bad", SandboxSpec())  # the places of the other two are free
    watching.cancel()


async def test_a_lease_is_renewed_again_after_an_answer_that_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = [(429, b"slow down"), (200, b"<html>"), (500, b"{}"), (200, b'{"gone": []}')]

    async def request(_pool: object, *_: object) -> Any:
        return _answer("http://host", *(answers.pop(0) if len(answers) > 1 else answers[0]))

    monkeypatch.setattr("etude.sandbox.remote._RENEW_S", 0.0)
    monkeypatch.setattr(RemoteSandboxPool, "_ask_tier", lambda *_: "process")
    monkeypatch.setattr(RemoteSandboxPool, "_request", request)
    pool = RemoteSandboxPool(["http://host"], "process")
    host = pool._hosts[0]
    pool.adopt(host, "one")
    assert pool._renewing is not None
    async with asyncio.timeout(LONG_S):
        while len(answers) > 1:
            assert not pool._renewing.done()
            await asyncio.sleep(0)
        while pool.owing():
            await asyncio.sleep(0)
    host.names.clear()
    await pool.close()


async def test_a_full_host_has_room_again_when_one_is_gone() -> None:
    host = SandboxHost({"fake": FakeSandboxPool()}, max_sandboxes=2)
    first = await host.open("fake", SandboxSpec())
    await host.fork(first.name)
    for ask in (lambda: host.open("fake", SandboxSpec()), lambda: host.fork(first.name)):
        with pytest.raises(Full):
            await ask()
    await host.kill(first.name)
    await host.open("fake", SandboxSpec())
    await host.close()
    assert len(host) == 0


async def test_a_sandbox_that_comes_after_its_host_was_closed_is_closed() -> None:
    class Slow(FakeSandboxPool):
        @contextlib.asynccontextmanager
        async def open(self, spec: SandboxSpec) -> AsyncIterator[FakeSandbox]:
            async with super().open(spec) as sandbox:
                await host.close()
                yield sandbox
            left.append(sandbox)

    left: list[FakeSandbox] = []
    host = SandboxHost({"fake": Slow()}, max_sandboxes=1)
    with pytest.raises(RolloutFailure, match="this host is closed"):
        await host.open("fake", SandboxSpec())
    assert len(left) == 1 and len(host) == 0


async def test_a_spec_is_the_same_on_the_other_machine() -> None:
    spec = SandboxSpec(
        files={"a": "text", "d/b": b"\xff\0"},
        env={"A": "1"},
        limits=Limits(memory_bytes=1 << 30, cpus=0.5),
        services=(Service(name="db", argv=("sleep", "1"), port=1, check=("true",)),),
        workdir="/app",
    )
    told = json.loads(json.dumps(await to_message(spec, max_bytes=100, max_entries=9)))
    there = from_message(told)
    for part in ("env", "limits", "services", "workdir", "network", "image"):
        assert getattr(there, part) == getattr(spec, part)
    assert {path: entry.content for path, entry in there.tree.items()} == {
        "a": b"text",
        "d/b": b"\xff\0",
    }


@pytest.mark.parametrize(
    "told", [{}, {"tree": {"../x": [0o100644, ""]}}, {"tree": {}, "services": [1]}]
)
def test_what_is_no_spec_is_refused(told: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        from_message(told)


async def test_an_attempt_goes_its_whole_way(remote: RemoteSandboxPool) -> None:
    async with remote.open(SandboxSpec(files={"a": "1\n"})) as sandbox:
        process = await sandbox.start(["sh", "-c", "cat; echo end; exit 3"])
        reading = asyncio.ensure_future(process.read())
        await asyncio.sleep(0)
        reading.cancel()
        await process.write(b"in\n")
        await process.write(b"")
        said = b""
        while data := await process.read():
            said += data
        assert said == b"in\nend\n" and await process.wait() == 3
        await sandbox.write("b", b"\xff")
        assert await sandbox.read_bytes("b") == b"\xff"
        fork = await sandbox.fork()
        assert (await fork.run(["cat", "a"], timeout_s=LONG_S)).output == "1\n"
        assert await fork.patch() == {"b": (0o100644, b"\xff")}
        await fork.close()
        with pytest.raises(RolloutFailure, match="closed"):
            await fork.read("a")
        with pytest.raises(FileNotFoundError):
            await sandbox.read("nothing")


class _Saying:
    """A `called.Caller` of a process that has this output and ends."""

    def __init__(self, *said: bytes) -> None:
        self._said = iter((*said, b""))

    async def call(self, operation: str, working_s: float = 0.0, **told: Any) -> Any:
        await asyncio.sleep(0)
        return base64.b64encode(next(self._said)).decode()


async def test_what_a_process_says_is_read_once_however_many_read() -> None:
    caller: Any = _Saying(b"one", b"two")
    process = CalledProcess(caller, 1)
    assert await asyncio.gather(*(process.read() for _ in range(4))) == [b"one", b"two", b"", b""]


async def test_whoever_asks_a_full_host_waits_for_room(remote: RemoteSandboxPool) -> None:
    async with remote.open(SandboxSpec()) as first, remote.open(SandboxSpec()):
        third = asyncio.ensure_future(remote.open(SandboxSpec()).__aenter__())
        await asyncio.sleep(0.1)
        assert not third.done()
        await first.close()
        await (await asyncio.wait_for(third, LONG_S)).close()


async def test_what_the_host_cannot_give_is_told_by_name(remote: RemoteSandboxPool) -> None:
    with pytest.raises(EtudeError, match="process sandboxes do not support.*: image"):
        async with remote.open(SandboxSpec(image="x")):
            pass


async def test_mounts_that_a_host_does_not_show_are_told_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = f"{tmp_path}:/opt/venvs"
    with sandbox_host("process") as (url, host):
        with pytest.raises(EtudeError, match="have no /opt/venvs.*--mount FOLDER:/opt/venvs"):
            open_sandbox_pool("process", hosts=[url], mounts=[mount])
        monkeypatch.setattr(host, "places", mount_places([mount]))
        await open_sandbox_pool("process", hosts=[url], mounts=[mount]).close()


async def test_a_command_that_nobody_waits_for_is_ended(remote: RemoteSandboxPool) -> None:
    async with remote.open(SandboxSpec()) as sandbox:
        seconds = str(uuid.uuid4().int % 10**9 + 1000)  # other tests have sleeping commands, too
        command = ["sh", "-c", f"echo on > went; exec sleep {seconds}"]
        running = asyncio.ensure_future(sandbox.run(command, timeout_s=LONG_S))
        while "went" not in await sandbox.diff():
            await asyncio.sleep(0.02)
        running.cancel()
        looking = f"ps -o args= -C sleep | grep -c {seconds}"
        while (await sandbox.run(["sh", "-c", looking], timeout_s=LONG_S)).output != "0\n":
            await asyncio.sleep(0.05)


async def test_a_host_that_is_gone_fails_the_attempt() -> None:
    with sandbox_host("process") as (url, _):
        pool = RemoteSandboxPool([url], "process")
        opened = pool.open(SandboxSpec())
        sandbox = await opened.__aenter__()
    with pytest.raises(RolloutFailure):
        await sandbox.run(["true"], timeout_s=1.0)
    await opened.__aexit__(None, None, None)
    await pool.close()
    with pytest.raises(EtudeError, match="no sandbox host answers.*etude sandboxes serve"):
        open_sandbox_pool("process", hosts=[url])


async def test_a_host_holds_the_tier_that_it_holds(remote: RemoteSandboxPool, guarded: str) -> None:
    assert remote.tier == "process"
    with pytest.raises(EtudeError, match="only tier process.*requires namespaces"):
        check_tier(remote, "namespaces")
    with pytest.raises(EtudeError, match="no sandboxes of isolation gvisor, only process"):
        RemoteSandboxPool([guarded], "gvisor", token=TOKEN)


@pytest.mark.parametrize("headers", [{}, {"X-API-Key": "wrong"}, {"X-Access-Token": TOKEN}])
async def test_nobody_comes_in_without_the_token(guarded: str, headers: dict[str, str]) -> None:
    with pytest.raises(EtudeError, match="send this host's token"):
        RemoteSandboxPool([guarded], "process", token=headers.get("X-API-Key"))
    async with aiohttp.ClientSession(headers=headers) as http:
        for path in ("/host", "/sandboxes", "/files?path=a", "/health"):
            assert (await http.get(guarded + path)).status == 401


async def test_a_page_in_a_browser_is_kept_out_where_there_is_no_token() -> None:
    with sandbox_host("process") as (url, _):
        async with aiohttp.ClientSession() as http:
            assert (await http.get(f"{url}/host")).status == 200
            for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
                assert (await http.get(f"{url}/host", headers=headers)).status == 401


async def test_the_token_of_one_sandbox_opens_no_other(guarded: str) -> None:
    async with aiohttp.ClientSession(guarded, headers={"X-API-Key": TOKEN}) as http:
        made = [await (await http.post("/sandboxes", json={})).json() for _ in range(2)]
        mine, other = [each["sandboxID"] for each in made]
        token = [("X-API-Key", ""), ("X-Access-Token", made[0]["envdAccessToken"])]
        for names, status in (([mine], 200), ([other], 401), ([other, mine], 400)):
            sent = CIMultiDict([*token, *(("E2b-Sandbox-Id", name) for name in names)])
            posted = await http.post("/files?path=a", data=b"1", headers=sent)
            assert posted.status == status
        for name in (mine, other):
            assert (await http.delete(f"/sandboxes/{name}")).status == 204


async def test_a_lease_that_is_no_number_opens_nothing(guarded: str) -> None:
    async with aiohttp.ClientSession(guarded, headers={"X-API-Key": TOKEN}) as http:
        for body in (b'{"timeout": NaN}', b'{"timeout": "nan"}'):
            assert (await http.post("/sandboxes", data=body)).status == 400
        assert await (await http.get("/sandboxes")).json() == []


@pytest.mark.parametrize("metadata", ["[1]", '{"a": NaN}', '{"a": {}}', r'{"a": "\ud800"}'])
async def test_metadata_that_no_listing_could_show_opens_nothing(
    guarded: str, metadata: str
) -> None:
    async with aiohttp.ClientSession(guarded, headers={"X-API-Key": TOKEN}) as http:
        body = f'{{"metadata": {metadata}}}'
        assert (await http.post("/sandboxes", data=body)).status == 400
        assert await (await http.get("/sandboxes")).json() == []


async def test_a_body_in_chunks_is_bounded_as_well(
    guarded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.sandbox.host_app.MAX_BODY_BYTES", 100)

    async def chunks() -> AsyncIterator[bytes]:
        yield b'{"timeout": 1, "metadata": {"a": "'
        yield b"x" * 100
        yield b'"}}'

    async with aiohttp.ClientSession(guarded, headers={"X-API-Key": TOKEN}) as http:
        assert (await http.post("/sandboxes", data=chunks())).status == 413
        assert await (await http.get("/sandboxes")).json() == []


async def test_what_the_sdk_of_e2b_does(guarded: str) -> None:
    async with aiohttp.ClientSession(guarded, headers={"X-API-Key": TOKEN}) as http:
        asked = {"templateID": "base", "timeout": 30, "envVars": {"A": "1"}}
        made = await http.post("/v2/sandboxes", json=asked)
        assert made.status == 201
        opened = await made.json()
        name = opened["sandboxID"]
        inside = {"X-API-Key": "", "E2b-Sandbox-Id": name}
        inside["X-Access-Token"] = opened["envdAccessToken"]
        form = aiohttp.FormData()
        form.add_field("file", b"\r\n--x\0", filename="a.bin")
        wrote = await http.post("/files?path=/work/a.bin", data=form, headers=inside)
        assert (await wrote.json())[0]["path"] == "/work/a.bin"
        read = await http.get("/files?path=a.bin", headers=inside)
        assert await read.read() == b"\r\n--x\0"
        # the token opens that sandbox alone, and not the routes that make and end sandboxes
        others = {**inside, "E2b-Sandbox-Id": "0" * 20}
        assert (await http.get("/files?path=a.bin", headers=others)).status == 401
        assert (await http.delete(f"/sandboxes/{name}", headers=inside)).status == 401
        config = {"cmd": "sh", "args": ["-c", "echo $A; exit 3"], "cwd": "/work"}
        started = await http.post(
            "/process.Process/Start", data=_framed({"process": config}), headers=inside
        )
        events = list(_messages(await started.read()))
        assert events[1]["event"]["data"] == {"stdout": "MQo="}
        assert events[2]["event"]["end"]["exitCode"] == 3 and events[3] == {}
        assert (await http.post(f"/sandboxes/{name}/timeout", json={"timeout": 60})).status == 204
        assert [each["sandboxID"] for each in await (await http.get("/v2/sandboxes")).json()] == [
            name
        ]
        assert (await http.delete(f"/sandboxes/{name}")).status == 204
        assert (await http.delete(f"/sandboxes/{name}")).status == 404
        assert (await http.get("/health", headers=inside)).status == 502


@contextlib.asynccontextmanager
async def _inside(url: str) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """A client for the inside of a new sandbox, and its name."""
    async with aiohttp.ClientSession(url, headers={"X-API-Key": TOKEN}) as http:
        made = await http.post("/sandboxes", json={})
        name = (await made.json())["sandboxID"]
        http.headers["E2b-Sandbox-Id"] = name
        try:
            yield http, name
        finally:
            await http.delete(f"/sandboxes/{name}")


async def _next(stream: aiohttp.ClientResponse) -> Any:
    (length,) = struct.unpack(">xI", await stream.content.readexactly(5))
    return json.loads(await stream.content.readexactly(length))


async def test_calls_of_the_sdk_are_posts_and_nothing_else(guarded: str) -> None:
    host: Any = None
    calls = [route.path for route in envd_routes(host) if "." in route.path]
    assert len(calls) == 11
    async with aiohttp.ClientSession(guarded, headers={"X-API-Key": TOKEN}) as http:
        for path in calls:
            assert (await http.get(path)).status == 405


@pytest.mark.parametrize(("kind", "asked"), [("stdout", {}), ("pty", {"pty": {"size": {}}})])
async def test_a_process_is_written_to_listed_and_killed(
    guarded: str, kind: str, asked: dict[str, Any]
) -> None:
    async with _inside(guarded) as (http, _):

        async def tell(call: str, **told: Any) -> Any:
            sent = {"process": {"pid": 1}, **told}
            answer = await http.post(f"/process.Process/{call}", json=sent)
            return answer.status, await answer.json()

        config = {"cmd": "sh", "args": ["-c", "stty -echo; read a; echo $a; exec sleep 1000"]}
        body = _framed({"process": config, **asked})
        started = await http.post("/process.Process/Start", data=body)
        assert await _next(started) == {"event": {"start": {"pid": 1}}}
        assert await tell("List") == (200, {"processes": [{"pid": 1, "config": config}]})
        given = {"stdin" if kind == "stdout" else "pty": base64.b64encode(b"hello\n").decode()}
        assert await tell("SendInput", input=given) == (200, {})
        said = b""
        while b"hello" not in said:
            said += base64.b64decode((await _next(started))["event"]["data"][kind])
        assert (await tell("SendSignal", signal="SIGNAL_SIGHUP"))[0] == 501
        assert await tell("SendSignal", signal="SIGNAL_SIGKILL") == (200, {})
        rest = list(_messages(await started.read()))
        ended = {"exited": False, "exitCode": 137, "status": "signal 9"}
        assert rest[-2:] == [{"event": {"end": ended}}, {}]
        assert await tell("List") == (200, {"processes": []})


async def test_the_processes_of_a_sandbox_are_forgotten_with_it(guarded: str) -> None:
    async with _inside(guarded) as (http, name):
        body = _framed({"process": {"cmd": "sleep", "args": ["1000"]}})
        started = await http.post("/process.Process/Start", data=body)
        await _next(started)
        assert (await http.delete(f"/sandboxes/{name}")).status == 204
        assert (await _next(started))["error"]["code"] == "unavailable"
        await started.read()
        listed = await http.post("/process.Process/List", json={})
        assert await listed.json() == {"processes": []}


async def test_files_are_found_moved_and_removed(guarded: str) -> None:
    async with _inside(guarded) as (http, _):

        async def tell(call: str, **told: Any) -> Any:
            answer = await http.post(f"/filesystem.Filesystem/{call}", json=told)
            return answer.status, await answer.json()

        def entry(path: str, kind: str = "FILE", size: str = "3") -> dict[str, str]:
            name = path.rpartition("/")[2]
            return {"name": name, "path": path, "type": f"FILE_TYPE_{kind}", "size": size}

        status, made = await tell("MakeDir", path="/work/d/e")
        folder = made["entry"]
        assert (status, folder) == (200, entry("/work/d/e", "DIRECTORY", folder["size"]))
        await http.post("/files?path=d/e/a", data=b"123")
        assert await tell("Stat", path="d/e/a") == (200, {"entry": entry("/work/d/e/a")})
        assert await tell("ListDir", path="/work/d/e") == (
            200, {"entries": [entry("/work/d/e/a")]}
        )  # fmt: skip
        _, below = await tell("ListDir", path="/work", depth=3)
        assert [each["path"] for each in below["entries"]] == [
            "/work/d",
            "/work/d/e",
            "/work/d/e/a",
        ]
        moved = await tell("Move", source="/work/d/e/a", destination="/work/b")
        assert moved == (200, {"entry": entry("/work/b")})
        assert await tell("Remove", path="/work/d") == (200, {})
        for call, told in (("Stat", {"path": "d"}), ("Move", {"source": "d", "destination": "e"})):
            status, error = await tell(call, **told)
            assert (status, error["code"]) == (404, "not_found")


def _framed(message: dict[str, Any]) -> bytes:
    data = json.dumps(message).encode()
    return struct.pack(">BI", 0, len(data)) + data


def _messages(stream: bytes) -> Iterator[Any]:
    while stream:
        (length,) = struct.unpack(">xI", stream[:5])
        yield json.loads(stream[5 : 5 + length])
        stream = stream[5 + length :]


def test_files_of_a_form() -> None:
    body = (
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n1\r\n\r\n'
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="d/b"\r\n\r\n\r\n--x--\r\n'
    )
    assert _parts(body, "x") == [("a", b"1\r\n"), ("d/b", b"")]
