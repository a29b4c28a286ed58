"""`etude doctor`: the support for sandboxes on this machine, and how to get what is missing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from etude.commands.terminal import PipeConsole, say
from etude.core.errors import EtudeError

if TYPE_CHECKING:
    from etude.core.sandbox import Tier
    from etude.sandbox.walls import Walls


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One requirement of sandboxes."""

    name: str
    there: bool
    found: str
    needed_for: str
    fix: str = ""
    """A command, or a change to make, if it is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The results of all checks of the machine."""

    walls: Walls | None
    refused: str
    """The reason why no sandbox in namespaces could be opened."""
    container_refused: str
    """The reason why no container could hold a sandbox; empty if one did."""
    container: str
    """The command of the container engine that worked."""
    kubernetes_refused: str
    """The reason why no cluster can run our sandboxes; empty if one can."""
    kubernetes: str
    """URL of the cluster."""
    gvisor_refused: str
    """The reason why no sandbox of gVisor could be opened; empty if one was."""
    vm_refused: str
    """The reason why no virtual machine boots; empty if one did."""
    vm: str
    """Description of the virtual machine."""
    vm_packages: tuple[str, ...]
    """Debian packages that virtual machines need and that are missing here."""
    sysctls: Mapping[str, str]
    programs: frozenset[str]


_RUNSC = "apt install -t bookworm-backports runsc"
_SWITCHES = {
    "user.max_user_namespaces": ("0", "65536"),
    "kernel.unprivileged_userns_clone": ("0", "1"),
    "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),
}
"""Settings that can turn user namespaces off -> the value that does so, and one that does not."""


def doctor(*, as_json: bool) -> int:
    """Show the findings. Returns 0 if sandboxes in namespaces, the default, are available."""
    found = probe()
    findings = examine(found)
    if as_json:
        print(
            json.dumps({"tier": _highest(found), "findings": [asdict(each) for each in findings]})
        )
    else:
        console = PipeConsole()
        commands = {f"          {each.fix}" for each in findings}
        for line in page(found, findings):
            if line in commands:
                print(line)  # in one piece, to be copied
            else:
                say(console, line, indent=8 if line[:1].strip() else 0)
    return 0 if _holds_namespaces(found) else 1


def probe() -> Probe:
    """Check the machine by opening sandboxes, which is the only reliable test."""
    from etude.sandbox.qemu import missing_packages

    walls, refused = _walls()
    container, container_refused = _container()
    kubernetes, kubernetes_refused = _kubernetes()
    vm, vm_refused = _vm()
    programs = ("podman", "docker", "runsc", "mmdebstrap")
    sysctls = {
        name: path.read_text().strip()
        for name in _SWITCHES
        if (path := Path("/proc/sys", *name.split("."))).exists()
    }
    return Probe(
        walls=walls,
        refused=refused,
        container_refused=container_refused,
        container=container,
        kubernetes_refused=kubernetes_refused,
        kubernetes=kubernetes,
        gvisor_refused=_gvisor_refused(),
        vm_refused=vm_refused,
        vm=vm,
        vm_packages=tuple(missing_packages()),
        sysctls=sysctls,
        programs=frozenset(name for name in programs if shutil.which(name)),
    )


def _walls() -> tuple[Walls | None, str]:
    import asyncio

    from etude.sandbox.namespaces import NamespaceSandboxPool

    async def tried() -> Walls:
        pool = NamespaceSandboxPool()
        await pool.close()
        return pool.walls

    try:
        return asyncio.run(tried()), ""
    except EtudeError as e:
        return None, str(e)


def _container() -> tuple[str, str]:
    """The container engine that could hold a sandbox, or the reason why there is none."""
    import asyncio

    from etude.sandbox.container import ContainerSandboxPool

    async def tried() -> str:
        pool = ContainerSandboxPool()
        await pool.close()
        return pool.client

    try:
        return asyncio.run(tried()), ""
    except EtudeError as e:
        return "", str(e)


def _kubernetes() -> tuple[str, str]:
    """A cluster that has agent-sandbox, or the reason why there is none. No sandbox is opened: that
    may take minutes, and costs money."""
    from etude.sandbox.cluster import find_cluster
    from etude.sandbox.kubernetes import check_cluster

    try:
        cluster = find_cluster()
        check_cluster(cluster)
        return cluster.url, ""
    except EtudeError as e:
        return "", str(e)


def _gvisor_refused() -> str:
    import asyncio

    from etude.sandbox.gvisor import GvisorSandboxPool

    async def tried() -> None:
        await GvisorSandboxPool().close()

    try:
        asyncio.run(tried())
    except EtudeError as e:
        return str(e)
    return ""


def _vm() -> tuple[str, str]:
    """A virtual machine that booted, or the reason why none did. The disk is not made, which would
    take minutes."""
    from etude.sandbox.qemu import description, find_engine

    try:
        return description(find_engine()), ""
    except EtudeError as e:
        return "", str(e)


