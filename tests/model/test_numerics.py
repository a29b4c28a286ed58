"""Batch-invariant arithmetic: the same functions, computed in products of one shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from etude.model import numerics
from etude.model.numerics import INVARIANT, PLAIN, TILE_ROWS
from etude.model.tiled_attention import KEYS, PRODUCTS, products, shares

ROWS = (1, TILE_ROWS - 1, TILE_ROWS, TILE_ROWS + 1, 3 * TILE_ROWS)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("rows", ROWS)
def test_tiles_make_up_the_whole_product(rows: int) -> None:
    x, w, bias = numbers(2, rows, 6), numbers(5, 6), numbers(5)
    for given in (None, bias):
        torch.testing.assert_close(INVARIANT.linear(x, w, given), PLAIN.linear(x, w, given))
    heads = numbers(2, rows, 3, 6)
    per_head = numbers(3, 6, 4)
    torch.testing.assert_close(INVARIANT.per_head(heads, per_head), PLAIN.per_head(heads, per_head))


def test_every_product_has_the_same_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shape of a product determines how it is split, and so its rounding."""
    shapes: set[Any] = set()
    for name in ("mm", "bmm"):
        product = getattr(torch, name)

        def noted(a: Any, b: Any, product: Any = product, **more: Any) -> Any:
            assert a.is_contiguous()
            shapes.add((a.shape, b.shape))
            return product(a, b, **more)

        monkeypatch.setattr(torch, name, noted)
    with torch.no_grad():
        for rows in ROWS:
            INVARIANT.linear(numbers(rows, 6), numbers(5, 6), None)
            INVARIANT.per_head(numbers(rows, 3, 6), numbers(3, 6, 4))
    assert shapes == {((TILE_ROWS, 6), (6, 5)), ((3, TILE_ROWS, 6), (3, 6, 4))}


def test_functions_in_steps_are_those_of_torch() -> None:
    x = torch.cat((torch.linspace(-80, 80, 10_001), torch.linspace(-1, 1, 10_001)))
    exact, near = torch.sigmoid(x.double()), {"rtol": 5e-7, "atol": 0.0}
    torch.testing.assert_close(INVARIANT.sigmoid(x).double(), exact, **near)
    torch.testing.assert_close(INVARIANT.silu(x).double(), x * exact, **near)
    far = INVARIANT.sigmoid(torch.tensor([-1e4, -90.0, 90.0, 1e4]))
    torch.testing.assert_close(far, torch.tensor([0.0, 0.0, 1.0, 1.0]), rtol=0.0, atol=1e-30)
    assert INVARIANT.sigmoid(x.bfloat16()).dtype == torch.bfloat16
    x, cos, other, sin = numbers(4, 7).unbind()
    torch.testing.assert_close(
        INVARIANT.rotate(x, cos, other, sin), PLAIN.rotate(x, cos, other, sin)
    )


def test_a_value_may_come_from_one_function_and_its_gradient_from_another() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    y = numerics.value_of(lambda: x + 1, gradient_of=lambda: 5 * x)
    y.backward()
    assert x.grad is not None
    assert (y.item(), x.grad.item()) == (4.0, 5.0)
    with torch.no_grad():
        assert numerics.value_of(lambda: x + 1, gradient_of=lambda: 1 / 0).item() == 4.0


class OnDevice(torch.Tensor):
    """A tensor that claims to be on a device."""

    is_cuda = True


@pytest.mark.parametrize("count", [1, PRODUCTS, PRODUCTS + 3])
def test_products_on_a_device_are_always_as_many(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = numbers(count, 5, 6), numbers(count, 6, 4)
    lengths: list[int] = []
    bmm = torch.bmm

    def noted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert a.is_contiguous() and b.is_contiguous() and len(a) == len(b)
        lengths.append(len(a))
        return bmm(a, b)

    monkeypatch.setattr(torch, "bmm", noted)
    strided = b.transpose(1, 2).contiguous().transpose(1, 2)
    found = products(a.as_subclass(OnDevice), strided.as_subclass(OnDevice))
    torch.testing.assert_close(found.as_subclass(torch.Tensor), bmm(a, b))
    assert lengths == [PRODUCTS] * -(-count // PRODUCTS)


def test_shares_on_a_device_do_not_depend_on_what_stands_behind_them() -> None:
    scores = numbers(2, 3, 2 * KEYS).float() * 30
    scores[..., KEYS + 5 :] = -torch.inf
    found = shares(scores.as_subclass(OnDevice)).as_subclass(torch.Tensor)
    torch.testing.assert_close(found, torch.softmax(scores, -1))
    longer = torch.nn.functional.pad(scores, (0, KEYS), value=-torch.inf)
    more = shares(longer.as_subclass(OnDevice)).as_subclass(torch.Tensor)
    assert torch.equal(more[..., : 2 * KEYS], found) and not more[..., 2 * KEYS :].any()
