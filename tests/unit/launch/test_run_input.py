"""Input of `paceline run`: parsed and refused before anything starts, torch included."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import MissingRanks, UsageError
from paceline.launch.agent.elastic_run import job_key, run_elastic, serve_rendezvous
from paceline.launch.agent.job_spec import JobSpec, check_script
from paceline.launch.agent.rendezvous_address import (
    RendezvousAddress,
    check_port_free,
    is_local,
    parse_rendezvous_address,
    reachable_address,
    wait_for_server,
)
from paceline.launch.process.rank_output import RankLogs, check_log_dir

PC1 = RendezvousAddress("pc1", 29400)


@pytest.mark.parametrize(
    ("text", "host", "port", "shown"),
    [
        ("pc1:4000", "pc1", 4000, "pc1:4000"),
        ("pc1", "pc1", 29400, "pc1:29400"),
        (" node-3.lan:1 ", "node-3.lan", 1, "node-3.lan:1"),
        ("10.0.0.7:65535", "10.0.0.7", 65535, "10.0.0.7:65535"),
        ("[::1]:5", "::1", 5, "[::1]:5"),
        ("[fe80::1%eth0]", "fe80::1%eth0", 29400, "[fe80::1%eth0]:29400"),
    ],
)
def test_addresses_are_read(text, host, port, shown):
    address = parse_rendezvous_address(text)
    assert (address.host, address.port, str(address)) == (host, port, shown)


@pytest.mark.parametrize(
    "text", ["", ":4000", "pc1:", "pc1:x", "tcp://pc1:4000", "pc1:4000/x", "::1", "a b:3"]
)
def test_invalid_addresses_are_refused(text):
    with pytest.raises(UsageError, match="is not a rendezvous address"):
        parse_rendezvous_address(text)


@pytest.mark.parametrize("port", [0, 65536, 99999])
def test_invalid_ports_are_refused(port):
    with pytest.raises(UsageError, match=f"has the invalid port {port}"):
        parse_rendezvous_address(f"pc1:{port}")


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ({"ranks": 0, "min_ranks": 0}, "ranks=0"),
        ({"ranks": -1}, "ranks=-1"),
        ({"hosts": 0}, "hosts=0"),
        ({"min_ranks": 0}, "min_ranks=0, of 2 ranks"),
        ({"min_ranks": 3}, "min_ranks=3, of 2 ranks"),
        ({"hosts": 3, "min_ranks": 7, "address": PC1}, r"min_ranks=7, of 6 ranks \(3 hosts × 2\)"),
        ({"max_restarts": -1}, "max_restarts=-1"),
        ({"hosts": 2}, "2 hosts, but no rendezvous"),
        ({"address": PC1}, "a rendezvous at pc1:29400, but only one host"),
    ],
)
def test_impossible_numbers_are_refused(numbers, text):
    with pytest.raises(UsageError, match=text):
        JobSpec(["train.py"], **{"ranks": 2, "min_ranks": 2} | numbers)


@pytest.mark.parametrize(
    ("ranks", "least", "hosts"), [(2, 6, 3), (2, 5, 3), (2, 4, 2), (2, 3, 2), (2, 1, 1), (8, 9, 2), (1, 2, 2)]
)
def test_the_least_hosts_hold_the_least_ranks(ranks, least, hosts):
    assert JobSpec(["train.py"], ranks, least, hosts=3, address=PC1).min_hosts == hosts


def test_missing_programs_are_refused(tmp_path):
    with pytest.raises(UsageError, match="no program"):
        check_script([])
    with pytest.raises(UsageError, match=r"no such script: .*absent\.py"):
        check_script([str(tmp_path / "absent.py")])
    with pytest.raises(UsageError, match="no such script"):
        run_elastic([str(tmp_path)], 2)
    check_script(["-m", "anything"])


def test_a_log_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "logs"):
        with pytest.raises(UsageError, match="can't be written"):
            check_log_dir(folder)
    check_log_dir(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_logs_have_a_place_for_each_start(tmp_path):
    with RankLogs(tmp_path / "kept") as logs:
        assert logs.path(0, 3) is None
        assert logs.path(1, 0) == tmp_path / "kept" / "rank1.log"
        assert logs.path(2, 3) == tmp_path / "kept" / "restart3" / "rank2.log"
    assert (tmp_path / "kept" / "restart3").is_dir()
    with RankLogs(None) as logs:
        private = logs.path(1, 0)
        assert isinstance(private, Path)
        assert private.parent.is_dir()
    assert not private.parent.exists()


def test_own_addresses_are_known(monkeypatch):
    assert is_local(RendezvousAddress("127.0.0.1", 1))
    assert is_local(RendezvousAddress("localhost", 1))
    assert not is_local(RendezvousAddress("192.0.2.1", 1))  # reserved for documentation
    with pytest.raises(UsageError, match="does not resolve"):
        is_local(RendezvousAddress("no-such-host.invalid", 1))
    assert reachable_address(RendezvousAddress("127.0.0.1", 9), serving=False) == "127.0.0.1"
    # Others know it by this name.
    assert reachable_address(RendezvousAddress("localhost", 9), serving=True) == "localhost"


def test_a_taken_port_is_refused_before_serving():
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        address = RendezvousAddress("127.0.0.1", taken.getsockname()[1])
        for refuse in (check_port_free, serve_rendezvous):
            with pytest.raises(UsageError, match=f"can't serve at {address}: the port is taken"):
                refuse(address)
    check_port_free(address)
    with pytest.raises(UsageError, match="is not an address of this machine"):
        check_port_free(RendezvousAddress("192.0.2.1", 29400))


def test_a_rendezvous_without_server_times_out():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = RendezvousAddress("127.0.0.1", free.getsockname()[1])
        with pytest.raises(MissingRanks, match=f"no rendezvous at {address} within 0.1 s") as caught:
            wait_for_server(address, 0.1, print)
        assert "--serve" in caught.value.remedy
        free.listen()
        wait_for_server(address, 5.0, print)


def test_a_host_alone_draws_a_key_for_each_job(monkeypatch):
    for name in ("PACELINE_JOB_KEY", "PACELINE_JOB_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    drawn = job_key(several=False, insecure=False)
    assert drawn != job_key(several=False, insecure=False)
    assert job_key(several=True, insecure=True) is None
    monkeypatch.setenv("PACELINE_JOB_KEY", drawn.secret.hex())
    assert job_key(several=True, insecure=False) == job_key(several=True, insecure=True) == drawn


def test_refusing_needs_no_torch():
    code = (
        "import sys\n"
        "from paceline.errors import UsageError\n"
        "from paceline.launch.agent.elastic_run import run_elastic\n"
        "try: run_elastic(['absent.py'], 2)\n"
        "except UsageError: print('torch' in sys.modules)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "False\n", ended.stderr


def test_faults_that_can_not_be_read_are_refused_before_anything_is_started(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_FAULTS", "fail_at(1)")
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('it was started')")
    with pytest.raises(UsageError, match=r"PACELINE_FAULTS='fail_at\(1\)'"):
        run_elastic([str(script)], 1)
