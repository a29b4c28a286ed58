"""Resource limits of a sandbox: defaults for small modules and their tests.

Time, processes, files and the size of each process are always bounded. The memory of all processes
together is bounded by a cgroup if one is writable (`cgroups`); otherwise each of them may hold
RLIMIT_AS, and when memory runs out, the kernel kills commands first.
"""

from __future__ import annotations

import resource
import struct

MIB = 1 << 20

COPY_BYTES = 32 * MIB
"""Size of the working copy; /tmp may have as much again. Both are in memory."""
COPY_FILES = 4096
"""Files, directories and links in each of the two. Empty ones take no bytes, but memory of the
kernel."""
MAX_PROCESSES = 16
MEMORY_BYTES = 1024 * MIB
"""All processes, the working copy and /tmp together."""
LEAST_MEMORY_BYTES = 16 * MIB
PROCESS_BYTES = 512 * MIB
READ_BYTES = MIB // 4
"""The largest file that is read out of a sandbox."""
OUTPUT_BYTES = 16 << 10
"""Length of the end of a command's output that is kept; stdout and stderr are one."""
PATCH_BYTES = 16 * MIB
"""All changed files of a working copy together, when it is taken over as a whole."""
REPORT_BYTES = MIB
"""Length of the end of a command's report that is kept."""

LIMITS = {
    resource.RLIMIT_AS: PROCESS_BYTES,
    resource.RLIMIT_FSIZE: COPY_BYTES // 2,
    resource.RLIMIT_NPROC: MAX_PROCESSES,  # of the whole sandbox: no process outside has its user
    resource.RLIMIT_NOFILE: 256,
    # at 0, a kernel that pipes core dumps to a program would still start it; 1 means never
    resource.RLIMIT_CORE: 1,
}
"""Limits of each process. A command's CPU seconds are limited as well, by its time."""
QUOTAS = {
    # No nested namespaces for commands: they would give them capabilities again, and with them a
    # far larger part of the kernel to attack.
    "user/max_user_namespaces": "0",
    # An ordinary user has 128 of these, in all of their sandboxes and programs together.
    "user/max_inotify_instances": "8",
    "user/max_fanotify_groups": "1",
    # The buffer of a connection grows up to the last of the three, in each direction.
    "net/ipv4/tcp_rmem": "4096 65536 262144",
    "net/ipv4/tcp_wmem": "4096 65536 262144",
}
"""Limits of the whole sandbox, as files below /proc/sys."""
TERMINAL_SIZE = struct.pack("=4H", 24, 80, 0, 0)
"""Rows and columns of a terminal, as the kernel takes them."""
NICENESS = 5
"""Niceness of commands: whatever they compute, the controller's event loop comes first. By the
kernel's weights they get a quarter of a core that a trainer keeps busy. At 10 it would be a tenth,
and the tests of a correct solution might run out of time."""


def memory_for(disk_bytes: int) -> int:
    """Memory of a sandbox without a limit of its own: files are in memory, too."""
    return MEMORY_BYTES + 2 * max(0, disk_bytes - COPY_BYTES)


def largest_file(copy_bytes: int) -> int:
    """Largest size of one file in a working copy of this size."""
    return max(LIMITS[resource.RLIMIT_FSIZE], copy_bytes // 2)


def files_in(copy_bytes: int) -> int:
    """Most files, directories and links in a working copy of this size."""
    return max(COPY_FILES, copy_bytes * COPY_FILES // COPY_BYTES)
