"""The escape suite: every known way out of a sandbox, tried for real. A canary on the host listens,
holds a secret, and must not be touched."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from etude.core.sandbox import SandboxPool, SandboxSpec
from etude.sandbox.namespaces import SPARES, NamespaceSandboxPool
from etude.sandbox.process import ProcessSandboxPool
from tests.namespaces import need_namespaces
from tests.sandbox.conftest import OTHERS, open_pool
from tests.sandbox.test_isolation import LONG_S

LIBC = ctypes.CDLL(None)
HELPERS = r"""
import array, ctypes, fcntl, glob, mmap, os, platform, resource, signal, socket, stat, struct, sys, termios
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
PATH, SECRET, PORT, ABSTRACT, UNIX, PID, HOST, KEY = {path!r}, {secret!r}, {port}, {abstract!r}, {unix!r}, {pid}, {host!r}, {key}
X86 = platform.machine() == "x86_64"

def ok(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def call(x86, arm, *args):
    return ok(libc.syscall(x86 if X86 else arm, *args))

def new(number, *args):
    return ok(libc.syscall(number, *args))

def holds(*paths):
    # whether the secret of the host is in one of these files
    for path in paths:
        with open(path, "rb") as file:
            if SECRET.encode() in file.read(1 << 20): return True
    raise OSError("it is not in there")

def tcp(*address):
    with socket.create_connection(address, timeout=2) as it: it.sendall(b"canary")
    return True

def udp(*address):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as it: it.sendto(b"canary", address)
    return True

def unix(address):
    with socket.socket(socket.AF_UNIX) as it: it.connect(address)
    return True

def wrote(path, data=b"x"):
    descriptor = os.open(path, os.O_WRONLY)
    os.write(descriptor, data)
    return True

def mounted(source, kind, flags=0, at=b"/tmp", data=None):
    ok(libc.mount(source, at, kind, ctypes.c_ulong(flags), data))
    return True

def as_child(action):
    pid = os.fork()
    if pid == 0:
        try: os._exit(0 if action() else 1)
        except BaseException: os._exit(1)
    return os.waitpid(pid, 0)[1] == 0
"""  # noqa: E501

ATTEMPTS = {
    # the network
    "tcp to the host's loopback": "tcp('127.0.0.1', PORT)",
    "tcp to the host's address": "tcp(HOST, PORT)",
    "tcp over ipv6": "tcp('::1', PORT)",
    "udp to the host's address": "udp(HOST, PORT)",
    "udp to another machine": "udp('8.8.8.8', 53)",
    "udp to everybody": "udp('255.255.255.255', PORT)",
    "the cloud's metadata": "tcp('169.254.169.254', 80)",
    "an abstract socket of the host": "unix('\\0' + ABSTRACT)",
    "a socket file of the host": "unix(UNIX)",
    "a raw socket": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1) and True",
    "a packet socket": "socket.socket(17, socket.SOCK_RAW) and True",
    "a vsock to the hypervisor": "socket.socket(40) and True",
    "another interface": "fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sh22x', b'tunl0', 1)) is not None",  # noqa: E501
    "a tun device": "os.open('/dev/net/tun', os.O_RDWR) > 0",
    # files
    "the secret by its path": "holds(PATH)",
    "the secret by /proc/1/root": "holds('/proc/1/root' + PATH)",
    "the secret by the canary's root": "holds(f'/proc/{PID}/root{PATH}')",
    "the secret above the root": "holds('/..' * 9 + PATH)",
    "the secret in any environment": "holds(*glob.glob('/proc/*/environ'))",
    "the secret in memory": "holds('/proc/kcore')",
    "a chroot and out of it": "os.chroot('/tmp') or os.chdir('../../..') or holds(PATH)",
    "a file by its handle": "call(304, 265, -100, struct.pack('IiQ', 8, 1, 2), 0) and True",
    "the disk": "wrote('/dev/vda') or wrote('/dev/sda')",
    "the disk by a node of its own": "os.mknod('/tmp/d', stat.S_IFBLK | 0o600, os.makedev(254, 0)) or True",  # noqa: E501
    "the memory of the machine": "os.open('/dev/mem', os.O_RDONLY) > 0",
    "the log of the kernel": "call(103, 116, 3, ctypes.create_string_buffer(99), 99) > 0 or os.open('/dev/kmsg', os.O_RDONLY) > 0",  # noqa: E501
    "a program of the system": "wrote('/usr/bin/env')",
    "the python that all share": "open(os.path.join(os.path.dirname(os.__file__), 'x.py'), 'w') and True",  # noqa: E501
    "the root directory": "os.mkdir('/new') or True",
    # mounts
    "a mount": "mounted(b'none', b'tmpfs')",
    "a bind of the root": "mounted(b'/', None, 4096)",
    "a bind of the root, writable": "mounted(b'none', None, 32 | 4096, b'/usr')",
    "another /proc": "mounted(b'proc', b'proc')",
    "/proc, writable": "mounted(b'none', None, 32 | 4096, b'/proc')",
    "sysfs": "mounted(b'sysfs', b'sysfs')",
    "cgroups, for their release agent": "mounted(b'cgroup', b'cgroup', 0, b'/tmp', b'memory')",
    "cgroups of the second kind": "mounted(b'none', b'cgroup2')",
    "debugfs": "mounted(b'debugfs', b'debugfs')",
    "an overlay": "mounted(b'o', b'overlay', 0, b'/tmp', b'lowerdir=/usr:/tmp,workdir=/work')",
    "what is below /proc": "ok(libc.umount2(b'/proc', 2)) == 0",
    "what is below /work": "ok(libc.umount2(b'/work', 2)) == 0",
    "pivot_root": "ok(libc.pivot_root(b'/work', b'/work')) == 0",
    "a detached copy of a mount": "new(428, -100, b'/', 1 | 0x8000) > 0",
    "a file system by fsopen": "new(430, b'tmpfs', 0) > 0",
    # rights
    "user 0": "os.setuid(0) or True",
    "another user": "os.setuid(65534) or True",
    "another group": "os.setgroups([0]) or True",
    "a program with its owner's rights": "os.system('cp /bin/sh /tmp/s && chmod 6755 /tmp/s') == 0 and os.system(\"/tmp/s -pc 'test $(id -u) != 1000'\") == 0",  # noqa: E501
    "capabilities": "ok(libc.capset(struct.pack('Ii', 0x20080522, 0), struct.pack('6I', *[1 << 21] * 6))) == 0",  # noqa: E501
    "a user namespace": "ok(libc.unshare(0x10000000)) == 0",
    "a mount namespace": "ok(libc.unshare(0x20000)) == 0",
    "a user namespace by clone": "call(56, 220, 0x10000000 | 17, 0, 0, 0, 0) >= 0",
    "the namespaces of process 1": "ok(libc.setns(os.open('/proc/1/ns/mnt', os.O_RDONLY), 0)) == 0",
    "the namespaces of the canary": "ok(libc.setns(os.open(f'/proc/{PID}/ns/net', os.O_RDONLY), 0)) == 0",  # noqa: E501
    "real-time priority": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50)) or True",
    "a better priority": "os.nice(0) > os.nice(-5)",
    "higher limits": "resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 16, 1 << 16)) or True",
    # processes
    "the canary's life": "os.kill(PID, signal.SIGKILL) or True",
    "the lives of all": "as_child(lambda: [os.kill(n, 0) for n in range(2, 400) if n not in (os.getpid(), os.getppid())])",  # noqa: E501
    "the memory of another": "call(310, 270, PID, 0, 0, 0, 0, 0) >= 0",
    "a trace of another": "call(101, 117, 16, PID, 0, 0) == 0",
    "a descriptor of another": "new(438, new(434, PID, 0), 0, 0) >= 0",
    "the limits of another": "resource.prlimit(PID, resource.RLIMIT_CPU, (0, 0)) and True",
    "open descriptors": "any(os.read(n, 1) for n in range(3, 256) if os.path.exists(f'/proc/self/fd/{n}') and not os.readlink(f'/proc/self/fd/{n}').startswith('/work'))",  # noqa: E501
    "a terminal's input": "fcntl.ioctl(os.open('/dev/tty', os.O_RDWR), termios.TIOCSTI, b'x') is not None",  # noqa: E501
    # the kernel
    "the name of the machine": "ok(libc.sethostname(b'owned', 5)) == 0",
    "the program for core dumps": "wrote('/proc/sys/kernel/core_pattern', b'|/tmp/x')",
    "the system request": "wrote('/proc/sysrq-trigger', b'h')",
    "a module of the kernel": "call(175, 105, b'x', 1, b'') == 0",
    "another kernel": "call(246, 104, 0, 0, 0, 0) == 0",
    "a reboot": "ok(libc.reboot(0x01234567)) == 0",
    "the clock": "ok(libc.settimeofday(struct.pack('qq', 0, 0), None)) == 0",
    "swap": "ok(libc.swapoff(b'/x')) == 0",
    "bpf": "call(321, 280, 0, struct.pack('IIII', 1, 4, 4, 1) + bytes(112), 128) >= 0",
    "io_uring": "new(425, 4, ctypes.create_string_buffer(120)) >= 0",
    "userfaultfd": "call(323, 282, 1) >= 0",
    "performance events": "call(298, 241, bytes(120), 0, -1, -1, 0) >= 0",
    "a keyring": "call(250, 219, 0, -3, 1) > 0",
    "shared memory": "call(29, 194, 0, 4097, 0o1666) >= 0",
    "shared memory of the host": "call(29, 194, KEY, 0, 0) >= 0",
    "a message queue": "call(68, 186, 0, 0o1666) >= 0",
    "calls by another table": "X86 and call(0x40000000 + 39, 0) > 0",
}


OF_THE_KERNEL_INSIDE = {
    "a tun device",
    "the disk by a node of its own",
    "the log of the kernel",
    "a user namespace",
    "a user namespace by clone",
    "a better priority",
    "the memory of another",
    "a keyring",
    "shared memory",
    "a message queue",
}
"""Attempts that gVisor grants with things of its own making: a tun device without a network, a
device node without a disk, a log of its own, priorities among the processes of one sandbox, none of
the bytes of a process that does not exist. On the machine's kernel, each would be a step towards an
escape."""


class Canary:
    """Targets that a sandbox must not reach: ports, sockets, a file, shared memory, an environment
    and a process."""

    def __init__(self, directory: Path) -> None:
        self.secret = f"secret-{os.urandom(8).hex()}"
        self.path = directory / "canary"
        self.path.write_text(self.secret)
        self._tcp = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        self._port = self._tcp.getsockname()[1]
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind(("", self._port))
        self._unix, self._abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        self._unix.bind(str(directory / "socket"))
        self._abstract.bind(f"\0{self.secret}")
        self._listeners = (self._tcp, self._unix, self._abstract)
        for each in (self._unix, self._abstract):
            each.listen()
        for each in (*self._listeners, self._udp):
            each.setblocking(False)
        self.process = subprocess.Popen(["sleep", "1000"], env={"SECRET": self.secret})
        key = int.from_bytes(os.urandom(3)) + 1
        self._segment = LIBC.shmget(key, 64, 0o1666)  # readable by anybody
        self._values = {
            "path": str(self.path),
            "secret": self.secret,
            "port": self._port,
            "abstract": self.secret,
            "unix": str(directory / "socket"),
            "pid": self.process.pid,
            "host": _address(),
            "key": key,
        }

    def script(self, attempt: str) -> str:
        helpers = HELPERS
        for name, value in self._values.items():
            helpers = helpers.replace(f"{{{name}!r}}", repr(value)).replace(
                f"{{{name}}}", str(value)
            )
        return f"{helpers}\nif {attempt}: print('es' 'caped')\n"

    def visitors(self) -> int:
        """Connections and packets since the last call."""
        count = 0
        for each in self._listeners:
            with contextlib.suppress(BlockingIOError):
                while True:
                    each.accept()[0].close()
                    count += 1
        with contextlib.suppress(BlockingIOError):
            while True:
                self._udp.recv(99)
                count += 1
        return count

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        LIBC.shmctl(self._segment, 0, None)  # IPC_RMID
        for each in (*self._listeners, self._udp):
            each.close()


def _address() -> str:
    """This machine's address, as others see it; nothing is sent to find out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            any_socket.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(any_socket.getsockname()[0])


@pytest.fixture(scope="module")
def canary() -> Iterator[Canary]:
    with tempfile.TemporaryDirectory() as directory:
        opened = Canary(Path(directory))
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def namespaces_pool() -> Iterator[SandboxPool]:
    need_namespaces()
    opened = NamespaceSandboxPool(spares=SPARES)
    yield opened
    asyncio.run(opened.close())


@pytest.fixture(params=["namespaces", *OTHERS])
async def shared_pool(request: pytest.FixtureRequest) -> AsyncIterator[SandboxPool]:
    """One pool for all attempts at a tier, since none of them may hurt the next either."""
    if request.param == "namespaces":
        yield request.getfixturevalue("namespaces_pool")
        return
    opened = open_pool(request, request.param)
    yield opened
    await opened.close()


async def tried(pool: SandboxPool, script: str) -> str:
    async with pool.open(SandboxSpec(files={"s.py": script})) as sandbox:
        return (await sandbox.run(["python", "s.py"], timeout_s=LONG_S)).output


@pytest.mark.parametrize("name", ATTEMPTS)
async def test_no_way_out(shared_pool: SandboxPool, canary: Canary, name: str) -> None:
    if shared_pool.tier == "gvisor" and name in OF_THE_KERNEL_INSIDE:
        pytest.skip("it is the kernel of the sandbox that grants it, and it leads to nothing else")
    told = await tried(shared_pool, canary.script(ATTEMPTS[name]))
    # a refusal, not a mistake in the attempt
    assert "escaped" not in told and "SyntaxError" not in told and "NameError" not in told, told
    assert canary.visitors() == 0
    assert canary.process.poll() is None and canary.path.read_text() == canary.secret


def test_there_are_many() -> None:
    assert set(ATTEMPTS) > OF_THE_KERNEL_INSIDE
    assert len(ATTEMPTS) - len(OF_THE_KERNEL_INSIDE) >= 40


@pytest.fixture
async def unwalled() -> AsyncIterator[SandboxPool]:
    opened = ProcessSandboxPool()
    yield opened
    await opened.close()


OPEN = [
    "tcp to the host's loopback",
    "udp to the host's address",
    "an abstract socket of the host",
    "a socket file of the host",
    "the secret by its path",
]


@pytest.mark.parametrize("name", OPEN)
async def test_without_walls_they_are_ways_out(
    unwalled: SandboxPool, canary: Canary, name: str
) -> None:
    """This shows that the suite notices an attempt that succeeds."""
    canary.visitors()
    assert "escaped" in await tried(unwalled, canary.script(ATTEMPTS[name]))
    assert canary.visitors() == ("secret" not in name)


LINKS = {
    "a link to the secret": "os.symlink(PATH, 'out')",
    "a link through /proc": "os.symlink('/proc/self/root' + PATH, 'out')",
    "a directory that is a link": "os.symlink(os.path.dirname(PATH), 'd') or os.symlink('d/canary', 'out')",  # noqa: E501
    "a pipe": "os.mkfifo('out')",
}


@pytest.mark.parametrize("attempt", LINKS.values(), ids=LINKS.keys())
async def test_the_host_is_led_nowhere(
    shared_pool: SandboxPool, canary: Canary, attempt: str
) -> None:
    async with shared_pool.open(SandboxSpec(files={"s.py": canary.script(attempt)})) as sandbox:
        await sandbox.run(["python", "s.py"], timeout_s=LONG_S)
        for path in ("out", "d/canary"):
            with pytest.raises((ValueError, FileNotFoundError)):
                await sandbox.read(path)
        with contextlib.suppress(ValueError):
            await sandbox.write("out", "owned")
        assert canary.secret not in await sandbox.diff()
        fork = await sandbox.fork()
        looked = await fork.run(["sh", "-c", "cat out < /dev/null &"], timeout_s=LONG_S)
        assert canary.secret not in looked.output
        await fork.close()
    assert canary.path.read_text() == canary.secret


async def test_another_sandbox_is_as_far_away_as_the_host(shared_pool: SandboxPool) -> None:
    server = """
import socket, time
one = socket.create_server(("127.0.0.1", 4000))
other = socket.socket(socket.AF_UNIX); other.bind("\\0there"); other.listen()
open("/tmp/mark", "w").write("here")
print("up", flush=True); one.settimeout(1000); time.sleep(1000)
"""
    visit = """
import os, socket
for family, address in ((socket.AF_INET, ("127.0.0.1", 4000)), (socket.AF_UNIX, "\\0there")):
    try: socket.socket(family).connect(address); print("reached", address)
    except OSError: pass
print(os.path.exists("/tmp/mark"), [p for p in os.listdir("/proc") if p.isdigit()])
"""
    spec = SandboxSpec(files={"server.py": server, "visit.py": visit})
    async with shared_pool.open(spec) as one, shared_pool.open(spec) as other:
        process = await one.start(["python", "server.py"])
        assert await process.read() == b"up\n"
        assert (await other.run(["python", "visit.py"], timeout_s=LONG_S)).output == "False ['1']\n"
        # within one sandbox they do meet, by Landlock's rules, too
        met = (await one.run(["python", "visit.py"], timeout_s=LONG_S)).output
        assert met.count("reached") == 2 and "True" in met
