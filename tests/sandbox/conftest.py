from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator

import pytest

from etude.core.errors import EtudeError
from etude.core.sandbox import SandboxPool
from etude.sandbox.cluster import Cluster
from etude.sandbox.container import find_engine
from etude.sandbox.e2b import E2bSandboxPool, E2bService
from etude.sandbox.kubernetes import KubernetesSandboxPool
from etude.sandbox.namespaces import NamespaceSandboxPool
from etude.sandbox.pool import open_sandbox_pool
from etude.sandbox.qemu import missing_packages
from tests.namespaces import need_namespaces
from tests.sandbox import kubernetes_stand_in
from tests.sandbox.e2b_stand_in import KEY, stand_in
from tests.sandbox.hosts import sandbox_host

OTHERS = [
    pytest.param(name, marks=pytest.mark.tiers)
    for name in ("remote", "e2b", "kubernetes", "container", "gvisor", "vm")
]


def need_gvisor() -> None:
    if shutil.which("runsc") is None:
        pytest.skip("runsc is not installed")


def need_container() -> None:
    try:
        find_engine()
    except EtudeError as e:
        pytest.skip(str(e))


def need_vm() -> None:
    if missing := missing_packages():
        pytest.skip(f"apt install {' '.join(missing)}")


@pytest.fixture(scope="session")
def namespaces_host() -> Iterator[str]:
    need_namespaces()
    with sandbox_host("namespaces") as (url, _):
        yield url


@pytest.fixture(scope="session")
def gvisor_host() -> Iterator[str]:
    """Through a host, since opening a pool takes seconds here."""
    need_gvisor()
    with sandbox_host("gvisor") as (url, _):
        yield url


@pytest.fixture(scope="session")
def container_host() -> Iterator[str]:
    need_container()
    with sandbox_host("container") as (url, _):
        yield url


@pytest.fixture(scope="session")
def vm_host() -> Iterator[str]:
    need_vm()
    with sandbox_host("vm") as (url, _):
        yield url


@pytest.fixture(scope="session")
def e2b_url() -> Iterator[str]:
    need_namespaces()
    with stand_in() as (url, _):
        yield url


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    need_namespaces()
    with kubernetes_stand_in.stand_in() as (url, _):
        yield Cluster(
            url=url, namespace=kubernetes_stand_in.NAMESPACE, token=kubernetes_stand_in.TOKEN
        )


@pytest.fixture(params=["namespaces", "process", *OTHERS])
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[SandboxPool]:
    """One pool of each kind: all must behave the same."""
    opened = open_pool(request, request.param)
    yield opened
    await opened.close()


def open_pool(request: pytest.FixtureRequest, kind: str) -> SandboxPool:
    if kind == "remote":
        return open_sandbox_pool("namespaces", hosts=[request.getfixturevalue("namespaces_host")])
    if kind == "e2b":
        url = request.getfixturevalue("e2b_url")
        return E2bSandboxPool(service=E2bService(url, KEY, "", url))
    if kind == "kubernetes":
        return KubernetesSandboxPool(cluster=request.getfixturevalue("cluster"))
    if kind in ("container", "gvisor", "vm"):
        return open_sandbox_pool(kind, hosts=[request.getfixturevalue(f"{kind}_host")])
    if kind == "namespaces":
        need_namespaces()
    return open_sandbox_pool(kind)


@pytest.fixture
async def walled() -> AsyncIterator[NamespaceSandboxPool]:
    need_namespaces()
    opened = NamespaceSandboxPool()
    yield opened
    await opened.close()
