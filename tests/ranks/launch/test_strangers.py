"""Who lacks the job's key gets into no run: strangers on the network, other users of the machine, floods of callers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

import paceline
from paceline._core.job_key import JobKey
from paceline.errors import WorldError
from paceline.launch.agent.job_messages import JOB_SERVICE, EndJob, JoinWorld
from paceline.launch.agent.job_server import serve_jobs
from paceline.launch.agent.job_spec import JobSpec
from paceline.launch.agent.remote_coordinator import RemoteCoordinator
from paceline.launch.agent.rendezvous_address import RendezvousAddress, free_port
from paceline.launch.agent.restart_policy import HostMember, JobOutcome
from paceline.world.store.key_value_state import KEY_VALUE_SERVICE, GetKeys
from paceline.world.store.request_client import Connection, ConnectionLost
from paceline.world.store.request_server import SERVER_KEY

SOURCE = str(Path(paceline.__file__).parents[1])
KEY = JobKey.generate()
NOBODY = 65534

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(15) + b"\x00" + bytes(31)
HALF_HANDSHAKES = [b"", b"\xff", GREETING[:11], GREETING, GREETING + b"\x04\xc8\x05HELLO" + bytes(194)]
GARBAGE = [os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 512, b"\x09\x3c\x85\xf7\xce" * 20]

# Ranks meet, reduce once, report their process, and stay until a file appears.
STAYS = """
import json, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import paceline

folder, backend = Path(sys.argv[1]), sys.argv[2]
if backend == "plain":
    dist.init_process_group("gloo")
else:
    paceline.init(backend, timeout=60.0)
total = torch.ones(1)
dist.all_reduce(total)
note = {"pid": os.getpid(), "store": os.environ["PACELINE_STORE"], "total": total.item()}
(folder / f"part{dist.get_rank()}").write_text(json.dumps(note))
(folder / f"part{dist.get_rank()}").rename(folder / f"rank{dist.get_rank()}")
while not (folder / "enough").exists():
    time.sleep(0.02)
dist.all_reduce(total)
dist.destroy_process_group()
"""


@pytest.fixture
def served():
    """A server of jobs on this machine, with a key."""
    server = serve_jobs(RendezvousAddress("127.0.0.1", free_port()), KEY)
    yield server
    server.close()


def coordinator(port, host, hosts=2):
    address = RendezvousAddress("127.0.0.1", port)
    job = JobSpec(["train.py"], 1, hosts, hosts=hosts, address=address)
    return RemoteCoordinator(job, f"m{host}", address, KEY)


def two_hosts_begin(port):
    """Let two hosts register, join and begin a world; return their coordinators."""
    both = [coordinator(port, host) for host in range(2)]
    for one in both:
        one.register()
    me = HostMember("host0", "m0", 1)
    both[0]._connection.send(JOB_SERVICE, joining(both[0], me))
    plan = both[1].join(HostMember("host1", "m1", 1), "127.0.0.1", 2)
    assert [one.host for one in plan.hosts] == ["host0", "host1"]
    return both


def joining(one, me):
    return JoinWorld(*one._head(), me, "127.0.0.1", 1)


def call(port):
    return socket.create_connection(("127.0.0.1", port), timeout=10)


@contextlib.contextmanager
def callers(port, number, words=(b"",)):
    """Hold connections open that have said some bytes, and never go on."""
    with contextlib.ExitStack() as stack:
        for index in range(number):
            with contextlib.suppress(OSError):  # dropped while it speaks
                stack.enter_context(call(port)).sendall(words[index % len(words)])
        yield


def stranger(port, kind, service, request):
    """Send a request without the key, and return what is answered within a while: nothing."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.setsockopt(zmq.LINGER, 0)
        if kind != "no key":
            public, secret = zmq.curve_keypair()
            server = JobKey.generate().curve_pair(SERVER_KEY)[0]
            if (
                kind == "another client key"
            ):  # it has the server's public key, but not the client's secret one
                server = KEY.curve_pair(SERVER_KEY)[0]
            dealer.curve_serverkey, dealer.curve_publickey, dealer.curve_secretkey = server, public, secret
        dealer.connect(f"tcp://127.0.0.1:{port}")
        with contextlib.suppress(zmq.Again):  # refused already
            dealer.send_multipart([service, msgspec.json.encode(request)], zmq.NOBLOCK)
        return dealer.recv_multipart() if dealer.poll(400) else None
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize("kind", ["no key", "another key", "another client key"])
def test_a_stranger_can_neither_read_nor_end_a_job(served, kind):
    both = two_hosts_begin(served.port)
    end = EndJob(1, "run", "m0", JobOutcome(1, "over"))
    assert stranger(served.port, kind, JOB_SERVICE, end) is None
    assert stranger(served.port, kind, KEY_VALUE_SERVICE, GetKeys(1, "run/0", [], 0.0)) is None
    assert both[0].view().outcome is None
    assert [one.report_finished(0) for one in both] == [1, 2]
    for one in both:
        one.close()


