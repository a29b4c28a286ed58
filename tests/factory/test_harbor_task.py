from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from etude.cli import main
from etude.core.errors import EtudeError
from etude.core.sandbox import Limits, SandboxPool
from etude.core.types import Attempt, Score, Transcript
from etude.factory import harbor_task
from etude.factory.harbor_task import (
    HarborTask,
    grade_harbor_task,
    prepare,
    read_harbor_task,
    read_rewards,
    solve,
    without_canary,
)
from etude.run.harbor_tasks import HarborTasks
from etude.sandbox.fake import FakeSandboxPool
from etude.sandbox.limits import PATCH_BYTES
from etude.sandbox.namespaces import NamespaceSandboxPool
from etude.sandbox.process import ProcessSandboxPool
from tests.namespaces import need_namespaces

PYTHON = f"python:{sys.version_info[0]}.{sys.version_info[1]}-slim"
FILES = {
    "instruction.md": "<!-- a canary: do not train -->\n\nWrite the sum to /app/sum.txt.\n",
    "task.toml": """
schema_version = "1.4"
artifacts = ["/app/sum.txt"]
[task]
name = "etude/sums"
[metadata]
difficulty = "easy"
[agent]
timeout_sec = 120.0
[verifier]
timeout_sec = 30.0
[verifier.env]
EXPECTED = "5"
[environment]
build_timeout_sec = 600.0
memory_mb = 512
storage_mb = 64
network_mode = "no-network"
[environment.env]
GREETING = "hello"
""",
    "environment/Dockerfile": f"""
# what the agent finds
FROM {PYTHON}
LABEL org.example.kind="task"
WORKDIR /app
ENV KIND=sums \\
    ROUND="one two"
COPY data/ /app/data/
COPY add.sh .
CMD ["sh"]
""",
    "environment/data/numbers.txt": "2 3\n",
    "environment/add.sh": '#!/bin/sh\nread a b < /app/data/numbers.txt\necho "$((a + b))"\n',
    "tests/test.sh": """#!/bin/bash
/tests/look.sh > /logs/verifier/look.txt
if [ "$(cat /logs/verifier/look.txt)" = "$EXPECTED$GREETING$ROUND" ]; then
  echo '{"reward": 1, "tidy": 0.5}' > /logs/verifier/reward.json
else
  echo 0 > /logs/verifier/reward.txt
fi
""",
    "tests/look.sh": '#!/bin/sh\nprintf %s "$(cat /app/sum.txt)$GREETING$ROUND"\n',
    "solution/solve.sh": "#!/bin/bash\n./add.sh > /app/sum.txt\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "sums"
    for name, text in FILES.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    for name in ("environment/add.sh", "tests/look.sh"):
        (place / name).chmod(0o755)
    return place


@pytest.fixture
async def walled() -> AsyncIterator[SandboxPool]:
    need_namespaces()
    pool = NamespaceSandboxPool()
    yield pool
    await pool.close()


def change(folder: Path, name: str, old: str, new: str) -> None:
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new))


def test_a_directory_is_read(folder: Path) -> None:
    task = read_harbor_task(folder)
    assert task.instruction == "Write the sum to /app/sum.txt.\n"
    assert task.spec.workdir == "/app"
    assert task.spec.env == {"KIND": "sums", "ROUND": "one two", "GREETING": "hello"}
    assert task.spec.limits == Limits(memory_bytes=512 << 20, disk_bytes=64 << 20)
    assert set(task.spec.files) == {"data/numbers.txt", "add.sh"}
    assert task.image.executables == ("add.sh",)
    assert "tests" not in str(task.as_task())


def test_every_key_that_harbor_writes_is_read(folder: Path) -> None:
    (folder / "task.toml").write_text("""
schema_version = "1.4"
version = "1"
source = "here"
artifacts = ["/app/sum.txt"]
task = {name = "etude/sums"}
metadata = {difficulty = "easy"}
solution = {env = {WAY = "short"}}
[agent]
timeout_sec = 120.0
network_mode = "no-network"
[verifier]
timeout_sec = 30.0
environment_mode = "shared"
network_mode = "no-network"
env = {EXPECTED = "5"}
[environment]
docker_image = "python"
os = "linux"
workdir = "/app"
build_timeout_sec = 600.0
cpus = 2
gpus = 0
memory = "1G"
memory_mb = 512
storage = "1G"
storage_mb = 64
allow_internet = false
network_mode = "no-network"
env = {GREETING = "hello"}
""")
    task = read_harbor_task(folder)
    limits = Limits(cpus=2, memory_bytes=512 << 20, disk_bytes=64 << 20)
    assert (task.spec.workdir, task.spec.limits, task.verifier_s) == ("/app", limits, 30.0)
    assert (task.solution_env, task.verifier_env) == ({"WAY": "short"}, {"EXPECTED": "5"})
    assert task.spec.env["GREETING"] == "hello"


