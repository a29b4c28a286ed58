"""`etude try RUN.toml`: try one task in the real sandbox before any training. It shows what doing
nothing earns, what a good answer earns, and what happens in a session.

Nothing is written to a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from etude.core.advantage import suspected_tricks, untrainable_params
from etude.core.config import RunConfig
from etude.core.errors import EtudeError, RolloutFailure
from etude.core.protocols import Agent, Environment, Policy
from etude.core.sampling import Request, Sample, Token
from etude.core.sandbox import Sandbox
from etude.core.stages import RolloutStageConfig
from etude.core.types import EVAL_SPLITS, Attempt, Json, Score, Task, Trajectory, Transcript
from etude.run.controller import (
    build_agent,
    build_review,
    open_environment,
    read_tasks,
    wanted_splits,
)
from etude.run.rollout import RolloutRunner, SessionRecorder, scoring_s
from etude.run.session_sandbox import diff_of
from etude.serve.alone import PolicySessions, ScriptedSessions, parse_script

UNTOUCHED = "untouched"
REFERENCE = "reference solution"
GIVEN = "your solution"
SESSION = "session"
_PATCHES = (".patch", ".diff")
NEAREST = 5
_SHOWN_LINES = 12
_SHOWN_CHARS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    task: str | None
    solution: Path | None
    script: Path | None
    no_model: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One attempt at the task, with its result."""

    name: str
    trajectory: Trajectory
    diff: str
    """The changes in the working copy before it was scored."""
    open_s: float
    score_s: float

    @property
    def reward(self) -> float | None:
        return self.trajectory.reward

    def to_json(self) -> dict[str, Json]:
        score = self.trajectory.score
        return {
            "name": self.name,
            "status": self.trajectory.status,
            "error": self.trajectory.error,
            "score": asdict(score) if score else None,
            "seconds": {
                "open": self.open_s,
                "score": self.score_s,
                "all": self.trajectory.cost.seconds,
            },
            "calls": self.trajectory.cost.calls,
            "diff": self.diff,
            "messages": self.trajectory.messages,
        }


def try_run(config: RunConfig, options: Options, console: Console) -> dict[str, Json]:
    """Try a task; returns the data for `--json`: the trials, and advice."""
    return asyncio.run(_try(config, options, console))


async def _try(config: RunConfig, options: Options, console: Console) -> dict[str, Json]:
    script = _read_script(options.script) if options.script else None
    async with open_environment(config) as (environment, _), aiohttp.ClientSession() as http:
        task = await _find_task(environment, config, options.task)
        console.print(f"[bold]task {escape(task.id)}[/]", highlight=False)
        trials = []

        async def attempt(name: str, agent: Agent, sessions: SessionRecorder) -> None:
            trial = await _attempt(name, task, environment, agent, sessions, config, http)
            show(trial, console)
            trials.append(trial)

        nobody = ScriptedSessions([])
        # otherwise sessions are run and scored by a service
        has_files = not hasattr(environment, "own_agent")
        if has_files:
            await attempt(UNTOUCHED, _Solver({}), nobody)
        solution = getattr(environment, "solution", lambda task: None)(task)
        if solution is not None:
            solver = _Solver(solution) if isinstance(solution, Mapping) else solution
            await attempt(REFERENCE, solver, nobody)
        if options.solution:
            await attempt(GIVEN, _given_solver(options.solution), nobody)
        if script is not None or not options.no_model:
            agent = build_agent(
                config.harness, environment, http, desk=None, temperature=_temperature(config)
            )
            loads = "" if script is not None else ", after loading it"
            console.print(f"[dim]a session with {_described(config, script)}{loads} ...[/]")
            async with _open_sessions(config, script, console) as sessions:
                await attempt(SESSION, agent, sessions)
        advice = findings(trials, has_files=has_files) + await _refusals(environment, config)
    for line in advice:
        console.print(f"[yellow]warning:[/] {escape(line)}", highlight=False, soft_wrap=True)
    if not advice:
        console.print("[green]no problems found[/]")
    return {
        "task": task.id,
        "trials": [trial.to_json() for trial in trials],
        "look": advice,
        "ok": is_sound(trials),
    }


