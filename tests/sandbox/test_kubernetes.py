"""Sandboxes of a cluster with agent-sandbox, and the search for the cluster."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from etude.core.errors import EtudeError, RolloutFailure
from etude.core.sandbox import Limits, SandboxSpec
from etude.core.sandbox_config import SandboxConfig
from etude.sandbox import service
from etude.sandbox.cluster import Cluster, find_cluster
from etude.sandbox.host import LEASE_S
from etude.sandbox.kubernetes import (
    INSTALL,
    KubernetesSandboxPool,
    check_cluster,
    is_ready,
    manifest,
)
from etude.sandbox.pool import open_sandbox_pool
from tests.namespaces import need_namespaces
from tests.sandbox.kubernetes_stand_in import (
    NAMESPACE,
    TOKEN,
    StandIn,
    faults,
    pod_faults,
    stand_in,
)

LONG_S = 60.0
NOON = "2026-01-01T12:00:00Z"
Served = tuple[KubernetesSandboxPool, StandIn]


def cluster_at(url: str) -> Cluster:
    return Cluster(url=url, namespace=NAMESPACE, token=TOKEN)


def kubeconfig(url: str, **user: Any) -> dict[str, Any]:
    return {
        "current-context": "here",
        "contexts": [
            {
                "name": "here",
                "context": {"cluster": "ours", "user": "me", "namespace": NAMESPACE},
            }
        ],
        "clusters": [{"name": "ours", "cluster": {"server": url}}],
        "users": [{"name": "me", "user": user or {"token": TOKEN}}],
    }


def make_certificates(place: Path) -> ssl.SSLContext:
    """Certificates for both ends. Returns the TLS settings of the cluster."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    for name in ("server", "client"):
        files = ["-keyout", str(place / f"{name}.key"), "-out", str(place / f"{name}.crt")]
        argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *files]
        names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:kubernetes"]
        subprocess.run([*argv, *names], check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(place / "server.crt", place / "server.key")
    tls.load_verify_locations(place / "client.crt")
    tls.verify_mode = ssl.CERT_REQUIRED
    return tls


def kubeconfig_with_certificates(place: Path, url: str) -> dict[str, Any]:
    ours = {"client-certificate": "client.crt", "client-key": "client.key"}
    config = kubeconfig(url, token=TOKEN, **ours)
    authority = base64.b64encode((place / "server.crt").read_bytes()).decode()
    config["clusters"][0]["cluster"] |= {
        "certificate-authority-data": authority,
        "tls-server-name": "kubernetes",
    }
    return config


def need_kubectl() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    need_namespaces()
    with stand_in() as (url, cluster):
        pool = KubernetesSandboxPool(cluster=cluster_at(url))
        yield pool, cluster
        await pool.close()
        assert not cluster.pods, "all were deleted"


@pytest.mark.parametrize("protocol", ["v5.channel.k8s.io", "v4.channel.k8s.io"])
async def test_only_what_is_documented_is_asked_for(served: Served, protocol: str) -> None:
    pool, cluster = served
    cluster.protocols = (protocol,)
    cluster.refusals = [429, 403]
    files = {"a": "1\n", "big": "x" * 700_000}
    limits = Limits(memory_bytes=1 << 30, cpus=0.5)
    async with pool.open(SandboxSpec(image="mine:1", files=files, limits=limits)) as sandbox:
        ran = await sandbox.run(["sh", "-c", "cat a; id -u; exit 3"], timeout_s=LONG_S)
        assert (ran.exit_code, ran.output) == (3, "1\n1000\n")
        await sandbox.write("a", "2\n")
        fork = await sandbox.fork()
        assert await fork.patch() == {"a": (0o100644, b"2\n")}
    assert cluster.asked == {
        *("GET v1beta1", "POST sandboxes", "GET sandboxes", "DELETE etude"),
        "GET exec",
    }
    pods = [each["spec"]["podTemplate"]["spec"] for each in cluster.created]
    assert [pod["containers"][0]["image"] for pod in pods] == ["mine:1", "mine:1"]
    held = pods[0]["containers"][0]["resources"]["limits"]
    assert held["cpu"] == "0.500" and int(held["memory"]) > 1 << 30
    assert not pods[0]["automountServiceAccountToken"], "nothing in there knows the cluster"


async def test_nothing_of_an_owner_that_was_killed_remains(tmp_path: Path) -> None:
    need_namespaces()
    script = """
import asyncio
from etude.core.sandbox import SandboxSpec
from etude.sandbox.pool import open_sandbox_pool
async def main():
    async with open_sandbox_pool("kubernetes").open(SandboxSpec()) as sandbox:
        await sandbox.start(["sleep", "1000"])
        print("up", flush=True)
        await asyncio.sleep(1000)
asyncio.run(main())
"""
    with stand_in() as (url, cluster):
        (tmp_path / "config").write_text(json.dumps(kubeconfig(url)))
        env = {**os.environ, "KUBECONFIG": str(tmp_path / "config"), "TMPDIR": str(tmp_path)}
        argv = [sys.executable, "-c", script]
        with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE) as owner:
            assert owner.stdout is not None
            assert await asyncio.to_thread(owner.stdout.readline) == b"up\n"
            owner.send_signal(signal.SIGKILL)
        (pod,) = cluster.pods.values()
        now = datetime.now(UTC)
        cluster.reconcile(now)
        assert cluster.pods, "its lease has not ended"
        cluster.reconcile(now + timedelta(seconds=LEASE_S))
        assert not cluster.pods and pod.process.returncode is not None


