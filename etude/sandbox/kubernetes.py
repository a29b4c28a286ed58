"""Sandboxes of a Kubernetes cluster that has agent-sandbox (agents.x-k8s.io).

Only documented features of both are used: a `Sandbox` is created, watched until it is ready, kept
alive by moving its `shutdownTime`, and deleted; in its pod, one process is started by `exec`, over
a WebSocket. That process receives its program at the beginning of its input, and serves a sandbox
in namespaces (`nested`), with everything that pods lack: `diff`, `patch`, a report, a fork of
files.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import aiohttp

from etude.core.errors import EtudeError, RolloutFailure
from etude.core.sandbox import SandboxSpec
from etude.sandbox.cluster import Cluster, find_cluster
from etude.sandbox.guest import GUEST_ID
from etude.sandbox.host import LEASE_S
from etude.sandbox.limits import MIB
from etude.sandbox.link import REPLY_TIMEOUT_S
from etude.sandbox.nested_caller import (
    NestedCaller,
    limits_within,
    machine_bytes,
    machine_name,
    python_arguments,
)
from etude.sandbox.service import FULL_S, PROGRAM, Send, ServiceMachine, ServicePool
from etude.sandbox.spec import check_machine

API = "agents.x-k8s.io/v1beta1"
INSTALL = (
    "kubectl apply -f https://github.com/kubernetes-sigs/agent-sandbox/releases/download/v0.5.6/"
    "sandbox.yaml"
)
IMAGE = "python:3.12-slim"
"""The image of sandboxes that name none."""
_LIMITS = ("cpus", "memory_bytes", "disk_bytes", "processes")
_CONTAINER = "sandbox"
_PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
_STDIN, _STDOUT, _STDERR, _STATUS = range(4)
"""The channels of a message, in its first byte."""
_AGAIN_S = 0.1
_WAITING = ["python3", "-c", "import signal as s; s.signal(s.SIGCHLD, s.SIG_IGN); s.pause()"]
"""The command of a pod: it waits, and reaps what the process that is started in the pod leaves
behind."""
_WALLS = {
    "runAsUser": GUEST_ID,
    "runAsGroup": GUEST_ID,
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
    # The defaults would keep a process from making namespaces. Our own filter, which refuses more,
    # is installed before every command instead.
    "seccompProfile": {"type": "Unconfined"},
    "appArmorProfile": {"type": "Unconfined"},
    "procMount": "Unmasked",
}
_PLACES = {PROGRAM.rpartition("/")[0]: 4 * MIB, "/tmp": 4 * MIB}
"""The writable folders of a pod and their sizes; a working copy has memory of its own."""


class KubernetesSandboxPool(ServicePool):
    """A sandbox pool (`core.sandbox.SandboxPool`) in pods of a Kubernetes cluster."""

    def __init__(
        self, reply_timeout_s: float = REPLY_TIMEOUT_S, cluster: Cluster | None = None
    ) -> None:
        """Raises EtudeError if no cluster is known, or if it does not answer or has no
        agent-sandbox."""
        self.cluster = cluster or find_cluster()
        self._ahead_s = check_cluster(self.cluster)
        self.connection = self.cluster.connection()
        super().__init__("kubernetes", reply_timeout_s)

    def check(self, spec: SandboxSpec) -> None:
        check_machine(spec, backend="kubernetes", limits=_LIMITS, gives={"image"})

    def machine(self, spec: SandboxSpec) -> NestedCaller:
        return _Sandbox(self, spec)

    def inner(self, spec: SandboxSpec) -> SandboxSpec:
        return replace(spec, image="", limits=limits_within(spec.limits))

    def lease_end(self) -> str:
        """The end of a lease that begins now, by the cluster's clock."""
        end = datetime.fromtimestamp(time.time() + self._ahead_s + LEASE_S, UTC)
        return end.strftime("%Y-%m-%dT%H:%M:%SZ")

    async def api(self, method: str, path: str, **more: Any) -> Any:
        headers = {**self.cluster.headers(), **more.pop("headers", {})}
        return await self.ask(method, self.cluster.url + path, headers, **self.connection, **more)


def check_cluster(cluster: Cluster) -> float:
    """Seconds by which the cluster's clock is ahead of ours. Raises EtudeError if the cluster has
    no agent-sandbox."""
    found, its_time = cluster.look(f"/apis/{API}")
    if "sandboxes" not in {each["name"] for each in (found or {}).get("resources", ())}:
        raise EtudeError(
            f"the cluster {cluster.url} does not have agent-sandbox ({API}), which isolation "
            f"kubernetes needs: {INSTALL}"
        )
    return its_time - time.time()


def manifest(name: str, spec: SandboxSpec, *, lease_end: str) -> dict[str, Any]:
    """The Sandbox resource in which a sandbox of ours runs."""
    limits = {"memory": str(machine_bytes(spec.limits))}
    if spec.limits.cpus is not None:
        limits["cpu"] = f"{spec.limits.cpus:.3f}"
    places = {f"place-{number}": each for number, each in enumerate(_PLACES.items())}
    pod = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostUsers": False,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "containers": [
            {
                "name": _CONTAINER,
                "image": spec.image or IMAGE,
                "command": _WAITING,
                "resources": {"limits": limits},
                "securityContext": _WALLS,
                "volumeMounts": [
                    {"name": place, "mountPath": path} for place, (path, _) in places.items()
                ],
            }
        ],
        "volumes": [
            {"name": place, "emptyDir": {"medium": "Memory", "sizeLimit": str(size)}}
            for place, (_, size) in places.items()
        ],
    }
    return {
        "apiVersion": API,
        "kind": "Sandbox",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/managed-by": "etude"}},
        "spec": {
            "podTemplate": {"spec": pod},
            "shutdownTime": lease_end,
            "shutdownPolicy": "Delete",
        },
    }


