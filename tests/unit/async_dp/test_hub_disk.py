"""A hub with little room: its journal is bounded in bytes, a full disk pauses it, a model too large is refused."""

from __future__ import annotations

import logging

import pytest
import torch

from forked_child import in_child
from hub_driver import LAYOUT, NUMEL, ONES, PACKING, HubDriver, kinds
from journal_folders import skip_fsync
from paceline.async_dp.hub import admission
from paceline.async_dp.hub.hub_settings import HubRules, HubShard
from paceline.async_dp.protocol.parameter_layout import MAX_FRAGMENT_NUMEL, ParameterLayout
from paceline.async_dp.wal import hub_journal as journal_module
from paceline.async_dp.wal.hub_journal import HubJournal
from paceline.testing import fault_injection

NBYTES = (1 << 30) + 1

quick = pytest.fixture(autouse=True)(skip_fsync)


@pytest.fixture(autouse=True)
def disarmed():
    yield
    fault_injection.disarm()


# ------------------------------------------------------------------ size of the journal


def test_the_journal_is_bounded_by_the_size_of_a_snapshot(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "_MIN_JOURNAL_NBYTES", 8 << 10)
    with HubJournal.open(tmp_path, resume=False) as journal:
        driver = HubDriver(HubRules(snapshot_every=500), journal)
        driver.join(1)
        for round in range(200):
            driver.update(1, round, ONES)
            sizes = [path.stat().st_size for path in tmp_path.glob("journal-*.log")]
            assert len(sizes) <= 2
            assert max(sizes) < 9 << 10
        before, driver.theta[:] = driver.theta.clone(), 0
    with HubJournal.open(tmp_path, resume=True) as journal:
        driver = HubDriver(HubRules(snapshot_every=500), journal)
        assert driver.hub.updates == 200
        assert torch.equal(driver.theta, before)


def test_the_bound_grows_with_the_model(tmp_path):
    with HubJournal.open(tmp_path, resume=False) as journal:
        journal.reserve(1 << 30)
        assert journal.max_journal_nbytes == 4 << 30
        journal.reserve(1000)
        assert journal.max_journal_nbytes == 256 << 20


@pytest.mark.parametrize(("snapshot_nbytes", "level"), [(1000, logging.INFO), (1 << 60, logging.WARNING)])
def test_the_room_that_the_folder_may_need_is_logged(tmp_path, caplog, snapshot_nbytes, level):
    caplog.set_level(logging.INFO)
    with HubJournal.open(tmp_path, resume=False) as journal:
        journal.reserve(snapshot_nbytes)
    (record,) = caplog.records
    assert record.levelno == level
    assert f"{str(tmp_path)!r} may need up to " in record.message
    assert " are free" in record.message


# ------------------------------------------------------------------ a full disk


def test_a_full_disk_pauses_a_hub_with_much_to_write_and_it_resumes_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "_MAX_BUFFERED_NBYTES", 1)
    with HubJournal.open(tmp_path, resume=False) as journal:
        driver = HubDriver(journal=journal)
        driver.join(1, 2)
        fault_injection.disk_full(after_nbytes=0)
        waiting = [each for round in range(3) for each in driver.envelopes(message(1, round))]
        assert driver.deliver(*waiting) == []
        merged = driver.hub.updates
        for second in range(60):
            driver.now = float(second)
            assert driver.update(2, 0, ONES) == driver.send("beat", 2) == driver.hello(3) == []
            driver.hub.record_traffic(1, 1, 1.0)
        assert driver.hub.updates == merged <= 1
        assert "the disk is full" in driver.hub.storage_error
        fault_injection.disarm()
        driver.now = 61.0
        assert kinds(driver.deliver()) == ["ack"] * merged
        assert driver.hub.storage_error == ""
        assert driver.hub.members.alive == {1, 2}, "it was the hub that did not listen"
        for round in range(3):
            assert kinds(driver.update(1, round, ONES)) == ["ack"]
        assert kinds(driver.update(2, 0, ONES)) == ["ack"]
        expected = driver.theta.clone()
    with HubJournal.open(tmp_path, resume=True) as journal:
        driver = HubDriver(journal=journal)
        assert driver.hub.updates == 4
        assert torch.equal(driver.theta, expected)


def message(worker, round):
    from paceline.async_dp.protocol.hub_messages import HubMessage

    meta = {"samples": 1.0, "steps": 1, "base": 0}
    return HubMessage("update", worker, 0, round, 0, meta, bytes(PACKING.pack(ONES)), "fp32")


def test_a_disk_that_is_full_when_training_begins_delays_the_beginning(tmp_path):
    with HubJournal.open(tmp_path, resume=False) as journal:
        driver = HubDriver(journal=journal)
        driver.hello(1)
        fault_injection.disk_full(after_nbytes=0)
        assert driver.send("parameters", 1, bytes(PACKING.pack(ONES)), dtype="fp32") == []
        assert "the disk is full" in driver.hub.storage_error
        fault_injection.disarm()
        driver.now = 2.0
        assert kinds(driver.deliver()) == ["together"]
    with HubJournal.open(tmp_path, resume=True) as journal:
        assert torch.equal(HubDriver(journal=journal).theta, torch.ones(NUMEL))


# ------------------------------------------------------------------ a model that is too large


def large(*numels):
    from msgspec import msgpack

    return ParameterLayout.unpack(
        msgpack.encode([[(f"w{k}", (numel,), 0)] for k, numel in enumerate(numels)])
    )


def test_a_model_beyond_the_memory_is_refused_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr(admission, "available_nbytes", lambda: 1 << 30)
    driver = HubDriver()
    (answer,) = driver.hello(1, large(*[10**9] * 16))
    assert answer.kind == "refusal"
    assert answer.meta["why"] == (
        "its model of 16,000,000,000 parameters needs 153 GiB of memory in this hub, 1 GiB are available; "
        "use several hubs (--shard) or a machine with more"
    )
    assert driver.hub.params is None
    assert [each.kind for each in driver.hello(2, LAYOUT)] == ["welcome", "ask"]
    driver = HubDriver(HubRules(shard=HubShard(0, 16)))
    assert "needs 13 GiB of memory" in driver.hello(1, large(*[10**9] * 16))[0].meta["why"]


def test_a_fragment_that_no_record_can_hold_is_refused_with_the_remedy():
    (answer,) = HubDriver().hello(1, large(5, MAX_FRAGMENT_NUMEL + 1))
    assert answer.meta["why"] == (
        "fragment 1 has 1,073,741,824 elements, at most 1,073,741,823 can be sent together; "
        "use more fragments (fragments=)"
    )


@pytest.mark.thorough
def test_a_journal_holds_an_update_above_1_gib(tmp_path):
    def work():
        with HubJournal.open(tmp_path, resume=False) as journal:
            journal.append({"k": 0}, bytes(NBYTES))
        with HubJournal.open(tmp_path, resume=True) as journal:
            ((_, payload),) = journal.recovered().records
            return len(payload) == NBYTES

    assert in_child(work, 240) == 0
