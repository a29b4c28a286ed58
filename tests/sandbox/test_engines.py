"""Our use of a container engine, which a script plays here."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from etude.core.errors import EtudeError
from etude.core.sandbox import Limits, SandboxSpec
from etude.sandbox import container
from etude.sandbox.container import ContainerSandboxPool, find_engine
from etude.sandbox.nested_caller import machine_bytes

BOUND = machine_bytes(Limits())


class Engine:
    """Answers by the first words of each request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: Any) -> None:
        self.answers = {"info": (0, "{}"), "image": (1, ""), "import": (0, ""), "ps": (0, "")}
        self.answers |= {"run": (0, json.dumps({"memory_bytes": BOUND}))} | answers
        self.asked: list[list[str]] = []
        self.data: list[bytes] = []
        monkeypatch.setattr(container.subprocess, "run", self._run)
        monkeypatch.setattr(container.shutil, "which", lambda name: name if name != "no" else None)

    def _run(self, argv: list[str], input: bytes = b"", **how: Any) -> Any:
        self.asked.append(argv)
        self.data.append(input)
        answer = self.answers[argv[1]]
        code, said = answer(argv) if callable(answer) else answer
        if code is None:
            raise subprocess.TimeoutExpired(argv, 5.0)
        out, error = (said, "") if code == 0 else ("", said)
        return SimpleNamespace(returncode=code, stdout=out.encode(), stderr=error.encode())

    def words(self, kind: str) -> list[list[str]]:
        return [argv for argv in self.asked if argv[1] == kind]


def test_the_first_engine_that_answers_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    Engine(monkeypatch, info=lambda argv: (0, "yes") if argv[0] == "b" else (1, "x\nno daemon"))
    assert find_engine(("no", "a", "b")) == ("b", "yes")
    with pytest.raises(EtudeError, match="a running container engine; a: no daemon$"):
        find_engine(("no", "a"))
    with pytest.raises(EtudeError, match="needs no, which is not installed"):
        find_engine(("no",))
    Engine(monkeypatch, info=(1, ""))
    with pytest.raises(EtudeError, match="a: no output"):
        find_engine(("a",))
    Engine(monkeypatch, info=(None, ""))
    with pytest.raises(EtudeError, match="a: a did not answer within 5 s"):
        find_engine(("a",))


def test_a_pool_imports_its_root_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "system_links", lambda: {"bin": "usr/bin", "lib": "usr/lib"})
    engine = Engine(monkeypatch)
    pool = ContainerSandboxPool(clients=("a",))
    (imported,) = engine.words("import")
    packed = engine.data[engine.asked.index(imported)]
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        found = {each.name: (each.type, each.mode, each.linkname) for each in archive}
    assert found["tmp"] == (tarfile.DIRTYPE, 0o1777, "")
    assert found["work"] == (tarfile.DIRTYPE, 0o755, "")
    assert found["bin"][0] == tarfile.SYMTYPE and found["bin"][2] == "usr/bin"
    assert found["lib"][2] == "usr/lib" and len(found) == 4
    name = imported[-1]
    assert pool.argv("one", SandboxSpec())[-1:] != [name] and name in pool.argv(
        "one", SandboxSpec()
    )
    again = Engine(monkeypatch, image=(0, "[]"))
    other = ContainerSandboxPool(clients=("a",))
    assert not again.words("import") and name in other.argv("one", SandboxSpec())
    with pytest.raises(EtudeError, match="a could not import the image: disk full"):
        Engine(monkeypatch, **{"import": (1, "disk full")})
        ContainerSandboxPool(clients=("a",))


