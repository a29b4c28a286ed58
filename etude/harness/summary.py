"""Sessions that outlive the context window: the model sums up what happened, and goes on from that.

At a number of tokens the agent asks for a summary, in the same context, whose keys and values the
engine still holds; or the model calls `summarise` by itself. The task, the summary, the plan, the
open to-dos and the number of summaries then open the next window. For the recorder that is a new
segment of the same session: what the model wrote as a summary is sampled, recorded and trained with
the final reward like every other turn of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from etude.core.types import Json

Message = dict[str, Json]

SUMMARISE = "summarise"
REQUEST = (
    "The context is nearly full. Write a summary of this session: it is all that you will see of "
    "it. Say what is done, what you found out, and what is next."
)
SCHEMA: Message = {
    "type": "function",
    "function": {
        "name": SUMMARISE,
        "description": "Forget the session but for this summary, and go on from it",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}},
            "required": ["text"],
        },
    },
}
"""The tool, as the chat completions API wants it."""


@dataclass(frozen=True, slots=True)
class CarriedState:
    """What the harness itself knows of a session, and no summary can lose."""

    plan: str = ""
    todos: tuple[str, ...] = ()
    """Those that are open."""

    def __str__(self) -> str:
        parts = [f"plan:\n{self.plan}"] if self.plan else []
        if self.todos:
            parts.append("\n".join(["open to-dos:", *(f"- {todo}" for todo in self.todos)]))
        return "\n\n".join(parts)


class Conversation:
    """The messages of a session: all that were said, and the window that the model is shown."""

    def __init__(self, opening: Sequence[Message], summarise_at: int | None = None) -> None:
        """`summarise_at`: tokens of a window; None: there is only one."""
        self.said: list[Message] = list(opening)
        self.window: list[Message] = list(opening)
        self.num_summaries = 0
        self._opening = tuple(opening)
        self._summarise_at = summarise_at
        self._num_tokens = 0
        self._fitted: list[int] = []  # messages of each window that the model could read

    def add(self, *messages: Message) -> None:
        self.said += messages
        self.window += messages

    def answered(self, answer: Message, num_tokens: int) -> None:
        """The model has read the window, and said this. `num_tokens`: of both."""
        self._fitted.append(len(self.window))
        self._num_tokens = num_tokens
        self.add(answer)

    @property
    def is_full(self) -> bool:
        """Whether a summary is due."""
        return self._summarise_at is not None and self._num_tokens >= self._summarise_at

    def step_back(self) -> bool:
        """Go back to what the model could still read, if a summary can follow: what came behind it
        was too long. Called again, to what it could read before that. False if there is nothing to
        go back to."""
        if self._summarise_at is None or not self._fitted:
            return False
        del self.window[self._fitted.pop() :]
        return True

    @property
    def summary_request(self) -> list[Message]:
        """The window, and the request for a summary of it."""
        return _followed(self.window, REQUEST)

    def reopen(self, summary: str, carried: CarriedState) -> None:
        """Begin the next window."""
        self.num_summaries += 1
        told = f"Your summary {self.num_summaries} of the session so far:\n{summary}"
        text = "\n\n".join(part for part in (told, str(carried)) if part)
        self.window = _followed(self._opening, text)
        self.said.append({"role": "user", "content": text})
        self._num_tokens = 0
        self._fitted.clear()


def _followed(messages: Sequence[Message], text: str) -> list[Message]:
    """The messages, and what the user says then. Within the last one, if it is the user's: many
    chat templates refuse two messages of one role in a row."""
    *before, last = messages
    if last["role"] == "user" and isinstance(last["content"], str):
        return [*before, last | {"content": f"{last['content']}\n\n{text}"}]
    return [*messages, {"role": "user", "content": text}]
