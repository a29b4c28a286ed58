"""Services of a sandbox: up before the agent, reached by name, gone with the sandbox."""

from __future__ import annotations

from dataclasses import replace

import pytest

from etude.bench._sandbox_database import POSTGRES
from etude.core.errors import EtudeError, RolloutFailure
from etude.core.sandbox import Limits, Sandbox, SandboxSpec, Service
from etude.sandbox.namespaces import NamespaceSandboxPool
from etude.sandbox.process import ProcessSandboxPool
from tests.sandbox.test_isolation import LONG_S, descendants, until

COUNTER = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    count = 0
    def do_GET(self):
        Handler.count += 1
        self.send_response(200); self.end_headers()
        self.wfile.write(f"{os.environ['GREETING']} {Handler.count}".encode())
print("x" * 300_000, flush=True)  # more than a pipe holds
http.server.HTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""
ASK = "import urllib.request; print(urllib.request.urlopen('http://counter:8000').read().decode())"
SERVICE = Service(
    name="counter", argv=("python", "counter.py"), port=8000, env={"GREETING": "hello"}
)
SPEC = SandboxSpec(
    files={"counter.py": COUNTER, "ask.py": ASK},
    services=(SERVICE,),
    limits=Limits(processes=32),
)


async def test_a_check_may_take_longer_than_was_thought(
    walled: NamespaceSandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.sandbox.services._LOOK_TIMEOUT_S", 0.001)
    slow = replace(SERVICE, check=("sh", "-c", "sleep 0.1"), ready_s=LONG_S)
    async with walled.open(replace(SPEC, services=(slow,))) as sandbox:
        assert (await sandbox.run(["true"], timeout_s=LONG_S)).exit_code == 0


async def test_a_service_is_up_and_reached_by_its_name(walled: NamespaceSandboxPool) -> None:
    async with walled.open(SPEC) as sandbox:
        for count in (1, 2):
            ran = await sandbox.run(["python", "ask.py"], timeout_s=LONG_S)
            assert ran.output == f"hello {count}\n"
        names = await sandbox.run(["cat", "/etc/hosts"], timeout_s=LONG_S)
        assert names.output.endswith("127.0.0.1 counter\n") and "localhost" in names.output
        # a fork has its own service, which has counted nothing yet
        fork = await sandbox.fork()
        assert (await fork.run(["python", "ask.py"], timeout_s=LONG_S)).output == "hello 1\n"
        await fork.close()
        assert (await sandbox.run(["python", "ask.py"], timeout_s=LONG_S)).output == "hello 3\n"
        # once an agent's work is taken for grading, its services are gone
        assert await sandbox.patch() == {}
        gone = await sandbox.run(["python", "ask.py"], timeout_s=LONG_S)
        assert "Connection refused" in gone.output
    async with walled.open(SandboxSpec()) as other:
        assert "counter" not in (await other.run(["cat", "/etc/hosts"], timeout_s=LONG_S)).output
    await until(lambda: not descendants(walled.zygote_pid))


async def test_a_check_of_its_own_and_services_that_need_others(
    walled: NamespaceSandboxPool,
) -> None:
    first = Service(
        name="first",
        argv=("sh", "-c", "sleep 0.2; touch /tmp/up; sleep 1000"),
        check=("test", "-e", "/tmp/up"),
        port=1,
    )
    second = Service(
        name="second",
        argv=("sh", "-c", "test -e /tmp/up && touch /tmp/seen; sleep 1000"),
        check=("test", "-e", "/tmp/seen"),
        port=2,
    )
    async with walled.open(SandboxSpec(services=(first, second))) as sandbox:
        assert (await sandbox.run(["ls", "/tmp"], timeout_s=LONG_S)).output == "seen\nup\n"


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo no such database; exit 3", "service db ended before it was ready; it said: no such"),
        ("echo wait; sleep 1000", "service db was not ready within 0.5 s; it said: wait"),
    ],
)
async def test_one_that_does_not_come_up_says_why_and_leaves_nothing(
    walled: NamespaceSandboxPool, script: str, told: str
) -> None:
    ready_s = 0.5 if "wait" in script else LONG_S
    service = Service(name="db", argv=("sh", "-c", script), port=5432, ready_s=ready_s)
    with pytest.raises(RolloutFailure, match=told):
        async with walled.open(SandboxSpec(services=(service,))):
            pass
    assert walled._sandboxes == set()
    await until(lambda: not descendants(walled.zygote_pid))


async def test_who_cannot_give_services_says_so() -> None:
    with pytest.raises(EtudeError, match="process sandboxes do not support.*: services"):
        async with ProcessSandboxPool().open(SPEC):
            pass
    with pytest.raises(ValueError, match="letters, digits and hyphens"):
        Service(name="a b", argv=("true",), port=1)


@pytest.mark.tiers
async def test_a_database_is_branched(walled: NamespaceSandboxPool) -> None:
    if not POSTGRES.exists():
        pytest.skip("apt install postgresql")
    settings = "-k /tmp -c shared_buffers=16MB -c fsync=off"
    start = f"""
[ -e db ] || {POSTGRES}/initdb -D db -N -A trust > /dev/null
exec {POSTGRES}/postgres -D db {settings}
"""
    psql = (str(POSTGRES / "psql"), "-h", "db", "-U", "user", "-d", "postgres", "-Atqc")
    # the fork is of a working database: its port answers before its log is read
    up = (*psql, "select 1")
    service = Service(name="db", argv=("sh", "db.sh"), port=5432, check=up, ready_s=LONG_S)
    limits = Limits(disk_bytes=256 << 20)

    async def sql(sandbox: Sandbox, text: str) -> str:
        ran = await sandbox.run((*psql, text), timeout_s=LONG_S)
        assert ran.exit_code == 0, ran
        return ran.output.strip()

    spec = SandboxSpec(files={"db.sh": start}, services=(service,), limits=limits)
    async with walled.open(spec) as origin:
        # more than the 16 MiB that a file may have by default
        await sql(origin, "create table t as select n from generate_series(1, 600000) n")
        fork = await origin.fork()
        for number, each in enumerate((origin, fork)):
            await sql(each, f"insert into t values ({-number})")
            assert await sql(each, "select count(*), min(n) from t") == f"600001|{-number}"
        await fork.close()