@pytest.mark.parametrize(
    ("memory", "bounded"), [(BOUND, True), (BOUND - 1, True), (BOUND + 1, False), (None, False)]
)
def test_bounds_are_believed_if_they_hold(
    monkeypatch: pytest.MonkeyPatch, memory: int | None, bounded: bool
) -> None:
    engine = Engine(monkeypatch, run=(0, json.dumps({"memory_bytes": memory})))
    pool = ContainerSandboxPool(clients=("a",))
    tried = engine.words("run")
    assert any(word.startswith("--memory=") for word in tried[0])
    assert len(tried) == (1 if bounded else 2)
    told = pool.argv("one", SandboxSpec(limits=Limits(memory_bytes=1 << 30)))
    assert (f"--memory={machine_bytes(Limits(memory_bytes=1 << 30))}" in told) is bounded
    assert "--name=one" in told and told[:3] == ["a", "run", "--rm"]
    wants = SandboxSpec(limits=Limits(cpus=1.0))
    if bounded:
        pool.check(wants)
    else:
        with pytest.raises(EtudeError, match=r"limits\.cpus"):
            pool.check(wants)


async def test_a_few_machines_are_made_at_once() -> None:
    machines: container.Machines[Any, Any] = container.Machines("container")
    made: list[object] = []
    enough = asyncio.Event()

    async def start() -> None:
        async with machines.start(lambda: made.append(object())):
            await enough.wait()

    starts = [asyncio.create_task(start()) for _ in range(6)]
    await asyncio.sleep(0)
    assert len(made) == 4
    enough.set()
    await asyncio.gather(*starts)
    assert len(made) == 6
    machines.home.rmdir()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((1, "first\nno rights"), "a: a container cannot run sandboxes here: no rights"),
        ((0, ""), "a: a container cannot run sandboxes here: nothing"),
        ((None, ""), "a: a test container did not end within 5 s"),
    ],
)
def test_an_engine_that_holds_no_sandbox(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: tuple[int | None, str], why: str
) -> None:
    Engine(monkeypatch, run=answer)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(EtudeError, match=why):
        ContainerSandboxPool(clients=("a",))
    assert not [*tmp_path.iterdir()], "nothing is left"


def test_an_image_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    env = json.dumps(["PATH=/bin", "A=b=c", "EMPTY"])
    engine = Engine(monkeypatch, image=lambda argv: (0, env) if "--format" in argv else (0, ""))
    pool = ContainerSandboxPool(clients=("a",))
    asked = len(engine.asked)
    for _ in range(2):
        pool.check(SandboxSpec(image="mine"))
    looked, tried = engine.asked[asked:]
    assert looked[-1] == "mine" and tried[-3] == "mine" and "--entrypoint=python3" in tried
    assert pool._image("mine").env == {"PATH": "/bin", "A": "b=c", "EMPTY": ""}
    assert "mine" in pool.argv("one", SandboxSpec(image="mine"))
    engine.answers["image"] = (1, "")
    with pytest.raises(EtudeError, match="a has no image 'gone': run `a pull gone`"):
        pool.check(SandboxSpec(image="gone"))
    engine.answers["image"] = (0, "null")
    for said, why in (("", "it has an older one"), ("no python3", "no python3")):
        engine.answers["run"] = (1, said)
        with pytest.raises(EtudeError, match=f"image 'old' has no Python 3.11 or newer.*{why}"):
            pool.check(SandboxSpec(image="old"))


def test_what_was_left_by_the_dead_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    label = container._LABEL
    listed = f"aa1 x=y,{label}=dead-1\nbb2 map[{label}:alive]\ncc3 {label}=dead-2,z=1\ndd4 other=x"
    monkeypatch.setattr(container, "is_abandoned", lambda mark: mark.startswith("dead"))
    engine = Engine(monkeypatch, ps=(0, listed), unpause=(1, ""), kill=(1, ""), rm=(0, ""))
    container._sweep("a")
    assert engine.words("ps")[0][2:4] == ["--all", f"--filter=label={label}"]
    for kind in ("unpause", "kill"):
        assert engine.words(kind) == [["a", kind, "aa1", "cc3"]]
    assert engine.words("rm") == [["a", "rm", "--force", "aa1", "cc3"]]
    quiet = Engine(monkeypatch)
    container._sweep("a")
    assert [argv[1] for argv in quiet.asked] == ["ps"]


def test_errors_of_a_program_are_what_it_says(tmp_path: Path) -> None:
    assert container._ran(["sh", "-c", "cat; echo x >&2"], b" in ") == (0, "in")
    assert container._ran(["sh", "-c", "echo out; echo x >&2; exit 3"]) == (3, "x")
