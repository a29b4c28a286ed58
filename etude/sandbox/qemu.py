"""QEMU: starting a virtual machine, and controlling it while it runs.

A machine has processors, memory, read-only disks and one port, with its other end at the host; it
has no network, no shared directory and no display. QEMU is a process without privileges, for which
most system calls are refused (its own seccomp filter), and ends with the process that started it.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from etude.core.errors import EtudeError, RolloutFailure
from etude.sandbox.link import REPLY_TIMEOUT_S
from etude.sandbox.vm_boot import PROBE, UP, Kernel, cache, find_kernel, write_initramfs

Accelerator = Literal["kvm", "tcg"]
_ARM = platform.machine() == "aarch64"
_PROGRAM = "qemu-system-aarch64" if _ARM else "qemu-system-x86_64"
_PACKAGES = {
    _PROGRAM: "qemu-system-arm" if _ARM else "qemu-system-x86",
    "sqfstar": "squashfs-tools",
    "busybox": "busybox-static",
}
_KERNEL_PACKAGE = "linux-image-cloud-arm64" if _ARM else "linux-image-cloud-amd64"
_KVM = "/dev/kvm"
_BOOT_S: dict[Accelerator, float] = {"kvm": 15.0, "tcg": 300.0}
"""Seconds until a guest must be up. With hardware support it takes a second; on machines where KVM
can be called but guests do not boot, the wait would never end."""
_LEAST_MIB = 256
_REFUSED = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
_LOOK_S = 0.005
_UNLIMITED = 1 << 40
"""Bytes per second at which a state is written to a file."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The parts that all machines here have in common."""

    program: str
    kernel: Kernel
    accelerator: Accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Memory and processors of one machine."""

    memory_mib: int
    processors: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A stopped machine: its devices, and its memory in a file of its own or, if `memory` is None,
    in the same file."""

    state: Path
    memory: Path | None


def missing_packages() -> list[str]:
    """Debian packages that machines need and that are not installed here."""
    packages = [package for name, package in _PACKAGES.items() if shutil.which(name) is None]
    return packages + ([] if find_kernel() else [_KERNEL_PACKAGE])


def find_engine() -> Engine:
    """Raises EtudeError if something is missing, or if no guest boots. KVM counts as usable only
    once a guest has booted with it."""
    if missing := missing_packages():
        raise EtudeError(
            f"isolation vm needs packages that are not installed: apt install {' '.join(missing)}"
        )
    kernel, program = find_kernel(), shutil.which(_PROGRAM)
    assert kernel is not None and program is not None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    parts = (boot, program, str(os.stat(program).st_mtime_ns), kernel.path, str(os.geteuid()))
    remembered = cache() / f"probe-{sha256(repr(parts).encode()).hexdigest()[:32]}"
    if not remembered.exists():
        remembered.write_text(_probe(program, kernel))
    accelerator: Accelerator = "kvm" if remembered.read_text() == "kvm" else "tcg"
    return Engine(program, kernel, accelerator)


def _probe(program: str, kernel: Kernel) -> Accelerator:
    initramfs = cache() / f"probe.{os.getpid()}"
    write_initramfs(initramfs, kernel, [])
    said = ""
    try:
        accelerators: list[Accelerator] = ["kvm", "tcg"]
        for each in accelerators:
            if each == "tcg" or os.access(_KVM, os.R_OK | os.W_OK):
                engine = Engine(program, kernel, each)
                if UP in (said := _booted(engine, initramfs)):
                    return each
    finally:
        initramfs.unlink()
    raise EtudeError(f"virtual machines do not boot here: {said[-500:] or 'QEMU says nothing'}")