def test_a_host_with_another_key_is_refused_and_says_so(served, monkeypatch):
    monkeypatch.setattr(Connection.__init__, "__defaults__", (1.0,))
    address = RendezvousAddress("127.0.0.1", served.port)
    job = JobSpec(["train.py"], 1, 2, hosts=2, address=address)
    with pytest.raises(WorldError, match="another job key") as caught:
        RemoteCoordinator(job, "m0", address, JobKey.generate())
    assert "PACELINE_JOB_KEY_FILE" in caught.value.remedy


@pytest.mark.parametrize(
    ("number", "words"),
    [(500, (b"",)), (100, HALF_HANDSHAKES), (100, GARBAGE), (1000, (b"", GREETING))],
    ids=["500 idle", "half handshakes", "garbage", "1000 at once"],
)
def test_hosts_and_ranks_join_while_strangers_call(served, number, words):
    from paceline.world.store.authenticated_store import AuthenticatedStore

    with callers(served.port, number, words):
        both = two_hosts_begin(served.port)
        store = AuthenticatedStore("127.0.0.1", served.port, KEY, "run/0")
        store.set("key", "value")
        assert store.get("key") == b"value"
        assert len(served._limit) <= 512
        assert both[0].view().outcome is None
    for one in both:
        one.close()


@pytest.mark.thorough
def test_connections_that_never_authenticate_are_closed(served):
    with call(served.port) as idle:
        idle.sendall(GREETING)
        idle.settimeout(20)
        while idle.recv(4096):  # the server's own greeting; then its end
            pass


def test_without_a_key_nothing_is_required():
    server = serve_jobs(RendezvousAddress("127.0.0.1", free_port()), None)
    try:
        assert stranger(server.port, "no key", KEY_VALUE_SERVICE, GetKeys(1, "run/0", [], 0.0)) is not None
        connection = Connection("127.0.0.1", server.port, KEY, 1.0)
        connection.send(KEY_VALUE_SERVICE, GetKeys(1, "run/0", [], 0.0))
        with pytest.raises(ConnectionLost):
            connection.receive(10.0)
    finally:
        server.close()


# ------------------------------------------------------------------------ runs


def listeners(processes):
    """Return the addresses at which processes listen by TCP or UDP."""
    inodes = set()
    for process in processes:
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                name = os.readlink(link)
                if name.startswith("socket:["):
                    inodes.add(name[8:-1])
    found = set()
    for table, listening in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == listening and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return found


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


