"""What one sandbox may use. Numbers for small modules and their tests; no command of one can exhaust the machine."""

from __future__ import annotations

import resource

MIB = 1 << 20

COPY_BYTES = 32 * MIB
"""The working copy, and once more as much for /tmp; both are in memory."""
READ_BYTES = MIB // 4
"""The largest file that is read out of a sandbox."""
OUTPUT_BYTES = 16 << 10
"""The end of a command's output that is kept; stdout and stderr are one."""

LIMITS = {
    resource.RLIMIT_AS: 512 * MIB,
    resource.RLIMIT_FSIZE: 16 * MIB,
    resource.RLIMIT_NPROC: 32,  # of the whole sandbox: its user exists only in there
    resource.RLIMIT_NOFILE: 256,
    resource.RLIMIT_CORE: 0,
}
"""Of each process. A command's CPU seconds are limited as well, by its time."""