def examine(found: Probe) -> list[Finding]:
    walls = found.walls
    return [
        _namespaces(found),
        Finding(
            name="seccomp",
            there=walls is not None and walls.seccomp,
            found=os.uname().machine,
            needed_for="tier namespaces",
            fix="use x86-64 or ARM64: system call numbers are known only for these",
        ),
        Finding(
            name="Landlock",
            there=walls is not None and walls.landlock > 0,
            found=f"version {walls.landlock}" if walls else "not tried",
            needed_for="a second layer of isolation for files",
            fix="use kernel 5.13 or newer, with landlock in lsm= on its command line",
        ),
        _cgroups(walls),
        Finding(
            name="users",
            there=walls is not None and walls.own_users,
            found="one for each sandbox" if walls and walls.own_users else "one for all sandboxes",
            needed_for="keeping sandboxes from using up each other's inotify instances and pipes",
            fix="run as root; Etude drops the privileges at once",
        ),
        Finding(
            name="containers",
            there=not found.container_refused,
            found=found.container_refused or f"{found.container} opened a sandbox",
            needed_for="isolation container",
            fix="start the engine (systemctl start docker), or let this user use it (podman info)"
            if found.programs & {"podman", "docker"}
            else "apt install podman",
        ),
        _cluster(found),
        Finding(
            name="runsc",
            there=not found.gvisor_refused,
            found=found.gvisor_refused or "a sandbox was opened",
            needed_for="tier gvisor",
            fix=_RUNSC if "runsc" not in found.programs else "run as root, on x86-64 or ARM64",
        ),
        Finding(
            name="qemu",
            there=not found.vm_refused,
            found=found.vm_refused or "a machine booted",
            needed_for="tier vm",
            fix=f"apt install {' '.join(found.vm_packages)}"
            if found.vm_packages
            else "a readable Debian kernel in /boot, and 256 MiB of free memory",
        ),
        Finding(
            name="mmdebstrap",
            there="mmdebstrap" in found.programs,
            found="installed" if "mmdebstrap" in found.programs else "not installed",
            needed_for="images of Debian packages (`etude images build`)",
            fix="apt install mmdebstrap",
        ),
    ]


def _namespaces(found: Probe) -> Finding:
    off = [
        f"sysctl -w {name}={on}"
        for name, (bad, on) in _SWITCHES.items()
        if found.sysctls.get(name) == bad
    ]
    return Finding(
        name="user namespaces",
        there=found.walls is not None,
        found="a sandbox was opened" if found.walls else found.refused,
        needed_for="tier namespaces",
        fix=" && ".join(off)
        or "in a container: docker run --security-opt seccomp=unconfined "
        "--security-opt apparmor=unconfined --security-opt systempaths=unconfined",
    )


def _cluster(found: Probe) -> Finding:
    from etude.sandbox.cluster import NO_CLUSTER
    from etude.sandbox.kubernetes import INSTALL

    refused = found.kubernetes_refused
    known = next((each for each in (INSTALL, NO_CLUSTER) if refused.endswith(each)), "")
    return Finding(
        name="kubernetes",
        there=not refused,
        found=refused or f"{found.kubernetes} has agent-sandbox",
        needed_for="isolation kubernetes",
        fix=known or "make `kubectl get sandboxes.agents.x-k8s.io` work",
    )


def _cgroups(walls: Walls | None) -> Finding:
    return Finding(
        name="cgroups",
        there=walls is not None and bool(walls.cgroup),
        found="not tried"
        if walls is None
        else f"writable, {walls.cgroup}"
        if walls.cgroup
        else walls.cgroup_refused,
        needed_for="limits.memory_bytes and limits.cpus",
        fix="run as root, or in a delegated cgroup: systemd-run --user --scope -p Delegate=yes "
        "sh -c 'g=/sys/fs/cgroup$(cut -d: -f3 /proc/self/cgroup); mkdir $g/main; echo $$ > "
        "$g/main/cgroup.procs; exec etude run RUN.toml'",
    )


def _holds_namespaces(found: Probe) -> bool:
    return found.walls is not None and found.walls.seccomp


def _highest(found: Probe) -> Tier:
    if not found.vm_refused:
        return "vm"
    if not found.gvisor_refused:
        return "gvisor"
    return "namespaces" if _holds_namespaces(found) else "process"


def page(found: Probe, findings: list[Finding]) -> list[str]:
    lines = []
    for each in findings:
        lines.append(f"{'ok     ' if each.there else 'missing'} {each.name}: {each.found}")
        if not each.there:
            lines += [f"          for {each.needed_for}", f"          {each.fix}"]
    lines.append("")
    if _holds_namespaces(found):
        lines.append(f"tier namespaces: {found.walls}")
    else:
        lines.append("tier namespaces: not available; only process is, which isolates nothing")
    if found.gvisor_refused:
        lines.append("tier gvisor: not available")
    else:
        lines.append(
            "tier gvisor: a user-space kernel for each sandbox; forks include running processes"
        )
    lines.append(f"tier vm: {'not available' if found.vm_refused else found.vm}")
    return lines
