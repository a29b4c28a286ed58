"""The walls around the sandboxes of this machine, as their zygote found them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Walls:
    """The walls that not every kernel has. Namespaces, no capabilities, a clean environment and
    limits on time, processes, disk and the size of each process are always in place."""

    seccomp: bool
    landlock: int
    """Version of the interface; 0: none."""
    own_users: bool
    """True if each sandbox has a user of its own, which requires root."""
    cgroup: str
    """`v1` or `v2`; empty: none is writable."""
    cgroup_refused: str
    """The reason why there is no cgroup."""

    @property
    def limits(self) -> tuple[str, ...]:
        """The limits of a spec that can be enforced."""
        by_cgroup = ("cpus",) if self.cgroup else ()
        return ("memory_bytes", "disk_bytes", "processes", *by_cgroup)

    def __str__(self) -> str:
        cgroup = f"cgroup {self.cgroup}" if self.cgroup else f"no cgroup ({self.cgroup_refused})"
        return ", ".join(
            [
                "seccomp" if self.seccomp else "no seccomp (unknown processor)",
                f"Landlock {self.landlock}" if self.landlock else "no Landlock",
                "memory of all processes together by " + cgroup
                if self.cgroup
                else f"memory by process only, {cgroup}",
                "one user for each sandbox" if self.own_users else "one user for all sandboxes",
            ]
        )
