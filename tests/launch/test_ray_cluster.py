"""Ray: a cluster of this machine, and one of two hosts on which a worker is killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest
from notes import STEPS

from paceline.errors import UsageError
from paceline.launch.targets.cluster_job import ClusterJob
from paceline.launch.targets.ray_job import run_on_ray

pytest.importorskip("ray", reason="no Ray (pip install 'paceline[ray]')")
pytestmark = pytest.mark.timeout(300)

ENV = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
NODE = ["--block", "--num-cpus=2", "--object-store-memory=80000000", "--disable-usage-stats"]
AWAIT_HEAD = 'until ray health-check --address "$1"; do sleep 0.2; done'
KILL = """
import psutil
[worker] = [one for one in psutil.process_iter() if one.name().startswith("ray::_Host")]
worker.kill()
"""


def line(notes, *options, pause=0.0):
    command = [sys.executable, "-m", "paceline", "launch", "ray", *options, "--submit"]
    return [*command, "--workdir", str(notes.folder), *notes.words(pause)]


@pytest.fixture(scope="module")
def cluster(lab):
    """A Ray cluster on both hosts of the lab; returns its address."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: sockets are in it
    first, second = lab.addresses
    head = ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={folder}"]
    try:
        jobs = [lab.start(["ray", "start", *head, f"--node-ip-address={first}", *NODE], on=0, env=ENV)]
        lab.run(["sh", "-c", AWAIT_HEAD, "sh", f"{first}:6379"], on=0, env=ENV, timeout=120)
        start = ["ray", "start", f"--address={first}:6379", f"--node-ip-address={second}", *NODE]
        jobs.append(lab.start(start, on=1, env=ENV))
        yield f"{first}:6379"
        assert all(job.running() for job in jobs), [text for job in jobs for text in job.lines()]
    finally:
        for host in range(lab.hosts):
            lab.kill(host)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.thorough
@pytest.mark.launcher("Ray", "finishes")
def test_it_finishes_on_a_cluster_of_this_machine(notes, expected_digest):
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | ENV
    result = subprocess.run(
        line(notes, "--nproc-per-node", "2"), env=env, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stdout + result.stderr
    notes.check_finished(expected_digest)


@pytest.mark.thorough
def test_a_warned_driver_has_the_ranks_save(notes, expected_digest):
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | ENV
    options = ["--nproc-per-node", "2", "--env", "SAVE_EVERY=1000"]
    output = subprocess.PIPE
    with subprocess.Popen(
        line(notes, *options, pause=0.3), env=env, stdout=output, stderr=subprocess.STDOUT, text=True
    ) as driver:
        try:
            notes.await_step(3)
            driver.send_signal(signal.SIGTERM)
            text = driver.communicate(timeout=120)[0]
        finally:
            driver.kill()
    assert driver.returncode == 75, text
    again = subprocess.run(line(notes, *options), env=env, capture_output=True, text=True, timeout=240)
    assert again.returncode == 0, again.stdout + again.stderr
    notes.check_resumed(expected_digest)
    assert [step for steps in notes.steps() for step in steps] == list(range(STEPS))


@pytest.mark.thorough
@pytest.mark.launcher("Ray", "killed and resumed")
def test_after_the_death_of_a_worker_on_one_of_two_hosts_it_resumes(lab, cluster, notes, expected_digest):
    options = ["--nnodes", "2", "--address", cluster, "--env", "GLOO_SOCKET_IFNAME=eth0"]
    driver = lab.start(line(notes, *options, pause=0.2), on=0, env=ENV)
    notes.await_step(3, lambda: list(driver.lines()))
    lab.run([sys.executable, "-c", KILL], on=1)
    [result] = driver.wait(timeout=240, check=False)
    assert result.code == 0, result.stdout + result.stderr
    notes.check_resumed(expected_digest, nodes=2)
    assert "host1 was lost" in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("address", "why"), [("127.0.0.1:9", "refused"), ("ray://pc1:10001", "start the driver on")]
)
def test_a_missing_cluster_is_an_error(address, why):
    with pytest.raises(UsageError, match=f"(?s)no Ray cluster at {address}: .*{why}.*ray start --head"):
        run_on_ray(ClusterJob(("train.py",)), address)
