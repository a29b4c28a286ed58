"""Kubernetes: the manifests of a run, as `etude export k8s` writes them. Pure: the result is text.

One Deployment of workers and one relay for each region, a Deployment for the gateway, a StatefulSet
for the trainer, whose pods meet by torchrun, and a Job for the controller. The store is all that
they share.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etude.launch.export import GATEWAY_PORT, Export, Part, parts

MOUNT = "/etc/etude"
MAX_NAME = 52
"""Kubernetes allows 63 characters, and adds up to 11 to the name of a StatefulSet."""

OPENS_SANDBOXES = ("controller", "evaluator")
SANDBOX_RIGHTS = (
    ("agents.x-k8s.io", "sandboxes", ["create", "watch", "patch", "delete"]),
    ("", "pods", ["get"]),
    ("", "pods/exec", ["get", "create"]),  # versions differ in which of the two a WebSocket needs
)
"""Rights of a program that opens sandboxes in pods (`sandbox.kubernetes`): group, resource,
verbs."""

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Names:
    """Names of the objects of one run, within the rules of Kubernetes."""

    run: str

    def of(self, *part: str) -> str:
        """The name of an object. A name that is too long keeps its part, and a digest replaces the
        rest. The name of a Service must begin with a letter."""
        run, role = (re.sub("[_.]", "-", text.lower()) for text in (self.run, "-".join(part)))
        run = run if run[0].isalpha() else f"run-{run}"
        name = f"{run}-{role}"
        if len(name) <= MAX_NAME:
            return name.strip("-")
        role = f"{hashlib.sha256(name.encode()).hexdigest()[:8]}-{role[: MAX_NAME // 2]}"
        return f"{run[: MAX_NAME - len(role) - 1]}-{role}".strip("-")

    def labels(self, *part: str) -> dict[str, str]:
        return {"app.kubernetes.io/name": "etude", "etude/part": self.of(*part)}


def kubernetes_files(export: Export) -> dict[str, str]:
    """File name -> manifests as YAML, in the order in which to apply them."""
    names = Names(export.name)
    made = {"00-run.yaml": [_config_map(names, export)]}
    if export.asks_for_pods:
        made["00-run.yaml"] += _account(names)
    for number, part in enumerate(parts(export, host="0.0.0.0"), 1):
        made[f"{number:02d}-{part.name}.yaml"] = _manifests(names, export, part)
    return {
        name: "---\n".join(f"{to_yaml(each)}\n" for each in manifests)
        for name, manifests in made.items()
    }


def gateway_url(export: Export) -> str:
    return f"http://{Names(export.name).of('gateway')}:{GATEWAY_PORT}"


def _manifests(names: Names, export: Export, part: Part) -> list[Manifest]:
    match part.kind:
        case "job":
            return [_job(names, export, part)]
        case "trainer":
            return [_service(names, part, headless=True), _trainer(names, export, part)]
        case "server":
            return [_service(names, part), _deployment(names, export, part)]
        case _:
            return [_deployment(names, export, part)]


def _config_map(names: Names, export: Export) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": names.of("run")},
        "data": {"run.toml": export.text},
    }


def _account(names: Names) -> list[Manifest]:
    """The account that opens sandboxes, and its rights in the cluster."""
    name = {"name": names.of("sandboxes")}
    rbac = "rbac.authorization.k8s.io"
    rules = [
        {"apiGroups": [group], "resources": [resource], "verbs": verbs}
        for group, resource, verbs in SANDBOX_RIGHTS
    ]
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": name}
    role = {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": name, "rules": rules}
    binding = {
        "apiVersion": f"{rbac}/v1",
        "kind": "RoleBinding",
        "metadata": name,
        "roleRef": {"apiGroup": rbac, "kind": "Role", **name},
        "subjects": [{"kind": "ServiceAccount", **name}],
    }
    return [account, role, binding]


def _container(names: Names, export: Export, part: Part) -> Manifest:
    gpus = {"nvidia.com/gpu": part.gpus} if part.gpus else {}
    container: Manifest = {
        "name": "etude",
        "image": export.image,
        "command": list(part.argv),
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            *(
                {"name": name, "valueFrom": {"secretKeyRef": {"name": "etude", "key": key}}}
                for name, key in part.secrets.items()
            ),
        ],
        "envFrom": [{"secretRef": {"name": "etude-store"}}],
        "volumeMounts": [{"name": "run", "mountPath": MOUNT}],
    }
    if gpus:
        container["resources"] = {"limits": gpus}
    if part.port:
        container["ports"] = [{"containerPort": part.port}]
        container["readinessProbe"] = {"tcpSocket": {"port": part.port}}
    return container


def _pod(names: Names, export: Export, part: Part, **more: object) -> Manifest:
    selector = {"topology.kubernetes.io/region": part.region} if part.region else {}
    spec: Manifest = {
        "containers": [_container(names, export, part)],
        "volumes": [{"name": "run", "configMap": {"name": names.of("run")}}],
        **more,
    }
    if selector:
        spec["nodeSelector"] = selector
    if export.asks_for_pods and part.name in OPENS_SANDBOXES:
        spec["serviceAccountName"] = names.of("sandboxes")
    return {"metadata": {"labels": names.labels(part.name)}, "spec": spec}


def _deployment(names: Names, export: Export, part: Part) -> Manifest:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": names.of(part.name)},
        "spec": {
            "replicas": part.replicas,
            "selector": {"matchLabels": names.labels(part.name)},
            "template": _pod(names, export, part),
        },
    }


def _trainer(names: Names, export: Export, part: Part) -> Manifest:
    """A StatefulSet, whose pods keep their names, so that the first one can be the rendezvous."""
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": names.of(part.name)},
        "spec": {
            "serviceName": names.of(part.name),
            "replicas": part.replicas,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": names.labels(part.name)},
            "template": _pod(names, export, part),
        },
    }


def _job(names: Names, export: Export, part: Part) -> Manifest:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": names.of(part.name)},
        "spec": {
            "backoffLimit": 20,
            "template": _pod(names, export, part, restartPolicy="OnFailure"),
        },
    }


def _service(names: Names, part: Part, *, headless: bool = False) -> Manifest:
    spec: Manifest = {
        "selector": names.labels(part.name),
        "ports": [{"port": part.port, "targetPort": part.port}],
    }
    if headless:
        spec |= {"clusterIP": "None", "publishNotReadyAddresses": True}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": names.of(part.name)},
        "spec": spec,
    }


def to_yaml(value: object, indent: int = 0) -> str:
    """Plain data as YAML."""
    pad = "  " * indent
    if isinstance(value, Mapping) and value:
        return "\n".join(f"{pad}{key}:{_nested(each, indent + 1)}" for key, each in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        return "\n".join(f"{pad}- {to_yaml(each, indent + 1).lstrip()}" for each in value)
    assert not isinstance(value, float) or math.isfinite(value)
    return pad + _scalar(value)


def _nested(value: object, indent: int) -> str:
    if isinstance(value, Mapping | list | tuple) and value:
        return "\n" + to_yaml(value, indent)
    return f" {_scalar(value)}"


def _scalar(value: object) -> str:
    """A scalar as in JSON, except for characters of more than 16 bits: JSON has two escapes for
    each, and Kubernetes' own parser rejects both as invalid."""
    if not isinstance(value, str):
        return json.dumps(value)
    written = (
        f"\\U{ord(each):08x}" if each > "\uffff" else json.dumps(each)[1:-1] for each in value
    )
    return f'"{"".join(written)}"'