def is_sound(trials: Sequence[Trial]) -> bool:
    """True if nothing failed, and the environment's own solution earns a reward."""
    return all(
        trial.reward is not None and (trial.name != REFERENCE or trial.reward > 0.0)
        for trial in trials
    )


NO_MODULE = (
    'a module was not found: for sources in src/, set `pythonpath = ["src"]` for pytest or '
    'env={"PYTHONPATH": "src"} in the SandboxSpec; install packages where `mounts` points'
)


def findings(trials: Sequence[Trial], *, has_files: bool = True) -> list[str]:
    """Advice on what to look at, in sentences. `has_files`: the environment has working copies."""
    by_name = {trial.name: trial for trial in trials}
    rewards = {trial.name: trial.reward for trial in trials if trial.reward is not None}
    found = [
        f"{trial.name} failed: a run does not train on such attempts, and stops if half of them "
        "fail"
        for trial in trials
        if trial.reward is None
    ]
    found += [
        f"{trial.name} is suspected of a trick ({tricks}): a run does not train on such "
        "attempts, unless rewards.detector is set otherwise; read its evidence"
        for trial in trials
        if (tricks := suspected_tricks(trial.trajectory))
    ]
    if (paid := rewards.get(UNTOUCHED)) is not None and paid > 0.0:
        found.append(f"doing nothing earns {paid:g}: a model can learn to do nothing")
    for name in (REFERENCE, GIVEN):
        if name in rewards and rewards[name] < 1.0:
            means = (
                "so a correct answer earns nothing: fix the grader, or solution(task)"
                if name == REFERENCE and rewards[name] <= 0.0
                else "but a task counts as solved only at 1"
            )
            found.append(f"{name} earns {rewards[name]:g}, {means}; read its evidence")
            if "ModuleNotFoundError" in _evidence(by_name[name]):
                found.append(NO_MODULE)
    if paid is not None and len(rewards) > 1 and len(set(rewards.values())) == 1:
        found.append(
            f"everything earns {paid:g}: if all attempts earn the same, nothing is learned"
        )
    if has_files and REFERENCE not in by_name and GIVEN not in by_name:
        found.append(
            "no correct answer was scored: pass one with --solution, or add solution(task) to "
            "your environment"
        )
    return found + (_session_findings(by_name[SESSION], has_files) if SESSION in by_name else [])


def _evidence(trial: Trial) -> str:
    score = trial.trajectory.score
    return "\n".join(part.evidence for part in score.parts) if score else ""


def _session_findings(session: Trial, has_files: bool) -> list[str]:
    if session.reward is None:
        return []
    found = []
    messages = session.trajectory.messages
    if has_files and not any(message.get("role") == "assistant" for message in messages):
        found.append(
            "the session has no answer of the model: does the agent send its requests to base_url?"
        )
    if session.trajectory.status in ("truncated", "timeout"):
        found.append("the session did not finish: its agent ran out of time, turns or context")
    if names := untrainable_params(session.trajectory):
        found.append(
            f"the session was sampled with {names}, which the trainer cannot recompute: such "
            "attempts are dropped. Have the agent set no sampling parameter except temperature, "
            "and keep it above 0"
        )
    if has_files and not session.diff:
        found.append("the session changed no files in the working copy")
    return found


def show(trial: Trial, console: Console) -> None:
    seconds = f"{trial.trajectory.cost.seconds:.1f} s"
    spent = f"{seconds} (open {trial.open_s:.2f}, score {trial.score_s:.2f})"
    score = trial.trajectory.score
    if score is None:
        console.print(f"[bold]{trial.name}[/]  [red]failed[/]  {spent}", highlight=False)
        _print_indented(trial.trajectory.error or "", console)
        return
    color = "green" if score.reward >= 1.0 else "default"
    flags = f"  flags: {', '.join(score.flags)}" if score.flags else ""
    console.print(
        f"[bold]{trial.name}[/]  reward [{color}]{score.reward:g}[/]  {spent}{escape(flags)}",
        highlight=False,
    )
    for part in score.parts:
        _print_indented(f"{part.name} = {part.value:g}", console)
        if part.evidence:
            _print_indented(part.evidence, console, indent=4, end=True)
    if trial.name == SESSION:
        for message in trial.trajectory.messages:
            _print_indented(f"{message.get('role')}:", console)
            _print_indented(_said(message), console, indent=4)


