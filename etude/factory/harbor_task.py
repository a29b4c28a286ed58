"""Tasks of Harbor that others made for containers: read, and graded by their own `tests/test.sh`.

A sandbox stands in for the container if it clearly makes no difference. Anything else that a task
asks for is refused by name when it is read.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from posixpath import join, normpath
from typing import Any

from etude.core.errors import EtudeError, RolloutFailure
from etude.core.sandbox import Limits, Sandbox, SandboxPool, SandboxSpec
from etude.core.types import Part, Score, Task
from etude.factory.dockerfile import Image, Unsupported, is_provided, read_image
from etude.factory.harbor import check_links, read_settings
from etude.rewards.fresh import CACHES, run_in_fresh_sandbox

PROVIDED = "provided.txt"
"""A file in a folder of tasks that lists what their sandboxes have already: a line of a Dockerfile
or a pattern per line."""
VERIFIER_S = 600.0
"""Harbor's own default."""
_STAGED = ".harbor"
"""Directory of a working copy for files on their way to /tests or /solution."""
_MAKE_LOGS = "mkdir -p /tmp/logs/agent /tmp/logs/artifacts /tmp/logs/verifier"
"""Not by the name /logs, which is a link: mkdir does not follow a dangling one."""
_SHOWN_CHARS = 2000

