"""Connections between ranks of a host: descriptors arrive, ends are detected, unknown callers are refused."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import socket
import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from forked_child import ended, in_child, start
from paceline._core.format import format_bytes
from paceline._core.processes.process_exit import ExitStatus
from paceline.backends.shm.peer_sockets import (
    HostPeers,
    PeerInfo,
    PeerListener,
    SharedMemoryUnavailable,
    exchange_peer_info,
)
from paceline.backends.shm.shared_arena import Segment
from paceline.errors import CollectiveTimeout

NBYTES = 2 << 20


def peer_info(rank, listener, **other):
    fields = {"rank": rank, "world_rank": rank, "host": "here", "name": "name", "pid": os.getpid()}
    return PeerInfo(**fields | {"address": listener.address, "token": listener.token} | other)


def connect(store, rank, size, change=lambda info: info, listener=None, timeout=20.0, nbytes=NBYTES):
    """Return the connections of `rank`; `change` replaces its info."""
    listener = listener or PeerListener()
    mine = change(peer_info(rank, listener))
    peers = exchange_peer_info(store, mine, size, timeout)
    local = [each for each in peers if each.host == mine.host]
    return HostPeers(mine, local, peers, listener=listener, store=store, timeout=timeout, nbytes=nbytes)


def in_threads(size, work):
    """Return the result or the error of ``work(rank)`` on every rank."""
    results = [None] * size

    def run(rank):
        try:
            results[rank] = work(rank)
        except BaseException as error:  # noqa: BLE001 — the test looks at it
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def group(size, **options):
    store = dist.HashStore()
    return in_threads(size, lambda rank: connect(store, rank, size, **options))


def open_files():
    gc.collect()  # errors hold the frames they passed
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
    return {fd: link for fd, link in found.items() if "socket" in link or "pidfd" in link or "memfd" in link}


@pytest.mark.sweep
@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_ranks_share_one_segment_and_leave_nothing(size):
    before = open_files()
    found = group(size)
    for rank, each in enumerate(found):
        assert isinstance(each, HostPeers), each
        each.segment.tensor(rank, 1, torch.uint8).fill_(rank + 1)
    for each in found:
        assert bytes(each.segment.map[:size]) == bytes(range(1, size + 1))
        assert each.gone() == []
    addresses = [each.me.address for each in found]
    for each in found:
        each.close()
    del found, each
    assert open_files() == before
    with open("/proc/net/unix") as file:
        left = file.read()
    assert not any(address in left for address in addresses)


def test_a_descriptor_arrives_under_its_number_and_only_once():
    low, high = group(2)
    files = [os.pipe() for _ in range(3)]
    for number, (_, write) in enumerate(files):
        assert low.send_fd(1, number, write)
    for number in (2, 0, 1):
        fd = high.receive_fd(0, number)
        os.write(fd, b"x")
        assert os.read(files[number][0], 1) == b"x"
        os.close(fd)
        assert high.receive_fd(0, number) is None
    for pair in files:
        for fd in pair:
            os.close(fd)
    low.close(), high.close()


def test_unclaimed_descriptors_are_closed():
    before = open_files()
    low, high = group(2)
    segment = Segment.create(NBYTES)
    assert low.send_fd(1, 0, segment.fd)
    assert low.send_fd(1, 1, segment.fd)
    assert high.gone() == []  # takes them in
    low.close(), high.close()
    del low, high, segment
    assert open_files() == before


def test_a_peer_that_reads_nothing_does_not_block_the_sender():
    low, high = group(2)
    segment, sent = Segment.create(NBYTES), 0
    while low.send_fd(1, sent, segment.fd):
        sent += 1
    assert sent > 10
    assert all(
        fd is not None and os.close(fd) is None for fd in (high.receive_fd(0, at) for at in range(sent))
    )
    assert low.send_fd(1, sent, segment.fd), "there is room again"
    low.close(), high.close()


def test_leaving_and_ending_are_distinguished():
    first, second, third = group(3)
    second.close()
    third.disconnect()
    assert sorted((peer.rank, left) for peer, left in first.gone()) == [(1, True), (2, False)]
    first.close()


def test_a_goodbye_behind_unclaimed_descriptors_is_received():
    low, high = group(2)
    segment = Segment.create(NBYTES)
    for number in range(20):
        low.send_fd(1, number, segment.fd)
    low.close()
    assert [(peer.rank, left) for peer, left in high.gone()] == [(0, True)]
    high.close()


def test_two_threads_may_read_concurrently():
    """As in messages and collectives: descriptors received by one are available to the other."""
    low, high = group(2)
    segment, over = Segment.create(NBYTES), threading.Event()

    def look():
        while not over.is_set():
            high.gone()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for number in range(2000):
            assert low.send_fd(1, number, segment.fd)
            fd = high.receive_fd(0, number)
            assert fd is not None, number
            os.close(fd)
    finally:
        over.set()
        thread.join()
    low.close(), high.close()


# Processes.


def test_an_end_is_detected_while_a_child_holds_the_socket(tmp_path):
    """A loader's worker, forked from a rank, outlives it: the rank's end counts, not the socket's."""
    path = str(tmp_path / "store")
    reading, writing = os.pipe()
    held, holding = os.pipe()

    def rank_1():
        os.close(holding)
        connect(dist.FileStore(path, 2), 1, 2)
        if os.fork() == 0:
            os.read(held, 1)  # runs until this test has seen its parent exit
        else:
            os.write(writing, b"x")
            time.sleep(0.1)
        os._exit(3)

    pid = start(rank_1)
    mine = connect(dist.FileStore(path, 2), 0, 2)
    assert os.read(reading, 1) == b"x"
    while not mine.gone():
        time.sleep(0.01)
    assert [(peer.rank, left) for peer, left in mine.gone()] == [(1, False)]
    assert mine.exit_status(1) == ExitStatus(3)
    assert ended(pid) == 3
    mine.close()
    for fd in (reading, writing, held, holding):
        os.close(fd)


