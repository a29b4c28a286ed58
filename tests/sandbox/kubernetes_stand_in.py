"""An API server with only the parts that isolation kubernetes uses: discovery, Sandboxes of
agent-sandbox with their controller, and `exec` over WebSockets. It is written from the CRD of
agent-sandbox and Kubernetes' documentation, not from our client. Its pods are PID and mount
namespaces of this machine, with the user and the rights in their manifests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

from etude.serve import process

TOKEN = "token of an account"
NAMESPACE = "agents"
_SANDBOXES = f"/apis/agents.x-k8s.io/v1beta1/namespaces/{NAMESPACE}/sandboxes"
_POD = f"/api/v1/namespaces/{NAMESPACE}/pods/{{name}}"
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[KMGTPE]i?)?")
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_NAMES: dict[str, Any] = {"labels": {"*": str}, "annotations": {"*": str}}
SCHEMA: dict[str, Any] = {
    "apiVersion!": ("agents.x-k8s.io/v1beta1",),
    "kind!": ("Sandbox",),
    "metadata!": {"name!": _NAME, **_NAMES},
    "spec!": {
        "operatingMode": ("Running", "Suspended"),
        "service": bool,
        "shutdownPolicy": ("Delete", "Retain"),
        "shutdownTime": re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"),
        "podTemplate!": {
            "metadata": _NAMES,
            "spec!": {
                "automountServiceAccountToken": bool,
                "enableServiceLinks": bool,
                "hostUsers": bool,
                "restartPolicy": ("Always", "OnFailure", "Never"),
                "runtimeClassName": _NAME,
                "terminationGracePeriodSeconds": int,
                "containers!": [
                    {
                        "name!": _NAME,
                        "image": str,
                        "command": [str],
                        "args": [str],
                        "workingDir": str,
                        "resources": {"limits": {"*": _QUANTITY}, "requests": {"*": _QUANTITY}},
                        "securityContext": {
                            "allowPrivilegeEscalation": bool,
                            "appArmorProfile": {"type!": ("RuntimeDefault", "Unconfined")},
                            "capabilities": {"add": [str], "drop": [str]},
                            "privileged": bool,
                            "procMount": ("Default", "Unmasked"),
                            "readOnlyRootFilesystem": bool,
                            "runAsGroup": int,
                            "runAsNonRoot": bool,
                            "runAsUser": int,
                            "seccompProfile": {"type!": ("RuntimeDefault", "Unconfined")},
                        },
                        "volumeMounts": [
                            {"name!": _NAME, "mountPath!": re.compile(r"/[^:]*"), "readOnly": bool}
                        ],
                    }
                ],
                "volumes": [
                    {
                        "name!": _NAME,
                        "emptyDir": {"medium": ("", "Memory"), "sizeLimit": _QUANTITY},
                    }
                ],
            },
        },
    },
}
"""The allowed part of the CRD; `!`: required."""
_POD_KIND = {"name": "pods", "singularName": "pod", "kind": "Pod", "namespaced": True}
_DISCOVERY: dict[str, dict[str, Any]] = {
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"apiVersion": "v1", "kind": "APIGroupList", "groups": []},
    "/api/v1": {
        **{"kind": "APIResourceList", "groupVersion": "v1"},
        "resources": [{**_POD_KIND, "verbs": ["get"]}],
    },
}
"""The objects that kubectl reads first."""
_SHELL = """
if [ ! -e /usr/"${PREFIX#/usr/}" ]; then  # our Python may be where only its owner may look
  mount --bind "$PREFIX" /mnt; mount -t tmpfs -o mode=755 e /"$(echo $PREFIX | cut -d/ -f2)"
  mkdir -p "$PREFIX"; mount --bind /mnt "$PREFIX"; umount /mnt
