"""`etude export k8s | slurm`: a run as manifests or batch files for a cluster's own scheduler."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from etude.commands.run_file import relative_paths
from etude.core.config import RunConfig
from etude.core.errors import EtudeError
from etude.launch import kubernetes, slurm
from etude.launch.export import RELAY_PORT, TRAINER_PORT, WORKER_PORT, Export
from etude.store.objects import is_bucket

SECRETS = """before the first run on this cluster:
  export ETUDE_SECRET=$(openssl rand -hex 32)
  kubectl create secret generic etude --from-literal=secret=$ETUDE_SECRET \\
    --from-literal=worker-token=$(etude token worker --subject workers) \\
    --from-literal=admin-token=$(etude token admin --subject controller)
  kubectl create secret generic etude-store --from-env-file=FILE   # AWS_ACCESS_KEY_ID=.. and so on
then: kubectl apply -f """


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    target: Path
    workers: int
    worker_gpus: int
    trainer_nodes: int
    trainer_min_nodes: int | None
    """None: all nodes."""
    trainer_gpus: int
    image: str
    folder: Path | None
    """The folder of the run's file as the cluster's machines see it; None if it is the same as
    here."""


def export(config: RunConfig, file: Path, kind: str, options: Options, console: Console) -> None:
    """Write the files into a new directory."""
    if config.store is None or (kind == "k8s" and not is_bucket(config.store)):
        folder_too = (
            "" if kind == "k8s" else ", or file:/PATH on a filesystem that all nodes share,"
        )
        raise EtudeError(
            "a run on several machines needs a store that all of them can reach: set store = "
            f'"s3://BUCKET/RUN" (or gs://, az://){folder_too} in its file'
        )
    _check_devices(config, options)
    folder = options.folder
    if folder is None and kind == "slurm":
        folder = file.absolute().parent
    if folder is None and (found := next(relative_paths(config), None)):
        raise EtudeError(
            f"{found[0]} = {found[1]!r} is relative to the folder of {file}, which pods cannot "
            "see: copy the folder into the image and pass its path there with --folder /PATH"
        )
    made = Export(
        name=config.name,
        text=file.read_text(),
        folder=str(folder or ""),
        store=config.store,
        regions=config.engine.regions,
        workers=options.workers,
        worker_gpus=options.worker_gpus,
        evaluates=config.eval.every_steps > 0,
        asks_for_pods=config.sandbox.isolation == "kubernetes" and not config.sandbox.hosts,
        trainer_nodes=options.trainer_nodes,
        trainer_min_nodes=options.trainer_min_nodes or options.trainer_nodes,
        trainer_gpus=options.trainer_gpus,
        image=options.image,
    )
    files = _kubernetes(made) if kind == "k8s" else _slurm(made, options.target)
    try:
        options.target.mkdir(parents=True)
    except OSError as e:
        raise EtudeError(
            f"cannot create {options.target} ({e.strerror}): choose a directory that does not exist"
        ) from e
    for name, content in files.items():
        (options.target / name).write_text(content)
    target = shlex.quote(str(options.target))
    told = f"{SECRETS}{target}" if kind == "k8s" else f"bash {target}/submit.sh"
    console.print(
        f"{len(files)} files in {options.target}\n{told}", highlight=False, markup=False,
        soft_wrap=True,
    )  # fmt: skip


def _check_devices(config: RunConfig, options: Options) -> None:
    for key, device, option, gpus in (
        ("engine.device", config.engine.device, "--worker-gpus", options.worker_gpus),
        ("trainer.device", config.trainer.device, "--trainer-gpus", options.trainer_gpus),
    ):
        if device == "cpu" and gpus:
            raise EtudeError(
                f'{key} = "cpu" would leave {option} {gpus} unused: set {key} = "cuda" in the '
                f"run's file, or pass {option} 0"
            )
        if device == "cuda" and not gpus:
            raise EtudeError(f'{key} = "cuda" needs GPUs: pass {option} 1 or more')


def _kubernetes(made: Export) -> dict[str, str]:
    names = kubernetes.Names(made.name)
    trainer = names.of("trainer")
    return kubernetes.kubernetes_files(
        replace(
            made,
            gateway=kubernetes.gateway_url(made),
            relays={
                region: f"http://{names.of('relay', region)}:{RELAY_PORT}"
                for region in made.regions
            },
            advertise=f"http://$(POD_IP):{WORKER_PORT}",
            rendezvous=f"{trainer}-0.{trainer}:{TRAINER_PORT}",
        )
    )


def _slurm(made: Export, target: Path) -> dict[str, str]:
    return slurm.slurm_files(replace(made, config_path=str(target.absolute() / "run.toml")))
