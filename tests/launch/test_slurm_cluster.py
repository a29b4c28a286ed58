"""The batch files of `etude export slurm`, run by a real Slurm with two nodes on this machine; jobs
are preempted in the middle (`make test-slurm`, as root, after `apt install slurm-wlm munge`)."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

from etude.cli import main
from etude.launch.launcher import free_ports
from etude.run.audit import audit
from etude.run.evaluate import reports
from etude.store.runs import Run
from tests.e2e.conftest import isolation, policy  # noqa: F401
from tests.e2e.runs import TINY

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1800)]

DEMO = files("etude.commands") / "demo.toml"

# Both nodes are this machine, under two of its names. `config_overrides`: Slurm accepts the stated
# number of processors.
CONF = """
ClusterName=etude
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=20
UnkillableStepTimeout=300
MpiDefault=none
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 Features=east
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 Features=west
PartitionName=normal Nodes=ALL Default=YES PriorityTier=1 State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
"""


def said(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if shutil.which("slurmctld") is None or shutil.which("munged") is None or os.getuid():
        pytest.skip("needs root, and slurmctld, slurmd and munged: apt install slurm-wlm munge")
    folder, host = tmp_path / "slurm", socket.gethostname()
    (folder / "state").mkdir(parents=True)
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(host=host, ports=free_ports(3), folder=folder))
    monkeypatch.setenv("SLURM_CONF", str(conf))
    files = {"socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log"}
    files |= {"key-file": "munge.key", "seed-file": "munge.seed"}
    paths = [f"--{name}={folder / file}" for name, file in files.items()]
    daemons = [
        ["munged", "--force", "--foreground", *paths],
        ["slurmctld", "-D", "-f", str(conf)],
        *(["slurmd", "-D", "-f", str(conf), "-N", node] for node in (host, "localhost")),
    ]
    started = []
    for argv in daemons:
        log = (folder / f"{argv[0]}.out").open("ab")
        started.append(subprocess.Popen(argv, stdout=log, stderr=log))
        time.sleep(1)
    yield
    subprocess.run(["scancel", "--user=root"], check=False)
    while said("squeue", "--noheader"):
        time.sleep(0.5)
    for process in reversed(started):
        process.terminate()
        process.wait()


def jobs() -> dict[str, str]:
    """Name -> state and number of restarts."""
    lines = said("scontrol", "--oneliner", "show", "jobs").splitlines()
    fields = [dict(each.partition("=")[::2] for each in line.split()) for line in lines]
    return {
        each["JobName"]: f"{each['JobState']} {each['Restarts']}"
        for each in fields
        if "JobName" in each
    }


def test_a_run_is_preempted_and_goes_on(
    slurm: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    policy: Path,  # noqa: F811
    isolation: str,  # noqa: F811
) -> None:
    added = f'[model]\npath = "{policy}"\n[sandbox]\nisolation = "{isolation}"\n'
    text = TINY.read_text().replace("steps = 4", "steps = 10").replace("[tasks]", added + "[tasks]")
    run_and_preempt(text, 2, tmp_path, monkeypatch)


@pytest.mark.skipif("ETUDE_CLUSTER_DEMO" not in os.environ, reason="half an hour")
@pytest.mark.timeout(3600)
def test_the_demo_learns_on_a_cluster(
    slurm: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    isolation: str,  # noqa: F811
) -> None:
    """The jobs of the gateway's node are preempted after a third of its groups."""
    added = f'[sandbox]\nisolation = "{isolation}"\n'
    text = DEMO.read_text().replace("[tasks]", added + "[tasks]")
    solved = run_and_preempt(text, 160, tmp_path, monkeypatch)
    print(solved)
    assert solved["rl"] > solved["sft"]


def run_and_preempt(
    text: str, groups: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, float]:
    """Run to the end, with an urgent job on the gateway's node after a number of groups. Returns
    the solve rate after each stage."""
    name = tomllib.loads(text)["name"]
    programs = tmp_path / "bin"
    programs.mkdir()
    for program, module in (("torchrun", "torch.distributed.run"), ("etude", "etude")):
        (programs / program).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        (programs / program).chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    monkeypatch.setenv("PATH", path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    store = f"file:{tmp_path / 'run'}"
    (tmp_path / "run.toml").write_text(f'store = "{store}"\n{text}')
    nodes = ("--trainer-nodes", "2", "--trainer-gpus", "0", "--worker-gpus", "0")
    target = tmp_path / "files"
    assert main(["export", "slurm", str(tmp_path / "run.toml"), str(target), *nodes]) == 0
    subprocess.run(["bash", str(target / "submit.sh")], check=True)

    def wait_for(count: int) -> None:
        made = tmp_path / "run" / "groups"
        while not made.exists() or len(list(made.iterdir())) < count:
            assert "FAILED" not in str(jobs()), jobs()
            time.sleep(0.5)

    wait_for(groups)
    where = said("squeue", "--noheader", "--format=%N", f"--name={name}-gateway").strip()
    urgent = ("--partition=urgent", f"--nodelist={where}", "--exclusive", "--output=/dev/null")
    said("sbatch", *urgent, "--job-name=urgent", "--wrap=sleep 5")
    while not jobs()[f"{name}-gateway"].endswith(" 1"):
        time.sleep(0.5)
    print(f"preempted: {jobs()}")
    while not jobs()[f"{name}-controller"].startswith("COMPLETED"):
        assert "FAILED" not in str(jobs()), jobs()
        time.sleep(1)
    run = Run.open(store, create=False)
    audited = audit(run)
    assert audited.finished and audited.violations == [] and audited.in_flight == 0
    while "RUNNING" in str(jobs()):  # the controller has cancelled them
        time.sleep(0.5)
    print(f"finished: {jobs()}")
    return {
        each.stage: each.solved / each.total for each in reports(run) if each.split == "heldout"
    }
