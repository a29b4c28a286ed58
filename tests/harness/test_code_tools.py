"""Every tool of the coding harness, on a real repository: this one."""

from __future__ import annotations

import inspect
import shutil
import sysconfig
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from etude.core.errors import RolloutFailure
from etude.core.harness_config import CodeConfig, ToolKind
from etude.core.sandbox import Sandbox, SandboxSpec
from etude.harness.code import files
from etude.harness.code.diagnostics import Diagnostic, Diagnostics, FakeDiagnostics
from etude.harness.code.servers import LanguageServers
from etude.harness.code.tool import Workspace, check_arguments
from etude.harness.code.toolset import TOOLS, Toolset
from etude.sandbox.fake import FakeSandbox
from etude.sandbox.pool import open_sandbox_pool

ROOT = Path(__file__).parents[2]
FILES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [*ROOT.glob("etude/core/*.py"), ROOT / "etude/__init__.py"]
    + [ROOT / "tests/core/test_effort.py", ROOT / "pyproject.toml"]
}
EFFORT = "etude/core/effort.py"
LONG_S = 600.0


class Session:
    """The tools over a sandbox, called as a model calls them."""

    def __init__(self, sandbox: Sandbox, **config: Any) -> None:
        told = {"command_timeout_s": LONG_S, "test_timeout_s": LONG_S, **config}
        self.sandbox = sandbox
        self.source = FakeDiagnostics()
        self._config = CodeConfig(**told)
        self.use(self.source)

    def use(self, source: Any) -> None:
        self.tools = Toolset(Workspace(self.sandbox, self._config, Diagnostics(source)))

    async def __call__(self, name: str, **arguments: Any) -> str:
        return await self.tools.call(name, arguments)


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    pool = open_sandbox_pool("process")
    quick = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    async with pool.open(SandboxSpec(files=FILES, env=quick)) as opened:
        yield opened
    await pool.close()


@pytest.fixture
def call(sandbox: Sandbox) -> Session:
    return Session(sandbox)


async def test_read(call: Session) -> None:
    lines = FILES[EFFORT].splitlines()
    whole = await call("read", path=EFFORT)
    assert whole.splitlines()[0] == f"     1\t{lines[0]}"
    some = await call("read", path=EFFORT, start=3, end=4)
    assert some.splitlines() == [
        f"     3\t{lines[2]}",
        f"     4\t{lines[3]}",
        f"(lines 5 to {len(lines)} follow: read with start=5)",
    ]
    assert "there is no file nowhere.py: glob finds" in await call("read", path="nowhere.py")
    alone = Session(call.sandbox, tools=["read", "submit"])
    assert await alone("read", path="nowhere.py") == "error: there is no file nowhere.py"
    assert f"has {len(lines)} lines" in await call("read", path=EFFORT, start=9999)
    assert (await call("read", path="../x")).startswith("error: ")


async def test_edit_in_a_path_that_is_written_whole(call: Session) -> None:
    root = (await call.sandbox.run(["pwd"], timeout_s=LONG_S)).output.strip()
    old = "def num_turns(trajectory: Trajectory) -> int:"
    said = await call("edit", path=f"{root}/{EFFORT}", old=old, new=old.replace("num", "count"))
    assert said.startswith("ok: line ")
    assert "count_turns(trajectory" in await call.sandbox.read(EFFORT)
    assert "outside of the working copy" in await call("read", path="/etc/passwd")


async def test_an_edit_keeps_the_ends_of_lines(call: Session) -> None:
    await call.sandbox.write("dos.txt", b"one\r\ntwo\r\n")
    assert await call("edit", path="dos.txt", old="one\ntwo", new="1\n2") == "ok: lines 1 to 2"
    assert await call.sandbox.read_bytes("dos.txt") == b"1\r\n2\r\n"


async def test_where_ends_of_lines_differ_each_stays_as_it_is(call: Session) -> None:
    mixed = b"one\r\ntwo\nthree\r\nfour\n"
    await call.sandbox.write("mixed.txt", mixed)
    assert await call("edit", path="mixed.txt", old="four", new="4") == "ok: line 4"
    assert await call.sandbox.read_bytes("mixed.txt") == mixed.replace(b"four", b"4")
    patch = "--- a/mixed.txt\n+++ b/mixed.txt\n@@ -1,3 +1,3 @@\n-two\n+2\n"
    assert (await call("apply_patch", patch=patch)).startswith("ok")
    assert await call.sandbox.read_bytes("mixed.txt") == b"one\r\n2\nthree\r\n4\n"


