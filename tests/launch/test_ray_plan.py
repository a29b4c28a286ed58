"""The plan of a run on a Ray cluster. For a real cluster: `make test-ray`."""

from __future__ import annotations

import pytest

from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.launch.launcher import Program
from etude.launch.ray_plan import (
    REGION_LABEL,
    Node,
    awaited,
    check_room,
    cluster_programs,
    filled,
    placement_groups,
    rank_environment,
)
from etude.serve.tokens import Scope

TOML = """
name = "mine"
[engine]
regions = ["east", "west"]
threads = 2
[trainer]
ranks = 2
[[stage]]
kind = "rl"
steps = 3
threads = 3
"""


def planned(*overrides: str, workers: int = 1) -> dict[str, Program]:
    config = parse(TOML, overrides)
    return {each.name: each for each in cluster_programs(config, "s3://bucket/mine", workers)}


def test_every_part_of_a_run_is_a_program_with_its_needs() -> None:
    programs = planned()
    assert list(programs) == [
        *("gateway", "worker-east-0", "worker-west-0", "trainer-0", "trainer-1", "controller")
    ]
    needs = {name: program.needs for name, program in programs.items()}
    assert [needs[name].cpus for name in ("gateway", "worker-east-0", "trainer-0")] == [1, 2, 3]
    assert {each.gpus for each in needs.values()} == {0}
    assert needs["worker-west-0"].region == "west" and needs["controller"].region == ""
    assert (needs["trainer-0"].rank, needs["trainer-1"].rank) == (0, 1)
    assert needs["gateway"].rank is None
    assert all("s3://bucket/mine" in program.argv for program in programs.values())

    assert programs["gateway"].serves and programs["worker-east-0"].restarts > 0
    assert not programs["controller"].serves and programs["trainer-1"].restarts == 0
    scopes = {name: program.scope for name, program in programs.items()}
    assert scopes["worker-east-0"] == Scope.WORKER and scopes["controller"] == Scope.ADMIN
    assert [name for name, each in programs.items() if each.makes_tokens] == ["gateway"]


def test_one_rank_needs_no_fellows_and_devices_are_those_of_the_file() -> None:
    one = planned("trainer.ranks=1", "trainer.device=cuda", "engine.device=cuda")
    assert one["trainer"].needs.rank is None
    assert {name for name, program in one.items() if program.needs.gpus == 1} == {
        *("trainer", "worker-east-0", "worker-west-0")
    }
    assert rank_environment(one["trainer"], 1, ("10.0.0.1", 7)) == {}


def test_several_workers_of_a_region_share_a_relay() -> None:
    assert "relay-east" not in planned()
    programs = planned(workers=2)
    assert {"relay-east", "worker-east-0", "worker-east-1"} <= programs.keys()
    assert programs["relay-east"].makes_tokens
    worker = programs["worker-east-1"]
    assert awaited(worker, programs) == {"gateway", "relay-east"}
    assert awaited(programs["gateway"], programs) == set()
    assert awaited(programs["controller"], programs) == {"gateway"}


def test_an_address_is_filled_in_when_it_is_known() -> None:
    worker = planned(workers=2)["worker-east-1"]
    urls = {"gateway": "http://10.0.0.1:80", "relay-east": "http://10.0.0.2:81"}
    argv = filled(worker, ("10.0.0.3", 4711), urls)
    told = dict(zip(argv[4:-1], argv[5:], strict=True))
    assert not any("@" in word for word in argv)
    assert (told["--host"], told["--port"]) == ("10.0.0.3", "4711")
    assert told["--advertise"] == "http://10.0.0.3:4711"
    assert (told["--gateway"], told["--relay"]) == ("http://10.0.0.1:80", "http://10.0.0.2:81")


def test_ranks_meet_at_the_first_of_them() -> None:
    trainer = planned()["trainer-1"]
    assert rank_environment(trainer, 2, ("10.0.0.1", 4711)) == {
        "RANK": "1",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4711",
    }


def test_workers_are_spread_in_their_region_and_ranks_are_together() -> None:
    nodes = [Node(cpus=8, region="east"), Node(cpus=8)]
    groups = {each.name: each for each in placement_groups([*planned(workers=2).values()], nodes)}
    assert groups.keys() == {"control", "region east", "region west", "trainer"}
    east, west, trainer = (groups[name] for name in ("region east", "region west", "trainer"))
    assert east.spread and east.labels == {REGION_LABEL: "east"}
    assert west.spread and west.labels == {}, "no node is in the west"
    assert not trainer.spread and trainer.bundles == [{"CPU": 3.0}, {"CPU": 3.0}]
    assert [each.name for each in east.programs] == ["worker-east-0", "worker-east-1"]


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ([Node(cpus=8), Node(cpus=3)], "needs 12 CPUs but the Ray cluster has 11"),
        ([Node(cpus=2)] * 8, "a process of trainer needs 3 CPUs on one node"),
        ([Node(cpus=16), Node(cpus=1, region="east")], "a process of region east needs 2 CPUs"),
        ([Node(cpus=8), Node(cpus=4)], None),
    ],
)
def test_what_can_never_be_placed_is_refused(nodes: list[Node], said: str | None) -> None:
    groups = placement_groups([*planned().values()], nodes)
    if said is None:
        check_room(groups, nodes)
        return
    with pytest.raises(EtudeError, match=said):
        check_room(groups, nodes)
