"""A branch of a PostgreSQL database, for the benchmark of sandboxes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from etude.core.sandbox import Limits, Sandbox, SandboxPool, SandboxSpec, Service
from etude.sandbox.services import start_services

POSTGRES = Path("/usr/lib/postgresql/15/bin")
SIZE = 375 * 1000 * 1000
_ROWS = 2_500_000
_BRANCHES = 20
_APART_S = 0.05
_LONG_S = 600.0
_SETTINGS = (
    "-c shared_buffers=16MB -c fsync=off -c wal_level=minimal -c max_wal_senders=0 "
    "-c max_wal_size=32MB -k /tmp"
)
_TABLE = f"create table t as select repeat(md5(n::text), 3) x from generate_series(1, {_ROWS}) n"
_FILL = f"""
set -e
{POSTGRES}/initdb -D db -N -A trust > /tmp/said
{POSTGRES}/pg_ctl -D db -w -l /tmp/log -o "{_SETTINGS}" start > /tmp/said
{POSTGRES}/psql -h /tmp -U user -qc "{_TABLE}" postgres
{POSTGRES}/pg_ctl -D db -w -m fast stop > /tmp/said
du -sb db
"""
_PSQL = (str(POSTGRES / "psql"), "-h", "/tmp", "-U", "user", "-Atqc")
_SERVER = Service(
    name="db",
    argv=(str(POSTGRES / "postgres"), "-D", "db", *_SETTINGS.split()),
    port=5432,
    check=(*_PSQL, "select 1", "postgres"),
)
_ROW = (*_PSQL, "select x from t where ctid = '(1000,1)'", "postgres")


async def branched(pool: SandboxPool) -> dict[str, list[float]]:
    """Seconds from the request for a fork of a working copy with a database until the fork's own
    server answers, and until it has returned a row of the large table, several times each. Empty if
    PostgreSQL is not installed."""
    if not POSTGRES.exists():
        return {}
    async with pool.open(SandboxSpec(limits=Limits(disk_bytes=3 * SIZE))) as source:
        filled = await source.run(["sh", "-c", _FILL], timeout_s=_LONG_S)
        assert int(filled.output.split()[0]) >= SIZE, filled.output
        times = [await _branch(source) for _ in range(_BRANCHES)]
    up, row = zip(*times, strict=True)
    return {"branch_postgres": sorted(up), "branch_postgres_row": sorted(row)}


async def _branch(source: Sandbox) -> tuple[float, float]:
    await asyncio.sleep(_APART_S)
    began = time.perf_counter()
    fork = await source.fork()
    try:
        reading = await start_services(fork, [_SERVER])
        up = time.perf_counter() - began
        row = await fork.run(_ROW, timeout_s=_LONG_S)
        assert row.exit_code == 0, row
        given = time.perf_counter() - began
    finally:
        await fork.close()
    for task in reading:
        task.cancel()
    return up, given
