"""Sessions that outlive the context window: the model summarises what happened, and continues from
the summary.

At a given number of tokens the agent asks for a summary, in the same context, whose keys and values
the engine still has; or the model calls `summarise` on its own. The next window then opens with the
task, the summary, the plan, the open to-dos and the number of summaries. For the recorder it is a
new segment of the same session: the summary is sampled, recorded, and trained with the final reward
like every other turn.
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
"""The tool's schema in the format of the chat completions API."""


@dataclass(frozen=True, slots=True)
class CarriedState:
    """State of a session that the harness tracks itself, so that no summary can lose it."""

    plan: str = ""
    todos: tuple[str, ...] = ()
    """The open to-dos."""

    def __str__(self) -> str:
        parts = [f"plan:\n{self.plan}"] if self.plan else []
        if self.todos:
            parts.append("\n".join(["open to-dos:", *(f"- {todo}" for todo in self.todos)]))
        return "\n\n".join(parts)


class Conversation:
    """The messages of a session: all of them, and the window that the model sees."""

    def __init__(self, opening: Sequence[Message], summarise_at: int | None = None) -> None:
        """`summarise_at`: number of tokens at which a window is full; None for a single window."""
        self.said: list[Message] = list(opening)
        self.window: list[Message] = list(opening)
        self.num_summaries = 0
        self._opening = tuple(opening)
        self._summarise_at = summarise_at
        self._num_tokens = 0
        self._fitted: list[int] = []  # lengths of the window at which the model could read it

    def add(self, *messages: Message) -> None:
        self.said += messages
        self.window += messages

    def answered(self, answer: Message, num_tokens: int) -> None:
        """Add an answer of the model to the window. `num_tokens`: of both together."""
        self._fitted.append(len(self.window))
        self._num_tokens = num_tokens
        self.add(answer)

    @property
    def is_full(self) -> bool:
        """True if a summary is due."""
        return self._summarise_at is not None and self._num_tokens >= self._summarise_at

    def step_back(self) -> bool:
        """Go back to the last window that the model could read, since what was added later was too
        long; a summary can then follow. Another call goes back one step further. Returns False if
        there is nothing to go back to, or no summaries are made."""
        if self._summarise_at is None or not self._fitted:
            return False
        del self.window[self._fitted.pop() :]
        return True

    @property
    def summary_request(self) -> list[Message]:
        """The window, followed by the request for its summary."""
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
    """The messages, followed by a text of the user. If the last message is the user's, the text is
    appended to it: many chat templates reject two messages of one role in a row."""
    *before, last = messages
    if last["role"] == "user" and isinstance(last["content"], str):
        return [*before, last | {"content": f"{last['content']}\n\n{text}"}]
    return [*messages, {"role": "user", "content": text}]
