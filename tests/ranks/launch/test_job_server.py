"""Hosts and ranks on the server of a job: broken connections, a lost server, every method of the ranks' store."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from paceline._core.job_key import JobKey
from paceline.launch.agent import remote_coordinator
from paceline.launch.agent.job_server import serve_jobs
from paceline.launch.agent.job_spec import JobSpec
from paceline.launch.agent.remote_coordinator import RemoteCoordinator
from paceline.launch.agent.rendezvous_address import RendezvousAddress, free_port
from paceline.launch.agent.restart_policy import HostMember, JobOutcome
from paceline.world.store import request_client, request_server
from paceline.world.store.authenticated_store import AuthenticatedStore
from paceline.world.store.key_value_state import KEY_VALUE_SERVICE
from paceline.world.store.request_client import ConnectionLost

KEY = JobKey.generate()


@pytest.fixture
def served():
    server = serve_jobs(RendezvousAddress("127.0.0.1", free_port()), KEY)
    yield server
    server.close()


@pytest.fixture
def store(served):
    return AuthenticatedStore("127.0.0.1", served.port, KEY, "run/0", timeout=20.0)


def hosts_of(served, number):
    address = RendezvousAddress("127.0.0.1", served.port)
    job = JobSpec(["train.py"], 1, number, hosts=number, address=address)
    hosts = [RemoteCoordinator(job, f"m{host}", address, KEY) for host in range(number)]
    for one in hosts:
        one.register()
    return hosts


def begin(hosts):
    """Let all hosts join; return their plans."""
    plans = [None] * len(hosts)

    def join(index):
        plans[index] = hosts[index].join(HostMember(f"host{index}", f"m{index}", 1), "127.0.0.1", index)

    threads = [threading.Thread(target=join, args=(index,)) for index in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(plans)
    return plans


def break_connections(served):
    for fd in list(served._client_of):
        request_server._drop(fd, served.port)


def wait_for(what):
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_hosts_whose_connections_break_connect_again_and_none_is_lost(served):
    hosts = hosts_of(served, 3)
    begin(hosts)
    wait_for(lambda: all(one.view().news for one in hosts))
    for _ in range(2):
        break_connections(served)
        for one in hosts:
            one.wait((), 0.3)
            view = one.view()
            assert (view.member, view.lost, view.world, view.news) == (True, False, 0, 1)
    assert [one.report_finished(0) for one in hosts] == [1, 2, 3]
    hosts[0].end(JobOutcome(0))
    wait_for(lambda: all(one.view().outcome for one in hosts))
    for one in hosts:
        one.close()


def test_a_host_that_goes_without_a_word_is_lost(served):
    hosts = hosts_of(served, 2)
    begin(hosts)
    hosts[1]._connection._close(0)  # as at the end of its process
    wait_for(lambda: hosts[0].view().lost)
    assert hosts[0].view().present == 1
    hosts[0].close()


def test_a_lost_server_is_an_error_on_hosts_and_ranks(served, store, monkeypatch):
    for module in (request_client, remote_coordinator):
        monkeypatch.setattr(module, "_AGAIN_SECONDS", 0.3)
    [host, other] = hosts_of(served, 2)
    store.set("a", "1")
    waiting = []

    def wait():
        try:
            store.get("absent")
        except dist.DistError as error:
            waiting.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_for(lambda: served._handlers[KEY_VALUE_SERVICE]._waiting)
    served.close()
    with pytest.raises(ConnectionLost):
        host.report_finished(0)
    with pytest.raises(ConnectionLost):
        other.view()
    thread.join(20)
    assert isinstance(waiting[0], dist.DistNetworkError)
    with pytest.raises(dist.DistNetworkError, match=r"job's store at 127\.0\.0\.1"):
        store.check(["a"])


def test_a_lost_connection_that_is_not_used_tries_nothing(served, store):
    """Its events would fill the monitor, after which no connection of the process would go on."""
    store.set("a", "1")
    (idle,) = store._client._idle
    served.close()
    time.sleep(0.5)  # ten tries, as often as libzmq was set to
    events = []
    while idle._monitor.poll(0):
        events.append(idle._monitor.recv_multipart())
    assert len(events) <= 3, "connected, disconnected, closed"


def test_the_store_of_the_ranks_has_torchs_methods(store):
    ranks = dist.PrefixStore("group", store)
    ranks.set("a", "1")
    assert (ranks.get("a"), store.get("group/a"), ranks.check(["a"]), ranks.check(["b"])) == (
        b"1",
        b"1",
        True,
        False,
    )
    assert [ranks.add("n", 2), ranks.add("n", -5)] == [2, -3]
    assert [ranks.compare_set("c", "", "x"), ranks.compare_set("c", "y", "z")] == [b"x", b"x"]
    ranks.multi_set(["d", "e"], [b"\x00\xff", b""])
    assert ranks.multi_get(["d", "e"]) == [b"\x00\xff", b""]
    ranks.append("e", "more")
    assert ranks.get("e") == b"more"
    assert (ranks.delete_key("e"), ranks.delete_key("e"), ranks.num_keys()) == (True, False, 4)
    assert ranks.has_extended_api()
    assert ranks.clone().get("a") == b"1"
    threading.Timer(0.05, lambda: ranks.set("late", "here")).start()
    assert ranks.get("late") == b"here"
    with pytest.raises(dist.DistStoreError, match=r"wait timeout after 0\.05 s, keys: group/never"):
        ranks.wait(["never"], timedelta(seconds=0.05))
    ranks.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(dist.DistStoreError, match="wait timeout"):
        ranks.get("never")
    with pytest.raises(dist.DistStoreError, match="refuses a request"):
        ranks.set("large", b"x" * (3 << 20))
    assert ranks.get("a") == b"1"


def test_a_call_that_waits_delays_no_other_thread(store):
    waiting = threading.Thread(target=lambda: store.get("late"))
    waiting.start()
    for number in range(20):
        store.set(f"k{number}", "v")
    assert waiting.is_alive()
    store.set("late", "1")
    waiting.join(20)
    assert not waiting.is_alive()
