"""The slot budget that bounds staleness.

A task may start only when a slot is free. A slot frees when the weights that were trained on its
group are live, or at once if the group is dropped. So no finished work is ever thrown away for
being stale, and yet no token is trained on more than `max_lag` steps after the weights that sampled
it.

Proof of the bound. Let a group be admitted while version v is live. At most `capacity - 1` older
groups are alive, and at most `reorder_window - 1` younger ones may be taken before it; every alive
group is trained on in some step after v, `per_step` groups to a step. So the group is trained on at
step v + 1 + (capacity + reorder_window - 2) // per_step at the latest, with the weights of the
version before that step: its lag is at most (capacity + reorder_window - 2) // per_step, and
`capacity` is chosen so that this equals `max_lag`. Letting younger groups overtake a straggler
costs slots, not staleness. `max_lag = 0` is synchronous training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Slot(Generic[T]):
    admitted: int
    work: T | None = None


class Window(Generic[T]):
    """The slots, numbered in the order of admission. Pure: the controller waits and wakes, this
    class only decides."""

    def __init__(
        self, *, per_step: int, max_lag: int, reorder_window: int = 1, live: int = 0
    ) -> None:
        self.per_step = per_step
        self.max_lag = max_lag
        self.reorder_window = reorder_window
        self.live = live
        self.capacity = (max_lag + 1) * per_step - (reorder_window - 1)
        if reorder_window < 1 or self.capacity < per_step:
            raise ValueError(
                f"reorder_window {reorder_window} leaves {self.capacity} slots for "
                f"{per_step} groups a step: with max_lag {max_lag}, it must be from 1 to "
                f"{max_lag * per_step + 1}"
            )
        self.step = live + 1  # the step that take() fills
        self._next = 0
        self._waiting: dict[int, _Slot[T]] = {}  # admitted, not taken yet; in slot order
        self._taken: dict[int, int] = {}  # step -> groups in it, until its weights are live
        self._room = per_step  # groups that the current step still takes

    def restore(self, *, step: int, slots: int, finished: Iterable[tuple[int, int, T]]) -> None:
        """Put a new window into the state that it had when the run stopped: `slots` were given out,
        every batch before `step` is made, and the `finished` groups (slot, version live at
        admission, work) wait to be taken.

        Groups that were in flight are left out, as if they had been dropped, and every other slot
        keeps its number. So the bound holds as if the run had never stopped, and no finished work
        is lost.
        """
        assert self._next == 0, "only a new window can be restored"
        self.step, self._next = step, slots
        self._waiting = {
            slot: _Slot(admitted, work)
            for slot, admitted, work in sorted(finished, key=lambda f: f[0])
        }
        self._taken = dict.fromkeys(range(self.live + 1, step), self.per_step)
        assert self.active <= self.capacity, (
            f"{self.active} groups were in flight, but the window has only {self.capacity} slots"
        )

    @property
    def active(self) -> int:
        return len(self._waiting) + sum(self._taken.values())

    @property
    def usage(self) -> tuple[int, int, int]:
        """Slots in use, all slots, and finished groups that wait for an older one."""
        held = sum(slot.work is not None for slot in self._waiting.values())
        return self.active, self.capacity, held

    def admit(self) -> int | None:
        """Give a slot to a new group, or return None while all are in use."""
        if self.active >= self.capacity:
            return None
        slot, self._next = self._next, self._next + 1
        self._waiting[slot] = _Slot(self.live)
        return slot

    def finish(self, slot: int, work: T) -> bool:
        """Mark the group as ready to be trained on. Returns False if it was delivered before: the
        first delivery counts."""
        entry = self._waiting.get(slot)
        if entry is None or entry.work is not None:
            return False
        entry.work = work
        return True

    def drop(self, slot: int) -> bool:
        """Free the slot of a group that will not be trained on. Returns False if it was settled
        before."""
        entry = self._waiting.get(slot)
        if entry is None or entry.work is not None:
            return False
        del self._waiting[slot]
        return True

    def take(self) -> T | None:
        """Take the oldest finished group that may go into the current step, or return None while
        there is none."""
        if not self._waiting:
            return None
        horizon = next(iter(self._waiting)) + self.reorder_window
        for slot, entry in self._waiting.items():
            if slot >= horizon:
                return None
            if entry.work is not None:
                del self._waiting[slot]
                assert self.step - 1 - entry.admitted <= self.max_lag, (
                    f"slot {slot} is too old for step {self.step}"
                )
                self._taken[self.step] = self._taken.get(self.step, 0) + 1
                self._room -= 1
                if self._room == 0:
                    self.step, self._room = self.step + 1, self.per_step
                return entry.work
        return None

    def advance(self, version: int) -> None:
        """Free the slots of every group that `version` was trained on. From now on, newly admitted
        groups are sampled from `version` or newer weights."""
        assert version >= self.live, f"live weights went back from version {self.live} to {version}"
        self.live = version
        self._taken = {step: count for step, count in self._taken.items() if step > version}
