"""The table `[tasks]` of a run's config."""

from __future__ import annotations

from typing import Annotated

from pydantic import model_validator

from etude.core.sandbox import VENVS
from etude.core.schema import (
    CODE_BY_NAME,
    URL,
    Config,
    Count,
    CountOrZero,
    Place,
    Positive,
    of_form,
)

PULL = "pull"
"""The environment is any client that asks the gateway for sessions."""
CODE_REPAIR = "etude.run.environment:CodeRepair"
TASK_FOLDER = "etude.run.task_folder:TaskFolder"
EnvironmentReference = Annotated[
    str,
    of_form(rf"{PULL}|{URL}|.+:\w+", f"{CODE_BY_NAME}, the URL of a service, or {PULL}"),
    Place.CODE,
]
"""Code by name, the URL of a service, or `pull`."""


class TasksConfig(Config):
    """The environment, and the number of its tasks that are used."""

    environment: EnvironmentReference = CODE_REPAIR
    """The environment, which provides tasks and scores attempts: a `core.protocols.Environment`,
    constructed with the sandbox pool, counts and seed; or the URL of a service that runs the
    sessions itself; or `pull`, where a scheduler asks the gateway for sessions
    (docs/environments-by-url.md)."""
    path: Annotated[str | None, Place.PATH] = None
    """The location of the tasks: a folder that `etude tasks build` made, for
    `etude.run.task_folder:TaskFolder` (its virtual environments are in every sandbox, read-only);
    one of Harbor's directories, for `etude.run.harbor_tasks:HarborTasks`; the configuration of an
    environment, for `etude.run.verifiers_environment:VerifiersEnvironment`, or of an OpenEnv
    server, for `etude.run.openenv_environment:OpenEnvEnvironment`; or a file of tasks in lines of
    JSON, for `pull` or to replace the tasks of a service."""
    results: Annotated[str | None, Place.PATH] = None
    """A folder that caches test results for all runs that name it: the verdicts of `TaskFolder`
    and, with `harness.code.remember_tests`, the test runs in sessions. The cache key is the task,
    the command and all changes. None: each run has a cache in memory."""
    train: Count = 4096
    """Tasks to train on."""
    heldout: CountOrZero = 400
    """Tasks for evaluation; they share no program with the training tasks. 0: none."""
    novel: CountOrZero = 200
    """Tasks for evaluation of a kind that is never trained on: other templates, or the repositories
    that `etude tasks build --novel` was given."""
    timeout_s: Positive = 600.0
    """Time to open the sandbox of an attempt, or to wait for room at a service, and again to score
    it, not counting the time that a Harbor task gives its verifier."""

    @property
    def is_remote(self) -> bool:
        """True if sessions run elsewhere, with a party that knows their scores."""
        return self.environment == PULL or self.environment.startswith(("http://", "https://"))

    @property
    def mounts(self) -> tuple[str, ...]:
        """Mounts for a folder that `etude tasks build` made. Environments of the user's own give
        `path` their own meaning, so they get none."""
        if self.path is None or self.environment != TASK_FOLDER:
            return ()
        return (f"{self.path}/venvs:{VENVS}",)

    @model_validator(mode="after")
    def _tasks_from_somewhere(self) -> TasksConfig:
        if self.path is not None and self.environment == CODE_REPAIR:
            raise ValueError(
                "path: the built-in environment has its own tasks; for a folder of tasks set "
                f'environment = "{TASK_FOLDER}"'
            )
        if self.results is not None and self.environment != TASK_FOLDER:
            raise ValueError(f'results only work with environment = "{TASK_FOLDER}"')
        if self.path is None and self.environment == PULL:
            raise ValueError('environment = "pull" provides no tasks: set path to a file of tasks')
        return self
