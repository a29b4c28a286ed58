"""Slurm: a run as batch files, as `etude export slurm` writes them. Pure: what is exported is text.

One file a part. A part that others have to find writes its address into a folder that all nodes
share; jobs that are preempted are queued again, and go on from the store.
"""

from __future__ import annotations

import shlex
from dataclasses import replace

from etude.launch.export import (
    GATEWAY_PORT,
    RELAY_PORT,
    TRAINER_PORT,
    WORKER_PORT,
    Export,
    Part,
    parts,
)

PLACES = "$ETUDE_PLACES"
"""The folder of addresses."""


def slurm_files(export: Export) -> dict[str, str]:
    """File name -> text. `submit.sh` submits all the others in their order."""
    shown = replace(
        export,
        gateway="@GATEWAY@",
        relays=dict.fromkeys(export.regions, "@RELAY@"),
        advertise="@OWN@",
        rendezvous="@RENDEZVOUS@",
    )
    made = {f"{part.name}.sbatch": _batch(export, part) for part in parts(shown, host="0.0.0.0")}
    return {"run.toml": export.text, **made, "submit.sh": _submit(export, shown)}


def _batch(export: Export, part: Part) -> str:
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={export.name}-{part.name}",
        f"#SBATCH --output={part.name}-%j.log",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
    ]
    if part.kind == "trainer":
        lines += [f"#SBATCH --nodes={part.replicas}", "#SBATCH --ntasks-per-node=1"]
    elif part.kind == "workers":
        lines.append(f"#SBATCH --array=0-{part.replicas - 1}")
    if part.gpus:
        lines.append(f"#SBATCH --gres=gpu:{part.gpus}")
    if part.region:
        lines.append(f"#SBATCH --constraint={part.region}")
    lines += ["set -euo pipefail", 'cd "$SLURM_SUBMIT_DIR"', *_addresses(part)]
    lines += [_credential(name, key) for name, key in part.secrets.items()]
    command = " ".join(_argument(each) for each in part.argv)
    lines.append(f"srun {command}" if part.kind == "trainer" else f"exec {command}")
    return "\n".join(lines) + "\n"


def _addresses(part: Part) -> list[str]:
    """What the part waits for, and what it tells."""
    wait = 'find() { until [ -s "$ETUDE_PLACES/$1" ]; do sleep 1; done; cat "$ETUDE_PLACES/$1"; }'
    tell = 'tell() { echo "http://$(hostname -f):$2" > "$ETUDE_PLACES/$1"; }'
    match part.kind:
        case "server":
            port = GATEWAY_PORT if part.name == "gateway" else RELAY_PORT
            return [tell, f"tell {part.name} {port}"]
        case "workers":
            # several may share a node
            return [
                wait,
                f"port=$(({WORKER_PORT} + SLURM_ARRAY_TASK_ID))",
                "gateway=$(find gateway)",
                f"relay=$(find relay-{part.region})",
                "own=http://$(hostname -f):$port",
            ]
        case "trainer":
            return [
                'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
                f"rendezvous=$first:{TRAINER_PORT}",
            ]
        case _:
            return [wait, "gateway=$(find gateway)"] if part.name == "controller" else []


def _argument(word: str) -> str:
    shown = {
        "@GATEWAY@": '"$gateway"',
        "@RELAY@": '"$relay"',
        "@OWN@": '"$own"',
        "@RENDEZVOUS@": '"$rendezvous"',
        str(WORKER_PORT): '"$port"',
    }
    return shown.get(word) or shlex.quote(word)


def _credential(name: str, key: str) -> str:
    return f'export {name}="$(cat "$ETUDE_PLACES/{key}")"'


def _submit(export: Export, shown: Export) -> str:
    others = [part.name for part in parts(shown, host="0.0.0.0") if part.name != "prepare"]
    lines = [
        "#!/bin/bash",
        "# Submits the run. ETUDE_PLACES: a folder of yours that all nodes see; it holds addresses",
        "# and tokens. What the store needs (AWS_ACCESS_KEY_ID, ..) is taken from the environment.",
        "set -euo pipefail",
        'cd "$(dirname "$0")"',
        'export ETUDE_PLACES="${ETUDE_PLACES:-$PWD/places}"',
        'mkdir -p -m 700 "$ETUDE_PLACES"',
        'rm -f "$ETUDE_PLACES"/gateway "$ETUDE_PLACES"/relay-*',
        'if [ ! -s "$ETUDE_PLACES/secret" ]; then',
        '  (umask 077; openssl rand -hex 32 > "$ETUDE_PLACES/secret")',
        "fi",
        'export ETUDE_SECRET="$(cat "$ETUDE_PLACES/secret")"',
        'etude token worker --subject workers > "$ETUDE_PLACES/worker-token"',
        'etude token admin --subject controller > "$ETUDE_PLACES/admin-token"',
        "unset ETUDE_SECRET",
        "prepared=$(sbatch --parsable prepare.sbatch)",
        *(f'sbatch --dependency="afterok:$prepared" {name}.sbatch' for name in others),
    ]
    return "\n".join(lines) + "\n"
