"""The table `[harness]` of a run's config, and in it `[harness.code]`, the coding harness."""

from __future__ import annotations

import re
from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator, model_validator

from etude.core.schema import (
    Config,
    Count,
    CountOrZero,
    NonNegative,
    Place,
    Positive,
    Reference,
    of_form,
)

CODING_AGENT = "etude.harness.agent:CodingAgent"
CODE_AGENT = "etude.harness.code.agent:CodeAgent"
ToolKind = Literal[
    "read", "edit", "write", "apply_patch", "undo", "grep", "glob", "terminal", "run_tests", "todo",
    "ask_user", "debug", "submit",
]  # fmt: skip
TOOL_KINDS: tuple[ToolKind, ...] = get_args(ToolKind)
SERVERS = "/opt/servers"
"""Where sandboxes show the programs of the installation, among them language servers."""
ToolName = Annotated[
    str,
    of_form(
        r"[A-Za-z_][A-Za-z0-9_-]{0,63}",
        "at most 64 letters, digits and any of _ -, with a letter or _ first",
    ),
]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class ToolConfig(Config):
    """How the model knows a tool of the coding harness, where that differs."""

    name: ToolName | None = None
    """Its name."""
    description: str | None = None
    """What it is said to do."""
    parameters: dict[str, ToolName] = {}
    """Our name of a parameter -> the one that the model knows."""
    output_chars: Count | None = None
    """Characters of its answers, instead of the harness's `output_chars`."""


class PromptConfig(Config):
    """The first messages of a session, made of parts."""

    system: Annotated[str | None, Place.PATH] = None
    """A file with the system prompt, instead of the built-in one."""
    max_tokens: Count = 4096
    """What all parts together may take. Where that is not enough, the least important ones are left
    out; the task itself never is."""
    chars_per_token: Positive = 3.0
    """So many characters count as a token, since only the server has the tokenizer. Lower is
    safer."""
    instructions: Annotated[tuple[str, ...], Field(strict=False)] = ("AGENTS.md", "CLAUDE.md")
    """Files of the working copy that are shown whole, if they are there."""
    depth: CountOrZero = 2
    """Levels of the tree of files that are shown; 0: none."""
    dropout: Share = 0.0
    """Share of the training sessions without the system prompt, so that what it says moves into the
    weights. Evaluations always have it."""


