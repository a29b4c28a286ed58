"""A run as manifests and batch files. For Kubernetes' own opinion of them: `make test-k8s`."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from etude.cli import main
from etude.commands.run_file import read_run_file
from etude.core.config import parse
from etude.launch import kubernetes
from etude.launch.kubernetes import Names, to_yaml
from etude.launch.start import start
from etude.store.runs import Run

TOML = """
name = "My_run.1"
store = "s3://bucket/runs/mine"
[engine]
device = "cuda"
regions = ["east", "west"]
[trainer]
device = "cuda"
[[stage]]
kind = "rl"
steps = 3
"""
FIELDS = {
    "apiVersion", "backoffLimit", "clusterIP", "command", "configMap", "containerPort",
    "containers", "data", "env", "envFrom", "fieldPath", "fieldRef", "image", "key", "kind",
    "labels", "limits", "matchLabels", "metadata", "mountPath", "name", "nodeSelector",
    "podManagementPolicy", "port", "ports", "publishNotReadyAddresses", "readinessProbe",
    "replicas", "resources", "restartPolicy", "secretKeyRef", "secretRef", "selector",
    "serviceName", "spec", "targetPort", "tcpSocket", "template", "valueFrom", "volumeMounts",
    "volumes",
    # names within the fields above
    "app.kubernetes.io/name", "etude/part", "nvidia.com/gpu", "run.toml",
    "topology.kubernetes.io/region",
}  # fmt: skip
"""All fields of ours that Kubernetes knows: it drops or refuses any others."""
SECRETS = {
    "gateway": {"ETUDE_SECRET": "secret"},
    **{f"relay-{region}": {"ETUDE_SECRET": "secret"} for region in ("east", "west")},
    **{f"worker-{region}": {"ETUDE_TOKEN": "worker-token"} for region in ("east", "west")},
    "controller": {"ETUDE_TOKEN": "admin-token"},
}
"""The secrets of each part; other parts have none."""
ONE_PLACE = ("prepare", "gateway", "trainer", "evaluator", "controller")
"""Parts that belong to no region."""


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(TOML)
    return tmp_path / "run.toml"


def exported(kind: str, toml: Path, *more: str) -> dict[str, str]:
    target = toml.parent / "out"
    assert main(["export", kind, str(toml), str(target), *more]) == 0
    return {path.name: path.read_text() for path in sorted(target.iterdir())}


def test_kubernetes(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = exported("k8s", toml, "--workers", "5", "--trainer-nodes", "2", "--trainer-gpus", "8")
    assert "kubectl create secret" in capsys.readouterr().out
    assert list(files) == [
        *("00-run.yaml", "01-prepare.yaml", "02-gateway.yaml"),
        *("03-relay-east.yaml", "04-worker-east.yaml", "05-relay-west.yaml"),
        *("06-worker-west.yaml", "07-trainer.yaml", "08-controller.yaml"),
    ]
    kinds = {name: re.findall(r'^kind: "(\w+)"$', text, re.M) for name, text in files.items()}
    assert kinds["07-trainer.yaml"] == ["Service", "StatefulSet"]
    assert kinds["04-worker-east.yaml"] == ["Deployment"] and kinds["01-prepare.yaml"] == ["Job"]
    worker = files["04-worker-east.yaml"]
    for text in (
        "replicas: 5",
        '- "http://my-run-1-gateway:8100"',
        '- "http://my-run-1-relay-east:8200"',
        '- "http://$(POD_IP):8101"',
        'topology.kubernetes.io/region: "east"',
        "nvidia.com/gpu: 1",
    ):
        assert text in worker
    assert "--folder" not in files["01-prepare.yaml"]
    assert "my-run-1-trainer-0.my-run-1-trainer:29400" in files["07-trainer.yaml"]
    assert all("s3://bucket/runs/mine" in text for text in files.values())


def fields(value: object) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(fields, value.values()))
    return set[str]().union(*map(fields, value)) if isinstance(value, list) else set()


@pytest.fixture
def manifests(toml: Path, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], Any]:
    """(kind, name) -> the manifest."""
    monkeypatch.setattr(kubernetes, "to_yaml", json.dumps)
    texts = exported("k8s", toml, "--trainer-nodes", "2").values()
    found = [json.loads(each) for text in texts for each in text.split("---\n")]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def test_kubernetes_knows_all_fields(manifests: dict[tuple[str, str], Any]) -> None:
    assert fields(list(manifests.values())) == FIELDS


def test_pods_are_those_that_others_look_for(manifests: dict[tuple[str, str], Any]) -> None:
    pods = {
        name: manifest["spec"]["template"]
        for (_, name), manifest in manifests.items()
        if "template" in manifest.get("spec", {})
    }
    assert len(pods) == 8
    labels = [pod["metadata"]["labels"] for pod in pods.values()]
    assert all(labels.count(each) == 1 for each in labels)
    for (kind, name), manifest in manifests.items():
        if kind in ("Deployment", "StatefulSet"):
            chosen = manifest["spec"]["selector"]["matchLabels"]
            assert chosen == pods[name]["metadata"]["labels"]
        elif kind == "Service":
            [port] = manifest["spec"]["ports"]
            [container] = pods[name]["spec"]["containers"]
            assert manifest["spec"]["selector"] == pods[name]["metadata"]["labels"]
            assert container["ports"] == [{"containerPort": port["targetPort"]}]
            assert port["port"] == port["targetPort"]
    for name, pod in pods.items():
        part = name.removeprefix("my-run-1-")
        [container] = pod["spec"]["containers"]
        held = {
            each["name"]: each["valueFrom"]["secretKeyRef"]["key"]
            for each in container["env"]
            if "secretKeyRef" in each["valueFrom"]
        }
        assert held == SECRETS.get(part, {}), part
        region = pod["spec"].get("nodeSelector", {}).get("topology.kubernetes.io/region", "")
        assert region == ("" if part in ONE_PLACE else part.partition("-")[2])
    trainer = manifests["StatefulSet", "my-run-1-trainer"]["spec"]
    assert ("Service", trainer["serviceName"]) in manifests
    for pod in pods.values():
        [container] = pod["spec"]["containers"]
        for host in re.findall(
            r"(?:http://|[.])(my-run-1-[a-z-]+):", " ".join(container["command"])
        ):
            assert ("Service", host) in manifests


def test_slurm(toml: Path) -> None:
    files = exported("slurm", toml, "--workers", "3", "--trainer-nodes", "2", "--trainer-gpus", "4")
    for name, text in files.items():
        if name != "run.toml":
            subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert "#SBATCH --array=0-2" in files["worker-east.sbatch"]
    assert "#SBATCH --nodes=2" in files["trainer.sbatch"]
    assert "torchrun --nnodes 2 --nproc-per-node 4" in files["trainer.sbatch"]
    assert '--gateway "$gateway" --relay "$relay" --advertise "$own"' in files["worker-west.sbatch"]
    for name, known in (("worker-east", ["gateway", "relay-east"]), ("controller", ["gateway"])):
        text = files[f"{name}.sbatch"]
        assert all(f"=$(find {each})\n" in text for each in known), "again when one has moved"
    cancelled = re.findall(r"scancel .*--name=My_run.1-(\S+)", files["controller.sbatch"])
    assert cancelled == ["gateway", "relay-east", "worker-east", "relay-west", "worker-west"]
    assert all("#SBATCH --requeue" in text for name, text in files.items() if "sbatch" in name[-7:])


FAKE_PYTHON = """#!/bin/bash
if [ "$1" = -c ]; then exec {python} "$@"; fi
printf "%s " python "$@" >> {said}; echo >> {said}
if [ "$3" = etude.run.controller ] && [ ! -e {moved} ]; then
  touch {moved}; echo http://elsewhere:1 > "$ETUDE_PLACES/gateway"; exec {sleep} 600