async def test_a_lease_is_renewed_by_the_clock_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    need_namespaces()
    monkeypatch.setattr(service, "_RENEW_S", 0.01)
    with stand_in() as (url, cluster):
        cluster.clock_ahead_s = 1e6
        pool = KubernetesSandboxPool(cluster=cluster_at(url))
        async with pool.open(SandboxSpec()) as sandbox:
            (name,) = cluster.pods
            first = cluster.created[0]["spec"]["shutdownTime"]
            cluster.pods[name].manifest["spec"]["shutdownTime"] = ""
            async with asyncio.timeout(LONG_S):
                while not cluster.pods[name].manifest["spec"]["shutdownTime"]:
                    await asyncio.sleep(0.01)
            for end in (first, cluster.pods[name].manifest["spec"]["shutdownTime"]):
                left_s = (datetime.fromisoformat(end) - cluster.now()).total_seconds()
                assert 0 < left_s <= LEASE_S + 2, "however far ours is behind"
            echo = await sandbox.run(["echo", "still there"], timeout_s=LONG_S)
            assert echo.output == "still there\n", "its connection was kept alive, too"
        await pool.close()


async def test_a_pod_that_ends_is_a_failure(served: Served) -> None:
    pool, cluster = served
    async with pool.open(SandboxSpec()) as sandbox:
        waiting = asyncio.create_task(sandbox.run(["sleep", "1000"], timeout_s=LONG_S))
        await sandbox.write("a", "1")
        (pod,) = cluster.pods.values()
        os.kill(pod.first, signal.SIGKILL)
        with pytest.raises(RolloutFailure):
            await waiting


async def test_a_pod_that_never_runs_says_why(served: Served) -> None:
    pool, cluster = served
    cluster.fails = "PodFailed"
    async with asyncio.timeout(LONG_S):
        with pytest.raises(RolloutFailure, match="its pod has ended: PodFailed: Pod failed"):
            async with pool.open(SandboxSpec()):
                pass


async def test_what_the_cluster_refuses_is_told(served: Served) -> None:
    pool, _ = served
    with pytest.raises(RolloutFailure, match="returned 422: .*image"):
        async with pool.open(SandboxSpec(image=7)):  # type: ignore[arg-type]
            pass
    pool.cluster = replace(pool.cluster, token="another")
    with pytest.raises(RolloutFailure, match="returned 401"):
        async with pool.open(SandboxSpec()):
            pass
    pool.cluster = replace(pool.cluster, token=TOKEN)


def test_a_cluster_without_agent_sandbox_is_told_how_to_get_it() -> None:
    with stand_in() as (url, cluster):
        check_cluster(cluster_at(url))
        cluster.installed = False
        with pytest.raises(EtudeError) as refused:
            check_cluster(cluster_at(url))
        assert str(refused.value).endswith(f"isolation kubernetes needs: {INSTALL}")
        with pytest.raises(EtudeError, match="returned 401"):
            check_cluster(replace(cluster_at(url), token="another"))
    with pytest.raises(EtudeError, match="does not answer"):
        check_cluster(cluster_at(url))