fi
mount -t tmpfs e /run; mkdir /run/etude
while [ "$1" != -- ]; do mount -t tmpfs -o mode=777,size="$2" e "$1"; shift 2; done
shift; echo ready; exec "$@"
"""
"""Becomes the first process of a pod."""


def faults(value: Any, schema: Any = SCHEMA, at: str = "") -> list[str]:
    """Errors that an API server finds under `fieldValidation=Strict`."""
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return [f"{at} is no object"]
        if "*" in schema:
            return [each for name in value for each in faults(value[name], schema["*"], at)]
        known = {name.rstrip("!"): part for name, part in schema.items()}
        missing = [name[:-1] for name in schema if name.endswith("!") and name[:-1] not in value]
        found = [f"{at}.{name} is required" for name in missing]
        found += [f"{at}.{name} is unknown" for name in value if name not in known]
        common = [name for name in value if name in known]
        return found + [
            each for name in common for each in faults(value[name], known[name], f"{at}.{name}")
        ]
    if isinstance(schema, list):
        if not isinstance(value, list):
            return [f"{at} is no list"]
        return [each for one in value for each in faults(one, schema[0], f"{at}[]")]
    if isinstance(schema, tuple):
        return [] if value in schema else [f"{at}: {value!r} is none of {schema}"]
    if isinstance(schema, re.Pattern):
        good = isinstance(value, str) and schema.fullmatch(value)
        return [] if good else [f"{at}: {value!r} does not match {schema.pattern}"]
    return [] if type(value) is schema else [f"{at}: {value!r} is no {schema.__name__}"]


def pod_faults(pod: dict[str, Any]) -> list[str]:
    """Errors that the validation of pods finds in addition to those of their schema."""
    found = []
    volumes = {each["name"] for each in pod.get("volumes", ())}
    for container in pod["containers"]:
        context = container.get("securityContext", {})
        if context.get("procMount") == "Unmasked" and pod.get("hostUsers", True):
            found.append("procMount: hostUsers must be false to use `Unmasked`")
        mounts = container.get("volumeMounts", ())
        found += [f"no volume {each['name']}" for each in mounts if each["name"] not in volumes]
        if len({each["mountPath"] for each in mounts}) < len(mounts):
            found.append("mountPath must be unique")
    return found


@dataclass
class Pod:
    """A Sandbox, and the first process of its pod."""

    manifest: dict[str, Any]
    process: subprocess.Popen[bytes]
    watched: int = 0
    ready: bool = False

    @property
    def container(self) -> dict[str, Any]:
        found: dict[str, Any] = self.manifest["spec"]["podTemplate"]["spec"]["containers"][0]
        return found

    def is_up(self) -> bool:
        assert self.process.stdout is not None
        return self.process.stdout.readline() == b"ready\n"

    @property
    def first(self) -> int:
        """PID on this machine of the pod's process 1."""
        pid = self.process.pid
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(child)


