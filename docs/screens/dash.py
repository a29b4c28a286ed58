"""Captures the dashboard's screens: `python docs/screens/dash.py URL RUN OTHER STOPPED GROUP`.

`etude dash` serves these runs at URL, of which one was stopped; GROUP is one of RUN. Needs
playwright and pillow."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

FOLDER = Path(__file__).parent
SIZE = {"width": 1280, "height": 800}


def main(url: str, run: str, other: str, stopped: str, group: str) -> None:
    shots = {
        "dash-run": (f"/runs/{run}", "light"),
        "dash-compare": (f"/runs/{run},{other}", "dark"),
        "dash-rollouts": (f"/runs/{run}/rollouts?kind=train&sort=-length", "light"),
        "dash-failures": (f"/runs/{run}/failures?kind=train", "light"),
        "dash-group": (f"/runs/{run}/groups/{group}", "dark"),
        "dash-session": (f"/runs/{run}/sessions/{group}.0", "light"),
        "dash-tokens": (f"/runs/{run}/sessions/{group}.7?tab=tokens", "light"),
        "dash-ledger": (f"/runs/{run}/ledger", "light"),
        "dash-fleet": (f"/runs/{run}/fleet", "dark"),
        "dash-doctor": (f"/runs/{stopped}/doctor", "light"),
    }
    with sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        for name, (path, theme) in shots.items():
            page = browser.new_page(viewport=SIZE, color_scheme=theme)
            page.goto(url + path)
            page.wait_for_selector("main .card, main table", timeout=120_000)
            page.wait_for_timeout(1500)
            image = Image.open(io.BytesIO(page.screenshot()))
            image.convert("RGB").quantize(96).save(FOLDER / f"{name}.png", optimize=True)
            page.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
