"""The weights of updates after a restart of the hub, a stall, and reports of any throughput."""

import json
from pathlib import Path

import pytest
import torch

from hub_driver import NUMEL, ONES, PACKING, HubDriver
from paceline.async_dp.hub.hub_settings import HubRules
from paceline.async_dp.wal.hub_journal import HubJournal


def moved(driver: HubDriver, worker: int, round: int, **meta: float) -> float:
    """Send an update of ones; return the weight with which it was merged."""
    before = driver.theta.clone()
    driver.update(worker, round, ONES, base=driver.hub.updates, **meta)
    return float((before - driver.theta)[0])


def test_after_a_restart_pending_updates_weigh_what_they_did_before(tmp_path: Path) -> None:
    workers = range(1, 101)
    with HubJournal.open(tmp_path, resume=True) as journal:
        driver = HubDriver(journal=journal)
        driver.join(*workers)
        for worker in workers:
            driver.update(worker, 0, ONES)
    with HubJournal.open(tmp_path, resume=True) as journal:
        restarted = HubDriver(journal=journal)
        total = 0.0
        for worker in workers:  # each comes back with an update that was not acknowledged
            restarted.hello(worker, session=10_000 + worker)
            total += moved(restarted, worker, 1)
    assert total == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("snapshot", [False, True])
def test_after_a_restart_paces_are_known(tmp_path: Path, snapshot: bool) -> None:
    rates = {1: 30.0, 2: 10.0, 3: 20.0}
    with HubJournal.open(tmp_path, resume=True) as journal:
        driver = HubDriver(journal=journal)
        driver.join(*rates)
        for worker, rate in rates.items():
            driver.update(worker, 0, ONES, rate=rate)
        if snapshot:
            driver.hub.snapshot()
    with HubJournal.open(tmp_path, resume=True) as journal:
        restarted = HubDriver(journal=journal)
        restarted.hello(2, session=77)
        assert moved(restarted, 2, 1, rate=10.0) == pytest.approx(1 / 6)


def test_those_who_do_not_come_back_after_a_restart_stop_counting(tmp_path: Path) -> None:
    with HubJournal.open(tmp_path, resume=True) as journal:
        HubDriver(journal=journal).join(1, 2, 3, 4)
    with HubJournal.open(tmp_path, resume=True) as journal:
        restarted = HubDriver(HubRules(silent_after=10), journal)
        restarted.now = 1000.0
        restarted.hello(1, session=77)
        assert moved(restarted, 1, 0) == pytest.approx(1 / 4)
        for restarted.now in (1005.0, 1011.0):
            restarted.send("beat", 1)
        assert moved(restarted, 1, 1) == pytest.approx(1.0)
    assert [each["worker"] for each in ledger(tmp_path, "silent")] == [2, 3, 4]


def ledger(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "ledger.jsonl").read_text().splitlines()
    return [each for each in map(json.loads, lines) if each.get("kind") == kind]


def test_the_absence_of_the_hub_is_not_that_of_its_workers() -> None:
    driver = HubDriver(HubRules(silent_after=15))
    workers = range(1, 11)
    driver.join(*workers)
    driver.now = 20.0  # it was stopped; everything that was sent meanwhile is waiting
    driver.hub.add_absence(20.0)
    assert driver.hub.commit(driver.now) == []
    total = sum(moved(driver, worker, 0) for worker in workers)
    assert total == pytest.approx(1.0)
    assert driver.hub.members.alive == set(workers)


def test_silence_counts_where_the_hub_listened() -> None:
    driver = HubDriver(HubRules(silent_after=15))
    driver.join(1, 2)
    driver.now = 10.0
    driver.send("beat", 1)
    driver.now = 20.0
    driver.send("beat", 1)
    assert driver.hub.members.alive == {1}


@pytest.mark.parametrize("rate", [1e300, 1e12, float("inf")])
def test_a_worker_that_reports_any_throughput_does_not_take_over(rate: float) -> None:
    driver = HubDriver()
    workers = range(1, 101)
    driver.join(*workers)
    for worker in workers:
        driver.update(worker, 0, torch.zeros(NUMEL), rate=10.0)
    most = moved(driver, 1, 1, rate=rate)
    assert most <= 16 / 115 + 1e-6
    others = sum(moved(driver, worker, 1, rate=10.0) for worker in range(2, 101))
    assert most + others == pytest.approx(1.0)


def test_a_worker_that_is_sixteen_times_faster_counts_sixteen_times() -> None:
    driver = HubDriver()
    driver.join(1, 2, 3)
    for worker, rate in ((1, 160.0), (2, 10.0), (3, 10.0)):
        driver.update(worker, 0, torch.zeros(NUMEL), rate=rate)
    assert moved(driver, 1, 1, rate=160.0) == pytest.approx(16 / 18)
    assert moved(driver, 2, 1, rate=10.0) == pytest.approx(1 / 18)


def test_the_journal_has_an_update_before_the_parameters_do() -> None:
    from paceline.errors import CheckpointError

    driver = HubDriver()
    driver.join(1)
    append = driver.journal.append

    def full(values: dict, payload: bytes = b"") -> int:
        raise CheckpointError("the disk is full", remedy="make room")

    driver.journal.append = full
    assert driver.update(1, 0, ONES) == []
    assert torch.equal(driver.theta, torch.zeros(NUMEL))
    assert driver.hub.refused["not stored"] == 1
    driver.journal.append = append
    driver.now += 1.0
    driver.send("beat", 1)
    (answer,) = driver.update(1, 0, ONES)
    assert answer.meta["why"] == ""
    assert torch.equal(driver.theta, -ONES)


def test_a_worker_that_contributed_is_forgotten_but_not_its_rounds(tmp_path: Path) -> None:
    with HubJournal.open(tmp_path, resume=True) as journal:
        driver = HubDriver(journal=journal)
        driver.hub.members.limit = 50
        for worker in range(1, 400):
            driver.hello(worker)
            if worker == 1:
                driver.send("parameters", 1, bytes(PACKING.pack(torch.zeros(NUMEL))), dtype="fp32")
            driver.update(worker, 5, ONES, base=driver.hub.updates)
            driver.send("bye", worker)
        assert len(list(driver.hub.members)) <= 50
        driver.hub.snapshot()
    with HubJournal.open(tmp_path, resume=True) as journal:
        restarted = HubDriver(journal=journal)
        restarted.hello(7, session=99)
        (answer,) = restarted.update(7, 5, ONES)
        assert (answer.kind, answer.meta["why"]) == ("ack", "")
        assert restarted.hub.updates == 399
