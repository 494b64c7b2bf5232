"""Live recovery between hosts: one is cut off and returns, one is lost; the others train on to the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.testing.netlab import Lab

pytestmark = [pytest.mark.timeout(300), pytest.mark.thorough]

PROGRAM = Path(__file__).parents[1] / "support" / "live_program.py"
STEPS = 1500


def logs(folder):
    """Return the (pid, step, ranks) that each process has written, and the digests at the ends."""
    rows, digests = {}, []
    for path in folder.glob("*.log"):
        words = [line.split() for line in path.read_text().splitlines()]
        rows[path.stem] = [tuple(map(int, each)) for each in words if len(each) == 3]
        digests += [each[1] for each in words if each[0] == "digest"]
    return rows, digests


def reach(folder, ranks, job, after=0):
    """Wait until a world of so many ranks makes steps; return the newest step."""
    deadline = time.monotonic() + 100
    while True:
        last = [rows[-1] for rows in logs(folder)[0].values() if rows]
        newest = max((row[1] for row in last), default=0)
        if newest > after and sum(row[2] == ranks and row[1] >= newest - 1 for row in last) == ranks:
            return newest
        assert time.monotonic() < deadline, [line for _, line in job.lines()]
        time.sleep(0.05)


def test_a_host_is_cut_off_and_another_is_lost_while_the_others_train_on(tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    quiet = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, PROGRAM, str(STEPS), alone], check=True, timeout=120, env=quiet)
    expected = logs(alone)[1]
    folder = tmp_path / "run"
    folder.mkdir()
    run = ["paceline", "run", "--nnodes", "3", "--min-ranks", "1", "--rendezvous", "host3:29400"]
    run += ["--log-dir", str(tmp_path / "logs"), str(PROGRAM), str(STEPS), str(folder)]
    env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    with Lab(hosts=4) as lab:
        server = lab.start(["paceline", "run", "--serve", "host3"], on=3)
        first = lab.start(run, on=[0, 1, 2], env=env)
        step = reach(folder, 3, first)
        lab.cut(2)
        step = reach(folder, 2, first, step)
        lab.mend(2)
        step = reach(folder, 3, first, step)
        lab.kill(1)
        reach(folder, 2, first, step)
        ended = first.wait(timeout=150, check=False)
        server.end()
    assert [one.code for one in ended] == [0, -9, 0], [one.stderr for one in ended]
    rows, digests = logs(folder)
    assert digests == expected * 2
    whole = [each for each in rows.values() if each[0][1] == 1 and each[-1][1] == STEPS]
    assert len(whole) == 1, "the process of the host that nothing happened to went on"
    assert [row[1] for row in whole[0]] == sorted(row[1] for row in whole[0])
    assert "restart 1" not in "".join(one.stderr for one in ended)
    reason = (tmp_path / "logs" / "rank2.log").read_text()
    assert "the job's store" in reason or "removed from the world" in reason
