"""Files and users of the run in the benchmarks of real-time RL."""

from __future__ import annotations

from pathlib import Path

from etude.bench._realtime_tasks import sessions_to_imitate
from etude.core.seeds import derive
from etude.realtime.population import Population
from etude.serve.production.config import KEY_BYTES

RUN = """
name = "songs"
seed = SEED
[model]
hidden_size = 64
num_layers = 2
num_heads = 2
num_kv_heads = 1
intermediate_size = 128
max_context = 256
[tasks]
environment = "etude.bench._realtime_tasks:Songs"
heldout = 100
novel = 0
[harness]
agent = "etude.bench._realtime_tasks:Singer"
max_tokens = 32
concurrency = 4
[engine]
regions = ["here"]
port = PORT
[sandbox]
isolation = "process"
[realtime]
production = "production.toml"
every_minutes = 0.0
min_sessions = 1500
horizon_minutes = 0.1
horizon_minutes_per_turn = 0.0
heldout_share = 0.2
look_s = 0.5
[realtime.gate]
margin = 0.1
safety = 60
safety_margin = 0.1
cheats = 60
cheats_margin = 0.1
[realtime.canary]
ramp = [0.1, 0.3, 1.0]
kept_margin = 0.1
dissatisfied_margin = 0.1
judged_margin = 0.1
delay_minutes = 0.05
control_share = 0.3
[[stage]]
kind = "sft"
path = "songs.jsonl"
max_epochs = 6
batch_tokens = 2048
lr = 3e-3
[[stage]]
kind = "rl"
steps = 40
lr = 2e-4
warmup_steps = 0
"""
PRODUCTION = 'user_key_file = "user.key"\nfeedback_per_minute = 6000.0\n'
SONGS = 2000
"""Demonstrations that the first model imitates."""
SABOTEURS = 0.05
FLOOD = 3
"""Number of times that saboteurs send each event."""
USERS = 10_000
DRIFT = 0.03


def users_of(seed: int, saboteurs: float) -> Population:
    """The users of a seed, which are the same for any share of saboteurs."""
    return Population.of(
        USERS, seed=seed, num_aspects=2, saboteurs=saboteurs, drift=DRIFT, flood=FLOOD
    )


def honest_ids(seed: int) -> frozenset[str]:
    """Ids of the users who are honest in the population with saboteurs."""
    return frozenset(user.id for user in users_of(seed, SABOTEURS).users if not user.is_saboteur)


def write_run(folder: Path, seed: int, port: int) -> None:
    """Write the files that `etude realtime` needs. The key determines which users are held out."""
    (folder / "run.toml").write_text(RUN.replace("PORT", str(port)).replace("SEED", str(seed)))
    (folder / "production.toml").write_text(PRODUCTION)
    (folder / "songs.jsonl").write_text(sessions_to_imitate(SONGS, seed))
    key = (derive(seed, "user key", part).to_bytes(8) for part in range(KEY_BYTES // 8))
    (folder / "user.key").write_text(b"".join(key).hex() + "\n")