_KINDS: dict[str, Callable[[Any], bool]] = {
    "anything": lambda value: True,
    "text": lambda value: isinstance(value, str),
    "true or false": lambda value: isinstance(value, bool),
    "a list": lambda value: isinstance(value, list),
    "a table": lambda value: isinstance(value, dict),
    "a number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "a number above 0": lambda value: _KINDS["a number"](value) and 0 < value < math.inf,
}
_READ: dict[str, dict[str, str]] = {
    "": dict.fromkeys(("schema_version", "version", "source"), "anything")
    | dict.fromkeys(("task", "metadata", "verifier", "agent"), "a table")
    | {"environment": "a table", "solution": "a table", "artifacts": "a list"},
    "verifier": {"timeout_sec": "a number above 0", "env": "a table"}
    | {"environment_mode": "text", "network_mode": "text"},
    "agent": {"timeout_sec": "a number above 0", "network_mode": "text"},
    "environment": dict.fromkeys(("docker_image", "os", "memory", "storage"), "text")
    | dict.fromkeys(("build_timeout_sec", "cpus", "memory_mb", "storage_mb"), "a number above 0")
    | {"gpus": "a number", "env": "a table", "workdir": "text"}
    | {"allow_internet": "true or false", "network_mode": "text"},
    "solution": {"env": "a table"},
}
"""Keys of each table that are read, or that ask for nothing that could be honoured here
(docs/tasks.md)."""
_NOTHING: tuple[object, ...] = (None, [], {}, "")
"""Values that ask for nothing, whatever the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    id: str
    instruction: str
    image: Image
    limits: Limits
    tests: Path
    solution: Path
    verifier_s: float
    verifier_env: Mapping[str, str]
    solution_env: Mapping[str, str]
    taken: tuple[str, ...]
    """Patterns of the files in the working copy that the verifier gets."""

    @property
    def spec(self) -> SandboxSpec:
        return SandboxSpec(
            files=self.image.files,
            workdir=self.image.workdir,
            env=self.image.env,
            limits=self.limits,
        )

    def as_task(self) -> Task:
        """The part that an agent may see."""
        return Task(id=self.id, prompt=self.instruction, sandbox=self.spec)


def read_provided(folder: Path) -> tuple[str, ...]:
    """The lines that the user lists in a folder of tasks as provided by sandboxes."""
    place = folder / PROVIDED
    lines = place.read_text().splitlines() if place.is_file() else []
    return tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))


def read_harbor_task(folder: Path, provided: Collection[str] = ()) -> HarborTask:
    """Read a directory. EtudeError names the part that cannot be honoured."""
    check_links(folder)
    settings = read_settings(folder)
    try:
        _check_keys("", settings)
        tables = {name: settings.get(name, {}) for name in _READ if name}
        for name, table in tables.items():
            _check_keys(name, table)
        _check_environment(tables)
        _check_files(folder)
        image = _image(folder, tables["environment"], provided)
        return HarborTask(
            id=folder.name,
            instruction=without_canary((folder / "instruction.md").read_text()),
            image=image,
            limits=_limits(tables["environment"]),
            tests=folder / "tests",
            solution=folder / "solution",
            verifier_s=float(tables["verifier"].get("timeout_sec", VERIFIER_S)),
            verifier_env=_env("verifier", tables["verifier"]),
            solution_env=_env("solution", tables["solution"]),
            taken=_taken(settings, tables["verifier"], image.workdir),
        )
    except (Unsupported, ValueError, OverflowError) as e:
        raise EtudeError(f"{folder}: {e}") from e


def _check_keys(name: str, table: Mapping[str, Any]) -> None:
    for key, value in table.items():
        told = f"{name}.{key}" if name else key
        kind = _READ[name].get(key)
        if kind is None and value not in _NOTHING:
            raise Unsupported(f"task.toml sets {told} = {value!r}, which is not supported")
        if kind is not None and not _KINDS[kind](value):
            raise Unsupported(f"{told} is {value!r} in task.toml: it must be {kind}")


def _check_environment(tables: Mapping[str, Mapping[str, Any]]) -> None:
    environment = tables["environment"]
    if environment.get("os", "linux").lower() != "linux":
        raise Unsupported(f"environment.os is {environment['os']!r}: sandboxes are Linux")
    if environment.get("gpus"):
        raise Unsupported(f"environment.gpus is {environment['gpus']}: sandboxes have none")
    for name, table in tables.items():
        open_to = table.get("network_mode", "public" if table.get("allow_internet") else None)
        if open_to not in (None, "no-network"):
            raise Unsupported(f"{name}.network_mode is {open_to!r}: sandboxes have no network")


def _check_files(folder: Path) -> None:
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise Unsupported(f"it has no file {name}")
    composed = ("docker-compose.yaml", "docker-compose.yml", "singularity-compose.yaml")
    for name in ("trajectory.json", *(f"environment/{each}" for each in composed)):
        if (folder / name).exists():
            raise Unsupported(f"its {name} is not supported")
    if ignored := next(folder.rglob(".harborignore"), None):
        raise Unsupported(f"{ignored.relative_to(folder)} is not supported")


def _image(folder: Path, environment: Mapping[str, Any], provided: Collection[str]) -> Image:
    workdir = environment.get("workdir")
    env = _env("environment", environment)
    if (folder / "environment" / "Dockerfile").is_file():
        image = read_image(folder / "environment", provided, workdir)
        return Image(image.workdir, {**image.env, **env}, image.files, image.executables)
    line = f"FROM {environment.get('docker_image', '')}"
    if not is_provided(line, provided):
        raise Unsupported(
            f"its environment is {line!r}, but images are not built: if your sandboxes have "
            f"what is in it ([sandbox] mounts), add the line to {PROVIDED} beside the tasks"
        )
    if not workdir:
        raise Unsupported("environment.workdir is missing, and that of its image is not known")
    return Image(workdir, env, {}, ())


def _limits(environment: Mapping[str, Any]) -> Limits:
    def mib(name: str) -> int | None:
        size = environment.get(f"{name}_mb")
        if size is None and (text := environment.get(name)):
            parts = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([GMK])", text.strip().upper())
            if parts is None:
                raise Unsupported(f"environment.{name} is {text!r}: it must be a size such as '2G'")
            size = float(parts[1]) * {"G": 1024.0, "M": 1.0, "K": 1 / 1024}[parts[2]]
        return None if size is None else int(float(size) * (1 << 20))

    return Limits(
        cpus=environment.get("cpus"), memory_bytes=mib("memory"), disk_bytes=mib("storage")
    )


def _env(name: str, table: Mapping[str, Any]) -> dict[str, str]:
    found = {key: str(value) for key, value in table.get("env", {}).items()}
    if templates := [key for key, value in found.items() if "${" in value]:
        raise Unsupported(
            f"{name}.env takes {templates[0]} from this machine's environment, where agents "
            f"could read it: write the value itself"
        )
    return found


def _taken(
    settings: Mapping[str, Any], verifier: Mapping[str, Any], workdir: str
) -> tuple[str, ...]:
    """All changes, or, for a verifier in an environment of its own, the artifacts."""
    if verifier.get("environment_mode", "shared") == "shared":
        return ("*",)
    found: list[str] = []
    for entry in settings.get("artifacts", []):
        asked = {"source": entry} if isinstance(entry, str) else entry
        if not isinstance(asked, dict) or not isinstance(asked.get("source"), str):
            raise Unsupported(
                f"artifacts has {entry!r}: each entry must be a path, or have a source"
            )
        if more := [key for key in ("exclude", "service") if asked.get(key)]:
            raise Unsupported(f"artifacts of a separate verifier do not support {more[0]}")
        source = PurePosixPath(normpath(join(workdir, asked["source"])))
        if not source.is_relative_to(workdir):
            raise Unsupported(f"the artifact {source} is outside the working copy, {workdir}")
        path = source.relative_to(workdir).as_posix()
        found += ["*"] if path == "." else [path, f"{path}/*"]
    if not found:
        raise Unsupported("a separate verifier needs at least one artifact of the working copy")
    return tuple(found)


def without_canary(text: str) -> str:
    """The text without the lines at its beginning that only state that nobody should train on it by
    accident."""
    return re.sub(r"\A([ \t]*(<!--.*canary.*-->|#.*canary.*)[ \t]*\n)+\s*", "", text, flags=re.I)


async def prepare(task: HarborTask, sandbox: Sandbox) -> None:
    """Make the directories of logs, and make the same files executable as in the task's
    directory."""
    programs = shlex.join(task.image.executables)
    script = _MAKE_LOGS + (f" && chmod +x -- {programs}" if programs else "")
    ran = await sandbox.run(["sh", "-c", script], timeout_s=60)
    if ran.exit_code != 0:
        raise RolloutFailure(f"the sandbox could not be prepared: {ran.output[-_SHOWN_CHARS:]}")


async def solve(task: HarborTask, sandbox: Sandbox) -> None:
    """Put the solution into a sandbox and run it. RolloutFailure if it fails."""
    await sandbox.run(["rm", "-rf", _STAGED], timeout_s=60)
    for path, content in _staged(task.solution).items():
        await sandbox.write(path, content)
    script = f"{_unpacked(task.solution)}/solution/solve.sh\n"
    ran = await sandbox.run(
        ["sh", "-c", script], timeout_s=task.verifier_s, env=dict(task.solution_env)
    )
    if ran.exit_code != 0:
        raise RolloutFailure(
            f"solve.sh ended with exit code {ran.exit_code}: {ran.output[-_SHOWN_CHARS:]}"
        )


async def grade_harbor_task(task: HarborTask, sandbox: Sandbox, pool: SandboxPool) -> Score:
    """The verdict of `tests/test.sh`, in a fresh sandbox over the agent's changes. An agent that
    makes it run out of time earns 0; a script that writes no reward has failed."""
    script = (
        f"{_unpacked(task.tests)}{_MAKE_LOGS}\n"
        "set +e\n"
        "/tests/test.sh\n"
        "for kind in txt json; do\n"
        "  if [ -e /logs/verifier/reward.$kind ]; then\n"
        "    said=$(head -c 65536 /logs/verifier/reward.$kind | tr '\\n' ' ')\n"
        '    printf \'%s %s\\n\' $kind "$said" >> "$ETUDE_REPORT"\n'
        "  fi\n"
        "done\n"
    )
    assigned = [f"{name}={value}" for name, value in task.verifier_env.items()]
    try:
        ran = await run_in_fresh_sandbox(
            sandbox,
            pool,
            task.spec,
            ["env", *assigned, "sh", "-c", script],
            timeout_s=task.verifier_s,
            files=_staged(task.tests),
            only=task.taken,
            without=(*CACHES, _STAGED, f"{_STAGED}/*"),
        )
    except ValueError as e:
        return _worthless(f"the working copy cannot be graded: {e}")
    if ran.exit_code is None:
        return _worthless(f"tests/test.sh did not end within {task.verifier_s:g} s")
    return read_rewards(ran.report, ran.output)


def read_rewards(report: bytes, output: str) -> Score:
    """The score in reward.json, or else in reward.txt. ValueError if neither contains a reward: the
    worth of the attempt is unknown then."""
    lines = report.decode(errors="replace").split("\n")
    said = dict(line.partition(" ")[::2] for line in lines if line)
    last = output[-_SHOWN_CHARS:]
    try:
        rewards = _rewards(said)
    except (KeyError, ValueError, OverflowError, RecursionError) as e:
        raise ValueError(
            f"tests/test.sh wrote no readable reward to /logs/verifier ({e!r:.200}); its last "
            f"output: {last}"
        ) from e
    return Score(
        rewards["reward"],
        tuple(Part(name, value, last) for name, value in rewards.items()),
        flags=("both reward.txt and reward.json were written",) if len(said) > 1 else (),
    )


def _rewards(said: Mapping[str, str]) -> dict[str, float]:
    """Rewards by name; `reward` is one of them."""
    if "json" not in said and "_" in said["txt"]:
        raise ValueError(f"{said['txt']!r} is not a plain number")
    found = json.loads(said["json"]) if "json" in said else float(said["txt"])
    rewards = found if isinstance(found, dict) else {"reward": found}
    for name, value in rewards.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name!r} is not a finite number")
    if "reward" not in rewards:
        raise ValueError(f"several values, but none is named 'reward': {', '.join(rewards)}")
    return {name: float(value) for name, value in rewards.items()}


def _worthless(evidence: str) -> Score:
    return Score(0.0, (Part("reward", 0.0, evidence),))


def _staged(folder: Path) -> dict[str, bytes]:
    return {
        f"{_STAGED}/{folder.name}/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _unpacked(folder: Path) -> str:
    """Lines of a script that move staged files out of the working copy, to their place in Harbor.
    The script ends if that fails."""
    programs: Sequence[str] = [
        f"/{folder.name}/{path.relative_to(folder).as_posix()}"
        for path in sorted(folder.rglob("*"))
        if path.is_file() and (path.stat().st_mode & 0o100 or path.suffix == ".sh")
    ]
    staged, target = f"{_STAGED}/{folder.name}", f"/tmp/{folder.name}"
    return (
        "set -e\n"
        f"rm -rf {target}\n"
        f"mv {staged} {target}\n"
        f"rm -rf {_STAGED}\n"
        f"chmod +x {shlex.join(programs)}\n"
    )
