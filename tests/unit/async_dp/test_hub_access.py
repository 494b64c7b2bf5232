"""A worker finds address and key of its hub: which of the given ones counts, and what an error names."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

from paceline._core.job_key import JobKey
from paceline.async_dp.protocol.hub_record import HubRecord
from paceline.async_dp.worker import hub_access
from paceline.async_dp.worker.hub_access import HubAccess
from paceline.errors import UsageError
from paceline.transport.zmq.curve_keys import WorkerKeys, make_keys

HERE, ADDRESS = socket.gethostname(), "tcp://127.0.0.1:7077"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path / "hub" / "keys")
    return tmp_path / "hub"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return make_keys(tmp_path / "others", "anna")


def name(access: HubAccess) -> str:
    return "" if access.keys is None else access.keys.name


def test_the_folder_of_a_hub_has_its_address_and_key(folder: Path) -> None:
    with HubRecord("tcp://*:7077", HERE, "keys/worker.key").kept_in(folder):
        access = HubAccess.find(folder, None, False, {})
        assert access == HubAccess(ADDRESS, WorkerKeys.read(folder / "keys" / "worker.key"))
        assert HubAccess.find(str(folder), None, False, {}) == access
        assert access.parsed.port == 7077


def test_what_is_given_for_this_worker_comes_first(folder: Path, own: Path) -> None:
    job = JobKey.generate().environment()
    with HubRecord(ADDRESS, HERE, "keys/worker.key").kept_in(folder):
        assert name(HubAccess.find(folder, own, True, job)) == "anna"
        assert name(HubAccess.find(folder, None, True, job)) == ""
        assert name(HubAccess.find(folder, None, False, job)) == "worker"
    with HubRecord(ADDRESS, HERE).kept_in(folder):
        assert name(HubAccess.find(folder, None, False, job)) == "job key"
    assert name(HubAccess.find(ADDRESS, own, False, job)) == "anna"
    assert name(HubAccess.find(ADDRESS, None, False, job)) == "job key"
    assert HubAccess.find("ipc://hub", None, False, {}) == HubAccess("ipc://hub", None)


def test_an_address_without_a_key_is_refused_with_all_ways() -> None:
    with pytest.raises(
        UsageError, match=rf"no key for the hub at {ADDRESS}\n.*hub='runs/hub'.*key=.*insecure=True"
    ):
        HubAccess.find(ADDRESS, None, False, {})


def test_a_job_key_that_is_malformed_is_an_error() -> None:
    with pytest.raises(UsageError, match="PACELINE_JOB_KEY is not a job key"):
        HubAccess.find(ADDRESS, None, False, {"PACELINE_JOB_KEY": "secret"})


def test_a_hub_that_starts_is_awaited(folder: Path) -> None:
    def start() -> None:
        time.sleep(0.2)
        stop.enter_context(HubRecord(ADDRESS, HERE, "keys/worker.key").kept_in(folder))

    from contextlib import ExitStack

    with ExitStack() as stop:
        starting = threading.Thread(target=start)
        starting.start()
        assert HubAccess.find(folder, None, False, {}).address == ADDRESS
        starting.join()


def test_a_folder_without_a_hub_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_access, "_START_SECONDS", 0.0)
    with pytest.raises(UsageError, match=r"no hub runs in .*absent.*\n.*paceline hub serve --out"):
        HubAccess.find(tmp_path / "absent", None, False, {})


@pytest.mark.parametrize("content", ["", "[]", '{"host": "pc1"}'])
def test_a_damaged_record_is_named(folder: Path, content: str) -> None:
    (folder / "address.json").write_text(content)
    with pytest.raises(UsageError, match=r"address\.json"):
        HubAccess.find(folder, None, False, {})


@pytest.mark.parametrize(
    ("bound", "from_there"),
    [
        ("tcp://*:7077", "tcp://pc1:7077"),
        ("tcp://[::]:7077", "tcp://pc1:7077"),
        ("tcp://192.168.1.5:7077", "tcp://192.168.1.5:7077"),
        (ADDRESS, ""),
        ("ipc://hub", ""),
    ],
)
def test_another_machine_that_shares_the_folder_finds_the_hub(bound: str, from_there: str) -> None:
    record = HubRecord(bound, "pc1")
    if from_there:
        assert record.address_from("pc2") == from_there
    else:
        with pytest.raises(UsageError, match=r"runs on pc1 .* from there only"):
            record.address_from("pc2")


def test_a_running_hub_s_record_ends_with_it(folder: Path) -> None:
    with HubRecord(ADDRESS, HERE).kept_in(folder):
        assert HubRecord.read(folder) == HubRecord(ADDRESS, HERE)
    assert HubRecord.read(folder) is None