fi
"""
"""Finds free ports. While the first controller runs, the gateway moves."""


def test_slurm_files_run(toml: Path) -> None:
    """Run the files as Slurm would: every part waits for the parts that it needs, and knows their
    addresses when it starts."""
    toml.write_text(TOML + "[eval]\nevery_steps = 5\n")
    files = exported("slurm", toml)
    programs, said = toml.parent / "bin", toml.parent / "said"
    programs.mkdir()
    made = dict.fromkeys(
        ("sbatch", "etude", "openssl", "scontrol", "srun", "scancel", "hostname"),
        f'#!/bin/bash\nprintf "%s " "${{0##*/}}" "$@" >> {said}; echo >> {said}\n'
        'echo "${0##*/}-says"\n',
    )
    sleep = shutil.which("sleep")
    made["sleep"] = f"#!/bin/bash\nexec {sleep} 0.01\n"
    made["python"] = FAKE_PYTHON.format(
        python=sys.executable, said=said, sleep=sleep, moved=toml.parent / "moved"
    )
    for name, text in made.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o700)
    env = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_ARRAY_TASK_ID": "1",
        "SLURM_JOB_ID": "20042",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_SUBMIT_DIR": str(toml.parent / "out"),
    }
    subprocess.run(["bash", toml.parent / "out" / "submit.sh"], env=env, check=True)
    submitted = [line.split() for line in said.read_text().splitlines() if "sbatch" in line]
    assert [words[-1] for words in submitted] == [
        *("prepare.sbatch", "gateway.sbatch", "relay-east.sbatch", "worker-east.sbatch"),
        *("relay-west.sbatch", "worker-west.sbatch", "trainer.sbatch", "evaluator.sbatch"),
        "controller.sbatch",
    ]
    assert submitted[0] == ["sbatch", "--parsable", "prepare.sbatch"]
    assert all("--dependency=afterok:sbatch-says" in words for words in submitted[1:])

    for *_, file in submitted:
        part = file.removesuffix(".sbatch")
        held = dict(re.findall(r"^export (\w+)=.*/([\w-]+)\"", files[file], re.M))
        assert held == SECRETS.get(part, {}), part
        regions = re.findall(r"^#SBATCH --constraint=(\w+)$", files[file], re.M)
        assert regions == ([] if part in ONE_PLACE else [part.partition("-")[2]])

    env["ETUDE_PLACES"] = str(toml.parent / "out" / "places")
    started: dict[str, list[list[str]]] = {}
    for *_, file in submitted:
        said.unlink()
        if file == "controller.sbatch":
            gateway = (Path(env["ETUDE_PLACES"]) / "gateway").read_text().strip()
        subprocess.run(["bash", "-c", files[file]], env=env, check=True, timeout=600)
        started[file.removesuffix(".sbatch")] = list(map(str.split, said.read_text().splitlines()))
    relay = (Path(env["ETUDE_PLACES"]) / "relay-west").read_text().strip()

    def given(name: str, option: str) -> list[str]:
        return [words[words.index(option) + 1] for words in started[name] if option in words]

    assert gateway == f"http://hostname-says:{given('gateway', '--port')[0]}"
    assert relay == f"http://hostname-says:{given('relay-west', '--port')[0]}"
    assert given("worker-west", "--gateway") == [gateway]
    assert given("worker-west", "--relay") == [relay]
    [port] = given("worker-west", "--port")
    assert given("worker-west", "--advertise") == [f"http://hostname-says:{port}"]
    assert given("trainer", "--rdzv-endpoint") == ["scontrol-says:29442"]
    assert given("controller", "--gateway") == [gateway, "http://elsewhere:1"]
    ends = [words[0] for words in started["controller"]]
    assert ends == ["python", "python", *["scancel"] * 5], "only once the run is over"


@pytest.mark.parametrize(("fewest", "nodes"), [((), "4"), (("--trainer-min-nodes", "2"), "2:4")])
def test_a_trainer_may_go_on_with_fewer_nodes(
    toml: Path, fewest: tuple[str, ...], nodes: str
) -> None:
    text = exported("slurm", toml, "--trainer-nodes", "4", *fewest)["trainer.sbatch"]
    assert re.search(f"^srun env \\S+ torchrun --nnodes {nodes} --nproc-per-node 1 ", text, re.M)


@pytest.mark.parametrize(
    ("kind", "name", "gpu"),
    [("k8s", "08-evaluator.yaml", "nvidia.com/gpu: 1"), ("slurm", "evaluator.sbatch", "gpu:1")],
)
def test_evaluations_on_the_way_have_a_part_of_their_own(
    toml: Path, kind: str, name: str, gpu: str
) -> None:
    toml.write_text(TOML + "[eval]\nevery_steps = 5\n")
    text = exported(kind, toml)[name]
    assert "etude.run.evaluator" in text and gpu in text


@pytest.mark.parametrize("length", [20, 48, 58, 200])
def test_no_two_objects_of_a_long_name_are_one(length: int) -> None:
    parts = ["gateway", "relay-us", "relay-eu", *(f"relay-{'x' * 60}{n}" for n in range(2))]
    parts.append(f"relay-{'x' * 19}-{'y' * 60}")  # is cut off after a hyphen
    names = [Names("r" * length).of(part) for part in parts]
    names += [Names("r" * length + "s").of(part) for part in parts]
    names += [Names("7" * length).of(part) for part in parts]
    assert len(set(names)) == 3 * len(parts)
    assert all(re.fullmatch("[a-z]([a-z0-9-]{0,50}[a-z0-9])?", name) for name in names)
    assert names[0].endswith("-gateway") and names[1].endswith("-relay-us")


def test_workers_find_the_relay_of_a_run_with_a_long_name(toml: Path) -> None:
    toml.write_text(TOML.replace("My_run.1", "r" * 58))
    files = exported("k8s", toml)
    names = re.findall(r'^  name: "(\S+-relay-\w+)"$', files["03-relay-east.yaml"], re.M)
    assert set(names) and all(
        f'"http://{name}:8200"' in files["04-worker-east.yaml"] for name in names
    )


@pytest.mark.parametrize(
    ("kind", "told"), [("k8s", "kubectl apply -f '{}'\n"), ("slurm", "bash '{}'/submit.sh\n")]
)
def test_the_command_that_starts_it_can_be_copied(
    kind: str, told: str, toml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = toml.parent / "two words"
    assert main(["export", kind, str(toml), str(target)]) == 0
    assert told.format(target) in capsys.readouterr().out


def test_no_secret_is_written(toml: Path) -> None:
    for text in exported("k8s", toml).values():
        assert 'kind: "Secret"' not in text


@pytest.mark.parametrize("store", ["", 'store = "file:/data/x"'])
def test_a_store_that_others_do_not_reach_is_refused(
    toml: Path, capsys: pytest.CaptureFixture[str], store: str
) -> None:
    toml.write_text(TOML.replace('store = "s3://bucket/runs/mine"', store))
    assert main(["export", "k8s", str(toml), str(toml.parent / "out")]) == 2
    said = capsys.readouterr().err
    assert "a store that all of them can reach" in said and "file:" not in said


def test_a_folder_that_all_nodes_see_is_offered_for_slurm(
    toml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml.write_text(TOML.replace('store = "s3://bucket/runs/mine"', ""))
    assert main(["export", "slurm", str(toml), str(toml.parent / "out")]) == 2
    assert "file:/PATH" in capsys.readouterr().err


def test_yaml_is_what_it_was() -> None:
    yaml = pytest.importorskip("yaml")
    data = {
        "a": [{"b": 1, "c": ["x", {"d": "on: off # no\n---\n"}]}, "y", [], {}],
        "e": {"f": None, "g": True, "h": {}},
        "i": 'quote " and ü, 🚀 and \\ud83d\\ude80, \\🚀',
    }
    assert yaml.safe_load(to_yaml(data)) == data
    assert not re.search(r"(?<!\\)\\u[dD][89a-fA-F]", to_yaml("🚀")), "libyaml refuses halves"


def test_a_run_is_put_into_its_store_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, ...]] = []

    def note(argv: tuple[str, ...], check: bool) -> subprocess.CompletedProcess[str]:
        started.append(argv)
        return subprocess.CompletedProcess(argv, 0)

    monkeypatch.setattr("etude.launch.start.subprocess.run", note)
    (tmp_path / "run.toml").write_text(TOML)
    store = f"file:{tmp_path / 'store'}"
    assert start(tmp_path / "run.toml", store) == 0
    assert Run.open(store).config() == parse(TOML).located(tmp_path)
    assert len(started) == 1 and "etude.trainer.prepare" in started[0]


def test_relative_paths_start_where_they_did(
    toml: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    toml.write_text(f"{TOML}[tasks]\nenvironment = 'tasks.py:Mine'\n")
    assert main(["export", "k8s", str(toml), str(toml.parent / "out")]) == 2
    assert "tasks.environment = 'tasks.py:Mine'" in capsys.readouterr().err
    prepare = exported("slurm", toml)["prepare.sbatch"]
    argv = shlex.split(prepare.splitlines()[-1])
    assert argv[argv.index("--folder") + 1] == str(toml.parent)

    monkeypatch.setattr("etude.launch.start.is_prepared", lambda run: True)
    store = f"file:{toml.parent / 'store'}"
    assert start(toml.parent / "out" / "run.toml", store, toml.parent) == 0
    assert Run.open(store).config() == read_run_file(toml)


@pytest.mark.parametrize(
    ("device", "gpus", "said"),
    [("cpu", "1", 'engine.device = "cpu" would leave'), ("cuda", "0", "pass --worker-gpus 1")],
)
def test_gpus_are_those_of_the_devices(
    toml: Path, capsys: pytest.CaptureFixture[str], device: str, gpus: str, said: str
) -> None:
    toml.write_text(TOML.replace('device = "cuda"', f'device = "{device}"', 1))
    target = toml.parent / "out"
    assert main(["export", "slurm", str(toml), str(target), "--worker-gpus", gpus]) == 2
    assert said in capsys.readouterr().err and not target.exists()


def test_who_opens_sandboxes_in_pods_may(toml: Path, request: pytest.FixtureRequest) -> None:
    toml.write_text(TOML + '[sandbox]\nisolation = "kubernetes"\n[eval]\nevery_steps = 5\n')
    made = request.getfixturevalue("manifests")
    name = "my-run-1-sandboxes"
    assert made["ServiceAccount", name]
    binding = made["RoleBinding", name]
    assert binding["roleRef"]["name"] == binding["subjects"][0]["name"] == name
    rights = {(each["resources"][0], *each["verbs"]) for each in made["Role", name]["rules"]}
    assert rights == {
        ("sandboxes", "create", "watch", "patch", "delete"),
        ("pods", "get"),
        ("pods/exec", "get", "create"),
    }
    accounts = {
        part: manifest["spec"]["template"]["spec"].get("serviceAccountName")
        for (_, part), manifest in made.items()
        if "template" in manifest.get("spec", {})
    }
    assert {part for part, account in accounts.items() if account == name} == {
        "my-run-1-controller",
        "my-run-1-evaluator",
    }
    assert set(accounts.values()) == {name, None}
    known = {"apiGroup", "apiGroups", "resources", "roleRef", "rules", "serviceAccountName"}
    assert fields(list(made.values())) == FIELDS | known | {"subjects", "verbs"}


@pytest.mark.k8s
@pytest.mark.parametrize("more", ["", '[sandbox]\nisolation = "kubernetes"\n'])
def test_kubernetes_takes_them(toml: Path, more: str) -> None:
    toml.write_text(TOML + more)
    exported("k8s", toml, "--workers", "5", "--trainer-nodes", "2")
    files = sorted(map(str, (toml.parent / "out").iterdir()))
    done = subprocess.run(
        ["kubernetes-validate", "--strict", *files], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