@dataclass
class StandIn:
    """State of the server, and the requests that it received."""

    protocols: tuple[str, ...] = ("v5.channel.k8s.io", "v4.channel.k8s.io")
    installed: bool = True
    pods: dict[str, Pod] = field(default_factory=dict)
    created: list[dict[str, Any]] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)
    renewed: dict[str, int] = field(default_factory=dict)
    refusals: list[int] = field(default_factory=list)
    """Statuses with which the next Sandboxes are refused."""
    fails: str = ""
    """The reason for which pods end at once."""
    clock_ahead_s: float = 0.0

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.on_response_prepare.append(self._tell_time)
        app.add_routes(
            [
                web.get("/apis/agents.x-k8s.io/v1beta1", self.discover),
                web.post(_SANDBOXES, self.create),
                web.get(_SANDBOXES, self.watch),
                web.patch(f"{_SANDBOXES}/{{name}}", self.patch),
                web.delete(f"{_SANDBOXES}/{{name}}", self.delete),
                *(web.get(path, self.discover_more) for path in _DISCOVERY),
                web.get(_POD, self.pod),
                web.get(f"{_POD}/exec", self.execute),
            ]
        )
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return status(401, "Unauthorized")
        self.asked.add(f"{request.method} {request.path.rpartition('/')[2].split('-')[0]}")
        response: web.StreamResponse = await handler(request)
        return response

    def now(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self.clock_ahead_s)

    async def _tell_time(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Date"] = self.now().strftime("%a, %d %b %Y %H:%M:%S GMT")

    async def discover(self, request: web.Request) -> web.Response:
        if not self.installed:
            return status(404, "404 page not found")
        found = [{"name": "sandboxes", "kind": "Sandbox", "namespaced": True}]
        return web.json_response({"kind": "APIResourceList", "resources": found})

    async def discover_more(self, request: web.Request) -> web.Response:
        return web.json_response(_DISCOVERY[request.path])

    async def create(self, request: web.Request) -> web.Response:
        if self.refusals:
            return status(self.refusals.pop(), "exceeded quota: pods, used: 8, limited: 8")
        told = await request.json()
        wrong = faults(told) or pod_faults(told["spec"]["podTemplate"]["spec"])
        if wrong:
            return status(422, f"Sandbox is invalid: {wrong}")
        name = told["metadata"]["name"]
        if name in self.pods:
            return status(409, f"{name} already exists")
        self.created.append(told)
        self.pods[name] = pod = Pod(told, _start(told["spec"]["podTemplate"]["spec"]))
        assert await asyncio.to_thread(pod.is_up)
        return web.json_response(told, status=201)

    async def watch(self, request: web.Request) -> web.StreamResponse:
        """The first watch ends before the Sandbox is ready, as happens now and then."""
        assert request.query["watch"] == "true"
        name = request.query["fieldSelector"].removeprefix("metadata.name=")
        pod = self.pods[name]
        pod.watched += 1
        response = web.StreamResponse()
        await response.prepare(request)
        pending = _condition("Ready", "False", "DependenciesNotReady", "Pod does not exist")
        await response.write(_event("ADDED", pod, [pending] if pod.watched > 1 else None))
        if self.fails:
            ended = _condition("Finished", "True", self.fails, "Pod failed")
            await response.write(_event("MODIFIED", pod, [ended]))
        elif pod.watched > 1:
            ready = _condition("Ready", "True", "DependenciesReady", "Pod is Ready")
            pod.ready = True
            await response.write(_event("MODIFIED", pod, [ready]))
        return response

    async def patch(self, request: web.Request) -> web.Response:
        assert request.content_type == "application/merge-patch+json"
        told = await request.json()
        assert not faults(told["spec"], {"shutdownTime": SCHEMA["spec!"]["shutdownTime"]})
        name = request.match_info["name"]
        self.pods[name].manifest["spec"] |= told["spec"]
        self.renewed[name] = self.renewed.get(name, 0) + 1
        return web.json_response(self.pods[name].manifest)

    async def delete(self, request: web.Request) -> web.Response:
        if (name := request.match_info["name"]) not in self.pods:
            return status(404, f"there is no {name}")
        await asyncio.to_thread(self.end, name)
        return status(200, "deleted")

    def end(self, name: str) -> None:
        """When the first process of a pod is killed, all others end before its parent notices."""
        pod = self.pods.pop(name)
        with contextlib.suppress(OSError, ValueError):  # it has ended
            os.kill(pod.first, signal.SIGKILL)
        pod.process.wait()
        assert pod.process.stdout is not None
        pod.process.stdout.close()

    def reconcile(self, now: datetime) -> None:
        """The work of the controller at this time: delete Sandboxes past their end."""
        for name, pod in list(self.pods.items()):
            spec = pod.manifest["spec"]
            if (end := spec.get("shutdownTime")) and now >= datetime.fromisoformat(end):
                assert spec["shutdownPolicy"] == "Delete"
                self.end(name)

    async def pod(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self.pods:
            return status(404, f'pods "{name}" not found')
        spec = self.pods[name].manifest["spec"]["podTemplate"]["spec"]
        meta = {"name": name, "namespace": NAMESPACE}
        told = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
        return web.json_response({**told, "status": {"phase": "Running"}})

    async def execute(self, request: web.Request) -> web.StreamResponse:
        """Channels: 0 is the input, 1 the output, 2 the errors, 3 the exit status; from v5 on, 255
        closes the channel that it names."""
        pod = self.pods[request.match_info["name"]]
        if not pod.ready:
            return status(500, "unable to upgrade connection: container not found")
        socket = web.WebSocketResponse(protocols=self.protocols, max_msg_size=0)
        assert socket.can_prepare(request).protocol in self.protocols
        await socket.prepare(request)
        assert request.query["container"] == pod.container["name"]
        wanted = [name in request.query for name in ("stdin", "stdout", "stderr")]
        started = await asyncio.create_subprocess_exec(
            *_inside(pod, request.query.getall("command")),
            **dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE),
            env=_environment(),
        )
        for channel in (1, 2):
            await socket.send_bytes(bytes([channel]))
        reading = asyncio.create_task(_take_input(socket, started))
        assert started.stdout is not None and started.stderr is not None
        streams = ((1, started.stdout), (2, started.stderr))
        await asyncio.gather(*(_copy(socket, *each) for each in streams if wanted[each[0]]))
        await socket.send_bytes(b"\x03" + json.dumps(_ended(await started.wait())).encode())
        await socket.close()
        reading.cancel()
        return socket


async def _take_input(socket: web.WebSocketResponse, started: asyncio.subprocess.Process) -> None:
    assert started.stdin is not None
    async for message in socket:
        if message.type is WSMsgType.BINARY and message.data[0] == 0:
            with contextlib.suppress(ConnectionError):
                started.stdin.write(message.data[1:])
                await started.stdin.drain()
        elif message.type is WSMsgType.BINARY and message.data == b"\xff\x00":
            assert socket.ws_protocol == "v5.channel.k8s.io"
            started.stdin.close()
    started.stdin.close()  # the client is gone


async def _copy(socket: web.WebSocketResponse, channel: int, stream: asyncio.StreamReader) -> None:
    while data := await stream.read(1 << 15):
        with contextlib.suppress(ConnectionError):
            await socket.send_bytes(bytes([channel]) + data)


def _ended(code: int) -> dict[str, Any]:
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    causes = [{"reason": "ExitCode", "message": str(code)}]
    return {
        "metadata": {},
        "status": "Failure",
        "reason": "NonZeroExitCode",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "details": {"causes": causes},
    }


def _start(pod: dict[str, Any]) -> subprocess.Popen[bytes]:
    """The first process of a pod, which sees the mounts of the manifest."""
    (container,) = pod["containers"]
    sizes = {each["name"]: each["emptyDir"]["sizeLimit"] for each in pod["volumes"]}
    mounts = [
        word
        for each in container["volumeMounts"]
        for word in (each["mountPath"], sizes[each["name"]])
    ]
    ordinary = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return subprocess.Popen(
        [
            *("unshare", *ordinary, "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
            *("sh", "-ec", _SHELL, "sh", *mounts, "--"),
            *_rights(container["securityContext"]),
            *container["command"],
        ],
        env={**_environment(), "PREFIX": sys.base_prefix},
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # of unshare, when its child was killed
    )


def _inside(pod: Pod, command: list[str]) -> list[str]:
    ordinary = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
    enter = ["nsenter", f"--target={pod.first}", *ordinary, "--mount", "--pid", "--wd=/"]
    return [*enter, *_rights(pod.container["securityContext"]), *command]


def _rights(context: dict[str, Any]) -> list[str]:
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["allowPrivilegeEscalation"] is False
    user, group = context["runAsUser"], context["runAsGroup"]
    others = [f"--reuid={user}", f"--regid={group}", "--clear-groups"]
    given_up = ["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]
    return ["setpriv", *(others if os.geteuid() == 0 else []), *given_up]


def _environment() -> dict[str, str]:
    return {"PATH": f"{sys.base_prefix}/bin:/usr/bin:/bin:/usr/sbin:/sbin"}


def _condition(kind: str, held: str, reason: str, message: str) -> dict[str, Any]:
    return {"type": kind, "status": held, "reason": reason, "message": message}


def _event(kind: str, pod: Pod, conditions: list[dict[str, Any]] | None) -> bytes:
    told = {"conditions": conditions} if conditions is not None else {}
    return json.dumps({"type": kind, "object": {**pod.manifest, "status": told}}).encode() + b"\n"


def status(code: int, message: str) -> web.Response:
    held = "Success" if code < 400 else "Failure"
    told = {"apiVersion": "v1", "kind": "Status", "status": held, "code": code, "message": message}
    return web.json_response(told, status=code)


@contextlib.contextmanager
def stand_in(tls: ssl.SSLContext | None = None) -> Iterator[tuple[str, StandIn]]:
    """The URL and state of a server that runs in a thread of its own."""
    listener = process.bind("127.0.0.1", 0, None)
    server = StandIn()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        runner = web.AppRunner(server.app(), handler_cancellation=True)
        await runner.setup()
        await web.SockSite(runner, listener, ssl_context=tls).start()

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(serve(), loop).result()
    try:
        url = process.url_of(listener)
        yield url.replace("http:", "https:") if tls else url, server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        for name in list(server.pods):
            server.end(name)
        listener.close()
