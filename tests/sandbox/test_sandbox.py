"""Common behaviour of all kinds of sandboxes."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

import pytest

from etude.core.errors import EtudeError
from etude.core.sandbox import CommandResult, Limits, SandboxPool, SandboxSpec, Service
from etude.sandbox.fake import FakeSandboxPool
from etude.sandbox.limits import MIB, OUTPUT_BYTES, READ_BYTES
from etude.sandbox.namespaces import NamespaceSandboxPool
from etude.sandbox.pool import open_sandbox_pool
from tests.namespaces import need_namespaces

LONG_S = 60.0


@pytest.mark.parametrize(
    ("part", "spec", "backends"),
    [
        ("image", SandboxSpec(image="python@sha256:0"), ("process", "fake")),
        (
            "services",
            SandboxSpec(services=(Service(name="db", image="postgres", argv=(), port=5432),)),
            ("namespaces", "process", "fake"),
        ),
        ("network", SandboxSpec(network=("pypi.org",)), ("process", "fake")),
    ],
)
@pytest.mark.parametrize("backend", ["namespaces", "process", "fake"])
async def test_what_a_backend_cannot_give_is_refused_by_name(
    backend: str, part: str, spec: SandboxSpec, backends: tuple[str, ...]
) -> None:
    if backend not in backends:
        pytest.skip("it can give that: see test_image_sandboxes.py and test_network.py")
    if backend == "namespaces":
        need_namespaces()
    pool = FakeSandboxPool() if backend == "fake" else open_sandbox_pool(backend)
    with pytest.raises(EtudeError, match=f"^{backend} sandboxes do not support.*: {part}\\. "):
        async with pool.open(spec):
            pass
    await pool.close()


async def test_a_limit_that_cannot_be_held_is_refused_by_name() -> None:
    """The limits of namespaces depend on the machine: see test_walls.py."""
    limits = Limits(disk_bytes=1, processes=1)
    told = r"^process sandboxes do not support.*: limits.disk_bytes, limits.processes\. "
    with pytest.raises(EtudeError, match=told):
        async with open_sandbox_pool("process").open(SandboxSpec(limits=limits)):
            pass
    async with FakeSandboxPool().open(SandboxSpec(limits=limits)):
        pass


async def test_files_go_in_and_come_out(pool: SandboxPool) -> None:
    async with pool.open(SandboxSpec(files={"a.py": "x = 1\r\n", "pkg/b.txt": "ü\n"})) as sandbox:
        await sandbox.write("new/deep/c.txt", "")
        assert [await sandbox.read(path) for path in ("a.py", "pkg/b.txt", "new/deep/c.txt")] == [
            "x = 1\r\n",
            "ü\n",
            "",
        ]
        await sandbox.write("a.py", "y")
        assert await sandbox.read("./a.py") == "y"


async def test_a_file_that_is_not_there(pool: SandboxPool) -> None:
    async with pool.open(SandboxSpec(files={"file": ""})) as sandbox:
        for path in ("nothing.py", "file/below"):
            with pytest.raises(
                FileNotFoundError if path == "nothing.py" else (FileNotFoundError, ValueError)
            ):
                await sandbox.read(path)


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "", "."])
async def test_a_path_cannot_leave(pool: SandboxPool, path: str) -> None:
    async with pool.open(SandboxSpec(files={"a/x": ""})) as sandbox:
        with pytest.raises(ValueError):
            await sandbox.read(path)
        with pytest.raises(ValueError):
            await sandbox.write(path, "")


@pytest.mark.parametrize(
    "target", ["/etc/passwd", "/proc/self/environ", "../../etc/passwd", "link"]
)
async def test_a_link_cannot_leave(pool: SandboxPool, target: str) -> None:
    async with pool.open(SandboxSpec(files={"a": ""})) as sandbox:
        await sandbox.run(["ln", "-s", target, "link"], timeout_s=LONG_S)
        with pytest.raises(ValueError):
            await sandbox.read("link")
        with pytest.raises(ValueError):
            await sandbox.write("link", "")


async def test_what_is_no_text_file_is_an_error_and_never_a_wait(pool: SandboxPool) -> None:
    async with pool.open(SandboxSpec(files={"huge": "x" * (READ_BYTES + 1)})) as sandbox:
        await sandbox.run(
            ["sh", "-c", "mkfifo pipe; mkdir dir; printf '\\377' > binary"], timeout_s=LONG_S
        )
        for path in ("pipe", "dir", "binary", "huge"):
            with pytest.raises(ValueError):
                await sandbox.read(path)
        for path in ("pipe", "dir"):
            with pytest.raises(ValueError):
                await sandbox.write(path, "")


async def test_text_that_cannot_be_encoded_leaves_the_file_as_it_was(pool: SandboxPool) -> None:
    async with pool.open(SandboxSpec(files={"a": "old"})) as sandbox:
        with pytest.raises(ValueError):
            await sandbox.write("a", "\ud800")
        assert await sandbox.read("a") == "old"


async def test_a_file_that_cannot_be_written(pool: SandboxPool) -> None:
    async with pool.open(SandboxSpec(files={"file": "", "dir/x": ""})) as sandbox:
        for path in ("file/below", "dir"):
            with pytest.raises(ValueError):
                await sandbox.write(path, "")


async def test_a_script_runs_as_under_python(pool: SandboxPool) -> None:
    script = (
        "import sys, helper\nprint(sys.argv[1:], sys.stdin.read(), "
        "helper.X)\nsys.stderr.write('err\\n')\nsys.exit(3)"
    )
    async with pool.open(SandboxSpec(files={"s.py": script, "helper.py": "X = 7"})) as sandbox:
        ran = await sandbox.run(["python", "s.py", "a", "b"], timeout_s=LONG_S, stdin="in")
        assert ran.exit_code == 3
        assert set(ran.output.splitlines()) == {"['a', 'b'] in 7", "err"}
        # no bytecode
        assert (await sandbox.run(["ls"], timeout_s=LONG_S)).output.split() == ["helper.py", "s.py"]


@pytest.mark.parametrize(
    ("script", "code", "last"),
    [
        ("exit('bye')", 1, "bye"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("def", 1, "SyntaxError: invalid syntax"),
        (
            "import atexit, threading\natexit.register(print, 'at "
            "exit')\nthreading.Thread(target=print).start()",
            0,
            "at exit",
        ),
        ("import os; os._exit(9)", 9, ""),
        (
            "import os; print(__name__, os.path.isabs(__file__), os.path.samefile(__file__, "
            "'s.py'))",
            0,
            "__main__ True True",
        ),
        ("import os; print(sorted(os.environ), end='')", 0, "['HOME', 'LANG', 'PATH']"),
    ],
)
async def test_how_a_script_ends(pool: SandboxPool, script: str, code: int, last: str) -> None:
    async with pool.open(SandboxSpec(files={"s.py": script})) as sandbox:
        ran = await sandbox.run(["python", "s.py"], timeout_s=LONG_S)
        assert (ran.exit_code, (ran.output.splitlines() or [""])[-1]) == (code, last)


async def test_a_crash_shows_the_script_and_none_of_ours(pool: SandboxPool) -> None:
    async with pool.open(
        SandboxSpec(files={"s.py": "def f():\n    raise KeyError('k')\nf()\n"})
    ) as sandbox:
        output = (await sandbox.run(["python", "s.py"], timeout_s=LONG_S)).output
    assert output.startswith("Traceback (most recent call last):\n") and output.endswith(
        "KeyError: 'k'\n"
    )
    assert output.count("File ") == 2 and "etude/" not in output


async def test_other_commands(pool: SandboxPool) -> None:
    async with pool.open(SandboxSpec()) as sandbox:
        assert await sandbox.run(
            ["sh", "-c", "cat; exit 4"], timeout_s=LONG_S, stdin="hello"
        ) == CommandResult(4, "hello")
        assert (
            await sandbox.run(["python", "-c", "print(6 * 7)"], timeout_s=LONG_S)
        ).output == "42\n"
        assert (await sandbox.run(["no-such-program"], timeout_s=LONG_S)).exit_code == 127


async def test_temporary_files_may_lie_behind_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "link"))
    pool = open_sandbox_pool("process")
    async with pool.open(SandboxSpec(files={"a": "1"})) as sandbox:
        assert await sandbox.read("a") == "1"
        assert (await sandbox.run(["cat", "a"], timeout_s=LONG_S, cwd=".")).output == "1"
    await pool.close()
    assert list((tmp_path / "real").iterdir()) == []


async def test_a_program_ends_by_the_signals_that_end_programs(pool: SandboxPool) -> None:
    """Python ignores a broken pipe, and its children inherit that."""
    async with pool.open(SandboxSpec()) as sandbox:
        ran = await sandbox.run(["sh", "-c", "yes | head -n 1"], timeout_s=LONG_S)
        assert ran == CommandResult(0, "y\n")


@pytest.mark.parametrize("argv", [["python", "s.py"], ["sh", "-c", "echo early; sleep 1000"]])
async def test_a_command_past_its_time_is_killed_and_its_output_kept(
    pool: SandboxPool, argv: list[str]
) -> None:
    async with pool.open(
        SandboxSpec(files={"s.py": "print('early', flush=True)\nwhile True: pass"})
    ) as sandbox:
        ran = await sandbox.run(argv, timeout_s=0.4)
        # a busy machine may not have started it in time
        assert ran.exit_code is None and ran.output in ("early\n", "")
        assert (await sandbox.run(["echo", "alive"], timeout_s=LONG_S)).output == "alive\n"


async def test_only_the_end_of_a_long_output_is_kept(pool: SandboxPool) -> None:
    async with pool.open(
        SandboxSpec(files={"s.py": "print('x' * 10**6)\nprint('end')"})
    ) as sandbox:
        output = (await sandbox.run(["python", "s.py"], timeout_s=LONG_S)).output
        assert len(output) == OUTPUT_BYTES and output.endswith("x\nend\n")


async def test_a_fork_goes_its_own_way(pool: SandboxPool) -> None:
    async with pool.open(SandboxSpec(files={"a": "1", "d/b": "2"})) as sandbox:
        await sandbox.run(["sh", "-c", "ln -s a l; chmod +x d/b"], timeout_s=LONG_S)
        fork = await sandbox.fork()
        await fork.write("a", "changed")
        assert await sandbox.read("a") == "1" and await fork.read("l") == "changed"
        assert (await fork.run(["test", "-x", "d/b"], timeout_s=LONG_S)).exit_code == 0
        await fork.close()
        await fork.close()


async def test_requests_at_once_do_not_end_each_other(pool: SandboxPool) -> None:
    async with pool.open(SandboxSpec(files={"a": "1"})) as sandbox:
        script = "import time; print('begun', flush=True); time.sleep(0.3); print('ended')"
        ran, read = await asyncio.gather(
            sandbox.run(["python", "-c", script], timeout_s=LONG_S), sandbox.read("a")
        )
    assert (ran, read) == (CommandResult(0, "begun\nended\n"), "1")


async def test_a_program_stays_one_when_it_is_written_anew(pool: SandboxPool) -> None:
    async with pool.open(SandboxSpec(files={"go": "#!/bin/sh\necho old\n"})) as sandbox:
        refused = await sandbox.run(["./go"], timeout_s=LONG_S)
        await sandbox.run(["chmod", "+x", "go"], timeout_s=LONG_S)
        await sandbox.write("go", "#!/bin/sh\necho new\n")
        assert refused.exit_code == 127
        assert await sandbox.run(["./go"], timeout_s=LONG_S) == CommandResult(0, "new\n")


@pytest.mark.parametrize("pty", [False, True])
async def test_a_start_that_fails_leaves_no_descriptor(pty: bool) -> None:
    async with open_sandbox_pool("process").open(SandboxSpec()) as sandbox:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(ValueError, match="null byte"):
                await sandbox.start(["a\0b"], pty=pty)
        assert len(os.listdir("/proc/self/fd")) <= before


async def test_a_cancelled_command_leaves_the_sandbox_usable(pool: SandboxPool) -> None:
    async with pool.open(
        SandboxSpec(files={"s.py": "open('started', 'w').close()\nwhile True: pass", "a": "1"})
    ) as sandbox:
        running = asyncio.create_task(sandbox.run(["python", "s.py"], timeout_s=1000))
        await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await sandbox.read("a") == "1"
        assert (await sandbox.run(["echo", "alive"], timeout_s=LONG_S)).output == "alive\n"


async def test_many_at_once(pool: SandboxPool) -> None:
    async def one(number: int) -> str:
        async with pool.open(SandboxSpec(files={"s.py": f"print({number})"})) as sandbox:
            return (await sandbox.run(["python", "s.py"], timeout_s=LONG_S)).output

    assert await asyncio.gather(*map(one, range(40))) == [f"{number}\n" for number in range(40)]


@pytest.fixture(params=["real", "fake"])
def any_pool(request: pytest.FixtureRequest, pool: SandboxPool) -> SandboxPool:
    silent = FakeSandboxPool(lambda files, argv: CommandResult(0, ""))
    return pool if request.param == "real" else silent


async def test_bytes_go_in_and_come_out(any_pool: SandboxPool) -> None:
    data = bytes(range(256))
    async with any_pool.open(SandboxSpec(files={"a": data, "t": "ü"})) as sandbox:
        assert (
            await sandbox.read_bytes("a") == data and await sandbox.read_bytes("t") == b"\xc3\xbc"
        )
        with pytest.raises(ValueError):
            await sandbox.read("a")
        await sandbox.write("b", data * 2)
        assert await sandbox.read_bytes("b") == data * 2
        with pytest.raises(FileNotFoundError):
            await sandbox.read_bytes("c")


async def test_stdin_is_bytes(pool: SandboxPool) -> None:
    data = bytes(range(256)) * 1000
    async with pool.open(SandboxSpec()) as sandbox:
        ran = await sandbox.run(["sh", "-c", "cat > copy"], timeout_s=LONG_S, stdin=data)
        assert ran.exit_code == 0
        assert await sandbox.read_bytes("copy") == data


async def test_a_command_has_its_directory_and_environment(pool: SandboxPool) -> None:
    spec = SandboxSpec(
        files={"d/e/s.py": "import os; print(os.path.basename(os.getcwd()), os.environ['A'])"},
        env={"A": "of the spec", "HOME": "/nowhere"},
    )
    async with pool.open(spec) as sandbox:
        for env, output in (
            (None, "e of the spec\n"),
            ({"A": "of the command"}, "e of the command\n"),
        ):
            ran = await sandbox.run(["python", "s.py"], timeout_s=LONG_S, cwd="./d/e", env=env)
            assert ran.output == output
        names = await sandbox.run(["env"], timeout_s=LONG_S, env={"PYTHONPATH": "x"})
        assert sorted(line.partition("=")[0] for line in names.output.splitlines()) == [
            "A",
            "HOME",
            "LANG",
            "PATH",
            "PYTHONPATH",
        ]
        fork = await sandbox.fork()
        ran = await fork.run(["sh", "-c", "echo $A"], timeout_s=LONG_S)
        assert ran.output == "of the spec\n"
        await fork.close()


async def test_a_directory_or_variable_that_cannot_be(any_pool: SandboxPool) -> None:
    async with any_pool.open(SandboxSpec(files={"d/a": ""})) as sandbox:
        for cwd in ("/", "..", "d/..", "nothing", "d/a", ""):
            with pytest.raises(ValueError):
                await sandbox.run(["true"], timeout_s=LONG_S, cwd=cwd)
        for name in ("", "A=B", "A\0"):
            with pytest.raises(ValueError, match="name of an environment variable"):
                await sandbox.run(["true"], timeout_s=LONG_S, env={name: "1"})
        assert (await sandbox.run(["true"], timeout_s=LONG_S, cwd="d")).exit_code == 0
    with pytest.raises(ValueError, match="name of an environment variable"):
        async with any_pool.open(SandboxSpec(env={"A=B": ""})):
            pass


async def test_a_directory_that_is_a_link_out_is_none(pool: SandboxPool) -> None:
    async with pool.open(SandboxSpec()) as sandbox:
        await sandbox.run(["ln", "-s", "/", "root"], timeout_s=LONG_S)
        with pytest.raises(ValueError):
            await sandbox.run(["true"], timeout_s=LONG_S, cwd="root")


async def test_limits_of_disk_and_processes(walled: NamespaceSandboxPool) -> None:
    limits = Limits(disk_bytes=64 * MIB, processes=3)
    fill = "for n in $(seq 8); do head -c 10000000 /dev/zero > f$n || exit 1; done"
    count = """