def _booted(engine: Engine, initramfs: Path) -> str:
    """Output of a machine that only boots, and of QEMU."""
    argv = [
        *_walled_in(),
        *_plain(engine, Hardware(memory_mib=_LEAST_MIB, processors=1)),
        *("-m", str(_LEAST_MIB), "-chardev", "stdio,id=console", "-serial", "chardev:console"),
        *_boot(engine, initramfs, PROBE),
    ]
    timeout_s = _BOOT_S[engine.accelerator]
    try:
        ran = subprocess.run(argv, input=b"", capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as e:
        return (
            f"a test machine did not boot within {timeout_s:.0f} s with "
            f"{engine.accelerator}: {e.stdout!r}"
        )
    return (ran.stdout + ran.stderr).decode(errors="replace")


def machine_argv(
    engine: Engine,
    hardware: Hardware,
    files: Files,
    *,
    port: int,
    monitor: int,
    memory: Path | None,
    boots: bool,
) -> list[str]:
    """Command line of a machine. It either boots, with its memory in this file, or waits for a
    saved state and works on a private copy of that file. `port` and `monitor`: descriptors of
    sockets."""
    serial = ("-serial", f"file:{files.console}") if boots else ("-serial", "null")
    return [
        *_common(engine, hardware, files.disks, port, monitor),
        *_memory(hardware, memory, shared=boots),
        *serial,
        *(() if boots else ("-incoming", "defer")),
        # a restored machine does not read these again, but they are part of its hardware
        *_boot(engine, files.initramfs, ""),
    ]


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a pool, for all of its machines."""

    disks: Mapping[str, int]
    """Descriptors that are open for reading, by serial number."""
    initramfs: Path
    console: Path
    """File for the kernel's messages of a booting machine."""


def _walled_in() -> list[str]:
    return ["setpriv", "--pdeathsig", "KILL", "--no-new-privs", "--"]


def _plain(engine: Engine, hardware: Hardware) -> list[str]:
    machine = "virt" if _ARM else "microvm,x-option-roms=off"
    # emulation caches translated code: up to 1 GiB by default
    accelerator = "kvm" if engine.accelerator == "kvm" else "tcg,tb-size=64"
    processor = "host" if engine.accelerator == "kvm" else "max"
    return [
        *(engine.program, "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"),
        *("-machine", machine, "-accel", accelerator, "-cpu", processor),
        *("-smp", str(hardware.processors), "-sandbox", _REFUSED),
        *("-global", "virtio-mmio.force-legacy=off"),
    ]


def _common(
    engine: Engine, hardware: Hardware, disks: Mapping[str, int], port: int, monitor: int
) -> list[str]:
    return [
        *_walled_in(),
        *_plain(engine, hardware),
        *("-machine", "memory-backend=ram", "-m", str(hardware.memory_mib)),
        *(word for name, descriptor in disks.items() for word in _disk(name, descriptor)),
        *("-chardev", f"socket,id=port,fd={port}", "-device", "virtio-serial-device"),
        *("-device", "virtserialport,chardev=port,name=etude"),
        *("-chardev", f"socket,id=monitor,fd={monitor}", "-mon", "chardev=monitor,mode=control"),
    ]


def _disk(name: str, descriptor: int) -> list[str]:
    opened = f"file=/dev/fdset/{descriptor},file.locking=off"
    return [
        *("-add-fd", f"fd={descriptor},set={descriptor}"),
        *("-drive", f"if=none,id={name},format=raw,readonly=on,{opened}"),
        *("-device", f"virtio-blk-device,drive={name},serial={name}"),
    ]


def _memory(hardware: Hardware, file: Path | None, *, shared: bool) -> list[str]:
    size = f"size={hardware.memory_mib}M"
    if file is None:
        return ["-object", f"memory-backend-ram,id=ram,{size}"]
    share = "on" if shared else "off"
    return ["-object", f"memory-backend-file,id=ram,{size},mem-path={file},share={share}"]


def _boot(engine: Engine, initramfs: Path, words: str) -> list[str]:
    said = ["quiet", "loglevel=3", "panic=-1", "random.trust_bootloader=on", words]
    if _ARM:
        said.append("console=ttyAMA0")
    else:
        said += ["console=ttyS0", "reboot=t"]
        if engine.accelerator == "tcg":  # which has no clock to calibrate the processor's by
            said += ["no_timer_check", "tsc=reliable", "tsc_early_khz=2100000", "lpj=4200000"]
    kernel = ("-kernel", engine.kernel.path, "-initrd", str(initramfs))
    return [*kernel, "-append", " ".join(word for word in said if word)]


class Monitor:
    """Connection to QEMU itself (QMP). Its calls block, usually for milliseconds, so they are made
    in a thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.settimeout(REPLY_TIMEOUT_S)
        self._lines = connection.makefile("r")

    def begin(self) -> None:
        self._answer("QMP")
        self._ask("qmp_capabilities")

    def save(self, state: Path, *, memory_too: bool) -> None:
        """Stop the machine and write its state."""
        self._ask("stop")
        self._ignore_memory(not memory_too)
        self._ask("migrate-set-parameters", **{"max-bandwidth": _UNLIMITED})
        with state.open("wb") as file:
            self._ask("getfd", file.fileno(), fdname="state")
        self._ask("migrate", uri="fd:state")
        while (status := self._ask("query-migrate").get("status")) != "completed":
            if status in ("failed", "cancelled"):
                raise RolloutFailure(f"sandbox: the state of its machine was not saved: {status}")
            time.sleep(_LOOK_S)

    def load(self, state: Path, *, memory_too: bool) -> None:
        """Load a saved state into this machine, and continue."""
        self._ignore_memory(not memory_too)
        with state.open("rb") as file:
            self._ask("getfd", file.fileno(), fdname="state")
        self._ask("migrate-incoming", uri="fd:state")
        while self._ask("query-status")["status"] == "inmigrate":
            time.sleep(_LOOK_S)
        self.go_on()

    def go_on(self) -> None:
        self._ask("cont")

    def _ignore_memory(self, ignored: bool) -> None:
        wanted = {"capability": "x-ignore-shared", "state": ignored}
        self._ask("migrate-set-capabilities", capabilities=[wanted])

    def _ask(self, command: str, descriptor: int | None = None, **arguments: Any) -> Any:
        line = json.dumps({"execute": command, "arguments": arguments}).encode()
        try:
            sent = [] if descriptor is None else [descriptor]
            socket.send_fds(self._connection, [line], sent)
            return self._answer("return")
        except OSError as e:
            raise RolloutFailure(f"sandbox: QEMU does not answer: {e}") from e

    def _answer(self, key: str) -> Any:
        """The next line that has this key; the other lines are events."""
        while line := self._lines.readline():
            said = json.loads(line)
            if "error" in said:
                raise RolloutFailure(f"sandbox: QEMU returned an error: {said['error']['desc']}")
            if key in said:
                return said[key]
        raise RolloutFailure("sandbox: QEMU has ended")

    def close(self) -> None:
        self._lines.close()
        self._connection.close()


def description(engine: Engine) -> str:
    how = "KVM" if engine.accelerator == "kvm" else "emulated by software, many times slower"
    return f"a machine with a kernel of its own for each sandbox, {how}"