async def test_lines_are_counted_as_grep_and_tracebacks_count_them(call: Session) -> None:
    text = "a = 1\n\f\nb = 'x\u2028y'\nc = 3\n"
    await call.sandbox.write("pages.py", text)
    assert await call("grep", pattern="c =", path="pages.py") == "pages.py:4:c = 3"
    assert await call("read", path="pages.py", start=4) == "     4\tc = 3"
    assert await call("edit", path="pages.py", old="c = 3", new="c = 4") == "ok: line 4"
    assert await call.sandbox.read("pages.py") == text.replace("c = 3", "c = 4")


async def test_ends_of_lines_of_other_systems_are_no_part_of_a_line(call: Session) -> None:
    for end in ("\r\n", "\r"):
        await call.sandbox.write("old.txt", f"one{end}two{end}")
        assert await call("grep", pattern="^[ot].*o$", path="old.txt") == "old.txt:2:two"
        assert await call("read", path="old.txt", start=2) == "     2\ttwo"


async def test_grep_waits_for_no_pipe(call: Session) -> None:
    await call("terminal", command="mkdir pipes; mkfifo pipes/a; echo found > pipes/b")
    assert await call("grep", pattern="found", path="pipes") == "pipes/b:1:found"


async def test_grep_finds_more_than_it_shows(call: Session) -> None:
    """A search whose time grows with the square of its hits would take hours."""
    await call("terminal", command="yes a | head -n 500000 > many.txt")
    said = await call("grep", pattern="a", path="many.txt")
    assert said.startswith("many.txt:1:a\n") and "more lines: narrow it down" in said


