"""A run on a real Ray cluster of several nodes, two of which are killed (`make test-ray`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import etude, isolation, policy  # noqa: F401
from tests.e2e.runs import TINY, Etude, check_books

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1800)]

OBJECT_STORE = 80 << 20
DEMO = files("etude.commands") / "demo.toml"


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head that runs nothing, so that every other node may be killed, and three other nodes."""
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    head = {"num_cpus": 0, "object_store_memory": OBJECT_STORE, "include_dashboard": False}
    made = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    for _ in range(3):
        made.add_node(num_cpus=3, object_store_memory=OBJECT_STORE)
    yield made
    made.shutdown()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def node_of(cluster: Any, etude: Etude, module: str) -> Any:  # noqa: F811
    """The node that a program of the run is on: one of its processes is the program's
    grandparent."""
    pid = next(pid for pid, line in etude.processes().items() if module in line)
    raylet = parent(parent(pid))
    return next(
        node
        for node in cluster.worker_nodes
        if raylet in {each.process.pid for each in node.all_processes["raylet"]}
    )


def test_nodes_are_killed_and_the_run_goes_on(cluster: Any, etude: Etude) -> None:  # noqa: F811
    """First the node of the gateway and the controller, then that of the trainer."""
    etude.write(TINY.read_text().replace("steps = 4", "steps = 10"))
    run_and_kill(cluster, etude, {"etude.serve.gateway": 2, "etude.trainer.trainer": 8})


@pytest.mark.skipif("ETUDE_CLUSTER_DEMO" not in os.environ, reason="a quarter of an hour")
def test_the_demo_learns_on_a_cluster(cluster: Any, etude: Etude) -> None:  # noqa: F811
    """Its trainer's node is killed after a third of its groups, its gateway's after two thirds."""
    etude.write(DEMO.read_text())
    given = etude.argv.index("--set")
    del etude.argv[given : given + 2]  # no model that half knows its tasks: the demo makes its own
    out = run_and_kill(cluster, etude, {"etude.trainer.trainer": 160, "etude.serve.gateway": 320})
    told = json.loads(out.splitlines()[-1])
    print(json.dumps(told))
    assert told["solve_rate"]["rl"] > told["solve_rate"]["sft"]


def run_and_kill(cluster: Any, etude: Etude, victims: dict[str, int]) -> str:  # noqa: F811
    """Run to the end, killing the nodes of these programs after a number of groups. Returns the
    output."""
    etude.argv += ["--ray", cluster.address]
    running = etude.start()
    for victim, groups in victims.items():
        etude.wait_for_groups(groups, running)
        while not any(victim in line for line in etude.processes().values()):
            assert running.poll() is None, running.communicate()[1]
            time.sleep(0.1)
        node = node_of(cluster, etude, victim)
        print(f"{len(etude.groups())} groups: the node of {victim} is killed")
        cluster.remove_node(node, allow_graceful=False)
        cluster.add_node(num_cpus=3, object_store_memory=OBJECT_STORE)
    out, err = running.communicate()
    assert running.returncode == 0, err
    said = out + err
    assert "the gateway was lost with its node and is being restarted" in said
    assert "the trainer was lost with its node and is being restarted" in said
    check_books(etude)
    deadline = time.monotonic() + 60
    while etude.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert etude.processes() == {}
    return out


def test_a_cluster_that_is_not_there(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    (tmp_path / "run.toml").write_text(TINY.read_text())
    argv = [sys.executable, "-m", "etude", "run", "run.toml", "--ray", "127.0.0.1:1"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "no answer from a Ray cluster at 127.0.0.1:1" in done.stderr