def test_the_manifest_is_one_of_the_crd() -> None:
    made = manifest("etude-1", SandboxSpec(limits=Limits(cpus=2)), lease_end=NOON)
    assert faults(made) == [] == pod_faults(made["spec"]["podTemplate"]["spec"])
    assert made["spec"]["shutdownPolicy"] == "Delete", "or the Sandbox would stay"
    pod = made["spec"]["podTemplate"]["spec"]
    # this shows that the checks notice errors
    wrong = {
        "unknown": {**pod, "hostUser": False},
        "no bool": {**pod, "hostUsers": "no"},
        "required": {},
        "none of": {**pod, "restartPolicy": "Sometimes"},
    }
    for word, each in wrong.items():
        (fault,) = faults({**made, "spec": {**made["spec"], "podTemplate": {"spec": each}}})
        assert word in fault
    assert faults({**made, "spec": {**made["spec"], "shutdownTime": "noon"}})
    assert pod_faults({**pod, "hostUsers": True}) and pod_faults({**pod, "volumes": []})


@pytest.mark.k8s
def test_kubernetes_takes_its_pod(tmp_path: Path) -> None:
    made = manifest("etude-1", SandboxSpec(limits=Limits(cpus=2)), lease_end=NOON)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}}
    for number, spec in enumerate((made["spec"]["podTemplate"]["spec"], {"containers": "none"})):
        (tmp_path / "pod.yaml").write_text(json.dumps({**pod, "spec": spec}))
        argv = ["kubernetes-validate", "--strict", str(tmp_path / "pod.yaml")]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == number, done.stdout + done.stderr


def test_readiness() -> None:
    ready = {"type": "Ready", "status": "True", "reason": "DependenciesReady"}
    assert not is_ready({}) and not is_ready({"status": {"conditions": []}})
    assert not is_ready({"status": {"conditions": [{**ready, "status": "False"}]}})
    assert is_ready({"status": {"conditions": [ready]}})


async def test_kubectl_speaks_to_the_stand_in_as_we_do(tmp_path: Path) -> None:
    """This shows that its protocol is that of Kubernetes."""
    need_namespaces()
    need_kubectl()
    with stand_in(make_certificates(tmp_path)) as (url, cluster):
        (tmp_path / "config").write_text(json.dumps(kubeconfig_with_certificates(tmp_path, url)))
        env = {**os.environ, "KUBECONFIG": str(tmp_path / "config"), "HOME": str(tmp_path)}
        pool = KubernetesSandboxPool(cluster=find_cluster(env))
        async with pool.open(SandboxSpec()):
            (name,) = cluster.pods
            argv = ["kubectl", "exec", "--stdin", name, "--", "sh", "-c"]
            ran = await asyncio.to_thread(
                subprocess.run,
                [*argv, "cat; echo bad >&2; exit 3"],
                input=b"there and back",
                capture_output=True,
                env=env,
            )
            assert (ran.stdout, ran.returncode) == (b"there and back", 3), ran.stderr
            assert b"bad" in ran.stderr
        await pool.close()


def test_a_kubeconfig_in_json(tmp_path: Path) -> None:
    config = kubeconfig("https://10.0.0.1:6443/", tokenFile="token")
    config["clusters"][0]["cluster"] |= {
        "certificate-authority": "ca.crt",
        "tls-server-name": "kubernetes",
    }
    (tmp_path / "ca.crt").write_bytes(b"authority")
    (tmp_path / "config").write_text(json.dumps(config))
    found = find_cluster({"KUBECONFIG": str(tmp_path / "config")})
    assert found == Cluster(
        url="https://10.0.0.1:6443",
        namespace=NAMESPACE,
        authority=b"authority",
        server_name="kubernetes",
        token_file=str(tmp_path / "token"),
    )
    for token in ("one", "the next"):
        (tmp_path / "token").write_text(f"{token}\n")
        assert found.headers() == {"Authorization": f"Bearer {token}"}
    with pytest.raises(EtudeError, match=r"the certificates of .* are invalid"):
        found.connection()