def _said(message: Mapping[str, Json]) -> str:
    calls = [
        f"-> {call['function']['name']}({call['function']['arguments']})"
        for call in message.get("tool_calls") or []
    ]
    content = message.get("content")
    return "\n".join([*([str(content)] if content else []), *calls])


def _print_indented(text: str, console: Console, indent: int = 2, *, end: bool = False) -> None:
    """Print the first lines of a text; or with `end`, the first line, which may summarise it, and
    the last ones."""
    lines = text.splitlines()
    if len(lines) > _SHOWN_LINES:
        last = [lines[0], "...", *lines[-_SHOWN_LINES:]]
        lines = last if end else [*lines[:_SHOWN_LINES], "..."]
    for line in lines:
        shown = line if len(line) <= _SHOWN_CHARS else f"{line[:_SHOWN_CHARS]} ..."
        console.print(" " * indent + escape(shown), style="dim", highlight=False, soft_wrap=True)


async def _attempt(
    name: str,
    task: Task,
    environment: Environment,
    agent: Agent,
    sessions: SessionRecorder,
    config: RunConfig,
    http: aiohttp.ClientSession,
) -> Trial:
    """Make an attempt with the same code as the rollouts of a run."""
    observed = _Observed(environment)
    runner = RolloutRunner(
        observed,
        agent,
        sessions,
        concurrency=1,
        needs_model=name == SESSION and isinstance(sessions, PolicySessions),
        agent_timeout_s=config.harness.timeout_s + 10.0,
        sandbox_timeout_s=config.tasks.timeout_s,
        review=build_review(config.rewards, http),
    )
    trajectory = await runner.attempt(task, "try.0", config.seed)
    return Trial(
        name=name,
        trajectory=trajectory,
        diff=observed.diff,
        open_s=observed.open_s,
        score_s=observed.score_s,
    )


