"""The page of real-time RL, from the store alone."""

from __future__ import annotations

import torch

from etude.commands.show import find_damage
from etude.core import traffic
from etude.core.traffic import Change
from etude.core.updates import Forgotten, UpdateRecord
from etude.dash.guard import Access
from etude.dash.realtime import RealtimePage
from etude.dash.recorded import RecordedRun
from etude.dash.server import create_app
from etude.store.objects import Objects
from etude.store.realtime import create_update, forget_user
from etude.store.runs import Run
from etude.weights.publish import publish
from tests.dash.realtime_store import write_realtime
from tests.dash.recorded_store import ask, write_run


def test_what_the_loop_did_and_why() -> None:
    objects = Objects.open("memory:")
    gone = write_realtime(objects)
    app = create_app([RecordedRun("users", Run(objects))], Access(host="127.0.0.1"))
    assert ask(app, "/api/runs").json["runs"][0]["realtime"] is True
    found = ask(app, "/api/runs/users/realtime").json

    state = found["state"]
    assert (state["doing"], state["live"], state["beside"]) == ("held", 1, None)
    assert (state["deployed"], state["refused"], state["rolled_back"]) == (1, 1, 1)
    actions = [(each["action"], each["version"]) for each in reversed(found["changes"])]
    assert actions == [("start", 0), ("canary", 1), ("promote", 1), ("settle", 1)] + [
        ("refuse", 2), ("canary", 3), ("roll_back", 3),
    ]  # fmt: skip
    refused = next(each for each in found["changes"] if each["action"] == "refuse")
    assert refused["evidence"]["heldout live"] == 0.75
    assert refused["evidence"]["heldout candidate"] == 0.5
    assert refused["evidence"]["heldout loss"] > refused["evidence"]["heldout margin"] == 0.03
    settled = next(each for each in found["changes"] if each["action"] == "settle")
    assert settled["evidence"]["kept low"] <= settled["evidence"]["kept gain"]

    became = {each["version"]: (each["base"], each["became"]) for each in found["updates"]}
    assert became == {1: (0, "settle"), 2: (1, "refuse"), 3: (1, "roll_back")}
    assert all(each["users"] == each["sessions"] >= 12 for each in found["updates"])
    assert found["updates"][0]["dropped"]["capped (user_cap)"] > 0
    ledger = found["ledger"]
    settled_or_waiting = ledger["trained"] + sum(ledger["dropped"].values()) + ledger["pending"]
    assert ledger["issued"] == settled_or_waiting and ledger["dropped"]["heldout"] > 0
    assert [(each["user"], each["versions"]) for each in found["deleted"]] == [(gone, [1, 2, 3])]


def test_sessions_of_users_are_in_no_group_and_none_is_missing() -> None:
    objects = Objects.open("memory:")
    write_realtime(objects)
    recorded = RecordedRun("users", Run(objects))
    recorded.refresh()
    assert recorded.missing() == []
    # the store has no weights and therefore no model
    assert all("model/" in each for each in find_damage(Run(objects)))


def test_what_was_read_before_is_not_read_again() -> None:
    objects = Objects.open("memory:")
    write_realtime(objects)
    run = Run(objects)
    page = RealtimePage(RecordedRun("users", run))
    first = page.page()

    def reads() -> int:
        before = objects.usage.reads
        page.page()
        return objects.usage.reads - before

    known = reads()
    for step in range(4, 40):
        record = UpdateRecord(step=step, base=1, time=0.0, answers=())
        create_update(run, record)
    assert reads() == known + 36
    assert reads() == known, "however many there are"
    gone = page.page()["updates"][-1]
    row = run.batch(1).rows[0]
    forgotten = Forgotten(user=row.sample.partition(".")[0], time=2e9, steps=(1,))
    forget_user(run, forgotten)
    changed = page.page()
    assert changed["updates"][-1]["users"] == gone["users"] - 1
    assert len(changed["deleted"]) == len(first["deleted"]) + 1


def test_a_run_without_users_has_no_such_page() -> None:
    run = Run(Objects.open("memory:"))
    write_run(run)
    app = create_app([RecordedRun("x", run)], Access(host="127.0.0.1"))
    assert ask(app, "/api/runs").json["runs"][0]["realtime"] is False
    assert ask(app, "/api/runs/x/realtime").json["state"] is None


def test_what_the_loop_is_at() -> None:
    """The state follows from the changes of traffic and the newest published version."""
    start = traffic.start(0, 0.0, 0.0)
    canary = traffic.canary(start, 1, 1.0, 0.5)
    promoted = traffic.promote(canary, 2.0, "", 0.5)
    settled = traffic.settle(promoted, 3.0, "")
    held = traffic.roll_back(canary, 2.0, "", held=True)
    objects = Objects.open("memory:")
    page = RealtimePage(RecordedRun("users", Run(objects)))

    def doing(*changes: Change, batched: int) -> str:
        state = page._state(changes, batched)
        assert state is not None
        return str(state["doing"])

    assert doing(start, batched=-1) == doing(start, batched=0) == "collect"
    assert doing(start, batched=1) == "train"
    for version, after in ((0, "train"), (1, "evaluate")):
        publish(objects, version, {"w": torch.tensor([version])}, stage="rl", step=version)
        assert doing(start, batched=1) == after
    assert doing(start, canary, batched=1) == "canary"
    assert doing(start, canary, promoted, batched=2) == "watch"
    assert doing(start, canary, promoted, settled, batched=1) == "collect"
    assert doing(start, canary, promoted, settled, batched=2) == "train"
    assert doing(start, canary, held, batched=1) == "held"
    assert page._state((), 1) is None
