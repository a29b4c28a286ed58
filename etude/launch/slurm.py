"""Slurm: a run as batch files, as `etude export slurm` writes them. Pure: the result is text.

One file for each part. A part that others have to find writes its address into a folder that all
nodes share, and those parts restart their program when the address changes. Jobs that are preempted
are queued again, and resume from the store.
"""

from __future__ import annotations

import shlex
from dataclasses import replace

from etude.launch.export import TRAINER_PORT, Export, Part, parts

PLACES = "$ETUDE_PLACES"
"""The folder of addresses."""
FREE_PORT = (
    'port=$(python -c \'import socket; s = socket.socket(); s.bind(("", 0)); '
    "print(s.getsockname()[1])')"
)
"""A free port, because nodes may be shared with other parts and other runs."""


def slurm_files(export: Export) -> dict[str, str]:
    """File name -> text. `submit.sh` submits all the others in their order."""
    shown = replace(
        export,
        gateway="@GATEWAY@",
        relays=dict.fromkeys(export.regions, "@RELAY@"),
        advertise="@OWN@",
        rendezvous="@RENDEZVOUS@",
    )
    made = {f"{part.name}.sbatch": _batch(shown, part) for part in parts(shown, host="0.0.0.0")}
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
    lines += ["set -euo pipefail", 'cd "$SLURM_SUBMIT_DIR"']
    lines += [_credential(name, key) for name, key in part.secrets.items()]
    lines += _addresses(part)
    command = " ".join(_argument(each, part) for each in part.argv)
    lines += _started(part, command)
    if part.name == "controller":
        lines += _end(export)
    return "\n".join(lines) + "\n"


def _addresses(part: Part) -> list[str]:
    """Shell lines that determine a part's address and publish it."""
    match part.kind:
        case "server":
            return [
                FREE_PORT,
                f'echo "http://$(hostname -f):$port" > "{PLACES}/.{part.name}"',
                f'mv "{PLACES}/.{part.name}" "{PLACES}/{part.name}"',
            ]
        case "workers":
            return [FREE_PORT, "own=http://$(hostname -f):$port"]
        case "trainer":
            return [
                'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
                # runs share nodes
                f"rendezvous=$first:$(({TRAINER_PORT} + SLURM_JOB_ID % 1000))",
            ]
        case _:
            return []


def _started(part: Part, command: str) -> list[str]:
    if part.kind == "trainer":
        return [f"srun {command}"]
    told = {"gateway": "gateway"} if part.name == "controller" else {}
    if part.kind == "workers":
        told = {"gateway": "gateway", "relay": f"relay-{part.region}"}
    if not told:
        return [f"exec {command}"]
    found = [f"  {variable}=$(find {name})" for variable, name in told.items()]
    moved = " || ".join(f'[ "$(find {name})" != "${key}" ]' for key, name in told.items())
    return [
        f'find() {{ until [ -s "{PLACES}/$1" ]; do sleep 1; done; cat "{PLACES}/$1"; }}',
        "# An address it was given has moved: restart it.",
        "while :; do",
        *found,
        f"  {command} &",
        "  program=$! moved= code=0",
        "  while kill -0 $program 2> /dev/null; do",
        "    sleep 2",
        f"    if {moved}; then moved=1; kill $program 2> /dev/null || true; fi",
        "  done",
        "  wait $program || code=$?",
        '  [ -n "$moved" ] || break',
        "done",
        "[ $code = 0 ] || exit $code",
    ]


def _end(export: Export) -> list[str]:
    """Shell lines for the end of the run, which cancel its servers: they would go on otherwise."""
    servers = [part.name for part in parts(export, host="") if part.kind in ("server", "workers")]
    return [f"scancel --user=$(id -un) --name={export.name}-{name}" for name in servers]


def _argument(word: str, part: Part) -> str:
    shown = {
        "@GATEWAY@": '"$gateway"',
        "@RELAY@": '"$relay"',
        "@OWN@": '"$own"',
        "@RENDEZVOUS@": '"$rendezvous"',
    }
    if part.port and word == str(part.port):
        return '"$port"'
    return shown.get(word) or shlex.quote(word)


def _credential(name: str, key: str) -> str:
    return f'export {name}="$(cat "$ETUDE_PLACES/{key}")"'


def _submit(export: Export, shown: Export) -> str:
    others = [part.name for part in parts(shown, host="0.0.0.0") if part.name != "prepare"]
    lines = [
        "#!/bin/bash",
        "# Submits the run. ETUDE_PLACES: a folder of yours that all nodes can see; it holds "
        "addresses",
        "# and tokens. Credentials of the store (AWS_ACCESS_KEY_ID, ..) are taken from the "
        "environment.",
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
