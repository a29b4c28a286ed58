"""Expected results of the FP8 kernels; `kernel_checks` runs them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from etude.engine.kernels import fp8, norm
from etude.model import fp8 as plain


def check_fp8(x_NC: Tensor, w_MC: Tensor, bias_M: Tensor) -> dict[str, float]:
    """Relative errors by name, for any x, w and bias; all but `act` and `product` are exact."""
    w = plain.quantise_rows(w_MC)
    exact = (plain.quantise_rows(x_NC).values.float() / 8).to(x_NC.dtype)
    # Triton's interpreter rounds to e4m3 incorrectly, so it gets numbers that are exact in e4m3.
    exact = exact.where(exact.abs() > 2**-9, 0)
    x = fp8.quantise_rows(exact)
    opened = torch.cat((torch.full_like(exact, 32), exact), -1)
    act = fp8.quantise_rows(opened, gated=True)
    signs, normed = torch.sign(x_NC), torch.empty_like(x_NC)
    ones = fp8.empty_rows(x_NC)
    norm.add_norm(signs, None, torch.ones_like(x_NC[0]), normed, 0.0, rounded=ones)
    wide = _read(x) @ _read(w).T + bias_M.double()
    pair = torch.cat((x_NC, x_NC.flip(0)), -1)
    gate, up = pair.double().chunk(2, -1)
    return {
        "quantised": _error(_read(x), exact),
        "quantised act": _error(_read(act), 32 * exact),
        "quantised norm": _error(_read(ones), normed),
        "act": _error(fp8.gated(pair), F.silu(gate) * up),
        "product": _error(fp8.product(x, w, bias_M, x_NC.dtype), wide),
    }


def _read(x: plain.Quantised) -> Tensor:
    return x.values.double() * x.scales.double()[:, None]


def _error(out: Tensor, reference: Tensor) -> float:
    return float((out.double() - reference.double()).norm() / reference.double().norm())
