"""Comparison with TRL: the same model, prompts, reward, group size, tokens and optimizer steps on
the same two cores.

`make bench-trl` makes the virtual environment that TRL needs and runs this. TRL goes first, then a
whole run of Etude with all its processes. Both take `STEPS` steps of `GROUPS_PER_STEP` groups;
startup and loading do not count.

    rollouts_per_s   answers that were sampled and graded, by the time from the first request to the
                     last step
    reward           mean of the answers in the last quarter of the time that the faster side took,
                     so at equal wall-clock time
    speedup          Etude's rollouts_per_s over TRL's
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.bench._trl_task import GROUP_SIZE, GROUPS_PER_STEP, LR, MAX_TOKENS, PROMPTS, STEPS
from etude.bench.loop import events, execute
from etude.core.errors import EtudeError
from etude.core.events import Event, GroupDone, StepDone
from etude.store.codec import Stamped

PYTHON = Path(".venv-trl/bin/python")

CONFIG = f"""
name = "side"
[model]
path = "PATH"
max_context = 256

[tasks]
environment = "etude.bench._trl_task:Sentences"
train = {len(PROMPTS)}
heldout = 1
novel = 0

[harness]
agent = "etude.bench._trl_task:Writer"
max_tokens = {MAX_TOKENS}

[engine]
regions = ["here"]
dtype = "bfloat16"

[trainer]
compute_dtype = "bfloat16"

[[stage]]
kind = "rl"
steps = {STEPS}
groups_per_step = {GROUPS_PER_STEP}
group_size = {GROUP_SIZE}
max_lag = 2
lr = {LR}
warmup_steps = 0
threads = 2
microbatch_tokens = 2048
"""


@dataclass(frozen=True, slots=True)
class Side:
    seconds: float
    seen: list[tuple[float, int, float]]
    """(time, number of answers, their mean reward) of each batch of answers"""

    @property
    def rollouts_per_s(self) -> float:
        return sum(count for _, count, _ in self.seen) / self.seconds

    def reward(self, until: float) -> float:
        """Mean reward in the last quarter of the time before `until`."""
        late = [(count, mean) for t, count, mean in self.seen if 0.75 * until <= t <= until]
        return sum(count * mean for count, mean in late) / max(1, sum(count for count, _ in late))


def run(model: str = "models/smollm2-135m") -> dict[str, float]:
    if not PYTHON.exists():
        raise EtudeError(
            f"{PYTHON} does not exist: `make bench-trl` installs TRL in its own environment"
        )
    directory = Path(model).absolute()
    other = trl_side(directory)
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as scratch:
        own = etude_side(
            events(execute(Path(scratch) / "side", CONFIG.replace("PATH", str(directory))))
        )
    return compare(own, other)


def compare(own: Side, other: Side) -> dict[str, float]:
    equal = min(own.seconds, other.seconds)
    return {
        "etude.rollouts_per_s": own.rollouts_per_s,
        "trl.rollouts_per_s": other.rollouts_per_s,
        "speedup": own.rollouts_per_s / other.rollouts_per_s,
        "equal_s": equal,
        "etude.reward": own.reward(equal),
        "trl.reward": other.reward(equal),
        "etude.seconds": own.seconds,
        "trl.seconds": other.seconds,
    }


def trl_side(model: Path) -> Side:
    root = Path(__file__).parent.parent.parent
    argv = [str(PYTHON), "-m", "etude.bench._trl_trainer", str(model)]
    # The package's directory, so that the other Python finds the task.
    own = {"PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(argv, env=os.environ | own, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EtudeError(f"TRL ended with code {done.returncode}: {done.stderr[-2000:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    return Side(told["seconds"], [tuple(entry) for entry in told["seen"]])


def etude_side(stamped: Sequence[Stamped[Event]]) -> Side:
    groups = [(e.t, e.record) for e in stamped if isinstance(e.record, GroupDone)]
    start = min(t - group.seconds for t, group in groups)
    end = max(e.t for e in stamped if isinstance(e.record, StepDone))
    seen = [
        (t - start, len(group.rewards), sum(group.rewards) / len(group.rewards))
        for t, group in groups
        if t <= end and group.rewards
    ]
    return Side(end - start, seen)
