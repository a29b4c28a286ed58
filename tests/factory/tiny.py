"""A small repository with tests and a history, and builds that need no network."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

from etude.factory.build import Options, Status, build
from etude.factory.install import CopyInstaller

CART = '''\
"""A cart."""


class Cart:
    def __init__(self):
        self.items = []

    def add(self, name, price, count=1):
        """Put `count` of a thing into the cart."""
        if count < 1:
            raise ValueError("count must be positive")
        self.items.append((name, price, count))

    def total(self, discount=0):
        """The price of all, less a discount in per cent."""
        full = sum(price * count for _, price, count in self.items)
        reduced = full - full * discount // 100
        return max(reduced, 0)

    def names(self):
        """The names in order, each once."""
        found = []
        for name, _, _ in self.items:
            if name not in found:
                found.append(name)
        return sorted(found)


def parse_price(text):
    """Cents of a text such as 1.50."""
    whole, _, part = text.partition(".")
    cents = int(whole) * 100
    if part:
        cents += int(part.ljust(2, "0")[:2])
    return cents
'''
TESTS = """\
import sys

import pytest

from shop.cart import Cart


def full():
    cart = Cart()
    cart.add("pear", 100, 2)
    cart.add("apple", 50)
    cart.add("pear", 100)
    return cart


class TestCart:
    def test_total(self):
        assert full().total() == 350

    @pytest.mark.parametrize("discount, total", [(10, 315), (100, 0)])
    def test_discount(self, discount, total):
        assert full().total(discount) == total

    def test_names(self):
        assert full().names() == ["apple", "pear"]


def test_no_negative_count():
    with pytest.raises(ValueError):
        Cart().add("pear", 1, 0)


def test_parse_price():
    from shop import cart

    assert cart.parse_price("1.5") == 150
    assert cart.parse_price("2") == 200


def test_flaky():
    # passes where lines are looked at, and nowhere else
    assert full().total() == 350 and "coverage" in sys.modules
"""
MORE = '''\


def format_price(cents):
    """Cents as a text such as 1.50."""
    return f"{cents // 100}.{cents % 100:02}"


def cheapest(items):
    """The name of the thing with the lowest price."""
    name, _, _ = min(items, key=lambda item: item[1])
    return name
'''
MORE_TESTS = """\


def test_format_price():
    from shop import cart

    assert cart.format_price(1205) == "12.05"


def test_cheapest():
    from shop import cart

    assert cart.cheapest(full().items) == "apple"
"""
PROJECT = '[project]\nname = "shop"\nversion = "1"\n'


def make_repository(folder: Path) -> Path:
    """Two commits: the second one adds functions with their tests."""
    for path, text in {
        "pyproject.toml": PROJECT,
        "shop/__init__.py": "",
        "shop/cart.py": CART,
        "tests/test_cart.py": TESTS,
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    git(folder, "init", "-q")
    commit(folder, "Start")
    for path, text in (("shop/cart.py", CART + MORE), ("tests/test_cart.py", TESTS + MORE_TESTS)):
        (folder / path).write_text(text)
    commit(folder, "Add format_price and cheapest (#12)\n\nSigned-off-by: A <a@b.c>")
    return folder


def commit(folder: Path, message: str) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", message)


def git(folder: Path, *argv: str) -> None:
    who = {"NAME": "a", "EMAIL": "a@b.c", "DATE": "2026-01-02T03:04:05Z"}
    told = {f"GIT_{role}_{key}": who[key] for role in ("AUTHOR", "COMMITTER") for key in who}
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), **told}
    subprocess.run(["git", *argv], cwd=folder, env=env, check=True)


def build_tiny(source: Path | str, out: Path, limit: int) -> Status:
    options = Options(limit=limit, jobs=2, repetitions=1, installer=CopyInstaller())
    return asyncio.run(build([str(source)], out, options, lambda status: None))
