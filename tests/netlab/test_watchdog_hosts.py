"""Hosts that are cut off, killed or stopped, and ranks on them that raise: every other rank names rank and host."""

from __future__ import annotations

import json
import sys
import time

import pytest

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300)]

HOSTS, RANKS, FAULTY_HOST = 3, 2, 1
STEP = 30
FAULTY = range(FAULTY_HOST * RANKS, (FAULTY_HOST + 1) * RANKS)
OTHERS = [rank for rank in range(HOSTS * RANKS) if rank not in FAULTY]


def on_faulty_ranks(fault):
    return "; ".join(fault.format(rank=rank) for rank in FAULTY)


def until(condition, explain, seconds=90.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, explain()
        time.sleep(0.02)
    return found


class FaultRun:
    """A training on all hosts of a lab, with a fault on one of them."""

    def __init__(self, lab, folder, backend, faults):
        self.lab, self.folder, self.faults = lab, folder, faults
        settings = {"backend": backend, "faults": faults, "stall": 5.0, "lost": 2.0}
        (folder / "cases.json").write_text(json.dumps([settings]))
        command = [sys.executable, "-m", "bench_harness.fault_injection.watchdog_program", str(folder)]
        self.jobs = [
            lab.start([*command, str(host), str(HOSTS), str(RANKS)], on=host) for host in range(HOSTS)
        ]

    def wait_for(self, name, ranks):
        """Return the content of these ranks' files of this name."""
        paths = [self.folder / f"{name}-0-{rank}" for rank in ranks]

        def read_all():
            return (
                [json.loads(path.read_text()) for path in paths]
                if all(path.exists() for path in paths)
                else None
            )

        return until(read_all, lambda: "\n".join(line for job in self.jobs for _, line in job.lines()))

    def run(self):
        """Return the errors on the ranks of other hosts, and on those of the faulty host that could write theirs."""
        if not self.faults:
            self.wait_for("training", range(HOSTS * RANKS))
            self.lab.cut(FAULTY_HOST)
        others = self.wait_for("error", OTHERS)
        can_write = "kill" not in self.faults and "stop" not in self.faults
        faulty = self.wait_for("error", FAULTY) if can_write else []
        (self.folder / "end-0").touch()
        return others, faulty


@pytest.fixture
def run_with_fault(lab, tmp_path):
    runs = []

    def run(backend, faults):
        runs.append(FaultRun(lab, tmp_path, backend, faults))
        return runs[-1].run()

    yield run
    for each in runs:
        for job in each.jobs:
            job.end()


def same_failure(errors, ranks=FAULTY):
    """Check that all errors name the same rank of the faulty host, and return one of them."""
    for each in errors:
        assert each["error"] == "PeerFailed", each
        assert each["rank"] in ranks, each
        assert each["host"] == f"host{FAULTY_HOST}", each
        assert f"rank {each['rank']} on host host{FAULTY_HOST} (process {each['pid']}" in each["text"], each
    assert len({(each["kind"], each["rank"]) for each in errors}) == 1, errors
    return errors[0]


def test_a_rank_that_raises(run_with_fault):
    others, faulty = run_with_fault("gloo", f"fail_at(rank=3, step={STEP})")
    one = same_failure(others + faulty[:1], [3])
    assert (one["kind"], one["step"], one["phase"]) == ("raised", STEP, "forward")
    assert "RuntimeError: injected fault" in one["stack"]
    assert faulty[1]["error"] == "RuntimeError"


@pytest.mark.thorough
def test_a_rank_that_runs_out_of_memory(run_with_fault):
    others, faulty = run_with_fault("paceline", f"fail_at(rank=3, step={STEP}, how='memory')")
    one = same_failure(others + faulty[:1], [3])
    assert (one["kind"], one["step"]) == ("raised", STEP)
    assert "_run_out_of_memory" in one["stack"]
    assert faulty[1]["error"] == "MemoryError"


@pytest.mark.thorough
def test_a_host_whose_ranks_are_killed(run_with_fault):
    others, _ = run_with_fault("gloo", on_faulty_ranks(f"fail_at(rank={{rank}}, step={STEP}, how='kill')"))
    assert same_failure(others)["kind"] == "gone"
    assert {each["step"] for each in others} <= {STEP - 1, STEP}


@pytest.mark.thorough
def test_a_host_whose_ranks_are_stopped(run_with_fault):
    others, _ = run_with_fault(
        "paceline", on_faulty_ranks(f"stall_at(rank={{rank}}, step={STEP}, how='stop')")
    )
    assert same_failure(others)["kind"] == "stopped"
    assert {each["step"] for each in others} <= {STEP - 1, STEP}


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_a_host_that_is_cut_off(run_with_fault, backend):
    others, faulty = run_with_fault(backend, "")
    assert same_failure(others)["kind"] == "unreachable"
    for each in faulty:
        found = (each["error"], each["kind"], each["host"])
        assert found == ("PeerFailed", "cut off", f"host{FAULTY_HOST}"), each
        assert "seems to be cut off" in each["text"]
