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
"""The directory where sandboxes show the programs of the installation, among them language
servers."""
ToolName = Annotated[
    str,
    of_form(
        r"[A-Za-z_][A-Za-z0-9_-]{0,63}",
        "at most 64 letters, digits and any of _ -, with a letter or _ first",
    ),
]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class ToolConfig(Config):
    """Changes to the way a tool of the coding harness is presented to the model."""

    name: ToolName | None = None
    """The tool's name."""
    description: str | None = None
    """The tool's description."""
    parameters: dict[str, ToolName] = {}
    """Our name of a parameter -> the name that the model sees."""
    output_chars: Count | None = None
    """Characters of the tool's answers, instead of the harness's `output_chars`."""


class PromptConfig(Config):
    """The first messages of a session, which consist of parts."""

    system: Annotated[str | None, Place.PATH] = None
    """A file with the system prompt, instead of the built-in one."""
    max_tokens: Count = 4096
    """Tokens of all parts together, at most. If they do not fit, the least important ones are left
    out; the task itself never is."""
    chars_per_token: Positive = 3.0
    """Characters that count as one token, since only the server has the tokenizer. Lower is
    safer."""
    instructions: Annotated[tuple[str, ...], Field(strict=False)] = ("AGENTS.md", "CLAUDE.md")
    """Files of the working copy that are shown whole, if they exist."""
    depth: CountOrZero = 2
    """Levels of the file tree that are shown; 0: none."""
    dropout: Share = 0.0
    """Share of the training sessions without the system prompt, so that its content moves into the
    weights. Evaluations always have it."""


class CodeConfig(Config):
    """The coding harness (docs/harness.md). The presence of this table, even an empty one, selects
    it."""

    tools: Annotated[tuple[ToolKind, ...], Field(min_length=1, strict=False)] = TOOL_KINDS
    """The available tools, in the order in which they are presented to the model."""
    tool: dict[ToolKind, ToolConfig] = {}
    """Tool -> its presentation to the model: a table for each tool that your product calls by
    another name."""
    output_chars: Count = 8000
    """Characters of a tool's answer. Of a longer one, the beginning, the end and lines about errors
    are kept."""
    command_timeout_s: Positive = 60.0
    """Time for a command in the terminal; after that it continues in the background."""
    test_command: Annotated[tuple[str, ...], Field(min_length=1, strict=False)] = (
        "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short",
    )  # fmt: skip
    """The command that runs tests; the model's arguments are appended."""
    test_timeout_s: Positive = 120.0
    """Time for the test command."""
    remember_tests: bool = False
    """Cache test results by the task, the command and all files that the agent changed. For tests
    that end the same way every time; they run in a copy of the working copy, and leave nothing
    behind. Cannot be combined with terminal, debug or diagnostics, which may leave something
    behind."""
    user_replies: dict[str, str] = {}
    """Regular expression -> the user's reply to a question that it matches."""
    default_user_reply: str = (
        "Nobody can be asked now. Decide for yourself, and say what you assumed."
    )
    """The user's reply to any other question."""
    diagnostics: dict[str, tuple[str, ...]] = Field(
        default={"ruff": ("ruff", "server"), "ty": ("ty", "server")}, validate_default=False
    )
    """Language servers that report after each edit what it broke: name -> command. Sandboxes show
    the programs of those that this installation has; a missing one is reported once."""
    diagnostics_timeout_s: Positive = 5.0
    """Time for the diagnostics of one edit."""
    debug_after: CountOrZero = 3
    """Failed test runs before the debugger may be used."""
    prompt: PromptConfig = PromptConfig()
    """The first messages of a session."""

    @field_validator("diagnostics", mode="before")
    @classmethod
    def _lists(cls, servers: object) -> object:
        """Turn TOML's lists into tuples."""
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
                raise ValueError(f"{pattern!r} is not a regular expression: {e}") from e
        return replies

    @model_validator(mode="after")
    def _names_differ(self) -> CodeConfig:
        names = [self.name_of(kind) for kind in self.tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two tools are called {twice[0]}: names must be unique")
        if "submit" not in self.tools:
            raise ValueError("tools has no submit: without it, no session can end")
        return self

    @model_validator(mode="after")
    def _check_remember_tests(self) -> CodeConfig:
        running = [str(kind) for kind in self.tools if kind in ("terminal", "debug")]
        running += ["diagnostics"] if self.diagnostics else []
        if self.remember_tests and running:
            raise ValueError(
                f"remember_tests does not work with {', '.join(running)}, which may leave "
                "behind files that tests depend on: set diagnostics = {}, and tools without "
                "the others"
            )
        return self

    def for_evaluation(self) -> CodeConfig:
        """The same config with the system prompt in every session."""
        prompt = self.prompt.model_copy(update={"dropout": 0.0})
        return self.model_copy(update={"prompt": prompt})

    def limit_of(self, kind: ToolKind) -> int:
        """The limit on the characters of a tool's answers."""
        return (self.tool[kind].output_chars if kind in self.tool else None) or self.output_chars

    def name_of(self, kind: ToolKind) -> str:
        """The name of a tool as the model sees it."""
        return (self.tool[kind].name if kind in self.tool else None) or kind


class HarnessConfig(Config):
    """The agent, and the limits of its sessions."""

    agent: Reference = CODING_AGENT
    """The agent: a `core.protocols.Agent`, constructed with an HTTP session and the values
    below."""
    command: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """A program as the agent, instead of `agent`, started in the sandbox: its name and arguments,
    in which `{prompt}`, `{task}` (its id) and `{base_url}` are replaced."""
    env: dict[str, str] = {}
    """Environment variables for `command`, in addition to those that point to the model."""
    max_turns: Count = 8
    """Calls of the model in one session; an agent of your own is given this number and counts in
    its own way."""
    max_tokens: Count = 64
    """Tokens that the model may generate in one turn."""
    timeout_s: Positive = 60.0
    """Time for a whole session."""
    tool_delay_s: NonNegative = 0.0
    """Delay added to every tool call; for benchmarks, whose tools would otherwise be
    unrealistically quick."""
    concurrency: Count = 64
    """Sessions at the same time."""
    summarise_at: Count | None = None
    """Tokens of a context at which the agent asks the model for a summary; the session continues
    from that in a new context (docs/training.md). None: a session ends with its context. The value
    must leave room in model.max_context for the tokens that arrive before the summary, and for the
    summary itself."""
    summarise_tool: bool = False
    """Let the model call `summarise` by itself."""
    code: CodeConfig | None = None
    """The coding harness, with the tools of a product, instead of the four of the demo
    (docs/harness.md). An `agent` of your own gets this table as `code`."""

    @property
    def summaries(self) -> dict[str, int | bool]:
        """The settings about summaries that an agent gets: empty if there are none."""
        told = {"summarise_at": self.summarise_at, "summarise_tool": self.summarise_tool}
        return {key: value for key, value in told.items() if value}

    @property
    def agent_class(self) -> str:
        """The agent to use, if there is no command."""
        return CODE_AGENT if self.code is not None and self.agent == CODING_AGENT else self.agent