import os, time
children = 0
try:
    while True:
        if os.fork() == 0: time.sleep(1000)
        children += 1
except OSError: print(1 + children)
"""
    async with walled.open(SandboxSpec(files={"s.py": count}, limits=limits)) as sandbox:
        for box in (sandbox, fork := await sandbox.fork()):
            assert (await box.run(["python", "s.py"], timeout_s=LONG_S)).output == "3\n"
            assert (await box.run(["sh", "-c", fill], timeout_s=LONG_S)).exit_code == 1
            sizes = await box.run(["sh", "-c", "cat f* | wc -c"], timeout_s=LONG_S)
            assert 60_000_000 < int(sizes.output) <= 64 * MIB
        await fork.close()
    async with walled.open(SandboxSpec(limits=Limits(disk_bytes=MIB))) as sandbox:
        with pytest.raises(ValueError, match="No space left"):
            await sandbox.write("a", bytes(2 * MIB))


@pytest.mark.parametrize("name", ["cpus", "memory_bytes", "disk_bytes", "processes"])
def test_a_limit_of_nothing_is_none(name: str) -> None:
    for value in (0, -1):
        with pytest.raises(ValueError, match=f"limits.{name} is {value}"):
            Limits(**{name: value})  # type: ignore[arg-type]


async def test_the_users_name(walled: NamespaceSandboxPool) -> None:
    async with walled.open(SandboxSpec(user="user")) as sandbox:
        names = await sandbox.run(["sh", "-c", "id -un; id -gn"], timeout_s=LONG_S)
        assert names.output == "user\nuser\n"
    with pytest.raises(EtudeError, match=r"do not support.*: user\."):
        async with walled.open(SandboxSpec(user="root")):
            pass


async def test_the_fake_makes_no_answer_up() -> None:
    async with FakeSandboxPool().open(SandboxSpec(files={"a": "1"})) as fake:
        for doing in (fake.run(["pytest"], timeout_s=1), fake.start(["pytest"])):
            with pytest.raises(NotImplementedError, match="cannot run 'pytest'"):
                await doing


async def test_the_fake_keeps_the_same_contract() -> None:
    async with FakeSandboxPool(lambda files, argv: CommandResult(len(files), argv[0])).open(
        SandboxSpec(files={"a": "1"})
    ) as fake:
        fork = await fake.fork()
        await fork.write("b", "2")
        assert await fork.run(["x"], timeout_s=1) == CommandResult(2, "x") and await fake.run(
            ["y"], timeout_s=1
        ) == CommandResult(1, "y")
        with pytest.raises(FileNotFoundError):
            await fake.read("b")
        with pytest.raises(ValueError):
            await fake.read("../a")
