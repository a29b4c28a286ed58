"""Tools that touch no file: the to-do list, questions to the user, and submit."""

from __future__ import annotations

import re

from etude.harness.code.tool import Tool, string

STATES = ("open", "doing", "done")
_MARKS = {"open": "[ ]", "doing": "[>]", "done": "[x]"}


class Todo(Tool):
    description = (
        "Keep a list of what is to do. Give the whole list each time, with the state of each item; "
        "finish or remove every item before you submit."
    )
    parameters = {
        "items": {
            "type": "array",
            "description": "The list as it is from now on.",
            "items": {
                "type": "object",
                "properties": {
                    "text": string("What is to do."),
                    "state": {"type": "string", "enum": list(STATES)},
                },
                "required": ["text", "state"],
            },
        }
    }
    required = ("items",)

    async def call(self, items: list[dict[str, str]]) -> str:
        lines = [f"{_MARKS[item['state']]} {item['text']}" for item in items]
        self.workspace.open_todos = [item["text"] for item in items if item["state"] != "done"]
        unfinished = len(self.workspace.open_todos)
        return "\n".join([*lines, f"{unfinished} of {len(items)} not done"])


class AskUser(Tool):
    description = "Ask the user, where the task leaves something open that you cannot find out."
    parameters = {"question": string("One question.")}
    required = ("question",)

    async def call(self, question: str) -> str:
        for pattern, reply in self.config.user_replies.items():
            if re.search(pattern, question, re.IGNORECASE):
                return reply
        return self.config.default_user_reply


class Submit(Tool):
    description = "Finish: the working copy is graded as it is now."

    async def call(self) -> str:
        return "ok"
