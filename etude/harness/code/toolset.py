"""The tools of a session, by the names under which the model knows them."""

from __future__ import annotations

from etude.core.harness_config import ToolConfig, ToolKind
from etude.core.types import Json
from etude.harness.code.files import ApplyPatch, Edit, Read, Undo, Write
from etude.harness.code.output import clip
from etude.harness.code.search import Glob, Grep
from etude.harness.code.talk import AskUser, Submit, Todo
from etude.harness.code.terminal import Terminal
from etude.harness.code.testing import Debug, RunTests
from etude.harness.code.tool import Schema, Tool, Workspace, check_arguments
from etude.harness.summary import CarriedState

TOOLS: dict[ToolKind, type[Tool]] = {
    "read": Read,
    "edit": Edit,
    "write": Write,
    "apply_patch": ApplyPatch,
    "undo": Undo,
    "grep": Grep,
    "glob": Glob,
    "terminal": Terminal,
    "run_tests": RunTests,
    "todo": Todo,
    "ask_user": AskUser,
    "debug": Debug,
    "submit": Submit,
}
_AS_IT_IS = ToolConfig()


class _Named:
    """A tool with the name, description and parameter names that the model sees."""

    def __init__(self, kind: ToolKind, workspace: Workspace) -> None:
        config = workspace.config
        self._workspace = workspace
        told = config.tool.get(kind, _AS_IT_IS)
        self._tool = TOOLS[kind](workspace)
        self.name = config.name_of(kind)
        self._description = told.description or self._tool.describe()
        self._limit = config.limit_of(kind)
        names = {ours: told.parameters.get(ours, ours) for ours in self._tool.parameters}
        self._ours = {theirs: ours for ours, theirs in names.items()}
        self._properties = {names[ours]: each for ours, each in self._tool.parameters.items()}
        self._required = [names[ours] for ours in self._tool.required]

    @property
    def schema(self) -> Schema:
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self._description,
                "parameters": {
                    "type": "object",
                    "properties": self._properties,
                    "required": self._required,
                },
            },
        }

    async def call(self, arguments: Json) -> str:
        if problem := check_arguments(arguments, self._properties, set(self._required)):
            return f"error: {problem}; {self.name} takes {', '.join(self._properties) or 'nothing'}"
        self._workspace.begin_call()
        try:
            answer = await self._tool.call(
                **{self._ours[name]: value for name, value in arguments.items()}
            )
        except ValueError as e:  # a mistake of the model, or of the working copy that it made
            answer = f"error: {e}"
        return clip(answer, self._limit)


class Toolset:
    """A `harness.agent.AgentTools`."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._tools = {
            named.name: named
            for kind in workspace.config.tools
            for named in [_Named(kind, workspace)]
        }
        self._end = workspace.config.name_of("submit")
        self.schemas: list[Schema] = [tool.schema for tool in self._tools.values()]

    async def call(self, name: str, arguments: Json) -> str:
        """The answer to a call as the model wrote it, however wrong it is. Raises only if the
        sandbox fails."""
        if name not in self._tools:
            return f"error: there is no tool {name}: those that there are: {', '.join(self._tools)}"
        return await self._tools[name].call(arguments)

    def ends(self, name: str) -> bool:
        return name == self._end

    def carried(self) -> CarriedState:
        return CarriedState(todos=tuple(self._workspace.open_todos))
