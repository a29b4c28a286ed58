"""The dashboard in a real browser: Debian's Chromium, headless, by Playwright (`make test-dash`).

A real run is made first, with few steps; ETUDE_DASH_RUN names an existing one to use instead. AXE
names axe-core's script, for the check of accessibility.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.core.events import EVENTS
from etude.store.runs import Run
from etude.store.verdicts import read_preferences
from tests.dash.recorded_store import attempt, write_run

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.browser

TOKEN = "0123456789abcdef"
TIMEOUT = 120_000
RUN = """
name = "real"
[model]
hidden_size = 64
num_layers = 2
num_heads = 4
num_kv_heads = 2
intermediate_size = 192
max_context = 768

[tasks]
train = 12
heldout = 8
novel = 4

[harness]
max_turns = 4
max_tokens = 40

[engine]
regions = ["east", "west"]

[[stage]]
kind = "sft"
demonstrations = 200
max_epochs = 6
patience = 6
batch_tokens = 1024
lr = 3e-3

[[stage]]
kind = "rl"
steps = 3
groups_per_step = 2
group_size = 4
max_lag = 1
"""
VIEWS = {
    "": "Mean reward",
    "rollouts": "failures by cause",
    "failures": "Failures by cause",
    "ledger": "Every sample, once",
    "fleet": "Weight versions",
    "doctor": "Waiting",
    "review": "Suspected cheats",
    "compare": "Which is better?",
    "realtime": "Loop",
}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if given := os.environ.get("ETUDE_DASH_RUN"):
        return Path(given)
    folder = tmp_path_factory.mktemp("runs")
    (folder / "run.toml").write_text(RUN)
    command = [sys.executable, "-m", "etude", "run", str(folder / "run.toml")]
    subprocess.run([*command, "--dir", str(folder / "real")], check=True)
    return folder / "real"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "hostile"
    write_run(Run.open(f"file:{folder}"))
    return folder


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "users"
    # a process of its own, since Playwright has an event loop here
    make = [sys.executable, "-m", "tests.dash.realtime_store", f"file:{folder}"]
    subprocess.run(make, check=True)
    return folder


@pytest.fixture(scope="module")
def link(
    real: Path, hostile: Path, users: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The URL that the command prints, with its token."""
    secret = tmp_path_factory.mktemp("token") / "token"
    secret.write_text(TOKEN)
    process = subprocess.Popen(
        [sys.executable, "-m", "etude", "dash", str(real), str(hostile), str(users), "--port", "0"]
        + ["--token-file", str(secret)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    yield process.stdout.readline().split()[-1]
    process.terminate()
    assert process.wait() == 0


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = shutil.which("chromium")
    assert program, "there is no chromium: apt install chromium"
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any, link: str) -> Iterator[Any]:
    """A page with the token. Any error in the browser, or a dialog that opens, fails the test."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    page.set_default_timeout(TIMEOUT)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.goto(link)
    page.wait_for_selector("nav")
    yield page
    context.close()
    assert wrong == []


def base(link: str) -> str:
    return link.partition("/#")[0]


def test_the_token_leaves_the_address(page: Any) -> None:
    assert TOKEN not in page.url
    assert page.evaluate("document.cookie") == ""


def test_without_the_token_it_is_asked_for(browser: Any, link: str) -> None:
    page = browser.new_page()
    page.set_default_timeout(TIMEOUT)
    page.goto(base(link))
    page.fill("input[type=password]", TOKEN)
    page.click("text=continue")
    page.wait_for_selector("nav")
    page.close()


@pytest.mark.parametrize("name", ["real", "hostile"])
@pytest.mark.parametrize("view", VIEWS)
def test_every_view_by_its_link(
    page: Any, link: str, real: Path, hostile: Path, name: str, view: str
) -> None:
    run = {"real": real, "hostile": hostile}[name].name
    page.goto(f"{base(link)}/runs/{run}/{view}".rstrip("/"))
    page.wait_for_selector(f"main >> text={VIEWS[view]}")


def test_keys_lead_through_the_views(page: Any, real: Path) -> None:
    page.keyboard.press("2")
    page.wait_for_selector("table.rollouts")
    assert page.url.endswith(f"/runs/{real.name}/rollouts")
    page.keyboard.press("j")
    page.wait_for_selector("tr.chosen")
    page.keyboard.press("Enter")
    page.wait_for_selector(".facts")
    page.keyboard.press("t")
    page.wait_for_selector(".ribbon, .empty")
    page.keyboard.press("?")
    page.wait_for_selector("[role=dialog]")
    page.keyboard.press("Escape")
    page.go_back()
    page.wait_for_selector("table.rollouts")


def test_dark_and_light_are_remembered(page: Any) -> None:
    before = page.evaluate("document.documentElement.dataset.theme")
    page.keyboard.press("d")
    after = page.evaluate("document.documentElement.dataset.theme")
    assert {before, after} == {"dark", "light"}
    page.reload()
    page.wait_for_selector("nav")
    assert page.evaluate("document.documentElement.dataset.theme") == after


def test_filters_stand_in_the_address(page: Any, link: str, hostile: Path) -> None:
    page.goto(f"{base(link)}/runs/{hostile.name}/rollouts")
    page.click(".facet:has-text('failed')")
    page.wait_for_url("**status=failed**")
    rows = page.locator("table.rollouts tbody tr")
    playwright.expect(rows).to_have_count(1, timeout=TIMEOUT)
    page.goto(page.url)
    playwright.expect(rows).to_have_count(1, timeout=TIMEOUT)
    page.click(".toolbar >> text=/^all$/")
    page.keyboard.press("/")
    page.keyboard.type("g000001")
    playwright.expect(rows).to_have_count(2, timeout=TIMEOUT)
    assert "text=g000001" in page.url


def test_what_a_model_says_is_text(page: Any, link: str, hostile: Path) -> None:
    """In all views of a session; the fixture fails on a dialog and on a violation of the policy."""
    for path in ("sessions/g000001.1", "sessions/g000001.1?tab=tokens", "groups/g000001"):
        page.goto(f"{base(link)}/runs/{hostile.name}/{path}")
        page.wait_for_selector("main .card")
        assert (
            page.evaluate("document.querySelectorAll('main script, main img, main iframe').length")
            == 0
        )
    assert page.locator("text=<script>alert(1)</script>").count() > 0
    page.goto(f"{base(link)}/runs/<script>alert(1)</script>/sessions/<img src=x onerror=alert(1)>")
    page.wait_for_selector(".problem")


def test_a_file_that_tells_of_errors_and_a_line_without_end(
    page: Any, link: str, hostile: Path
) -> None:
    """As in sessions of real repositories: a read is not red, and a line of dots is folded."""
    turn = {"role": "tool", "text": "", "reasoning": "", "calls": [], "call_id": ""}
    call = {"id": "1", "name": "read", "arguments": {"path": "a.py"}}
    answer = "   7\tclass ParseError: pass\n   8\traise ParseError"
    turns = [
        turn | {"role": "assistant", "calls": [call]},
        turn | {"text": answer, "call_id": "1"},
        turn | {"role": "user", "text": "." * 1600},
    ]

    def real(route: Any) -> None:
        answered = route.fetch()
        told = answered.json()
        told["session"]["turns"] = turns
        route.fulfill(response=answered, json=told)

    page.route(
        "**/sessions/g000001.1",
        lambda route: real(route) if "/api/" in route.request.url else route.continue_(),
    )
    page.goto(f"{base(link)}/runs/{hostile.name}/sessions/g000001.1")
    page.wait_for_selector(".call:has-text('read')")
    assert page.locator(".call.wrong").count() == 0
    assert page.locator(".turn.user pre").inner_text() == "." * 400 + " …"


def test_a_group_side_by_side(page: Any, link: str, real: Path) -> None:
    group = Run.open(str(real), create=False).groups()[0]
    page.goto(f"{base(link)}/runs/{real.name}/groups/{group}")
    page.wait_for_selector(".side >> nth=1")
    page.click(".attempts div:nth-child(2) >> text=right")
    page.wait_for_url("**right=**")


def test_the_page_grows_with_the_run(page: Any, link: str, hostile: Path) -> None:
    page.goto(f"{base(link)}/runs/{hostile.name}/rollouts")
    page.wait_for_selector("table.rollouts tbody tr")
    before = page.locator("table.rollouts tbody tr").count()
    log = Run.open(str(hostile), create=False).events("late", EVENTS)
    log.append(attempt("g000777.0"))
    log.flush()
    page.wait_for_selector("text=g000777.0")
    assert page.locator("table.rollouts tbody tr").count() == before + 1


def test_a_verdict_is_kept(page: Any, link: str, hostile: Path) -> None:
    page.goto(f"{base(link)}/runs/{hostile.name}/review")
    page.fill("label:has-text('your name') input", "Ada")
    page.fill("input[placeholder=note] >> nth=0", "<b>it read the tests</b>")
    page.click("button:has-text('confirm') >> nth=0")
    page.wait_for_selector("text=<b>it read the tests</b>")
    page.wait_for_selector("td:has-text('100%')")


def test_a_blind_choice_is_kept(page: Any, link: str, real: Path) -> None:
    """Between the versions of the first and the last evaluation."""
    page.goto(f"{base(link)}/runs/{real.name}/compare")
    page.click("label:has-text('your name') input")
    page.keyboard.type("Ada", delay=300)
    select = page.locator("select")
    versions = select.nth(0).locator("option").evaluate_all("all => all.map(each => each.value)")
    select.nth(0).select_option(versions[1])
    select.nth(1).select_option(versions[-1])
    page.wait_for_selector(".side >> nth=1")
    before = page.locator(".choice span").inner_text()
    page.click("button:has-text('left')")
    playwright.expect(page.locator(".choice span")).not_to_have_text(before, timeout=TIMEOUT)
    page.keyboard.press("ArrowRight")
    page.click("summary:has-text('preferences so far')")
    told = [each.record for each in read_preferences(Run.open(str(real), create=False))]
    assert told[0].who == "Ada" and told[0].verdict == "left"


def test_a_cheat_that_nothing_flagged(page: Any, link: str, hostile: Path) -> None:
    page.goto(f"{base(link)}/runs/{hostile.name}/sessions/g000001.0")
    page.fill("label:has-text('your name') input", "Bo")
    page.click("button:has-text('confirm')")
    page.wait_for_selector("text=all verdicts")
    page.click("text=all verdicts")
    page.wait_for_selector("main >> text=g000001.0")


def test_two_runs_over_each_other(page: Any, link: str, real: Path, hostile: Path) -> None:
    page.goto(f"{base(link)}/runs/{real.name},{hostile.name}")
    page.wait_for_selector(f".legend:has-text('{hostile.name}')")
    names = page.locator(".runhead h1").all_inner_texts()
    assert names == 2 * [real.name, hostile.name], "above the charts, and below them"
    runs, lines = (
        page.eval_on_selector_all(
            places, f"all => all.map((each) => getComputedStyle(each).{side})"
        )
        for places, side in (
            (".runhead .dot", "backgroundColor"),
            (".legend i", "borderTopColor"),
        )
    )
    assert len({*runs}) == 2 and {*lines} == {*runs}, "a colour is that of a run"


def test_the_loop_of_a_run_that_learns_from_users(page: Any, link: str, users: Path) -> None:
    assert page.locator("nav >> text=Real-time").count() == 0, "of a run without users"
    page.goto(f"{base(link)}/runs/{users.name}")
    page.wait_for_selector("nav >> text=Real-time")
    page.keyboard.press("9")
    page.wait_for_selector("[aria-current=step]:has-text('held')")
    assert page.url.endswith(f"/runs/{users.name}/realtime")
    playwright.expect(page.locator("[aria-label=gate] .chip.bad")).not_to_have_count(0)
    playwright.expect(page.locator("[aria-label=canary] >> text=dissatisfied")).not_to_have_count(0)
    page.wait_for_selector("[aria-label=decisions] >> text=stopped by hand")
    page.wait_for_selector("text=capped (user_cap)")
    page.wait_for_selector(".plot canvas")
    if place := os.environ.get("ETUDE_SCREENS"):
        page.screenshot(path=f"{place}/dash-realtime.png", full_page=True)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", [*VIEWS, "session", "group"])
def test_no_serious_finding_of_axe(
    browser: Any, link: str, hostile: Path, users: Path, view: str, theme: str
) -> None:
    script = os.environ.get("AXE")
    if not script:
        pytest.skip("AXE does not name axe-core's script")
    context = browser.new_context(bypass_csp=True, color_scheme=theme)
    page = context.new_page()
    page.set_default_timeout(TIMEOUT)
    paths = {"session": "sessions/g000001.1", "group": "groups/g000001"}
    page.goto(link)
    page.wait_for_selector("nav")
    run = users if view == "realtime" else hostile
    page.goto(f"{base(link)}/runs/{run.name}/{paths.get(view, view)}".rstrip("/"))
    page.wait_for_selector("main .card, main table")
    page.evaluate(Path(script).read_text())
    found = page.evaluate("axe.run().then(found => found.violations)")
    serious = [
        (each["id"], each["nodes"][0]["html"][:200], each["nodes"][0].get("failureSummary"))
        for each in found
        if each["impact"] in ("serious", "critical")
    ]
    context.close()
    assert serious == []


def test_the_page_asks_no_other_host(page: Any, link: str, real: Path) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{base(link)}/runs/{real.name}")
    page.wait_for_selector(".plot canvas")
    assert asked and all(url.startswith((base(link), "blob:", "data:")) for url in asked)
    assert TOKEN not in " ".join(asked)
