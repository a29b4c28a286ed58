"""An agent as a separate program: it is started in the sandbox, asks the model at OPENAI_BASE_URL,
and changes files. Any script or coding agent can take its place.

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
    """The harness for the script. Its output ends the transcript; all its requests to the model are
    recorded and trained on."""

    def command(self, task: Task) -> Sequence[str]:
        return ["python", "-c", SCRIPT]
