"""Asynchronous training under injected faults: nothing acknowledged is lost or counted twice, and the run ends."""

import itertools
from pathlib import Path

import pytest

from bench_harness.fault_injection.fault_plan import Fault, draw_faults
from bench_harness.fault_injection.hub_run import count_losses, run_with_faults
from paceline.errors import UsageError
from paceline.testing.netlab import Lab

pytestmark = pytest.mark.timeout(240)


@pytest.mark.thorough
def test_training_survives_faults_of_workers_and_hub(tmp_path: Path) -> None:
    faults = [
        Fault(10.0, "stop", 1, 4.0),
        Fault(12.0, "kill", 2, 2.0),
        Fault(16.0, "hub", 0, 2.0),
        Fault(22.0, "cut", 1, 5.0),
    ]
    with Lab(3, "200Mbit/s") as lab:
        run_with_faults(lab, tmp_path, 38.0, faults, corrupted=0.05)
    found = count_losses(tmp_path, 2)
    assert (found["lost"], found["twice"], found["gaps"]) == (0, 0, 0)
    assert found["acknowledged"] > 10
    assert (found["ended"], found["ended_with_global_params"]) == (2, 2)


@pytest.mark.thorough
def test_workers_of_two_ranks_survive_faults_of_one_rank_or_all(tmp_path: Path) -> None:
    faults = [
        Fault(12.0, "kill", 1, 1.0, rank=1),
        Fault(14.0, "stop", 2, 4.0, rank=0),
        Fault(22.0, "kill", 2, 2.0),
        Fault(26.0, "stop", 1, 3.0),
        Fault(32.0, "hub", 0, 2.0),
        Fault(34.0, "kill", 2, 1.0, rank=0),
        Fault(38.0, "cut", 1, 4.0),
        Fault(40.0, "stop", 2, 8.0, rank=1),
    ]
    with Lab(3, "200Mbit/s") as lab:
        run_with_faults(lab, tmp_path, 64.0, faults, corrupted=0.05, ranks=2)
    found = count_losses(tmp_path, 2)
    assert (found["lost"], found["twice"], found["gaps"], found["diverged"]) == (0, 0, 0, 0)
    assert found["acknowledged"] > 10
    assert (found["ended"], found["ended_with_global_params"]) == (2, 2)


def test_a_fault_plan_is_deterministic_and_a_host_has_one_fault_at_a_time() -> None:
    plan = draw_faults(600.0, 8, 60, 5, seed=3)
    assert plan == draw_faults(600.0, 8, 60, 5, seed=3)
    assert plan != draw_faults(600.0, 8, 60, 5, seed=4)
    assert sum(each.what == "hub" for each in plan) == 5
    assert {each.what for each in plan} == {"hub", "kill", "stop", "cut"}
    for host in range(1, 9):
        mine = [each for each in plan if each.host == host]
        assert all(one.at + one.seconds < other.at for one, other in itertools.pairwise(mine))
    several = draw_faults(600.0, 8, 60, 5, seed=3, ranks=2)
    assert [(each.at, each.what, each.host) for each in several] == [
        (each.at, each.what, each.host) for each in plan
    ]
    assert {each.rank for each in plan} == {None}
    assert {each.rank for each in several if each.what in ("kill", "stop")} == {None, 0, 1}
    assert {each.rank for each in several if each.what in ("cut", "hub")} == {None}
    with pytest.raises(UsageError, match="in 5 s"):
        draw_faults(5.0, 8, 1, 1, seed=0)