def test_no_descriptor_left_to_receive_one_is_an_error():
    low, high = group(2)
    segment = Segment.create(NBYTES)

    def work():
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, most))
        with contextlib.suppress(OSError):
            while True:
                os.dup(0)
        low.send_fd(1, 0, segment.fd)
        try:
            high.receive_fd(0, 0)
        except OSError as error:
            return "no descriptor left for memory of rank 0: raise the limit (ulimit -n)" in str(error)
        return False

    assert in_child(work) == 0
    low.close(), high.close()


# Failures to share memory: all ranks raise the same, without waiting.


def test_all_ranks_name_the_one_with_a_problem():
    store = dist.HashStore()
    found = in_threads(
        3,
        lambda rank: connect(
            store, rank, 3, lambda info: replace(info, problem="no futex" if info.rank == 1 else "")
        ),
    )
    assert [str(each) for each in found] == ["rank 1: no futex"] * 3
    assert all(isinstance(each, SharedMemoryUnavailable) for each in found)


def test_all_ranks_report_another_network_namespace():
    before = open_files()
    store = dist.HashStore()
    found = in_threads(
        3,
        lambda rank: connect(
            store, rank, 3, lambda info: replace(info, address="elsewhere") if info.rank == 1 else info
        ),
    )
    assert all(isinstance(each, SharedMemoryUnavailable) for each in found), found
    reason = "rank 2: rank 1 can't be reached by a Unix socket (another network namespace?)"
    assert [str(each) for each in found] == [reason] * 3
    del found
    assert open_files() == before


def test_all_ranks_report_that_memory_is_unavailable():
    before = open_files()
    store = dist.HashStore()
    found = in_threads(3, lambda rank: connect(store, rank, 3, nbytes=2**60 if rank == 0 else NBYTES))
    assert all(isinstance(each, SharedMemoryUnavailable) for each in found), found
    reason = f"rank 0: [Errno 12] no {format_bytes(2**60)} of shared memory: Cannot allocate memory"
    assert [str(each) for each in found] == [reason] * 3
    del found
    assert open_files() == before


def test_ranks_that_do_not_join_are_named():
    store = dist.HashStore()

    def work(rank):
        if rank == 2:
            return None
        return connect(store, rank, 3, timeout=0.5)

    for error in in_threads(3, work)[:2]:
        assert isinstance(error, CollectiveTimeout)
        assert "rank 2 of 3 did not join the group within 0.5 s" in str(error)


@pytest.mark.thorough
def test_a_peer_that_does_not_connect_is_named():
    store = dist.HashStore()

    def work(rank):
        if rank == 0:
            return connect(store, 0, 2, timeout=1.0)
        return exchange_peer_info(store, peer_info(1, PeerListener()), 2, 20.0)

    error = in_threads(2, work)[0]
    assert isinstance(error, CollectiveTimeout)
    assert error.rank == 1


def test_callers_without_the_token_are_refused():
    listener = PeerListener()
    answers = []
    for hello in (b"", b"x" * 5, b"\0" * 20, (1).to_bytes(4, "little") + bytes.fromhex(listener.token)):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(f"\0{listener.address}")
            stranger.sendall(hello)
            stranger.shutdown(socket.SHUT_WR)
            answers.append(listener.accept())
    assert answers[:3] == [None] * 3
    assert answers[3][0] == 1
    answers[3][1].close()
    listener.close()
