"""Hosts that are cut off, killed or stopped, and ranks that raise: every other rank names which and where."""

from __future__ import annotations

import json
import sys
import time

import pytest

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300)]

HOSTS, RANKS, VICTIM = 3, 2, 1
STEP = 30
MINE = range(VICTIM * RANKS, (VICTIM + 1) * RANKS)  # ranks of the victim


def both(call):
    return "; ".join(call.format(rank=rank) for rank in MINE)


DRILLS = [
    ("gloo", f"fail_at(rank=3, step={STEP})"),
    ("paceline", f"fail_at(rank=3, step={STEP}, how='memory')"),
    ("gloo", both(f"fail_at(rank={{rank}}, step={STEP}, how='kill')")),
    ("paceline", both(f"stall_at(rank={{rank}}, step={STEP}, how='stop')")),
    ("gloo", ""),  # the host is cut off
    ("paceline", ""),
]


def until(condition, what, seconds=90.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)
    return found


class Course:
    """The drills, one after another, on three hosts."""

    def __init__(self, lab, folder):
        self.lab, self.folder = lab, folder
        listed = [{"backend": b, "faults": f, "stall": 5.0, "lost": 2.0} for b, f in DRILLS]
        (folder / "drills.json").write_text(json.dumps(listed))
        self.jobs = []
        for host in range(HOSTS):
            line = [
                sys.executable,
                "-m",
                "paceline.tools.bench.fire_drill",
                str(folder),
                *map(str, (host, HOSTS, RANKS)),
            ]
            self.jobs.append(lab.start(line, on=host))

    def there(self, name, number, ranks):
        def all_there():
            paths = [self.folder / f"{name}-{number}-{rank}" for rank in ranks]
            return [json.loads(p.read_text()) for p in paths] if all(p.exists() for p in paths) else None

        return until(all_there, lambda: "\n".join(line for job in self.jobs for _, line in job.lines()))

    def run(self, number):
        """Return what the ranks of other hosts told, those of the victim if they could, and if its fault came true."""
        others = [rank for rank in range(HOSTS * RANKS) if rank not in MINE]
        fault = DRILLS[number][1]
        if not fault:
            self.there("training", number, range(HOSTS * RANKS))
            self.lab.cut(VICTIM)
        told = self.there("told", number, others)
        own = self.there("told", number, MINE) if "kill" not in fault and "stop" not in fault else []
        (self.folder / f"over-{number}").touch()
        if not fault:
            self.lab.mend(VICTIM)
        return told, own


@pytest.fixture(scope="module")
def course(shared, tmp_path_factory):
    made = Course(shared, tmp_path_factory.mktemp("drills"))
    yield made
    for job in made.jobs:
        job.end()


def named(told, ranks=MINE):
    """Check that all say the same of the victim, and return one of them."""
    for each in told:
        assert each["error"] == "PeerFailed", each
        assert each["rank"] in ranks, each
        assert each["host"] == f"host{VICTIM}", each
        assert f"rank {each['rank']} on host host{VICTIM} (process {each['pid']}" in each["text"], each
    assert len({(each["kind"], each["rank"]) for each in told}) == 1, told
    return told[0]


def test_a_rank_that_raises(course):
    told, own = course.run(0)
    one = named(told + own[:1], [3])
    assert (one["kind"], one["step"], one["phase"]) == ("raised", STEP, "forward")
    assert "RuntimeError: injected fault" in one["stack"]
    assert own[1]["error"] == "RuntimeError"


def test_a_rank_that_runs_out_of_memory(course):
    told, own = course.run(1)
    one = named(told + own[:1], [3])
    assert (one["kind"], one["step"]) == ("raised", STEP)
    assert "_run_out_of_memory" in one["stack"]
    assert own[1]["error"] == "MemoryError"


def test_a_host_whose_ranks_are_killed(course):
    told, _ = course.run(2)
    assert named(told)["kind"] == "gone"
    assert {each["step"] for each in told} <= {STEP - 1, STEP}


def test_a_host_whose_ranks_are_stopped(course):
    told, _ = course.run(3)
    assert named(told)["kind"] == "stopped"
    assert {each["step"] for each in told} <= {STEP - 1, STEP}


@pytest.mark.parametrize("number", [4, 5])
def test_a_host_that_is_cut_off(course, number):
    told, own = course.run(number)
    assert named(told)["kind"] == "unreachable"
    for each in own:
        assert (each["error"], each["kind"], each["host"]) == ("PeerFailed", "cut off", f"host{VICTIM}"), each
        assert "it seems to be cut off" in each["text"]