@contextlib.contextmanager
def running(folder, words, ranks, env=None, commands=1):
    """Run commands until the block ends; yield their processes and what the ranks noted."""
    variables = os.environ | {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"} | (env or {})
    started = [
        subprocess.Popen([sys.executable, "-m", "paceline", *words], env=variables, process_group=0)
        for _ in range(commands)
    ]
    try:
        notes = [folder / f"rank{rank}" for rank in range(ranks)]
        deadline = time.monotonic() + 90
        while not all(note.exists() for note in notes):
            assert time.monotonic() < deadline
            assert all(one.poll() is None for one in started)
            time.sleep(0.05)
        yield [psutil.Process(one.pid) for one in started], [json.loads(one.read_text()) for one in notes]
        (folder / "enough").write_text("")
        assert [one.wait(60) for one in started] == [0] * commands
    finally:
        for one in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()


def script(folder):
    path = folder / "stays.py"
    path.write_text(STAYS)
    return str(path)


def family(processes):
    return [*processes, *(child for one in processes for child in one.children(recursive=True))]


def as_another_user(function):
    """Run a function in a child process of another user, and return the name of the error that it raised."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        name = "none"
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            function()
        except BaseException as error:  # noqa: BLE001 — its name is the result
            name = type(error).__name__
        os.write(writer, name.encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        name = pipe.read()
    os.waitpid(child, 0)
    return name


@pytest.mark.parametrize(
    "backend", ["plain", *(pytest.param(one, marks=pytest.mark.thorough) for one in ("gloo", "paceline"))]
)
def test_a_single_host_listens_on_loopback_alone_and_to_nobody_else(tmp_path, backend):
    words = ["run", "--nproc-per-node", "2", script(tmp_path), str(tmp_path), backend]
    with running(tmp_path, words, 2) as (commands, notes):
        assert [note["total"] for note in notes] == [2.0, 2.0]
        assert listeners(commands) == set(), "the command itself listens nowhere"
        assert listeners(family(commands)) <= LOOPBACK
        store = Path(notes[0]["store"].removeprefix("file://").partition("?")[0])
        assert store.is_file()
        if os.geteuid() == 0:
            assert as_another_user(lambda: store.read_bytes()) == "PermissionError"
            assert as_another_user(lambda: store.write_bytes(b"")) == "PermissionError"
            environ = Path(f"/proc/{notes[0]['pid']}/environ")
            assert as_another_user(lambda: environ.read_bytes()) == "PermissionError"
        key = environment_of(notes[0]["pid"])["PACELINE_JOB_KEY"]
        lines = [line for one in family(commands) for line in one.cmdline()]
        assert not any(key in line for line in lines)


def environment_of(pid):
    lines = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(line.split("=", 1) for line in lines if "=" in line)


@pytest.mark.thorough
def test_a_training_listens_on_loopback_alone_and_keeps_its_key_out_of_its_folder(tmp_path):
    out = tmp_path / "run"
    words = ["train", "--nproc-per-node", "2", "--steps", "100000", "--out", str(out)]
    variables = os.environ | {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    command = subprocess.Popen([sys.executable, "-m", "paceline", *words], env=variables, process_group=0)
    try:
        log, deadline = out / "steps.jsonl", time.monotonic() + 120
        while not any(path.stat().st_size for path in out.rglob("*.jsonl")) or not log.parent.exists():
            assert time.monotonic() < deadline
            assert command.poll() is None
            time.sleep(0.1)
        ranks = psutil.Process(command.pid).children(recursive=True)
        assert listeners([psutil.Process(command.pid), *ranks]) <= LOOPBACK
        [key] = {environment_of(one.pid)["PACELINE_JOB_KEY"] for one in ranks[:1]}
    finally:
        os.killpg(command.pid, signal.SIGTERM)
        command.wait(60)
    for path in out.rglob("*"):
        assert path.is_dir() or key.encode() not in path.read_bytes()


@pytest.mark.thorough
def test_strangers_hardly_cost_a_run_of_several_hosts_anything(tmp_path):
    """CPU time of the commands and ranks in alternating seconds, without and with 500 callers that reconnect."""
    port = free_port()
    key = tmp_path / "key"
    KEY.write(key)
    words = [
        "run",
        "--nnodes",
        "2",
        "--rendezvous",
        f"127.0.0.1:{port}",
        script(tmp_path),
        str(tmp_path),
        "gloo",
    ]
    with running(tmp_path, words, 2, {"PACELINE_JOB_KEY_FILE": str(key)}, commands=2) as (commands, _):
        processes = family(commands)

        def used():
            times = [one.cpu_times() for one in processes]
            return sum(one.user + one.system for one in times)

        def cost(seconds=1.0):
            start, before = time.monotonic(), used()
            time.sleep(seconds)
            return (used() - before) / (time.monotonic() - start)

        quiet, crowded = [], []
        for _ in range(5):
            quiet.append(cost())
            with callers(port, 500, HALF_HANDSHAKES):
                crowded.append(cost())
    assert (
        statistics.median(crowded) - statistics.median(quiet) < 0.05 * 2
    )  # of the two cores that the ranks may use
