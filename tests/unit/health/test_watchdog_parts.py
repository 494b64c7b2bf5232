"""Parts of the watchdog: processes, stacks, symptoms, stragglers, error texts, freeing a thread, a world of one."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline.errors import BackwardFailed, MismatchError, PeerFailed, PeerLost, SyncError, UsageError
from paceline.health import abort_collectives, thread_probe
from paceline.health.attribution import Attribution, RankObservation
from paceline.health.failure_text import peer_failed
from paceline.health.heartbeat import FailureNotice, Heartbeat
from paceline.health.peer_endpoint import LOOPBACK, PeerEndpoint, watchdog_address
from paceline.health.straggler import StepTimes, find_slowest
from paceline.health.watchdog import is_symptom
from paceline.world.process_probe import LocalProcess, host_key, process_start_ticks


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


# ------------------------------------------------------------------ processes of this host


def test_a_process_runs_stops_and_exits():
    child = subprocess.Popen(["sleep", "1000"])
    process = LocalProcess(child.pid, process_start_ticks(child.pid))
    assert process.state() == "runs"
    child.send_signal(signal.SIGSTOP)
    until(lambda: process.state() == "stopped")
    child.send_signal(signal.SIGCONT)
    until(lambda: process.state() == "runs")
    child.kill()
    until(lambda: process.state() == "gone")
    assert process.exit_code() == -signal.SIGKILL
    child.wait()
    assert process.state() == "gone"
    process.close()


def test_without_a_pidfd_the_start_time_identifies_a_process():
    child = subprocess.Popen(["sleep", "1000"])
    process = LocalProcess(child.pid, process_start_ticks(child.pid) - 1)
    process.close()
    assert process.state() == "gone"
    mine = LocalProcess(os.getpid(), process_start_ticks(os.getpid()))
    mine.close()
    assert mine.state() == "runs"
    child.kill()
    child.wait()
    assert process_start_ticks(child.pid) == 0


def test_processes_of_a_host_share_its_key():
    line = "from paceline.world.process_probe import host_key; print(host_key())"
    output = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True).stdout
    assert output.strip() == host_key()


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_the_address_is_that_of_the_interface_the_group_uses(variable):
    assert watchdog_address({variable: "lo"}) == LOOPBACK


def test_without_a_network_the_address_is_the_loopback(monkeypatch):
    monkeypatch.setattr("paceline.health.peer_endpoint.host_address", lambda: "127.0.1.1")
    assert watchdog_address({}) == watchdog_address({"MASTER_ADDR": "localhost"}) == LOOPBACK
    monkeypatch.setattr("paceline.health.peer_endpoint.host_address", lambda: "10.1.2.3")
    assert watchdog_address({"GLOO_SOCKET_IFNAME": "none such"}) == "10.1.2.3"


# ------------------------------------------------------------------ where a thread stands


def wait_in_thread(release):
    release.wait()


@pytest.fixture
def waiting_thread():
    release = threading.Event()
    thread = threading.Thread(target=wait_in_thread, args=(release,))
    thread.start()
    until(lambda: "in wait" in thread_probe.format_stack(thread.ident).splitlines()[-2])
    yield thread
    release.set()
    thread.join()


def test_a_stack_names_functions_and_its_fingerprint_is_stable(waiting_thread):
    assert "in wait_in_thread" in thread_probe.format_stack(waiting_thread.ident)
    numbers = {
        thread_probe.stack_fingerprint(thread_probe.current_frame(waiting_thread.ident)) for _ in range(20)
    }
    assert len(numbers) == 1
    assert numbers != {thread_probe.stack_fingerprint(thread_probe.current_frame(threading.get_ident()))}
    assert not thread_probe.in_collective(thread_probe.current_frame(waiting_thread.ident))
    assert thread_probe.format_stack(10**9) == ""
    assert thread_probe.stack_fingerprint(None) == 0


def test_a_thread_in_a_collective_is_recognised(tmp_path):
    found = []
    code = compile("def call(look): look()", f"{tmp_path}/torch/distributed/c10d.py", "exec")
    scope = {}
    exec(code, scope)
    scope["call"](lambda: found.append(thread_probe.in_collective(sys._getframe())))
    assert found == [True]


def test_a_faulthandler_dump_is_parsed(waiting_thread, tmp_path):
    with (tmp_path / "dump").open("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        dump = file.read()
    text = thread_probe.stack_in_dump(dump, waiting_thread.ident)
    lines = text.splitlines()
    assert "in wait_in_thread" in text
    assert "_bootstrap" in lines[0]
    assert "wait" in lines[-1]
    assert thread_probe.stack_in_dump(dump, 12345) == thread_probe.stack_in_dump("", 1) == ""


def test_exceptions_are_formatted_with_causes_even_if_their_str_raises():
    try:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error
    except ValueError as error:
        text = thread_probe.format_exception(error, error.__traceback__)
    assert "KeyError: 'first'" in text
    assert text.endswith("ValueError: second")

    class BrokenStr(Exception):
        def __str__(self):
            raise RuntimeError

    assert "BrokenStr" in thread_probe.format_exception(BrokenStr(), None)


# ------------------------------------------------------------------ symptoms


def caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            RuntimeError("[…/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:60310"),
            True,
        ),
        (RuntimeError("Read error [10.0.0.1]:9092: Connection reset by peer"), True),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), True),
        (RuntimeError("NCCL error in: …, remote process exited or there was a network error"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] can't allocate memory"), False),
        (MemoryError(), False),
        (KeyboardInterrupt(), False),
        (ConnectionResetError("Connection reset by peer"), True),
        (SyncError("another rank ended or stopped answering during this step (Broken pipe)"), True),
        (SyncError("ranks [0] called a and ranks [1] called b"), False),
        (PeerLost("rank 1 ended"), True),
        (BackwardFailed("backward raised an exception on rank 1"), True),
        (MismatchError("this rank calls a, rank 1 calls b"), False),
        (dist.DistNetworkError("The client socket has failed"), True),
        (caused(ValueError("could not save"), PeerLost("rank 1 ended")), True),
        (caused(PeerLost("rank 1 ended"), ValueError("x")), True),
        (ValueError("x"), False),
        (None, False),
    ],
)
def test_symptoms_of_failures_on_other_ranks(error, expected):
    assert is_symptom(error) is expected


def test_an_error_that_is_its_own_cause_ends_the_search():
    error, other = ValueError("a"), ValueError("b")
    error.__cause__, other.__cause__ = other, error
    assert not is_symptom(error)


# ------------------------------------------------------------------ slow ranks


def test_the_slowest_rank_is_found_by_median_step_times():
    times = StepTimes()
    for step in range(1, 20):
        for rank, seconds in enumerate((0.1, 0.13, 0.1)):
            outlier = 50.0 if step >= 10 and rank == 0 else 0.0  # one step with a checkpoint
            times.add(rank, step, step * seconds + outlier)
    rank, factor = find_slowest(times.medians())
    assert (rank, factor) == (1, pytest.approx(1.3))


def test_steps_between_two_samples_count_by_their_mean():
    times = StepTimes()
    for step in (1, 5, 9, 13, 17):
        times.add(0, step, step * 0.2)
        times.add(0, step, step * 0.2)  # the same row again
    assert times.medians() == {0: pytest.approx(0.2)}


@pytest.mark.parametrize("seconds", [{}, {0: 1.0}, {0: 0.0, 1: 0.0}])
def test_too_few_ranks_have_no_slowest(seconds):
    assert find_slowest(seconds) is None


@given(st.dictionaries(st.integers(0, 9), st.floats(0.01, 10), min_size=2))
def test_the_slowest_is_at_least_as_slow_as_the_others(seconds):
    rank, factor = find_slowest(seconds)
    assert seconds[rank] == max(seconds.values())
    assert factor >= 1


# ------------------------------------------------------------------ error texts

ENDPOINTS = [
    PeerEndpoint(
        rank=rank,
        host=f"pc{rank // 2}",
        host_key=f"key{rank // 2}",
        pid=100 + rank,
        start_ticks=0,
        thread_ident=0,
        address="",
        port=0,
        token="",
    )
    for rank in range(4)
]
STATE = Heartbeat(1, 1, step=20, phase="backward", bucket=3)


@pytest.mark.parametrize(
    ("failure", "notices", "text"),
    [
        (
            Attribution("raised", 1),
            [FailureNotice("raised", 1, 1, name="ValueError: no", text="a\nb", step=20, phase="forward")],
            "[rank 1, step 20] rank 1 on host pc0 (process 101, in forward) raised ValueError: no\n  | a\n  | b",
        ),
        (
            Attribution("gone", 1, others=(2, 3)),
            [FailureNotice("gone", 1, 0, code=-9)],
            "(process 101, in backward, bucket 3) was ended by SIGKILL (the kernel does this when memory runs out); "
            "likewise ranks 2–3",
        ),
        (Attribution("gone", 1), [FailureNotice("gone", 1, 0, code=3)], "ended with exit code 3"),
        (Attribution("gone", 1), [], "ended; its exit code is unknown"),
        (
            Attribution("stopped", 1, 3.0, waiting=0),
            [],
            "has been stopped for 3 s, while rank 0 waits for it",
        ),
        (
            Attribution("unreachable", 1, 12.3),
            [],
            "has been out of reach for 12.3 s: its host is down or cut off",
        ),
        (
            Attribution("held", 1, 90),
            [FailureNotice("stack", 1, 1, text="old"), FailureNotice("stack", 1, 1, text="new")],
            "| new",
        ),
        (Attribution("stalled", 1, 61), [], "has stood still for 1 min 1 s, while others wait for it"),
        (
            Attribution("finished", 1, 61, waiting=2),
            [FailureNotice("done", 1, 1, step=9, phase="outside")],
            "[rank 1, step 9] rank 1 on host pc0 (process 101, in its own code) has left its loop; rank 2 waited "
            "1 min 1 s for it",
        ),
        (
            Attribution("elsewhere", 1, 61, waiting=2),
            [],
            "has waited 1 min 1 s for something else than rank 2",
        ),
        (
            Attribution("cut off", None, 12.0, (0, 1)),
            [],
            "this host (pc0) has received nothing from any of the 1 others for 12 s",
        ),
    ],
)
def test_error_text_of_each_kind_of_failure(failure, notices, text):
    observations = [
        RankObservation(endpoint.rank, endpoint.host, STATE if endpoint.rank == 1 else None)
        for endpoint in ENDPOINTS
    ]
    error = peer_failed(failure, ENDPOINTS, observations, notices)
    assert text in str(error)
    assert error.kind == failure.kind
    assert error.host == "pc0"
    assert "→" in str(error)


def test_a_step_that_other_ranks_reached_counts_for_a_silent_rank():
    heartbeats = [Heartbeat(0, 1, step=22, phase="exchange", bucket=0, waiting=True), STATE]
    observations = [RankObservation(0, "pc0", heartbeats[0]), RankObservation(1, "pc0", heartbeats[1])]
    error = peer_failed(Attribution("gone", 1), ENDPOINTS[:2], observations, [])
    assert (error.step, error.phase, error.bucket) == (22, "", -1)


# ------------------------------------------------------------------ freeing


def test_an_error_is_raised_in_a_thread_that_runs_python():
    caught, ready = [], threading.Event()

    def work():
        ready.set()
        try:
            while True:
                time.sleep(0.001)
        except PeerFailed as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    abort_collectives.raise_in_thread(
        thread.ident, PeerFailed("rank 1 is gone", rank=1, kind="gone", host="pc1")
    )
    thread.join(20)
    assert (caught[0].rank, caught[0].kind, caught[0].host) == (1, "gone", "pc1")
    assert str(caught[0]) == "[rank 1] rank 1 is gone"
    assert type(caught[0]).__name__ == "PeerFailed"


@pytest.mark.thorough
def test_a_process_that_can_not_be_freed_prints_the_reason_and_ends():
    line = (
        "from paceline.health.abort_collectives import end_process; from paceline.errors import PeerFailed\n"
    )
    line += "end_process(PeerFailed('rank 1 is gone', rank=1))"
    ended = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, timeout=120)
    assert ended.returncode == abort_collectives.EXIT_CODE
    assert "paceline.errors.PeerFailed: [rank 1] rank 1 is gone" in ended.stderr
    assert "most recent call first" in ended.stderr


class EchoServer:
    """An asyncio server and a connection to it, in a thread of this process."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.reader, self.writer = self.run(self.connect())

    async def connect(self):
        async def echo(reader, writer):
            while line := await reader.readline():
                writer.write(line)
            writer.close()

        self.server = await asyncio.start_server(echo, LOOPBACK, 0)
        return await asyncio.open_connection(*self.server.sockets[0].getsockname())

    async def exchange(self):
        self.writer.write(b"still there\n")
        return await self.reader.readline()

    async def end(self):
        self.writer.close()
        self.server.close()
        await asyncio.sleep(0.05)  # the server's side of the connection closes too

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(20)

    def close(self):
        self.run(self.end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def echo_server():
    server = EchoServer()
    yield server
    server.close()


@pytest.fixture
def gloo_pair():
    """Two ranks of a gloo group in this process."""
    store, groups = dist.HashStore(), {}

    def make(rank):
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, datetime.timedelta(seconds=60))

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    yield groups
    groups.clear()


