"""Master weights: fp32, of which a model that computes in bf16 already holds one half.

Rounding a master to bf16 leaves a remainder of 16 bits. Where the model's parameters are the
rounded masters, only these remainders are kept beside it, as int16 (`SplitMaster`): both together
are the master, to the bit, in 4 bytes instead of 6.

Masters are rounded to the nearest bf16 number and, where two are equally near, away from zero.
Rounding to even would need another bit: it rounds up to an even number from halfway below it and
down to it from halfway above it, and int16 has only one of the two remainders. Masters that are not
split are rounded in the same way, so that a checkpoint stands for the same weights on any machine.

Seen as integers, `split` adds half of the last place and cuts, and `join` adds the halves. This is
exact for every bit pattern, also of subnormal numbers and where the sum carries into the exponent.
As with any rounding to the nearest, masters from 2**128 - 2**119 on become infinite; a NaN may
become any number. `join` gives back both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.train.distributed import local_tensor

HALF = 0x8000
"""Half of the last place of a bf16 number, in the bits of an fp32 number."""


@dataclass(frozen=True, slots=True, eq=False)
class SplitMaster:
    """A master whose rounded half is a parameter of the model. It has as much of a tensor's
    interface as those need who do not care which of the two a master is."""

    parameter: Tensor
    """bf16; of a sharded one, the rows of this rank count."""
    remainder: Tensor
    """int16."""

    @classmethod
    def of(cls, master: Tensor, parameter: Tensor) -> SplitMaster:
        """Split a master; its rounded half is written into the parameter."""
        made = cls(parameter, torch.empty_like(master, dtype=torch.int16))
        made.copy_(master)
        return made

    @property
    def shape(self) -> torch.Size:
        return self.remainder.shape

    @property
    def ndim(self) -> int:
        return self.remainder.ndim

    @property
    def device(self) -> torch.device:
        return self.remainder.device

    @property
    def rounded(self) -> Tensor:
        # FSDP may replace the local tensor of a parameter, so it is not kept
        return local_tensor(self.parameter).detach()

    def join(self) -> Tensor:
        return join(self.rounded, self.remainder)

    def copy_(self, master: Tensor) -> None:
        rounded, remainder = split(master.to(self.device))
        self.rounded.copy_(rounded)
        self.remainder.copy_(remainder)

    def clone(self) -> SplitMaster:
        return SplitMaster(self.rounded.clone(), self.remainder.clone())

    def pieces(self, size: int) -> Iterator[SplitMaster]:
        """The master in pieces of so many numbers, which share memory with it."""
        halves = (torch.split(half.view(-1), size) for half in (self.rounded, self.remainder))
        return map(SplitMaster, *halves)


Master = Tensor | SplitMaster


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """A master's rounded half (bf16) and its remainder (int16)."""
    bits = master.contiguous().view(torch.int32)
    rounded = (bits + HALF).bitwise_right_shift_(16).to(torch.int16)
    return rounded.view(torch.bfloat16), bits.to(torch.int16)


def join(rounded: Tensor, remainder: Tensor) -> Tensor:
    """The master with these halves."""
    bits = rounded.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return bits.add_(remainder).view(torch.float32)


def whole(master: Master) -> Tensor:
    """The master in fp32: itself, or joined."""
    return master if isinstance(master, Tensor) else master.join()


def zeros_like(master: Master) -> Tensor:
    """fp32 zeros of the shape of a master."""
    return torch.zeros(master.shape, device=master.device)


@contextlib.contextmanager
def joined(master: Master) -> Iterator[Tensor]:
    """The master in fp32, to be changed in place inside the `with` block."""
    tensor = whole(master)
    yield tensor
    if isinstance(master, SplitMaster):
        master.copy_(tensor)


@torch.no_grad()
def round_into(parameter: Tensor, master: Master) -> None:
    """Make a parameter, of bf16 or fp32, the rounded master."""
    own = local_tensor(parameter)
    if isinstance(master, SplitMaster):
        if master.parameter is not parameter:
            own.copy_(master.rounded)
    elif own.dtype == torch.float32:  # in place: three times as fast as by way of bf16
        bits = own.view(torch.int32)
        torch.add(master.view(torch.int32), HALF, out=bits)
        bits.bitwise_and_(-2 * HALF)
    else:
        own.copy_(split(master)[0])
