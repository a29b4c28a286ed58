"""Address and credentials of a Kubernetes cluster, found as kubectl does: by KUBECONFIG, in
~/.kube/config, or in a pod by its service account.

A JSON file is read directly. YAML is left to kubectl itself, which also merges several files. A
kubeconfig that needs more than a token or a certificate is refused, with the name of the field.
"""

from __future__ import annotations

import asyncio
import base64
import email.utils
import json
import os
import shutil
import ssl
import subprocess
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from etude.core.errors import EtudeError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""The folder in which a pod finds its service account for the cluster that it runs in."""
NO_CLUSTER = "export KUBECONFIG=FILE"
_VIEW = ("kubectl", "config", "view", "--raw", "--minify", "--flatten", "--output=json")
_USER_REFUSED = ("exec", "auth-provider", "username", "as")
_CLUSTER_REFUSED = ("proxy-url",)
_ANSWER_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The API server of a cluster, a namespace in it, and our credentials."""

    url: str
    namespace: str
    authority: bytes = b""
    """CA certificates to verify the server's certificate; empty: those of this machine."""
    insecure: bool = False
    """True: the certificate of the server is not verified."""
    server_name: str = ""
    """The name in the certificate of the server, if it is not the host of the URL."""
    identity: bytes = b""
    """The client certificate and its key."""
    token: str = ""
    token_file: str = ""
    """A file that is read for each request, since a service account's token expires after an
    hour."""

    def headers(self) -> dict[str, str]:
        token = Path(self.token_file).read_text().strip() if self.token_file else self.token
        return {"Authorization": f"Bearer {token}"} if token else {}

    def connection(self) -> dict[str, Any]:
        """The TLS settings, as aiohttp takes them."""
        if not self.url.startswith("https:"):
            return {}
        try:
            context = ssl.create_default_context(cadata=self.authority.decode() or None)
            if self.insecure:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            if self.identity:
                with tempfile.NamedTemporaryFile() as file:  # ssl loads it from a file only
                    file.write(self.identity)
                    file.flush()
                    context.load_cert_chain(file.name)
        except (ValueError, ssl.SSLError) as e:
            raise EtudeError(f"the certificates of the cluster {self.url} are invalid: {e}") from e
        return {"ssl": context, "server_hostname": self.server_name or None}

    def look(self, path: str) -> tuple[Any, float]:
        """The object at a path of the API, and the cluster's time. None if there is no such object.
        Raises EtudeError if the cluster does not answer or refuses."""
        # the caller may be in an event loop, which asyncio.run cannot be called from
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, self._look(path)).result()

    async def _look(self, path: str) -> tuple[Any, float]:
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        try:
            async with (
                aiohttp.ClientSession(headers=self.headers(), timeout=timeout) as session,
                session.get(self.url + path, **self.connection()) as response,
            ):
                said = await response.text()
        except (OSError, aiohttp.ClientError) as e:  # a timeout is an OSError
            raise EtudeError(f"the cluster {self.url} does not answer: {e}") from e
        its_time = _time_of(response.headers.get("Date"))
        if response.status == 404:
            return None, its_time
        if response.status >= 400:
            raise EtudeError(f"the cluster {self.url} returned {response.status}: {said[:500]}")
        return json.loads(said), its_time


def _time_of(date: str | None) -> float:
    try:
        return email.utils.parsedate_to_datetime(date or "").timestamp()
    except ValueError:
        return time.time()


def find_cluster(variables: Mapping[str, str] = os.environ, account: Path = ACCOUNT) -> Cluster:
    """The cluster that kubectl would use. Raises EtudeError if there is none."""
    named = variables.get("KUBECONFIG", "")
    file = Path(named or Path(variables.get("HOME", "/"), ".kube", "config"))
    if named or file.exists():
        return _from_config(_read_config(file, variables), file.parent)
    host, port = (variables.get(f"KUBERNETES_SERVICE_{each}", "") for each in ("HOST", "PORT"))
    if not host or not account.is_dir():
        raise EtudeError(
            f"isolation kubernetes needs a cluster, but {file} does not exist, and this is not "
            f"a pod with a service account: {NO_CLUSTER}"
        )
    return Cluster(
        url=f"https://{f'[{host}]' if ':' in host else host}:{port or 443}",
        namespace=(account / "namespace").read_text().strip(),
        authority=(account / "ca.crt").read_bytes(),
        token_file=str(account / "token"),
    )


def _read_config(file: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError):
        pass  # no such file, several, or YAML
    if shutil.which(_VIEW[0], path=variables.get("PATH")) is None:
        raise EtudeError(
            f"{file} is not JSON, so reading it needs kubectl: install kubectl, or run "
            f"`{' '.join(_VIEW)} > FILE` where it is installed, and here {NO_CLUSTER}"
        )
    ran = subprocess.run(
        _VIEW, capture_output=True, text=True, env=dict(variables), timeout=6 * _ANSWER_S
    )
    if ran.returncode != 0:
        raise EtudeError(f"`{' '.join(_VIEW)}` failed: {ran.stderr.strip()}")
    return dict(json.loads(ran.stdout))


def _from_config(config: Mapping[str, Any], folder: Path) -> Cluster:
    """`folder`: the base of relative paths in the config."""
    current = config.get("current-context", "")
    context = _named(config, "contexts", "context", current)
    cluster = _named(config, "clusters", "cluster", context.get("cluster", ""))
    user = _named(config, "users", "user", context.get("user", ""))
    for part, refused in ((user, _USER_REFUSED), (cluster, _CLUSTER_REFUSED)):
        for name in refused:
            if name in part:
                raise EtudeError(
                    f"the context {current!r} of the kubeconfig has {name!r}, which isolation "
                    f"kubernetes does not support: use a token (`kubectl create token ACCOUNT`) "
                    f"or a client certificate for its user; see docs/sandboxes.md for the "
                    f"rights that it needs"
                )
    token_file = user.get("tokenFile", "")
    identity = [_content(user, name, folder) for name in ("client-certificate", "client-key")]
    return Cluster(
        url=str(cluster.get("server", "http://localhost:8080")).rstrip("/"),
        namespace=context.get("namespace") or "default",
        authority=_content(cluster, "certificate-authority", folder),
        insecure=bool(cluster.get("insecure-skip-tls-verify")),
        server_name=cluster.get("tls-server-name", ""),
        identity=b"\n".join(identity) if all(identity) else b"",
        token=user.get("token", ""),
        token_file=str(folder / token_file) if token_file else "",
    )


def _named(config: Mapping[str, Any], kind: str, field: str, name: str) -> dict[str, Any]:
    for each in config.get(kind) or ():
        if each.get("name") == name:
            return dict(each.get(field) or {})
    raise EtudeError(
        f"the kubeconfig has no {field} {name!r}: list the contexts with `kubectl config "
        f"get-contexts`, and choose one with `kubectl config use-context NAME`"
    )


def _content(part: Mapping[str, Any], name: str, folder: Path) -> bytes:
    """Content of a field that is either embedded or names a file."""
    if data := part.get(f"{name}-data"):
        return base64.b64decode(str(data))
    if not (path := part.get(name)):
        return b""
    try:
        return (folder / str(path)).read_bytes()
    except OSError as e:
        raise EtudeError(f"{name} of the kubeconfig cannot be read: {e}") from e
