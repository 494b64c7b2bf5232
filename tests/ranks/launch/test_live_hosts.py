"""Hosts of a live world, two commands on this machine: marks in the store, lost and returning hosts, signals."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

import paceline
from live_job import LiveAgent, wait_until
from paceline._core.job_key import JobKey
from paceline.launch.agent.job_server import serve_jobs
from paceline.launch.agent.rendezvous_address import RendezvousAddress, free_port
from paceline.world.live_file import dead_key, lost_key
from paceline.world.store.key_value_state import KEY_VALUE_SERVICE, CheckKeys
from paceline.world.store.request_client import RequestClient


class Cluster:
    """A rendezvous that is served here, and the commands of the hosts."""

    def __init__(self, folder):
        self.folder, self.key = folder, JobKey.generate()
        self.server = serve_jobs(RendezvousAddress("127.0.0.1", free_port()), self.key)
        self.hosts = []
        self._client = RequestClient("127.0.0.1", self.server.port, self.key)

    def start(self, *more):
        """Start the command of another host."""
        words = ["--nnodes", "2", "--min-ranks", "1", "--rendezvous", f"127.0.0.1:{self.server.port}", *more]
        self.hosts.append(LiveAgent(self.folder / f"host{len(self.hosts)}", words, self.key))
        return self.hosts[-1]

    def is_dead(self, member):
        """Return whether ranks see the mark of a process."""
        return self._has(dead_key(member))

    def _has(self, key):
        return self._client.call(KEY_VALUE_SERVICE, CheckKeys(0, "run/0", [key]), 10.0).result

    def is_lost(self, member):
        """Return whether ranks see that the host of a process is lost."""
        return self._has(lost_key(member))

    def close(self):
        for host in self.hosts:
            host.abandon()
        self._client.close()
        self.server.close()


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(paceline.__file__).parents[1]))
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def live_hosts(cluster, *more):
    """Return two hosts with one live rank each, once the rendezvous knows it."""
    hosts = [cluster.start(*more) for _ in range(2)]
    for host in hosts:
        host.order("live a", "0.0-0")
    settle()
    return hosts


def settle():
    """Let agents see the files of their ranks."""
    time.sleep(1.5)


def test_the_only_rank_of_a_host_is_killed_and_replaced(cluster):
    first, second = live_hosts(cluster)
    old = first.facts("0.0-0")
    assert not cluster.is_dead(old["MEMBER"])
    first.kill("0.0-0")
    new = first.facts("0.1-0")
    assert (new["RANK"], new["WORLD_SIZE"], new["JOINER"], new["STORE"]) == (
        old["RANK"],
        "2",
        "1",
        old["STORE"],
    )
    assert cluster.is_dead(old["MEMBER"])
    assert not cluster.is_dead(new["MEMBER"])
    first.order("live a", "0.1-0")
    settle()
    second.order("exit 0", "0.0-0")
    first.end("0.1-0")
    second.wait()
    assert [host.agent.returncode for host in (first, second)] == [0, 0]
    assert [len(host.records("departure")) for host in (first, second)] == [1, 0]
    assert [host.records("restart") for host in (first, second)] == [[], []]


def test_a_host_is_lost_and_another_one_takes_its_place(cluster):
    first, second = live_hosts(cluster)
    pid, rank = first.process("0.0-0"), second.facts("0.0-0")["RANK"]
    members = [host.facts("0.0-0")["MEMBER"] for host in (first, second)]
    first.order("live " + " ".join(members), "0.0-0")
    settle()
    second.agent.kill()
    wait_until(lambda: first.records("change"))
    wait_until(lambda: cluster.is_lost(members[1]))
    assert not cluster.is_lost(members[0])
    third = cluster.start()
    facts = third.facts("0.0-0")
    assert (facts["RANK"], facts["WORLD_SIZE"], facts["JOINER"]) == (rank, "2", "1")
    assert facts["STORE"] == first.facts("0.0-0")["STORE"]
    third.order("live a", "0.0-0")
    settle()
    first.kill("0.0-0")  # the ranks of the third host go on
    assert first.process("0.1-0") != pid
    third.order("exit 0", "0.0-0")
    for host in (first, third):
        host.wait()
    assert (first.agent.returncode, third.agent.returncode) == (0, 0)
    assert [one["how"] for one in first.records("change")] == ["was lost", "joined"]
    assert "was lost after" in first.output
    assert "this host joins the running world with 1 rank" in third.output


def test_the_command_of_a_host_is_ended_and_its_ranks_leave_in_order(cluster):
    first, second = live_hosts(cluster)
    member = second.facts("0.0-0")["MEMBER"]
    second.agent.send_signal(signal.SIGTERM)
    wait_until(lambda: first.records("change"))
    assert cluster.is_dead(member)
    assert second.agent.wait(60) == 75
    first.end("0.0-0")
    assert first.agent.returncode == 0
    assert [one["how"] for one in first.records("change")] == ["left"]


def test_a_host_is_lost_while_another_is_not_live_and_all_restart(cluster):
    first, second = (cluster.start("--last-call", "100ms") for _ in range(2))
    second.order("live a", "0.0-0")
    first.process("0.0-0")
    settle()
    second.agent.kill()
    first.end("0.0-1")
    assert first.agent.returncode == 0
    assert len(first.records("restart")) == 1


def test_a_host_that_was_cut_off_ends_its_ranks_and_joins_the_running_world(cluster):
    first, second = live_hosts(cluster)
    old = second.facts("0.0-0")
    second.agent.send_signal(signal.SIGSTOP)
    wait_until(lambda: first.records("change"))
    second.agent.send_signal(signal.SIGCONT)
    new = second.facts("0.1-0")
    assert (new["RANK"], new["JOINER"], new["STORE"]) == (old["RANK"], "1", old["STORE"])
    second.order("live a", "0.1-0")
    settle()
    first.order("exit 0", "0.0-0")
    second.end("0.1-0")
    first.wait()
    assert (first.agent.returncode, second.agent.returncode) == (0, 0)
    assert [one["how"] for one in first.records("change")] == ["was lost", "joined"]
    assert "restart 1" not in first.output + second.output
