"""`etude doctor` on various simulated machines, and on this one."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from etude.cli import main
from etude.commands.doctor import Probe, examine, page
from etude.core.errors import EtudeError
from etude.sandbox.fake import FakeSandboxPool
from etude.sandbox.kubernetes import INSTALL
from etude.sandbox.pool import check_tier, open_sandbox_pool
from etude.sandbox.walls import Walls
from tests.namespaces import refusal

WALLS = Walls(seccomp=True, landlock=7, own_users=True, cgroup="v2", cgroup_refused="")
ALL = Probe(
    walls=WALLS,
    refused="",
    container_refused="",
    container="podman",
    kubernetes_refused="",
    kubernetes="https://10.0.0.1",
    gvisor_refused="",
    vm_refused="",
    vm="a machine with a kernel of its own for each sandbox, KVM",
    vm_packages=(),
    sysctls={"user.max_user_namespaces": "96373"},
    programs=frozenset({"runsc", "mmdebstrap"}),
)
NOTHING = Probe(
    walls=None,
    refused="unshare(0x10000000): Operation not permitted",
    container_refused="isolation container needs podman or docker, which is not installed",
    container="",
    kubernetes_refused="isolation kubernetes needs a cluster: export KUBECONFIG=FILE",
    kubernetes="",
    gvisor_refused="isolation gvisor needs runsc, which is not installed",
    vm_refused="isolation vm needs packages that are not installed",
    vm="",
    vm_packages=("qemu-system-x86", "busybox-static"),
    sysctls={"kernel.unprivileged_userns_clone": "0", "user.max_user_namespaces": "0"},
    programs=frozenset(),
)


def test_a_machine_that_has_everything() -> None:
    findings = examine(ALL)
    assert all(each.there for each in findings)
    told = page(ALL, findings)
    assert not any("missing" in line for line in told)
    assert f"tier namespaces: {WALLS}" in told
    assert any(line.startswith("tier gvisor: a user-space kernel") for line in told)
    assert f"tier vm: {ALL.vm}" in told


def test_a_machine_that_has_nothing_is_told_how_to_get_it() -> None:
    findings = {each.name: each for each in examine(NOTHING)}
    assert not any(each.there for each in findings.values())
    assert all(each.fix and each.needed_for for each in findings.values())
    assert findings["user namespaces"].found == NOTHING.refused
    assert findings["user namespaces"].fix == (
        "sysctl -w user.max_user_namespaces=65536 && sysctl -w kernel.unprivileged_userns_clone=1"
    )
    assert findings["containers"].fix == "apt install podman"
    silent = {each.name: each for each in examine(replace(NOTHING, programs=frozenset({"docker"})))}
    assert "systemctl start docker" in silent["containers"].fix, "installed, and does not answer"
    assert findings["kubernetes"].fix == "export KUBECONFIG=FILE"
    for refused, fix in (
        (f"it has no agent-sandbox: {INSTALL}", INSTALL),
        ("it answered 401", "make `kubectl get sandboxes.agents.x-k8s.io` work"),
    ):
        told_so = {each.name: each for each in examine(replace(ALL, kubernetes_refused=refused))}
        assert (told_so["kubernetes"].there, told_so["kubernetes"].fix) == (False, fix)
    assert findings["runsc"].fix == "apt install -t bookworm-backports runsc"
    assert findings["mmdebstrap"].fix == "apt install mmdebstrap"
    assert findings["qemu"].fix == "apt install qemu-system-x86 busybox-static"
    assert "btrfs" not in findings, "this version makes no use of it"
    told = "\n".join(page(NOTHING, list(findings.values())))
    assert "tier namespaces: not available" in told and "sysctl -w" in told
    assert "tier gvisor: not available" in told and "tier vm: not available" in told


def test_an_ordinary_user_is_told_what_is_in_the_way_of_a_cgroup() -> None:
    walls = Walls(
        seccomp=True, landlock=0, own_users=False, cgroup="", cgroup_refused="/sys/x: it is full"
    )
    probe = replace(NOTHING, walls=walls, refused="", sysctls={})
    findings = {each.name: each for each in examine(probe)}
    assert findings["user namespaces"].there and not findings["Landlock"].there
    assert findings["cgroups"].found == "/sys/x: it is full"
    assert "Delegate=yes" in findings["cgroups"].fix


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    told = json.loads(capsys.readouterr().out)
    possible = refusal() is None
    assert code == (0 if possible else 1)
    held = {each["name"]: each["there"] for each in told["findings"]}
    lower = "namespaces" if possible else "process"
    lower = "gvisor" if held["runsc"] else lower
    assert told["tier"] == ("vm" if held["qemu"] else lower)
    assert main(["doctor"]) == code
    assert capsys.readouterr().out.count("\n") > len(told["findings"])


def test_a_tier_that_cannot_be_had_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(EtudeError, match="gvisor needs runsc.*apt install"):
        open_sandbox_pool("gvisor")
    with pytest.raises(EtudeError, match="needs podman or docker.*: apt install podman"):
        open_sandbox_pool("container")
    with pytest.raises(
        EtudeError, match="vm needs packages that are not installed: apt install qemu-system"
    ):
        open_sandbox_pool("vm")


def test_a_run_does_not_start_below_the_tier_that_it_accepts() -> None:
    weak = open_sandbox_pool("process")
    check_tier(weak, "process")
    with pytest.raises(EtudeError, match="only tier process.*requires namespaces"):
        check_tier(weak, "namespaces")
    check_tier(FakeSandboxPool(), "vm")
