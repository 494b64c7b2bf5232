"""A restarted hub recovers all committed records; nothing uncommitted was acknowledged."""

from pathlib import Path

import pytest
import torch

from hub_driver import NUMEL, ONES, HubDriver, kinds
from paceline.async_dp.hub.hub_settings import HubOptimizer, HubRules
from paceline.async_dp.wal.decision_ledger import read_ledger
from paceline.async_dp.wal.hub_journal import HubJournal


def test_a_restarted_hub_continues_bit_for_bit(tmp_path: Path) -> None:
    rules = HubRules(outer=HubOptimizer("delayed-nesterov", 0.7, 0.9, warmup=0), snapshot_every=7)
    generator = torch.Generator().manual_seed(0)
    deltas = [torch.randn(NUMEL, generator=generator) for _ in range(24)]

    def course(folder: Path, killed: bool) -> torch.Tensor:
        with HubJournal.open(folder, resume=True) as journal:
            driver = HubDriver(rules, journal)
            driver.join(1, 2, 3)
            for number, delta in enumerate(deltas[:17]):
                driver.update(1 + number % 3, number // 3, delta, samples=1.0 + number % 3)
            if not killed:
                for number, delta in enumerate(deltas[17:], 17):
                    driver.update(1 + number % 3, number // 3, delta, samples=1.0 + number % 3)
                return driver.theta.clone()
        with HubJournal.open(folder, resume=True) as journal:
            restarted = HubDriver(rules, journal)
            assert restarted.hub.updates == 17
            restarted.sessions = {worker: 1000 for worker in (1, 2, 3)}
            for worker in (1, 2, 3):
                restarted.hello(worker)
            (again,) = restarted.update(2, 5, deltas[16], samples=1.0 + 16 % 3)
            assert again.meta["why"] == ""
            assert restarted.hub.updates == 17, "round 5 of worker 2 was update 17, and is there"
            for number, delta in enumerate(deltas[17:], 17):
                restarted.update(1 + number % 3, number // 3, delta, samples=1.0 + number % 3)
            return restarted.theta.clone()

    assert torch.equal(course(tmp_path / "whole", killed=False), course(tmp_path / "killed", killed=True))


@pytest.mark.parametrize("snapshot_every", [1, 500])
def test_the_owners_of_worker_numbers_outlive_the_hub(tmp_path: Path, snapshot_every: int) -> None:
    rules = HubRules(snapshot_every=snapshot_every)
    with HubJournal.open(tmp_path, resume=True) as journal:
        driver = HubDriver(rules, journal)
        driver.keys = {1: "first's key", 2: "second's key", 3: "third's key"}
        driver.join(1, 2)
        driver.update(1, 0, ONES)
        driver.hello(3)
        driver.update(2, 0, ONES, base=1)
    with HubJournal.open(tmp_path, resume=True) as journal:
        restarted = HubDriver(rules, journal)
        assert {member.number: member.key for member in restarted.hub.members} == driver.keys
        joined = [line["key"] for line in read_ledger(tmp_path) if line["kind"] == "join"]
        assert joined == list(driver.keys.values())


def test_nothing_is_answered_before_it_is_committed() -> None:
    driver = HubDriver()
    driver.join(1)
    order: list[str] = []
    commit, append = driver.journal.commit, driver.journal.append

    def note(*given, **options):
        order.append("append")
        return append(*given, **options)

    driver.journal.append = note
    driver.journal.commit = lambda: (order.append("commit"), commit())[1]
    answers = driver.update(1, 0, ONES)
    assert order == ["append", "commit"]
    assert kinds(answers) == ["ack"]


def test_an_uncommitted_update_is_lost_with_the_hub_and_merged_when_it_is_repeated() -> None:
    driver = HubDriver()
    driver.join(1)
    driver.update(1, 0, ONES)
    from hub_driver import PACKING
    from paceline.async_dp.protocol.hub_messages import HubMessage

    packet = bytes(PACKING.pack(ONES))
    meta = {"samples": 1.0, "steps": 1, "base": 1}
    (envelope,) = driver.envelopes(HubMessage("update", 1, 0, 1, 0, meta, packet, "fp32"))
    driver.hub.receive(envelope, driver.now)
    driver.journal.crash()
    driver.hub = driver.new_hub()
    assert driver.hub.updates == 1
    driver.hello(1)
    driver.update(1, 1, ONES, base=1)
    assert driver.hub.updates == 2
    torch.testing.assert_close(driver.theta, -2 * ONES)