class CodeConfig(Config):
    """The coding harness (docs/harness.md): this table, which may be empty, chooses it."""

    tools: Annotated[tuple[ToolKind, ...], Field(min_length=1, strict=False)] = TOOL_KINDS
    """The tools that there are, in the order in which the model is told."""
    tool: dict[ToolKind, ToolConfig] = {}
    """Tool -> how the model knows it: a table for each that a team has under another name."""
    output_chars: Count = 8000
    """Characters of a tool's answer. Of a longer one beginning, end and lines about errors stay."""
    command_timeout_s: Positive = 60.0
    """Time for a command in the terminal; then it goes on in the background."""
    test_command: Annotated[tuple[str, ...], Field(min_length=1, strict=False)] = (
        "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short",
    )  # fmt: skip
    """The command that runs tests; what the model asks for is added."""
    test_timeout_s: Positive = 120.0
    """Time for it."""
    remember_tests: bool = False
    """Whether results of the tests are cached, by the task, the command and all files that the
    agent changed. For tests that end the same way every time; they are run in a copy, and leave
    nothing behind. Not with terminal, debug or diagnostics, which may."""
    user_replies: dict[str, str] = {}
    """Regular expression -> what the user answers to a question in which it is found."""
    default_user_reply: str = (
        "Nobody can be asked now. Decide for yourself, and say what you assumed."
    )
    """What the user answers otherwise."""
    diagnostics: dict[str, tuple[str, ...]] = Field(
        default={"ruff": ("ruff", "server"), "ty": ("ty", "server")}, validate_default=False
    )
    """Language servers that say after each edit what it broke: name -> command. Of those that this
    installation has, sandboxes show the programs; one that is missing is told of once."""
    diagnostics_timeout_s: Positive = 5.0
    """Time for what they say of one edit."""
    debug_after: CountOrZero = 3
    """Failed runs of the tests before the debugger may be used."""
    prompt: PromptConfig = PromptConfig()
    """The first messages of a session."""

    @field_validator("diagnostics", mode="before")
    @classmethod
    def _lists(cls, servers: object) -> object:
        """TOML has lists only."""
        if not isinstance(servers, dict):
            return servers
        return {name: tuple(v) if isinstance(v, list) else v for name, v in servers.items()}

    @field_validator("user_replies")
    @classmethod
    def _patterns(cls, replies: dict[str, str]) -> dict[str, str]:
        for pattern in replies:
            try:
                re.compile(pattern)
            except re.error as e:
                raise ValueError(f"{pattern!r} is no regular expression: {e}") from e
        return replies

    @model_validator(mode="after")
    def _names_differ(self) -> CodeConfig:
        names = [self.name_of(kind) for kind in self.tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two tools are called {twice[0]}: names must differ")
        if "submit" not in self.tools:
            raise ValueError("tools has no submit: without it no session comes to its end")
        return self

    @model_validator(mode="after")
    def _check_remember_tests(self) -> CodeConfig:
        running = [str(kind) for kind in self.tools if kind in ("terminal", "debug")]
        running += ["diagnostics"] if self.diagnostics else []
        if self.remember_tests and running:
            raise ValueError(
                f"remember_tests does not go with {', '.join(running)}, which may leave behind "
                f"what tests depend on: set diagnostics = {{}}, and tools without the others"
            )
        return self

    def for_evaluation(self) -> CodeConfig:
        """The same, and every session has the system prompt."""
        prompt = self.prompt.model_copy(update={"dropout": 0.0})
        return self.model_copy(update={"prompt": prompt})

    def limit_of(self, kind: ToolKind) -> int:
        """Characters of its answers."""
        return (self.tool[kind].output_chars if kind in self.tool else None) or self.output_chars

    def name_of(self, kind: ToolKind) -> str:
        """As the model knows it."""
        return (self.tool[kind].name if kind in self.tool else None) or kind


class HarnessConfig(Config):
    """The agent, and the limits of its sessions."""

    agent: Reference = CODING_AGENT
    """The agent: a `core.protocols.Agent`, called with an HTTP session and the values below."""
    command: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Or a program as the agent, started in the sandbox: its name and arguments, in which
    `{prompt}`, `{task}` (its id) and `{base_url}` stand for what they say."""
    env: dict[str, str] = {}
    """Environment variables for `command`, beside those that say where the model is."""
    max_turns: Count = 8
    """Calls of the model in one session; an agent of your own is told, and counts as it likes."""
    max_tokens: Count = 64
    """Tokens that the model may generate in one turn."""
    timeout_s: Positive = 60.0
    """Time for a whole session."""
    tool_delay_s: NonNegative = 0.0
    """Delay added to every tool call; for benchmarks, whose tools would otherwise be
    unrealistically quick."""
    concurrency: Count = 64
    """Sessions at once."""
    summarise_at: Count | None = None
    """Tokens of a context at which the agent asks the model for a summary; the session goes on from
    that in a new context (docs/training.md). None: a session ends with its context. It leaves room
    in model.max_context for what comes until then, and for the summary."""
    summarise_tool: bool = False
    """The model may call `summarise` by itself."""
    code: CodeConfig | None = None
    """The coding harness, with the tools of a product, instead of the four of the demo
    (docs/harness.md). An `agent` of your own is given this table as `code`."""

    @property
    def summaries(self) -> dict[str, int | bool]:
        """What an agent is told of summaries: nothing if there are none."""
        told = {"summarise_at": self.summarise_at, "summarise_tool": self.summarise_tool}
        return {key: value for key, value in told.items() if value}

    @property
    def agent_class(self) -> str:
        """The agent that is meant, where no command is."""
        return CODE_AGENT if self.code is not None and self.agent == CODING_AGENT else self.agent