class _Observed:
    """An environment that measures its times, and records the diff of the working copy."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.open_s = 0.0
        self.score_s = 0.0
        self.diff = ""

    def tasks(self, split: str) -> Sequence[Task]:
        return self._environment.tasks(split)

    @contextlib.asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Sandbox]:
        began = time.monotonic()
        async with self._environment.open(task) as sandbox:
            self.open_s = time.monotonic() - began
            yield sandbox

    def scoring_s(self, task: Task) -> float:
        return scoring_s(self._environment, task)

    async def score(self, task: Task, sandbox: Sandbox, attempt: Attempt) -> Score:
        self.diff = await diff_of(sandbox)
        began = time.monotonic()
        try:
            return await self._environment.score(task, sandbox, attempt)
        finally:
            self.score_s = time.monotonic() - began


class _Solver:
    """An agent that applies a known solution: files, or a patch."""

    def __init__(self, files: Mapping[str, str | bytes], patch: str = "") -> None:
        self._files = files
        self._patch = patch

    async def run(
        self, task: Task, sandbox: Sandbox, *, base_url: str, api_key: str, seed: int
    ) -> Transcript:
        for path, content in self._files.items():
            await sandbox.write(path, content)
        if self._patch:
            applied = await sandbox.run(["git", "apply", "-"], timeout_s=60, stdin=self._patch)
            if applied.exit_code != 0:
                raise RolloutFailure(f"git apply: {applied.output.strip()}")
        return Transcript(messages=[], finished=True)


def _given_solver(path: Path) -> _Solver:
    """A solver from a path: a directory of files for the working copy, a patch, or FILE:PLACE."""
    try:
        if path.is_dir():
            files = [each for each in sorted(path.rglob("*")) if each.is_file()]
            return _Solver({str(each.relative_to(path)): each.read_bytes() for each in files})
        if path.suffix in _PATCHES:
            return _Solver({}, patch=path.read_text())
        file, _, place = str(path).partition(":")
        return _Solver({place or Path(file).name: Path(file).read_bytes()})
    except (OSError, UnicodeDecodeError) as e:
        raise EtudeError(
            f"--solution {path}: {getattr(e, 'strerror', None) or e}; give a directory of files, "
            "a .patch, or FILE:PATH in the working copy"
        ) from e


def _read_script(path: Path) -> list[dict[str, Json]]:
    try:
        return parse_script(path.read_text(), lines_of_json=path.suffix == ".jsonl")
    except (OSError, ValueError) as e:
        raise EtudeError(
            f"--script {path}: {getattr(e, 'strerror', None) or e}; give a text file with lines "
            "of --- between answers, or a .jsonl with a text or a message on each line"
        ) from e


async def _find_task(environment: Environment, config: RunConfig, wanted: str | None) -> Task:
    seen, refused = list[str](), list[EtudeError]()
    for split in ("train", *EVAL_SPLITS):
        if getattr(config.tasks, split) == 0:
            continue
        try:
            tasks = await read_tasks(environment, config.tasks, split)
        except EtudeError as e:  # reported with the findings if another split has a task
            refused.append(e)
            continue
        for task in tasks:
            if wanted in (None, task.id):
                return task
        seen += [task.id for task in tasks]
    if not seen:
        raise refused[0]
    near = ", ".join(get_close_matches(wanted or "", seen, n=NEAREST, cutoff=0.0))
    raise EtudeError(f"there is no task {wanted}: the closest of {len(seen)} are {near}")


async def _refusals(environment: Environment, config: RunConfig) -> list[str]:
    """The errors that would stop a run before its first stage."""
    found = []
    for split in wanted_splits(config):
        try:
            await read_tasks(environment, config.tasks, split)
        except EtudeError as e:
            found.append(str(e))
    return found


def _temperature(config: RunConfig) -> float:
    """That of a rollout in training. It is never 0, so that of a session that was sampled at 0 it
    can be said that its agent asked for that."""
    stages = [stage for stage in config.stage if isinstance(stage, RolloutStageConfig)]
    default: float = RolloutStageConfig.model_fields["temperature"].default
    return stages[0].temperature if stages else default


def _described(config: RunConfig, script: Sequence[object] | None) -> str:
    if script is not None:
        return f"a script of {len(script)} answer{'s' if len(script) != 1 else ''}"
    return config.model.path or "untrained weights"


class _Watched:
    """A policy with its progress on the screen: without a GPU, one answer may take minutes."""

    def __init__(self, policy: Policy, status: Status) -> None:
        self._policy = policy
        self._status = status
        self._answers = 0

    async def sample(self, request: Request) -> Sample:
        *_, sample = [event async for event in self.stream(request)]
        assert isinstance(sample, Sample)
        return sample

    async def stream(self, request: Request) -> AsyncIterator[Token | Sample]:
        self._answers += 1
        name = f"answer {self._answers}"
        tokens = 0
        began = time.monotonic()
        self._status.update(f"{name}: reads {len(request.prompt)} tokens")
        async for event in self._policy.stream(request):
            if isinstance(event, Token):
                tokens += 1
                self._status.update(f"{name}: {tokens} tokens")
            yield event
        spent = f"{tokens} tokens in {time.monotonic() - began:.1f} s"
        self._status.console.print(f"[dim]  {name}: {spent}[/]", highlight=False)

    async def load(self, version: int) -> None:
        await self._policy.load(version)


@contextlib.asynccontextmanager
async def _open_sessions(
    config: RunConfig, script: Sequence[dict[str, Json]] | None, console: Console
) -> AsyncIterator[SessionRecorder]:
    if script is not None:
        scripted = ScriptedSessions(script)
        async with scripted.open():
            yield scripted
        return
    from etude.commands.serve import no_other_version
    from etude.engine.engine import Engine
    from etude.engine.select import select_device
    from etude.model.directory import cut_context
    from etude.serve.engine_thread import EngineThread
    from etude.train.start import initial_model
    from etude.trainer.prepare import model_directory, model_files

    files = cut_context(model_files(config), config.model.max_context)
    directory = model_directory(config.model.path) if config.model.path else None
    model = initial_model(directory, files["config.json"], config.seed).requires_grad_(False)
    model.to(select_device(config.engine.device))
    engine = EngineThread(Engine(model, max_num_seqs=1), no_other_version, files)
    try:
        with console.status("the agent starts") as status:
            watched = _Watched(engine, status)
            recorded = PolicySessions(watched, files, max_context=engine.max_context)
            async with recorded.open():
                yield recorded
    finally:
        engine.close()