def is_ready(sandbox: Mapping[str, Any]) -> bool:
    """True if processes can be started in it. RolloutFailure if they never will be."""
    found = {each["type"]: each for each in sandbox.get("status", {}).get("conditions", ())}
    if found.get("Finished", {}).get("status") == "True":
        raise RolloutFailure(f"sandbox: its pod has ended: {conditions(sandbox)}")
    return bool(found.get("Ready", {}).get("status") == "True")


def conditions(sandbox: Mapping[str, Any]) -> str:
    """The conditions that the cluster reports for a sandbox that is not ready."""
    said = sandbox.get("status", {}).get("conditions", ())
    texts = [f"{each['reason']}: {each.get('message', '')}" for each in said]
    return "; ".join(texts) or "no controller has processed it"


class _Sandbox(ServiceMachine):
    """One Sandbox of the cluster, and the process in its pod."""

    def __init__(self, pool: KubernetesSandboxPool, spec: SandboxSpec) -> None:
        super().__init__(pool, spec)
        self._cluster_pool = pool
        self._name = machine_name()
        namespace = pool.cluster.namespace
        self._all = f"/apis/{API}/namespaces/{namespace}/sandboxes"
        self._pod = f"/api/v1/namespaces/{namespace}/pods/{self._name}"
        self._asked = False
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def create(self) -> None:
        self._asked = True
        made = manifest(self._name, self._spec, lease_end=self._cluster_pool.lease_end())
        await self._cluster_pool.api("POST", self._all, json=made)

    async def renew(self) -> None:
        change = {"spec": {"shutdownTime": self._cluster_pool.lease_end()}}
        headers = {"Content-Type": "application/merge-patch+json"}
        path = f"{self._all}/{self._name}"
        await self._cluster_pool.api("PATCH", path, data=json.dumps(change), headers=headers)
        if self._socket is not None:
            with contextlib.suppress(ConnectionError):
                await self._socket.ping()  # or proxies close an idle connection

    async def delete(self) -> None:
        if self._asked:
            await self._cluster_pool.api("DELETE", f"{self._all}/{self._name}")

    async def prepare(self) -> None:
        """Wait for a node, for the image, and for the container."""
        sandbox: dict[str, Any] = {}
        try:
            async with asyncio.timeout(FULL_S):
                while not is_ready(sandbox := await self._watch(sandbox)):
                    await asyncio.sleep(_AGAIN_S)  # a cluster ends each watch after a while
        except TimeoutError as e:
            raise RolloutFailure(
                f"sandbox: it was not ready within {FULL_S:.0f} s: {conditions(sandbox)}; "
                f"{await self._why_the_pod_waits()}"
            ) from e

    async def _watch(self, sandbox: dict[str, Any]) -> dict[str, Any]:
        """The Sandbox resource once it is ready, or its last state when the cluster ended the
        watch."""
        pool = self._cluster_pool
        url = pool.cluster.url + self._all
        which = {"watch": "true", "fieldSelector": f"metadata.name={self._name}"}
        timeout = aiohttp.ClientTimeout(total=None)
        try:
            async with pool.session.get(
                url,
                params=which,
                headers=pool.cluster.headers(),
                timeout=timeout,
                read_bufsize=MIB,
                **pool.connection,
            ) as response:
                if response.status >= 400:
                    said = await response.text()
                    raise RolloutFailure(f"sandbox: {url} returned {response.status}: {said}")
                async for line in response.content:
                    event = json.loads(line)
                    sandbox = event["object"]
                    if event["type"] in ("DELETED", "ERROR"):
                        said = sandbox.get("message") or conditions(sandbox)
                        raise RolloutFailure(f"sandbox: {event['type'].lower()}: {said}")
                    if is_ready(sandbox):
                        break
        except aiohttp.ClientError as e:
            raise RolloutFailure(f"sandbox: {url} does not answer: {e}") from e
        return sandbox

    async def _why_the_pod_waits(self) -> str:
        """The reason why the pod is not ready: the Sandbox does not report an image that does not
        exist."""
        with contextlib.suppress(RolloutFailure):
            pod = await self._cluster_pool.api("GET", self._pod)
            states = [each["state"] for each in pod["status"].get("containerStatuses", ())]
            return f"its containers: {json.dumps(states)}"
        return "it has no pod"

    async def converse(self, started: asyncio.Future[Send]) -> None:
        """Start the process and exchange messages with it, by Kubernetes' protocol of channels."""
        pool = self._cluster_pool
        has_image = bool(self._spec.image)
        told = {"mounts": [], "image": has_image, "probe": False}
        args = python_arguments(PROGRAM, sent_bytes=len(pool.program), **told)
        query = [("command", each) for each in ("python3", *args)]
        query += [(each, "true") for each in ("stdin", "stdout", "stderr")]
        async with pool.session.ws_connect(
            f"{pool.cluster.url}{self._pod}/exec",
            params=[("container", _CONTAINER), *query],
            headers=pool.cluster.headers(),
            protocols=_PROTOCOLS,
            max_msg_size=0,
            **pool.connection,
        ) as socket:

            async def send(data: bytes) -> None:
                await socket.send_bytes(bytes([_STDIN]) + data)

            for start in range(0, len(pool.program), MIB // 4):
                await send(pool.program[start : start + MIB // 4])
            self._socket = socket
            started.set_result(send)
            async for message in socket:
                if message.type is not aiohttp.WSMsgType.BINARY:
                    continue
                channel, data = message.data[0], message.data[1:]
                if channel == _STDOUT:
                    self.hear(data)
                elif channel in (_STDERR, _STATUS):
                    self.hear(errors=data)
