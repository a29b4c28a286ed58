"""An agent that is a program of its own: it is started in the sandbox, asks the model at
OPENAI_BASE_URL, and changes files. Any script or coding agent can stand here.

etude run examples/custom_env.toml --set harness.agent=program_agent.py:Program
"""

from __future__ import annotations

from collections.abc import Sequence

from etude.core.types import Task
from etude.harness.program import ProgramAgent

SCRIPT = """
import json, os, sys, urllib.request

task = json.load(sys.stdin)
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"messages": task["messages"]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
open("song.txt", "w").write(answer or "")
print("sang", len(answer or ""), "letters")
"""


class Program(ProgramAgent):
    """What it prints ends the transcript; everything it asks the model is recorded and trained
    on."""

    def command(self, task: Task) -> Sequence[str]:
        return ["python", "-c", SCRIPT]