async def test_looking_for_a_place_holds_up_no_other_session(
    call: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def noted(known: Callable[..., Any]) -> Callable[..., Any]:
        def look(*given: Any, **named: Any) -> Any:
            seen.append(threading.get_ident())
            return known(*given, **named)

        return look

    for name in ("replace", "after_changes"):
        monkeypatch.setattr(files, name, noted(getattr(files, name)))
    await call.sandbox.write("a.txt", "1\n2\n")
    assert await call("edit", path="a.txt", old="1", new="one") == "ok: line 1"
    patch = "--- a/a.txt\n+++ b/a.txt\n@@ -2 +2 @@\n-2\n+two\n"
    assert (await call("apply_patch", patch=patch)).startswith("ok")
    assert await call.sandbox.read("a.txt") == "one\ntwo\n"
    assert len(seen) == 2 and threading.get_ident() not in seen


TWICE = "def f(x):\n    return x\n\n\ndef g(x):\n    return x\n"


async def test_of_several_places_the_one_that_was_read_last_is_meant(call: Session) -> None:
    async def edit(new: str, old: str = "    return x") -> str:
        return await call("edit", path="twice.py", old=old, new=new)

    await call.sandbox.write("twice.py", TWICE.encode())
    refused = "error: twice.py: old stands in 2 places (lines 2, 6)"
    chosen = "ok (of 2 places the one that was read last): "
    assert (await edit("    return 1")).startswith(refused), "nobody has read it"
    await call("read", path="twice.py", start=5, end=6)
    assert await edit("    return 1\n    # so") == f"{chosen}lines 6 to 7"
    assert await call("undo") == "ok: twice.py as before that change"
    # at its present position: another tool may have inserted lines above
    await call.sandbox.write("twice.py", f"import os\n\n{TWICE}".encode())
    assert await edit("    return 1") == f"{chosen}line 8"
    assert await call.sandbox.read("twice.py") == f"import os\n\n{TWICE[:-2]}1\n"
    await call.sandbox.write("twice.py", TWICE.encode())
    for start, end in ((1, 6), (3, 4)):  # both places, or neither
        await call("read", path="./twice.py", start=start, end=end)
        assert (await edit("    return 1")).startswith(refused)


async def test_what_was_read_decides_between_places_found_alike_only(call: Session) -> None:
    text = f"{TWICE}if True:\n        return x\n"
    await call.sandbox.write("twice.py", text.encode())
    await call("read", path="twice.py", start=7, end=8)
    said = await call("edit", path="twice.py", old="\n    return x\n", new="\n    return 1\n")
    assert said.startswith("error: twice.py: old stands in 2 places")


async def test_write_and_apply_patch(call: Session) -> None:
    assert await call("write", path="new/made.py", content="x = 1\n") == (
        "ok: wrote new/made.py, 1 lines"
    )
    patch = (
        f"*** Begin Patch\n*** Update File: {EFFORT}\n@@\n-import math\n+import cmath\n"
        "*** Update File: new/made.py\n-x = 1\n+x = 2\n*** Delete File: pyproject.toml\n"
    )
    wrong = f"{patch}*** Update File: {EFFORT}x\n-a\n+b\n"
    assert (await call("apply_patch", patch=wrong)).startswith("error: nothing was changed: there")
    assert await call.sandbox.read("new/made.py") == "x = 1\n"
    assert await call("apply_patch", patch=patch) == (
        f"ok\nchanged {EFFORT}\nchanged new/made.py\ndeleted pyproject.toml"
    )
    assert "import cmath" in await call.sandbox.read(EFFORT)
    with pytest.raises(FileNotFoundError):
        await call.sandbox.read("pyproject.toml")


async def test_a_patch_is_checked_before_anything_is_written(call: Session) -> None:
    await call.sandbox.write("f.txt", "one\ntwo\n")
    first = "*** Begin Patch\n*** Update File: f.txt\n-one\n+1\n"
    for wrong in (
        "*** Add File: /etc/x\n+x\n",
        "*** Add File: ../x\n+x\n",
        f"*** Add File: {EFFORT}\n+x\n",
        "*** Add File: new\n+\ud800\n",
    ):
        said = await call("apply_patch", patch=first + wrong)
        assert said.startswith("error: nothing was changed: ")
        assert await call.sandbox.read("f.txt") == "one\ntwo\n"
    second = "*** Update File: ./f.txt\n*** Move to: g.txt\n-two\n+2\n"
    assert await call("apply_patch", patch=first + second) == "ok\nchanged g.txt\ndeleted f.txt"
    assert await call.sandbox.read("g.txt") == "1\n2\n"


async def test_grep_and_glob(call: Session) -> None:
    number = FILES[EFFORT].splitlines().index("class Effort:") + 1
    assert await call("grep", pattern=r"^class Ef+ort\b", glob="etude/**/*.py") == (
        f"{EFFORT}:{number}:class Effort:"
    )
    around = await call("grep", pattern="CLASS effort:", path="etude", ignore_case=True, context=1)
    assert [line.split(":")[0][: len(EFFORT)] for line in around.splitlines()] == [EFFORT] * 3
    assert await call("grep", pattern="zz+top") == "nothing was found"
    assert "no regular expression" in await call("grep", pattern="(")
    assert await call("glob", pattern="test_*.{py,txt}") == "tests/core/test_effort.py"
    assert await call("glob", pattern="effort.*", path="etude/core") == EFFORT
    assert "more lines: narrow it down" in await call("grep", pattern="e")


async def test_the_terminal_remembers(call: Session) -> None:
    assert await call("terminal", command="cd etude && export A=3 && f() { echo $A; }") == (
        "(no output)"
    )
    assert await call("terminal", command="basename $PWD; f; cat") == "etude\n3"
    assert await call("terminal", command="unset A; exit 4") == "exit code 4"
    assert await call("terminal", command='echo "[$A]"; ls core/seeds.py') == "[]\ncore/seeds.py"
    assert "syntax error" in (await call("terminal", command="if")).lower()
    assert await call("terminal", command="basename $PWD") == "etude"


async def test_a_path_without_a_shell_can_be_mended(call: Session) -> None:
    path = (await call("terminal", command="echo $PATH")).strip()
    for broken in ("export PATH=/nowhere", "unset PATH"):
        await call("terminal", command=broken)
        assert "exit code 127" in await call("terminal", command="ls"), "and it is remembered"
        assert await call("terminal", command=f"PATH={path}; export PATH") == "(no output)"
        assert await call("terminal", command="ls etude/__init__.py") == "etude/__init__.py"


async def test_a_shell_that_holds_much_goes_on(call: Session) -> None:
    for name in "fg":
        await call("terminal", command=f"{name}() {{ echo {'a' * 70_000}; }}")
    assert (await call("terminal", command="f | wc -c; g | wc -c")).split() == ["70001"] * 2
    quotes = "\\'" * 40_000
    assert (await call("terminal", command=f"echo {quotes} | wc -c")).strip() == "40001"
    # No program can start with such a variable; it is dropped, and the rest of the state is kept.
    await call("terminal", command="B=$(printf %0200000d 0); export B; cd etude")
    said = await call("terminal", command='echo "[$B]"; ls core/seeds.py; f | wc -c')
    assert said.split() == ["[]", "core/seeds.py", "70001"]
    # More than is kept of an output: the shell keeps its previous state.
    longer = 'eval "$(declare -f f | sed s/a/bbbbb/g)"'
    await call("terminal", command=f"{longer}; cd core")
    assert (await call("terminal", command="ls core/seeds.py; f | wc -c")).split() == [
        "core/seeds.py",
        "70001",
    ]
    for wrong in ("echo \0", "echo \ud800"):
        assert (await call("terminal", command=wrong)).startswith("error: ")


async def test_jobs_in_the_background(call: Session) -> None:
    said = await call("terminal", command="echo up; exec sleep 1000", timeout_s=1)
    assert "still running after 1 s: it goes on as job 1" in said
    assert "job 2 was started" in await call("terminal", command="echo hi; exit 3", background=True)
    assert await call("terminal", job=2, timeout_s=600) == "hi\n\njob 2: ended with exit code 3"
    assert await call("terminal", job=2) == "job 2: ended with exit code 3"
    assert "job 1 was killed" in await call("terminal", job=1, kill=True)
    assert "there is no job 7" in await call("terminal", job=7)


async def test_tests_and_then_the_debugger(sandbox: Sandbox) -> None:
    call = Session(sandbox, debug_after=1)
    early = await call("debug", start="-m pytest")
    assert "after 1 more failed runs" in early
    args = ["tests/core/test_effort.py"]
    assert "passed" in await call("run_tests", tests=args)
    await call("edit", path=EFFORT, old="log = math.log1p(k * x)", new="log = math.log1p(k + x)")
    failed = await call("run_tests", tests=args)
    assert "failed" in failed and failed.endswith("the debugger may be used now: debug")
    program = "import etude.core.effort as e\nprint(e.concave(2.0, k=3.0, q=1))\n"
    await call("write", path="try_it.py", content=program)
    line = FILES[EFFORT].splitlines().index("    log = math.log1p(k * x)") + 1
    said = await call("debug", start="try_it.py", command=f"b {EFFORT}:{line}\nc\np (k, x)")
    assert "Breakpoint 1 at" in said and said.endswith("(3.0, 2.0)")
    assert await call("debug", command="p k + x") == "5.0"
    assert await call("debug", stop=True) == "ended"
    assert "nothing is being debugged" in await call("debug", command="n")


async def test_what_is_said(sandbox: Sandbox) -> None:
    call = Session(
        sandbox, user_replies={"python.*version": "3.11"}, default_user_reply="as you like"
    )
    items = [{"text": "look", "state": "done"}, {"text": "mend", "state": "open"}]
    assert await call("todo", items=items) == "[x] look\n[ ] mend\n1 of 2 not done"
    # carried into the next window, if there is a summary
    assert call.tools.carried().todos == ("mend",)
    assert "items[0]: there is no parameter" in await call("todo", items=[{**items[0], "x": 1}])
    assert "must be one of open, doing, done" in await call(
        "todo", items=[{"text": "a", "state": "never"}]
    )
    assert await call("ask_user", question="Which Python version?") == "3.11"
    assert await call("ask_user", question="Tabs?") == "as you like"
    assert await call("submit") == "ok" and call.tools.ends("submit")
    assert "there is no tool fly" in await call("fly")
    assert (
        await call("read", path=3)
        == "error: path must be of type string; read takes path, start, end"
    )
    assert "start must be at least 1" in await call("read", path=EFFORT, start=0)


@pytest.mark.parametrize("kind", TOOLS)
def test_what_a_tool_takes_for_granted_may_be_said(kind: ToolKind) -> None:
    """Models write out default values."""
    tool = TOOLS[kind]
    for name, parameter in inspect.signature(tool.call).parameters.items():
        if parameter.default not in (inspect.Parameter.empty, None):
            assert check_arguments({name: parameter.default}, tool.parameters, set()) == ""


async def test_names_and_limits_are_configuration(sandbox: Sandbox) -> None:
    view: dict[str, Any] = {
        "name": "view",
        "description": "Look.",
        "parameters": {"path": "file"},
        "output_chars": 300,
    }
    call = Session(sandbox, tools=("read", "submit"), tool={"read": view})
    first, second = (schema["function"] for schema in call.tools.schemas)
    assert (first["name"], first["description"], second["name"]) == ("view", "Look.", "submit")
    assert list(first["parameters"]["properties"]) == ["file", "start", "end"]
    assert first["parameters"]["required"] == ["file"]
    assert len(await call("view", file=EFFORT)) < 400
    assert "there is no tool read" in await call("read", path=EFFORT)


async def test_an_edit_tells_what_it_broke_and_mended_and_nothing_else(call: Session) -> None:
    def check(path: str, text: str) -> list[Diagnostic]:
        lines = enumerate(text.splitlines(), 1)
        return [Diagnostic(n, "X1", f"bad {line}", "fake") for n, line in lines if "bad" in line]

    call.use(FakeDiagnostics(check))
    await call.sandbox.write("a.py", "bad old\nfine\n")
    said = await call("edit", path="a.py", old="fine", new="above\nbad new")
    assert said == "ok: lines 2 to 3\ndiagnostics: 1 new, 0 gone\n  line 3: X1 bad bad new (fake)"
    assert await call("edit", path="a.py", old="bad old\nabove", new="above") == (
        "ok: lines were removed after line 0\ndiagnostics: 0 new, 1 gone"
    )
    assert await call("write", path="a.txt", content="bad") == "ok: wrote a.txt, 1 lines"


@pytest.mark.parametrize(("server", "code"), [("ruff", "F821"), ("ty", "unresolved-reference")])
async def test_real_servers_look_at_texts_that_no_file_has(
    sandbox: Sandbox, server: str, code: str
) -> None:
    if shutil.which(server, path=sysconfig.get_path("scripts")) is None:
        pytest.skip(f"{server} is not installed")
    source = LanguageServers(sandbox, {server: [server, "server"]}, timeout_s=LONG_S)
    before = {(each.code, each.message) for each in await source.check(EFFORT, FILES[EFFORT])}
    text = FILES[EFFORT].replace("math.log1p(k * x)", "math.log1p(kk * x)")
    after = await source.check(EFFORT, text)
    [found] = [each for each in after if (each.code, each.message) not in before]
    assert (found.code, found.source) == (code, server) and "kk" in found.message
    assert text.splitlines()[found.line - 1].strip() == "log = math.log1p(kk * x)"
    assert await source.check(EFFORT, FILES[EFFORT]) == await source.check(EFFORT, FILES[EFFORT])
    assert await sandbox.read(EFFORT) == FILES[EFFORT]
    assert await sandbox.diff() == "" and source.missing() == {}


async def test_servers_that_are_absent_or_broken_are_told_of_once(call: Session) -> None:
    servers = {"none": ["no-such-server"], "mute": ["true"], "loud": ["echo", "hi\r\n\r\n"]}
    call.use(LanguageServers(call.sandbox, servers, timeout_s=LONG_S))
    said = await call("write", path="a.py", content="x = 1\n")
    assert "(no diagnostics of none: no program no-such-server in the sandbox)" in said
    assert "(no diagnostics of mute: it has ended (exit code 0))" in said
    assert "(no diagnostics of loud: it does not speak LSP" in said
    assert await call("edit", path="a.py", old="1", new="2") == "ok: line 1"


async def test_a_server_that_speaks_something_else_is_not_waited_for(call: Session) -> None:
    banner = "printf 'hello\\r\\n\\r\\n'; echo $$ > pid; exec sleep 1000"
    servers = {"banner": ["sh", "-c", banner]}
    call.use(LanguageServers(call.sandbox, servers, timeout_s=LONG_S))
    said = await call("write", path="a.py", content="x = 1\n")
    assert "(no diagnostics of banner: it does not speak LSP" in said
    alive = await call("terminal", command="[ ! -f pid ] || ! kill -0 $(cat pid) 2> /dev/null")
    assert alive == "(no output)"


SERVER = """
import json, sys
while True:
    size = 0
    while (line := sys.stdin.buffer.readline()) != b"\\r\\n":
        size = int(line.split(b":")[1])
    asked = json.loads(sys.stdin.buffer.read(size))
    if "id" in asked:
        first = asked["method"] == "initialize"
        said = '{"id": ID, "result": null}' if first else sys.argv[1]
        said = said.replace("ID", str(asked["id"])).encode()
        sys.stdout.buffer.write(b"Content-Length: %d\\r\\n\\r\\n%s" % (len(said), said))
        sys.stdout.buffer.flush()
"""


async def test_a_server_whose_answers_are_wrong_is_dropped(call: Session) -> None:
    answers = {
        "list": "[1]",
        "json": "{nope",
        "range": '{"id": ID, "result": {"items": [{"message": "x"}]}}',
        "items": '{"id": ID, "result": [1]}',
        "error": '{"id": ID, "error": "broken"}',
    }
    await call.sandbox.write("server.py", SERVER)
    servers = {name: ["python", "-S", "server.py", said] for name, said in answers.items()}
    call.use(LanguageServers(call.sandbox, servers, timeout_s=LONG_S))
    said = await call("write", path="a.py", content="x = 1\n")
    for name in answers:
        assert f"(no diagnostics of {name}: it " in said
    assert await call("edit", path="a.py", old="1", new="2") == "ok: line 1"


async def test_a_sandbox_that_breaks_is_no_answer(call: Session) -> None:
    await call.sandbox.close()
    with pytest.raises(RolloutFailure):
        await call("terminal", command="true")


async def test_undo(call: Session) -> None:
    assert "no change to take back" in await call("undo")
    await call("edit", path=EFFORT, old="import", new="IMPORT", all=True)
    await call("read", path=EFFORT)  # changes nothing
    await call("write", path="new.py", content="x = 1\n")
    assert await call("undo") == "ok: new.py as before that change"
    with pytest.raises(FileNotFoundError):
        await call.sandbox.read("new.py")
    assert await call("undo") == f"ok: {EFFORT} as before that change"
    assert await call.sandbox.read(EFFORT) == FILES[EFFORT]
    assert "no change to take back" in await call("undo")


async def test_undo_takes_a_patch_back_as_a_whole(call: Session) -> None:
    await call.sandbox.write("old.bin", b"\xff\x00")
    await call("write", path="old.bin", content="text\n")
    first = FILES[EFFORT].splitlines()[0]
    patch = f"""*** Begin Patch
*** Update File: {EFFORT}
-{first}
+{first} again
*** Add File: more.py
+x = 1
*** End Patch"""
    assert (await call("apply_patch", patch=patch)).startswith("ok")
    assert await call.sandbox.read(EFFORT) != FILES[EFFORT]
    assert (await call("undo")).startswith("ok: ")
    assert await call.sandbox.read(EFFORT) == FILES[EFFORT]
    with pytest.raises(FileNotFoundError):
        await call.sandbox.read("more.py")
    assert await call.sandbox.read("old.bin") == "text\n"
    await call("undo")
    assert await call.sandbox.read_bytes("old.bin") == b"\xff\x00"


async def test_nothing_is_undone_across_a_removal(call: Session) -> None:
    await call("write", path="a.py", content="x = 1\n")
    patch = "*** Begin Patch\n*** Delete File: pyproject.toml\n*** End Patch"
    assert (await call("apply_patch", patch=patch)).startswith("ok")
    assert "no change to take back" in await call("undo")
    assert await call.sandbox.read("a.py") == "x = 1\n"


async def test_undo_leaves_what_somebody_else_wrote(call: Session) -> None:
    await call("write", path="a.py", content="x = 1\n")
    await call("write", path="b.py", content="x = 1\n")
    await call("terminal", command="echo x = 2 > b.py")
    assert "b.py is not as that change left it" in await call("undo")
    assert await call.sandbox.read("b.py") == "x = 2\n"
    assert await call("undo") == "ok: a.py as before that change"


async def test_a_file_that_cannot_be_written_is_as_before_and_so_are_the_others() -> None:
    class Full(FakeSandbox):
        """Its disk is full after the first line of `b`."""

        async def write(self, path: str, content: str | bytes) -> None:
            await super().write(path, content[:2] if "long" in str(content) else content)
            if "long" in str(content):
                raise ValueError(f"{path} cannot be written: No space left on device")

    sandbox = Full({"a": "1\n", "b": "2\n", "c": "3\n"})
    call = Session(sandbox)
    await call("write", path="c", content="4\n")
    patch = """*** Begin Patch
*** Update File: a
-1
+11
*** Add File: new
+x
*** Update File: b
-2
+long
*** End Patch"""
    assert "No space left" in await call("apply_patch", patch=patch)
    assert {path: await sandbox.read(path) for path in sandbox.files} == {
        "a": "1\n", "b": "2\n", "c": "4\n",
    }  # fmt: skip
    assert await call("undo") == "ok: c as before that change"
