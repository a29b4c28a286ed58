"""Requests of a sandbox to a cluster, QEMU, runsc and a container engine, compared with recorded
ones.

After a deliberate change, write `machines.json` again, and review the differences:

    ETUDE_WRITE_ANSWERS=1 python -m pytest tests/sandbox/test_written_machines.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from etude.core.errors import RolloutFailure
from etude.core.sandbox import Limits, SandboxSpec
from etude.sandbox import bundle, container, qemu
from etude.sandbox.kubernetes import conditions, is_ready, manifest
from etude.sandbox.mounts import Mount
from etude.sandbox.qemu import Engine, Files, Hardware, machine_argv
from etude.sandbox.vm_boot import Kernel

MACHINES = Path(__file__).with_name("machines.json")
LIMITS = {
    "least": Limits(),
    "all": Limits(cpus=1.5, memory_bytes=1 << 30, disk_bytes=64 << 20, processes=9),
}


def virtual_machines(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    found = {}
    files = Files(disks={"system": 5, "python": 6}, initramfs=Path("/i"), console=Path("/c"))
    for is_arm in (True, False):
        monkeypatch.setattr(qemu, "_ARM", is_arm)
        for accelerator in ("kvm", "tcg"):
            engine = Engine("qemu", Kernel("/k", "/m"), accelerator)  # type: ignore[arg-type]
            for boots, memory in ((True, Path("/memory")), (False, Path("/memory")), (False, None)):
                name = f"{'arm' if is_arm else 'x86'} {accelerator} {boots} {memory}"
                found[name] = machine_argv(
                    engine, Hardware(memory_mib=512, processors=2), files,
                    port=3, monitor=4, memory=memory, boots=boots,
                )  # fmt: skip
    return found


def bundles(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(bundle, "system_directories", lambda: ["/usr"])
    monkeypatch.setattr(bundle, "base_python", lambda: "/usr/bin/python3")
    monkeypatch.setattr(bundle, "search_path", lambda mounts: ["/lib"])
    monkeypatch.setattr(bundle.glob, "glob", lambda pattern: [])
    return {
        f"{name} {cgroup}": bundle.oci_spec(
            Path("/root"), Path("/program"), [Mount("/a", "/b")], limits, cgroup=cgroup
        )
        for name, limits in LIMITS.items()
        for cgroup in ("", "/etude/x")
    }


def test_every_word_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {
        f"pod {name} {image}": manifest(
            "one", SandboxSpec(image=image, limits=limits), lease_end="2026-01-01T00:00:00Z"
        )
        for name, limits in LIMITS.items()
        for image in ("", "reg/mine:1")
    }
    told |= {f"bounds {name}": container._bounds(limits) for name, limits in LIMITS.items()}
    told["bind"] = container._bind(Mount("/a", "/b"))
    told |= {f"machine {name}": each for name, each in virtual_machines(monkeypatch).items()}
    told |= {f"bundle {name}": each for name, each in bundles(monkeypatch).items()}
    found = json.loads(json.dumps(told))
    if os.environ.get("ETUDE_WRITE_ANSWERS"):
        MACHINES.write_text(json.dumps(found, indent=1) + "\n")
    expected = json.loads(MACHINES.read_text())
    for name, each in found.items():
        assert each == expected[name], name
    assert found.keys() == expected.keys()


def pod(**conditions: str) -> dict[str, Any]:
    told = [
        {"type": kind, "status": status, "reason": f"Why{kind}", "message": f"is {status}"}
        for kind, status in conditions.items()
    ]
    return {"status": {"conditions": told}}


def test_when_a_pod_is_ready() -> None:
    assert is_ready(pod(Ready="True")) and is_ready(pod(Finished="False", Ready="True"))
    for other in ({}, pod(), pod(Ready="False"), pod(Scheduled="True")):
        assert not is_ready(other)
    with pytest.raises(RolloutFailure, match="its pod has ended: WhyFinished: is True"):
        is_ready(pod(Finished="True", Ready="True"))
    assert conditions({}) == "no controller has processed it"
    assert conditions(pod(A="x", B="y")) == "WhyA: is x; WhyB: is y"


def test_an_engine_of_ordinary_users_has_one_user(monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary = container._users(f"... {next(iter(container._ORDINARY))} ...")
    assert {next(ordinary) for _ in range(5)} == {container.GUEST_ID}
    monkeypatch.setattr(container, "OWN_IDS", range(7, 12))
    own = container._users("")
    found = [next(own) for _ in range(5)]
    assert sorted(found) == [7, 8, 9, 10, 11], "each a while, and then again"
    assert next(own) == found[0]