@pytest.mark.parametrize(
    ("text", "size"), [("2G", 2 << 30), ("1.5g", 3 << 29), (" 300 M", 300 << 20), ("64K", 64 << 10)]
)
def test_sizes_may_be_written_with_their_unit(folder: Path, text: str, size: int) -> None:
    change(folder, "task.toml", "memory_mb = 512", f'memory = "{text}"')
    change(folder, "task.toml", "storage_mb = 64", f'storage = "{text}"')
    limits = read_harbor_task(folder).spec.limits
    assert (limits.memory_bytes, limits.disk_bytes) == (size, size)


@pytest.mark.parametrize(
    ("name", "old", "new", "told"),
    [
        ("environment/Dockerfile", f"FROM {PYTHON}", "FROM ubuntu:24.04", "'FROM ubuntu:24.04'"),
        ("environment/Dockerfile", "CMD", "RUN pip install numpy\nCMD", "'RUN pip install numpy'"),
        ("environment/Dockerfile", "CMD", "USER agent\nCMD", "'USER agent'"),
        ("environment/Dockerfile", "add.sh .", "add.sh /opt/", "which is not inside"),
        ("environment/Dockerfile", "add.sh .", "missing.sh .", "which it copies, does not"),
        ("environment/Dockerfile", "add.sh .", "../../secret .", "../../secret must be named"),
        ("environment/Dockerfile", "add.sh .", "data/../../../s* .", "without '..'"),
        ("environment/Dockerfile", "COPY add.sh", "ADD https://x.y/z.sh", "downloads or unpacks"),
        ("environment/Dockerfile", "COPY add.sh", "ADD data.tar.gz", "or unpacks data.tar.gz"),
        ("environment/Dockerfile", "COPY add.sh", "COPY --chown=me add.sh", "not a plain copy"),
        ("environment/Dockerfile", "WORKDIR /app", "", "has no WORKDIR"),
        ("environment/Dockerfile", "CMD", 'ENV A="b\nCMD', """'ENV A="b' cannot be parsed"""),
        ("environment/Dockerfile", "COPY add.sh", "COPY 'add.sh", "cannot be parsed: No closing"),
        ("task.toml", "memory_mb = 512", 'memory = "abcG"', "environment.memory is 'abcG'"),
        ("task.toml", "memory_mb = 512", "memory_mb = true", "environment.memory_mb is True"),
        ("task.toml", "storage_mb = 64", "os = 3", "environment.os is 3 in task.toml"),
        ("task.toml", '[environment.env]\nGREETING = "hello"', "env = 3", "environment.env is 3"),
        ("task.toml", "memory_mb = 512", "memory_mb = 1e308", "infinity"),
        ("task.toml", "[agent]\ntimeout_sec = 120.0", "[[agent]]", "agent is [{}] in task.toml"),
        ("task.toml", "= 30.0", '= "x"', "verifier.timeout_sec is 'x'"),
        ("task.toml", "= 30.0", "= nan", "verifier.timeout_sec is nan"),
        ("task.toml", "= 30.0", "= -1", "verifier.timeout_sec is -1"),
        ("task.toml", "= 30.0", "= inf", "timeout_sec is inf in task.toml: it must be a number"),
        ("task.toml", '"no-network"', '"public"', "environment.network_mode is 'public'"),
        ("task.toml", "= 120.0", '= 1\nnetwork_mode = "public"', "agent.network_mode is 'public'"),
        ("task.toml", "= 30.0", '= 1\nnetwork_mode = "public"', "verifier.network_mode is"),
        ("task.toml", 'network_mode = "no-network"', "allow_internet = true", "is 'public'"),
        ("task.toml", "storage_mb = 64", "gpus = 1", "environment.gpus is 1"),
        ("task.toml", "storage_mb = 64", 'os = "windows"', "environment.os is 'windows'"),
        ("task.toml", "storage_mb = 64", 'skills_dir = "/s"', "environment.skills_dir = '/s'"),
        ("task.toml", "timeout_sec = 120.0", 'user = "root"', "agent.user = 'root'"),
        ("task.toml", "artifacts =", "steps = [{name = 'a'}]\nartifacts =", "sets steps"),
        ("task.toml", '"hello"', '"${HOME}"', "environment.env takes GREETING"),
        ("task.toml", "timeout_sec = 30.0", 'environment_mode = "shared"\nx = 1', "verifier.x = 1"),
        ("task.toml", '"/app/sum.txt"]\n', '"/etc/x"]\nverifier.environment_mode = "separate"\n',
         "artifact /etc/x is outside"),
        ("task.toml", '"/app/sum.txt"]\n', '"../etc/x"]\nverifier.environment_mode = "separate"\n',
         "artifact /etc/x is outside"),
        ("task.toml", '"/app/sum.txt"]\n', '1]\nverifier.environment_mode = "separate"\n',
         "artifacts has 1"),
        ("task.toml", '"/app/sum.txt"]\n', ']\nverifier.environment_mode = "separate"\n',
         "needs at least one artifact"),
        ("task.toml", '"/app/sum.txt"]\n', '{source = "/app/sum.txt", exclude = ["x"]}]\n'
         'verifier.environment_mode = "separate"\n', "verifier do not support exclude"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(
    folder: Path, name: str, old: str, new: str, told: str
) -> None:
    if "verifier.environment_mode" in new:  # a table may occur only once
        change(folder, "task.toml", "[verifier]\ntimeout_sec = 30.0\n[verifier.env]", "[x]")
        (folder / "task.toml").write_text(
            (folder / "task.toml").read_text().replace('[x]\nEXPECTED = "5"\n', "")
        )
    change(folder, name, old, new)
    with pytest.raises(EtudeError) as refused:
        read_harbor_task(folder)
    assert str(folder) in str(refused.value)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    "name",
    [
        *("trajectory.json", "environment/docker-compose.yaml", "environment/docker-compose.yml"),
        *("environment/singularity-compose.yaml", ".harborignore", "tests/.harborignore"),
    ],
)
def test_files_that_are_not_read_are_refused(folder: Path, name: str) -> None:
    (folder / name).write_text("{}")
    with pytest.raises(EtudeError, match=name):
        read_harbor_task(folder)


@pytest.mark.parametrize(
    "name",
    [
        "instruction.md",
        "task.toml",
        "environment",
        "environment/Dockerfile",
        "environment/data/more",
        "tests",
        "tests/deep/er",
        "solution/solve.sh",
    ],
)
def test_links_that_lead_out_of_a_directory_are_refused(folder: Path, name: str) -> None:
    secret = folder.parent / "secret"
    link = folder / name
    link.parent.mkdir(exist_ok=True)
    if link.exists():
        link.rename(secret)
    else:
        secret.write_text("key")
    link.symlink_to(Path("../" * len(Path(name).parents), "secret"))
    with pytest.raises(EtudeError, match=f"{folder}: {name} is a link"):
        read_harbor_task(folder)


def test_a_link_to_a_file_of_the_task_is_that_file(folder: Path) -> None:
    (folder / "environment/data/again.txt").symlink_to("numbers.txt")
    assert read_harbor_task(folder).spec.files["data/again.txt"] == b"2 3\n"
    (folder / "environment/data/all").symlink_to(".")
    with pytest.raises(EtudeError, match="data/all is a link"):
        read_harbor_task(folder)


def test_what_sandboxes_have_already_is_the_users_word(folder: Path) -> None:
    change(folder, "environment/Dockerfile", f"FROM {PYTHON}", "FROM ubuntu:24.04\nRUN apt-get x")
    assert read_harbor_task(folder, ["FROM ubuntu:*", "RUN apt-get *"]).spec.workdir == "/app"
    (folder / "environment/Dockerfile").unlink()
    change(folder, "task.toml", "storage_mb = 64", 'docker_image = "a/b"\nworkdir = "/app"')
    with pytest.raises(EtudeError, match="FROM a/b"):
        read_harbor_task(folder)
    assert read_harbor_task(folder, ["FROM a/b"]).spec.files == {}


async def graded(task: HarborTask, pool: SandboxPool, command: str = "true") -> Score:
    async with pool.open(task.spec) as sandbox:
        await prepare(task, sandbox)
        ran = await sandbox.run(["sh", "-c", command], timeout_s=30)
        assert ran.exit_code == 0, ran.output
        return await grade_harbor_task(task, sandbox, pool)


async def test_the_verifier_of_the_task_decides(folder: Path, walled: SandboxPool) -> None:
    task = read_harbor_task(folder)
    assert (await graded(task, walled)).reward == 0.0
    score = await graded(task, walled, "./add.sh > /app/sum.txt")
    assert {part.name: part.value for part in score.parts} == {"reward": 1.0, "tidy": 0.5}
    assert score.reward == 1.0
    assert not score.flags


async def test_an_agent_finds_neither_tests_nor_solution_and_cannot_leave_a_reward(
    folder: Path, walled: SandboxPool
) -> None:
    task = read_harbor_task(folder)
    forged = "mkdir /tmp/tests && echo 1 > /logs/verifier/reward.txt"
    score = await graded(task, walled, f"! ls /tests/ && ! ls /solution/ && {forged}")
    assert score.reward == 0.0


@pytest.mark.parametrize(
    "planted",
    [
        "mkdir -p .harbor/tests/deep; touch .harbor/tests/json.py .harbor/tests/deep/a",
        "mkdir .harbor; touch .harbor/x",
        "touch .harbor",
        "ln -s /tmp .harbor",
    ],
)
async def test_nothing_that_an_agent_plants_is_among_the_tests(
    folder: Path, walled: SandboxPool, planted: str
) -> None:
    (folder / "tests/test.sh").write_text(
        "#!/bin/sh\nfind /tests/ .harbor -type f\necho 0 > /logs/verifier/reward.txt\nexit 1\n"
    )
    score = await graded(read_harbor_task(folder), walled, planted)
    found = {line for line in score.parts[0].evidence.splitlines() if line.startswith(("/", "."))}
    assert score.reward == 0.0
    assert found == {"/tests/test.sh", "/tests/look.sh"}


async def test_the_solution_of_the_task_solves_it(folder: Path, walled: SandboxPool) -> None:
    task = read_harbor_task(folder)
    async with walled.open(task.spec) as sandbox:
        await prepare(task, sandbox)
        await sandbox.write(".harbor/solution/stray", "")
        await solve(task, sandbox)
        assert (await sandbox.run(["ls", "/solution/stray"], timeout_s=30)).exit_code != 0
        assert (await sandbox.patch()).keys() == {"sum.txt", "add.sh"}  # executable from now on
        assert (await grade_harbor_task(task, sandbox, walled)).reward == 1.0


async def test_a_separate_verifier_gets_the_artifacts_only(
    folder: Path, walled: SandboxPool
) -> None:
    change(folder, "task.toml", "timeout_sec = 30.0", 'environment_mode = "separate"')
    helped = "echo 5 > sum.txt; echo spoilt > data/numbers.txt"
    helped += f"; head -c {PATCH_BYTES + 1} /dev/zero > beside"
    assert (await graded(read_harbor_task(folder), walled, helped)).reward == 1.0
    change(folder, "tests/test.sh", "/tests/look.sh >", "cat data/numbers.txt; /tests/look.sh >")
    score = await graded(read_harbor_task(folder), walled, helped)
    assert score.parts[0].evidence == "2 3\n"


async def test_a_verifier_that_hangs_pays_nothing_and_a_silent_one_has_failed(
    folder: Path, walled: SandboxPool
) -> None:
    change(folder, "task.toml", "timeout_sec = 30.0", "timeout_sec = 1.0")
    change(folder, "tests/test.sh", "/tests/look.sh >", "sleep 1000; /tests/look.sh >")
    assert (await graded(read_harbor_task(folder), walled)).reward == 0.0
    (folder / "tests/test.sh").write_text("#!/bin/sh\necho no network\n")
    change(folder, "task.toml", "timeout_sec = 1.0", "timeout_sec = 60.0")
    with pytest.raises(ValueError, match="no network"):
        await graded(read_harbor_task(folder), walled)


def test_rewards_are_finite_numbers_by_name() -> None:
    assert read_rewards(b"txt 0.25\n", "").reward == 0.25
    both = read_rewards(b'txt 0\njson {"reward": 1}\n', "")
    assert both.reward == 1.0
    assert both.flags == ("both reward.txt and reward.json were written",)
    assert read_rewards('json {"reward": 1, "a\u2028b": 0}\n'.encode(), "").reward == 1.0


@pytest.mark.parametrize(
    "report",
    [
        b"",
        b"txt\n",
        b"txt nan\n",
        b"txt 1_0\n",
        b'json {"reward": "1"}\n',
        b'json {"a": 1}\n',
        b'json {"reward": 1' + b"0" * 400 + b"}\n",
        b"json " + b"[" * 60_000 + b"\n",
    ],
    ids=lambda report: report[:20],
)
def test_what_is_no_reward_is_told(report: bytes) -> None:
    with pytest.raises(ValueError, match=r"tests/test\.sh wrote no readable reward"):
        read_rewards(report, "")


async def test_a_reward_is_read_as_it_was_written(folder: Path, walled: SandboxPool) -> None:
    (folder / "tests/test.sh").write_text(
        '#!/bin/sh\nprintf \'{\n"reward":\n 1, "%s": 0}\n\' "a * b\\\\n" '
        "> /logs/verifier/reward.json\n"
    )
    score = await graded(read_harbor_task(folder), walled)
    assert [part.name for part in score.parts] == ["reward", "a * b\n"]


def test_only_the_canary_is_taken_out() -> None:
    assert without_canary("# Canary GUID 1\n\n# Title\ncanary\n") == "# Title\ncanary\n"
    assert without_canary("Sing of a canary.\n") == "Sing of a canary.\n"


async def test_a_folder_is_an_environment(folder: Path, walled: SandboxPool) -> None:
    counts = {"train": 5, "heldout": 5, "novel": 0}
    environment = HarborTasks(walled, counts=counts, seed=0, path=str(folder.parent))
    (task,) = [*environment.tasks("train"), *environment.tasks("heldout")]
    assert environment.scoring_s(task) == 30.0
    solver = environment.solution(task)
    assert solver is not None
    async with environment.open(task) as sandbox:
        done = await solver.run(task, sandbox, base_url="", api_key="", seed=0)
        assert done == Transcript(messages=[], finished=True)
        score = await environment.score(task, sandbox, Attempt(transcript=done, segments=()))
    assert score.reward == 1.0


def test_backends_that_have_no_such_place_refuse(folder: Path) -> None:
    task = read_harbor_task(folder)
    FakeSandboxPool().check(task.spec)
    with pytest.raises(EtudeError, match="workdir"):
        ProcessSandboxPool().check(task.spec)
    change(folder, "environment/Dockerfile", "WORKDIR /app", "WORKDIR /srv/elsewhere")
    change(folder, "environment/Dockerfile", "/app/data/", "data/")
    need_namespaces()
    with pytest.raises(EtudeError, match="workdir"):
        NamespaceSandboxPool().check(read_harbor_task(folder).spec)


def test_show_says_whether_it_can_be_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "show", str(folder)]) == 0
    assert "runs with etude.run.harbor_tasks:HarborTasks" in capsys.readouterr().out
    change(folder, "environment/Dockerfile", f"FROM {PYTHON}", "FROM ubuntu:24.04")
    assert main(["tasks", "show", str(folder)]) == 0
    assert "cannot be run here" in capsys.readouterr().out
    (folder.parent / "provided.txt").write_text("# the machine is one\nFROM ubuntu:*\n")
    assert main(["tasks", "show", str(folder)]) == 0
    assert "runs with" in capsys.readouterr().out
    (folder / "task.toml").write_text("metadata = 3\n")
    assert main(["tasks", "show", str(folder)]) == 0
    assert "metadata is 3 in task.toml: it must be a table" in capsys.readouterr().out
    assert main(["tasks", "show", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["id"] == folder.name and "metadata is 3" in told["refused"]


def test_programs_are_made_executable_in_an_order_of_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    (folder / "inner").mkdir(parents=True)
    for name in ("d.sh", "b.sh", "inner/a.sh", "c.sh", "run", "a.py", "e.sh"):
        (folder / name).touch()
    (folder / "run").chmod(0o755)
    *_, last = harbor_task._unpacked(folder).splitlines()
    named = [f"/tests/{name}.sh" for name in ("b", "c", "d", "e", "inner/a")]
    assert last.split() == ["chmod", "+x", *named, "/tests/run"]