@pytest.mark.parametrize(
    ("user", "message"),
    [
        ({"exec": {"command": "aws"}}, "has 'exec', which .*kubectl create token"),
        ({"auth-provider": {"name": "oidc"}}, "has 'auth-provider'"),
        ({"client-certificate": "none", "client-key": "k"}, "client-certificate of the kubeconfig"),
    ],
)
def test_a_kubeconfig_that_asks_for_more(
    tmp_path: Path, user: dict[str, Any], message: str
) -> None:
    (tmp_path / "config").write_text(json.dumps(kubeconfig("https://c", **user)))
    with pytest.raises(EtudeError, match=message):
        find_cluster({"KUBECONFIG": str(tmp_path / "config")})


def test_a_kubeconfig_without_its_context(tmp_path: Path) -> None:
    (tmp_path / ".kube").mkdir()
    config = {**kubeconfig("https://c"), "current-context": "there"}
    (tmp_path / ".kube/config").write_text(json.dumps(config))
    with pytest.raises(EtudeError, match="no context 'there'.*use-context"):
        find_cluster({"HOME": str(tmp_path)})


def test_a_kubeconfig_in_yaml_is_left_to_kubectl(tmp_path: Path) -> None:
    text = f"""
apiVersion: v1
kind: Config
current-context: here
contexts: [{{name: here, context: {{cluster: ours, user: me, namespace: {NAMESPACE}}}}}]
clusters:
- name: ours
  cluster: {{server: "https://10.0.0.1", certificate-authority: ca.crt}}
users:
- name: me
  user: {{token: {TOKEN}}}
"""
    (tmp_path / "ca.crt").write_bytes(b"authority")
    (tmp_path / "config").write_text(text)
    variables = {"KUBECONFIG": str(tmp_path / "config"), "HOME": str(tmp_path)}
    with pytest.raises(
        EtudeError, match="is not JSON, so reading it needs kubectl: install kubectl"
    ):
        find_cluster({**variables, "PATH": "/nowhere"})
    need_kubectl()
    found = find_cluster({**variables, "PATH": os.environ["PATH"]})
    assert found == Cluster(
        url="https://10.0.0.1", namespace=NAMESPACE, authority=b"authority", token=TOKEN
    )
    (tmp_path / "config").write_text("current-context: nowhere")
    with pytest.raises(EtudeError, match="kubectl config view.* failed: "):
        find_cluster({**variables, "PATH": os.environ["PATH"]})


def test_in_a_pod_its_service_account_is_taken(tmp_path: Path) -> None:
    for name, content in (("token", "t"), ("ca.crt", "c"), ("namespace", "mine")):
        (tmp_path / name).write_text(content)
    variables = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    found = find_cluster({**variables, "HOME": str(tmp_path)}, tmp_path)
    assert (found.url, found.namespace) == ("https://[fd00::1]:443", "mine")
    assert (found.authority, found.headers()) == (b"c", {"Authorization": "Bearer t"})
    with pytest.raises(
        EtudeError, match="but .*/.kube/config does not exist.*: export KUBECONFIG=FILE"
    ):
        find_cluster({"HOME": str(tmp_path)}, tmp_path)


async def test_certificates_of_both_ends(tmp_path: Path) -> None:
    need_namespaces()
    with stand_in(make_certificates(tmp_path)) as (url, _):
        (tmp_path / "config").write_text(json.dumps(kubeconfig_with_certificates(tmp_path, url)))
        found = find_cluster({"KUBECONFIG": str(tmp_path / "config")})
        pool = KubernetesSandboxPool(cluster=found)
        async with pool.open(SandboxSpec()) as sandbox:
            assert (await sandbox.run(["echo", "1"], timeout_s=LONG_S)).output == "1\n"
        await pool.close()
        check_cluster(replace(found, authority=b"", insecure=True))
        for changed in ({"identity": b""}, {"authority": b""}, {"server_name": ""}):
            with pytest.raises(EtudeError, match="does not answer"):
                check_cluster(replace(found, **changed))  # type: ignore[arg-type]


def test_what_stands_in_a_runs_file() -> None:
    with pytest.raises(EtudeError, match="put them into the image"):
        open_sandbox_pool("kubernetes", mounts=["/usr"])
    SandboxConfig(isolation="kubernetes", min_isolation="namespaces")
    with pytest.raises(ValueError, match='isolation "kubernetes" is weaker'):
        SandboxConfig(isolation="kubernetes", min_isolation="vm")
