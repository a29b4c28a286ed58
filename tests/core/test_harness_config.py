"""The table of the coding harness: its meaning, and the values that it refuses."""

from __future__ import annotations

import pytest

from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.core.harness_config import TOOL_KINDS, CodeConfig

RUN = 'name = "r"\n[[stage]]\nkind = "rl"\nsteps = 1\n[harness.code]\n'


def code(text: str) -> CodeConfig:
    found = parse(RUN + text).harness.code
    assert found is not None
    return found


def test_an_empty_table_has_all_tools_under_their_own_names() -> None:
    plain = code("")
    assert plain.tools == TOOL_KINDS and [plain.name_of(kind) for kind in TOOL_KINDS] == list(
        TOOL_KINDS
    )
    assert {plain.limit_of(kind) for kind in TOOL_KINDS} == {plain.output_chars}


def test_a_tool_may_have_another_name_and_a_limit_of_its_own() -> None:
    team = code('output_chars = 500\n[harness.code.tool.submit]\nname = "done"\noutput_chars = 7\n')
    assert (team.name_of("submit"), team.limit_of("submit")) == ("done", 7)
    other = next(kind for kind in TOOL_KINDS if kind != "submit")
    assert (team.name_of(other), team.limit_of(other)) == (other, 500)


def test_language_servers_are_commands_by_name() -> None:
    assert set(code("").diagnostics) == {"ruff", "ty"}
    own = code('[harness.code.diagnostics]\nmine = ["server", "--stdio"]\n')
    assert own.diagnostics == {"mine": ("server", "--stdio")}
    assert code("diagnostics = {}").diagnostics == {}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('diagnostics = "ruff"', "harness.code.diagnostics = 'ruff'"),
        ('diagnostics = {ruff = "server"}', "it must be a list, such as"),
        ('user_replies = {"(" = "no"}', "is not a regular expression"),
        ('tools = ["submit"]\ntool = {sub = {name = "x"}}', "harness.code.tool"),
        ("tools = []", "harness.code.tools"),
        ("remember_tests = true", "does not work with terminal, debug, diagnostics"),
        ('remember_tests = true\ntools = ["submit"]', "does not work with diagnostics"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, why: str) -> None:
    with pytest.raises(EtudeError, match=why):
        code(text)


def test_tools_differ_in_their_names_and_one_of_them_ends_the_session() -> None:
    first, second = [kind for kind in TOOL_KINDS if kind != "submit"][:2]
    named = f'tool = {{{first} = {{name = "{second}"}}}}'
    with pytest.raises(EtudeError, match=f"two tools are called {second}"):
        code(named)
    code(f'tools = ["{first}", "submit"]\n{named}')  # the other tool is not available
    with pytest.raises(EtudeError, match="tools has no submit"):
        code(f'tools = ["{first}"]')


def test_an_evaluation_always_has_the_system_prompt() -> None:
    config = code("output_chars = 500\n[harness.code.prompt]\ndropout = 0.5\n")
    evaluated = config.for_evaluation()
    assert (config.prompt.dropout, evaluated.prompt.dropout) == (0.5, 0.0)
    assert evaluated.output_chars == 500
