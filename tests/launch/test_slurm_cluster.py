"""Slurm on two hosts of the network lab: jobs that finish, are requeued, are cancelled."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest
from notes import STEPS
from slurm_cluster import SlurmCluster, lacking

pytestmark = pytest.mark.timeout(450)


@pytest.fixture(scope="module")
def cluster(lab):
    problem = lacking()
    if problem:
        pytest.skip(f"Slurm is not here whole: no {problem} (Debian: slurm-wlm munge)")
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short: sockets are in it
    folder.chmod(0o755)
    try:
        made = SlurmCluster(lab, folder)
        made.start()
        yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def launch(cluster, notes):
    """Start ``paceline launch slurm`` on the first host, with all paths in a folder that wants quoting."""

    def start(*options, pause=0.0):
        line = [sys.executable, "-m", "paceline", "launch", "slurm", "--workdir", str(notes.folder), *options]
        line += ["--env", f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}"]
        return cluster.lab.start([*line, *notes.words(pause)], on=0, env=cluster.env)

    return start


def number_of(job):
    [result] = job.wait(timeout=120, check=False)
    assert result.code == 0, result.stderr
    return re.match(r"job (\d+); it writes to ", result.stdout)[1]


def await_state(cluster, job, state, reason=""):
    """Wait until Slurm reports this state of a job, and return its output."""
    deadline = time.monotonic() + 120
    while True:
        result = cluster.run("scontrol", "show", "job", "--oneliner", job)
        if f"JobState={state} " in result and reason in result:
            return result
        assert time.monotonic() < deadline, result
        time.sleep(0.2)


def start_again(cluster, job):
    """Spare a requeued job the two minutes that Slurm lets it wait, which begin once its processes have ended."""
    await_state(cluster, job, "PENDING", "Reason=BeginTime")
    time.sleep(2.0)  # slurmd refuses a start in the second in which the one before was ended
    assert cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now") == ""


@pytest.mark.thorough
@pytest.mark.launcher("Slurm", "finishes")
def test_it_finishes_on_two_hosts_and_is_followed(launch, notes, expected_digest):
    [result] = launch("--nnodes", "2", "--watch").wait(timeout=240, check=False)
    assert result.code == 0, result.stdout + result.stderr
    notes.check_finished(expected_digest, nodes=2)
    assert "RUNNING on host[0-1]" in result.stderr
    assert re.search(r"job \d+: COMPLETED, exit code 0", result.stderr)


@pytest.mark.thorough
@pytest.mark.launcher("Slurm", "killed and resumed")
def test_a_requeued_job_resumes_and_a_cancelled_one_once_it_is_submitted_again(
    cluster, launch, notes, expected_digest
):
    job = number_of(launch("--nnodes", "2", "--time", "1h", "--submit", pause=0.2))
    notes.await_step(3)
    assert cluster.run("scancel", "--batch", "--signal=USR1", job) == ""  # as before the end of its time
    start_again(cluster, job)
    notes.await_step(7)
    assert cluster.run("scancel", job) == ""
    assert " Restarts=1 " in await_state(cluster, job, "CANCELLED")
    [result] = launch("--nnodes", "2", "--watch").wait(timeout=240, check=False)
    assert result.code == 0, result.stdout + result.stderr
    notes.check_resumed(expected_digest, starts=3, nodes=2)


def finish(cluster, job):
    """Wait until a job is complete; start it again whenever it was requeued."""
    deadline = time.monotonic() + 350
    while "JobState=COMPLETED " not in (state := cluster.run("scontrol", "show", "job", "--oneliner", job)):
        assert time.monotonic() < deadline, state
        if "JobState=PENDING Reason=BeginTime" in state:
            start_again(cluster, job)
        time.sleep(0.5)


def check_no_step_was_lost(notes, job, expected_digest):
    """Check that each start went on with the step after the last one of the start before; return the job's log."""
    made = notes.steps()
    assert [step for steps in made for step in steps] == list(range(STEPS)), made
    notes.check_resumed(expected_digest, starts=len(made), nodes=2)
    log = notes.folder.joinpath(f"train-{job}.log").read_text()
    assert log.count("all ranks leave after step") == len(made) - 1 >= 1
    return log


@pytest.mark.thorough
def test_before_its_time_limit_a_job_saves_and_it_resumes_without_a_lost_step(
    cluster, launch, notes, expected_digest
):
    """Here slurmctld itself sends the warning; nothing is saved but after it."""
    options = ["--time", "2min", "--warn", "20", "--env", "SAVE_EVERY=1000"]
    job = number_of(launch("--nnodes", "2", *options, "--submit", pause=11.0))
    finish(cluster, job)
    assert "was warned by SIGUSR1" in check_no_step_was_lost(notes, job, expected_digest)


@pytest.mark.thorough
def test_a_script_of_ones_own_needs_a_signal_to_its_steps_and_a_requeue(cluster, notes, expected_digest):
    """Without a launcher of Paceline's: sbatch --signal=USR1@20 signals the ranks, which srun has started."""
    line = shlex.join([sys.executable, *notes.words(pause=11.0)])
    script = notes.folder / "own.sh"
    script.write_text(
        f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --time=2 --signal=USR1@20 --requeue --open-mode=append
export SAVE_EVERY=1000
srun {line}
code=$?
[ "$code" = 75 ] && scontrol requeue "$SLURM_JOB_ID"
exit "$code"
"""
    )
    log = notes.folder / "train-%j.log"
    job = cluster.run("sbatch", "--parsable", f"--output={log}", str(script)).strip()
    finish(cluster, job)
    assert "was warned by SIGUSR1" in check_no_step_was_lost(notes, job, expected_digest)


@pytest.mark.thorough
def test_a_preempted_job_saves_within_the_grace_and_resumes_without_a_lost_step(
    cluster, launch, notes, expected_digest
):
    job = number_of(launch("--nnodes", "2", "--env", "SAVE_EVERY=1000", "--submit", pause=0.5))
    notes.await_step(3)
    urgent = ["--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true"]
    other = cluster.run("sbatch", "--parsable", *urgent)
    finish(cluster, job)
    await_state(cluster, other, "COMPLETED")
    assert "was warned by SIGTERM" in check_no_step_was_lost(notes, job, expected_digest)


def test_tasks_that_srun_starts_join_without_a_launcher(cluster, notes, expected_digest):
    output = cluster.run("srun", "-N2", "-n2", sys.executable, *notes.words())
    assert notes.steps(), output
    notes.check_finished(expected_digest, nodes=2)


@pytest.mark.thorough
def test_a_failed_job_passes_its_exit_code_on_and_a_refused_one_gives_the_reason(cluster, launch, notes):
    notes.folder.joinpath("fails.py").write_text("raise SystemExit(7)")
    line = [sys.executable, "-m", "paceline", "launch", "slurm", "--workdir", str(notes.folder), "--watch"]
    job = cluster.lab.start([*line, "--max-restarts", "0", "fails.py"], on=0, env=cluster.env)
    refused = cluster.lab.start([*line, "--partition", "no such", "fails.py"], on=0, env=cluster.env)
    [result], [other] = job.wait(timeout=240, check=False), refused.wait(timeout=240, check=False)
    assert result.code == 7, result.stdout + result.stderr
    assert "FAILED (NonZeroExitCode), exit code 7" in result.stderr
    assert other.code == 2
    assert "sbatch refused" in other.stderr
    assert "invalid partition specified: no such" in other.stderr