def test_an_abort_ends_connections_of_gloo_and_no_others(gloo_pair, echo_server):
    pending = gloo_pair[0].recv([torch.zeros(1)], 1, 0)
    assert echo_server.run(echo_server.exchange()) == b"still there\n"
    abort_collectives.abort_groups(PeerFailed("rank 1 is gone", rank=1))
    with pytest.raises(RuntimeError, match=r"(?i)closed|reset"):
        pending.wait()
    assert echo_server.run(echo_server.exchange()) == b"still there\n"


def test_an_abort_ends_no_connection_that_got_the_descriptor_of_one_of_gloo(gloo_pair, monkeypatch):
    """Between the look at epoll's descriptors and the shutdown, gloo closes one and another thread opens a socket."""
    with contextlib.ExitStack() as stack:
        assert len([stack.enter_context(each) for each in abort_collectives.gloo_sockets()]) == 2
    one, other = (stack.enter_context(each) for each in socket.socketpair())
    duplicate = os.dup
    monkeypatch.setattr(os, "dup", lambda fd: duplicate(one.fileno()))
    abort_collectives.abort_groups(PeerFailed("rank 1 is gone", rank=1))
    monkeypatch.undo()
    one.send(b"open")
    assert other.recv(4) == b"open"
    stack.close()


# ------------------------------------------------------------------ a world of one


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stall": 0}, "stall=0 is not a valid time"),
        ({"lost": -1.0}, "lost=-1.0"),
        ({"warn": float("inf")}, "warn=inf"),
        ({"grace": "long"}, "grace='long'"),
        ({"on_stall": "tel"}, "did you mean 'tell'"),
    ],
)
def test_invalid_arguments_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        paceline.Watchdog(**options)


def test_in_a_world_of_one_nothing_is_watched():
    threads, hooks = threading.active_count(), (sys.excepthook, threading.excepthook)
    watchdog = paceline.Watchdog()
    assert watchdog.slowest() is None
    assert (threading.active_count(), sys.excepthook, threading.excepthook) == (threads, *hooks)
    with pytest.raises(ZeroDivisionError), watchdog:
        _ = 1 / 0
    watchdog.close()
    watchdog.close()
