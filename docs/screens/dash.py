"""Captures the dashboard's screens of any run that `etude dash` serves at URL:

    python docs/screens/dash.py URL RUN GROUP [--session ID] [--other RUN] [--stopped RUN]
                                [--only NAME ...]

GROUP is one of RUN, and the session that is shown its first attempt or ID. The pictures of several
runs and of a stopped one are made only if those are named. Needs playwright and pillow."""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

FOLDER = Path(__file__).parent
WIDTH = 1280
HEIGHT = {"dash-compare": 1000, "dash-tokens": 1500}
"""Of views whose point is further down than 800 pixels."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("run")
    parser.add_argument("group")
    parser.add_argument("--session")
    parser.add_argument("--other")
    parser.add_argument("--stopped")
    parser.add_argument("--only", nargs="+")
    given = parser.parse_args()
    for name, (path, theme) in shots(given).items():
        if not given.only or name in given.only:
            capture(
                given.url.rstrip("/") + path, theme, HEIGHT.get(name, 800), FOLDER / f"{name}.png"
            )


def shots(given: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """Name -> the view, and dark or light."""
    run, session = f"/runs/{given.run}", given.session or f"{given.group}.0"
    found = {
        "dash-run": (run, "light"),
        "dash-rollouts": (f"{run}/rollouts?kind=train&sort=-length", "light"),
        "dash-failures": (f"{run}/failures?kind=train", "light"),
        "dash-group": (f"{run}/groups/{given.group}", "dark"),
        "dash-session": (f"{run}/sessions/{session}", "light"),
        "dash-tokens": (f"{run}/sessions/{session}?tab=tokens", "light"),
        "dash-ledger": (f"{run}/ledger", "light"),
        "dash-fleet": (f"{run}/fleet", "dark"),
    }
    if given.other:
        found["dash-compare"] = (f"{run},{given.other}", "dark")
    if given.stopped:
        found["dash-doctor"] = (f"/runs/{given.stopped}/doctor", "light")
    return found


def capture(url: str, theme: str, height: int, to: Path) -> None:
    with sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": WIDTH, "height": height}, color_scheme=theme)
        page.goto(url)
        page.wait_for_selector("main .card, main table", timeout=120_000)
        page.wait_for_timeout(1500)
        image = Image.open(io.BytesIO(page.screenshot()))
        few = image.convert("RGB").quantize(
            256, Image.Quantize.MAXCOVERAGE, kmeans=1
        )  # rare colours too
        few.save(to, optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
