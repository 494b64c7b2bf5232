"""A hub that merges by quorum: waiting updates, held parameters, late and dead workers, restarts."""

import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hub_driver import NUMEL, ONES, PACKING, HubDriver, kinds
from paceline.async_dp.hub.hub_settings import HubOptimizer, HubRules, MergeRules
from paceline.async_dp.hub.staleness_policy import StalenessPolicy
from paceline.async_dp.protocol.hub_messages import HubMessage
from paceline.async_dp.wal.decision_ledger import read_ledger
from paceline.async_dp.wal.hub_journal import HubJournal
from paceline.errors import CheckpointError, DamagedCheckpoint
from paceline.tools.cli.hub_live_table import HubLiveTable


def quorum_rules(quorum: float = 2, **more: Any) -> HubRules:
    return HubRules(merge=MergeRules("quorum", quorum), down="fp32", **more)


def driver_of(workers: int, rules: HubRules | None = None, journal: Any = None) -> HubDriver:
    driver = HubDriver(rules or quorum_rules(), journal)
    driver.join(*range(1, workers + 1))
    return driver


def merges(driver: HubDriver) -> list[dict[str, Any]]:
    return [each for each in driver.journal.ledger() if each["kind"] == "merge"]


def randn(seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def test_updates_wait_for_the_quorum_and_are_acknowledged_before() -> None:
    driver = driver_of(4)
    (answer,) = driver.update(1, 0, ONES)
    assert (answer.kind, answer.meta["why"]) == ("ack", "")
    assert torch.equal(driver.theta, torch.zeros(NUMEL))
    assert driver.kinds()[-1] == "update"
    driver.update(2, 0, 3 * ONES)
    assert torch.equal(driver.theta, -2 * ONES)
    (merge,) = merges(driver)
    assert (merge["of"], merge["late"], merge["updates"], merge["revision"]) == ([1, 2], [], 2, 2)
    assert (merge["workers"], merge["quorum"], merge["grace"], merge["scale"]) == (4, 2, 0.0, 1.0)


def test_parameters_are_held_until_they_include_the_workers_own_update() -> None:
    driver = driver_of(3)
    driver.update(1, 0, ONES)
    assert driver.send("fetch", 1) == []
    assert kinds(driver.send("fetch", 3)) == ["global_params"], "nothing of this worker waits"
    answers = driver.update(2, 0, ONES)
    assert sorted((each.kind, each.target, each.round) for each in answers) == [
        ("ack", 2, 0),
        ("global_params", 1, 2),
    ]


def test_the_mean_is_weighted_by_samples() -> None:
    driver = driver_of(2)
    driver.update(1, 0, ONES, samples=30.0)
    driver.update(2, 0, torch.zeros(NUMEL), samples=10.0)
    torch.testing.assert_close(driver.theta, -0.75 * ONES)


def test_grace_is_given_and_ends_without_a_message() -> None:
    driver = driver_of(3)
    report = {"samples": 10.0, "rate": 1.0}
    driver.update(1, 0, ONES, **report)
    driver.update(2, 0, ONES, **report)
    assert merges(driver) == []
    assert driver.hub.next_due(driver.now) == 5.0, "half of the ten seconds that they report"
    driver.now = 4.9
    driver.hub.commit(driver.now)
    assert merges(driver) == []
    driver.now = 5.0
    driver.hub.commit(driver.now)
    assert [(each["of"], each["grace"]) for each in merges(driver)] == [([1, 2], 5.0)]
    assert driver.hub.next_due(driver.now) == math.inf


def test_all_workers_are_not_waited_for_once_they_have_delivered() -> None:
    driver = driver_of(3)
    for worker in (1, 2, 3):
        driver.update(worker, 0, ONES, samples=10.0, rate=1.0)
    assert [each["of"] for each in merges(driver)] == [[1, 2, 3]]


def test_a_late_update_takes_part_in_the_next_merge_with_less_weight() -> None:
    driver = driver_of(3, quorum_rules(staleness=StalenessPolicy("down-weight", power=1.0)))
    driver.update(1, 0, ONES)
    driver.update(2, 0, ONES)
    driver.update(3, 0, ONES, base=0)
    driver.update(1, 1, torch.zeros(NUMEL), base=2)
    weight = 1 / (1 + 2 / 3)
    torch.testing.assert_close(driver.theta, -(1 + weight / 2) * ONES)
    assert [each["late"] for each in merges(driver)] == [[], [3]]


def test_a_waiting_update_that_is_repeated_counts_once() -> None:
    driver = driver_of(3)
    driver.update(1, 0, ONES)
    (answer,) = driver.update(1, 0, ONES)
    assert (answer.kind, answer.meta["why"]) == ("ack", "")
    driver.update(2, 0, 3 * ONES)
    assert torch.equal(driver.theta, -2 * ONES)


def test_nobody_waits_for_workers_that_died_or_left() -> None:
    driver = driver_of(4, quorum_rules(0.75, silent_after=15.0))
    driver.now = 14.0
    driver.update(1, 0, ONES)
    driver.update(2, 0, ONES)
    driver.now = 20.0
    driver.hub.commit(driver.now)
    assert driver.hub.members.alive == {1, 2}
    assert [each["of"] for each in merges(driver)] == [[1, 2]]
    driver.update(1, 1, ONES, base=2)
    driver.send("bye", 2)
    assert [each["of"] for each in merges(driver)] == [[1, 2], [1]]


def test_an_update_of_a_worker_that_died_is_merged() -> None:
    driver = driver_of(3, quorum_rules(2))
    driver.update(1, 0, ONES)
    driver.send("bye", 1)
    driver.update(2, 0, 3 * ONES)
    assert torch.equal(driver.theta, -2 * ONES)


def test_refused_updates_neither_wait_nor_count() -> None:
    driver = driver_of(2)
    (answer,) = driver.update(1, 0, ONES * math.nan)
    assert answer.meta["why"] == "not finite"
    assert kinds(driver.send("fetch", 1)) == ["global_params"]
    driver.update(2, 0, ONES)
    assert merges(driver) == []
    assert torch.equal(driver.theta, torch.zeros(NUMEL))


def test_the_table_shows_the_last_merge(capsys: pytest.CaptureFixture[str]) -> None:
    driver = driver_of(3)
    exchange: Any = SimpleNamespace(
        address="here", refused=Counter(), rejected=Counter(), sent_nbytes=0, received_nbytes=0, problem=""
    )
    driver.update(1, 0, ONES)
    with HubLiveTable(driver.hub, exchange, Path("folder")):
        driver.update(2, 0, ONES)
    assert "0 refused, 1 merges (last: 2 updates, 0 s grace), " in capsys.readouterr().out


def test_workers_are_started_in_step() -> None:
    driver = driver_of(1)
    slots = [driver.hello(worker)[0].meta["slot"] for worker in (2, 3)]
    assert slots == [0, 0]


# ---------------------------------------------------------------------- restarts


def drive(driver: HubDriver, restart_after: int | None, snapshot: bool) -> torch.Tensor:
    """Send the same updates, restarting the hub after one of them; return the parameters.

    All arrive at the same time: a restarted hub has to learn anew how long workers take.
    """
    number = 0
    for round in range(4):
        for worker in (1, 2, 3, 4):
            base = driver.hub.params.fragments[0].revision if driver.hub.params else 0
            driver.update(worker, round, randn(10 * round + worker), base=base, samples=10.0 + worker)
            if number == restart_after:
                if snapshot:
                    driver.hub.snapshot()
                driver.hub = restarted(driver)
            number += 1
    return driver.theta.clone()


def restarted(driver: HubDriver) -> Any:
    before = driver.hub
    driver.journal.crash()
    hub = driver.new_hub()
    assert before.params is not None
    assert hub.params is not None
    for one, other in zip(before.params.fragments.values(), hub.params.fragments.values(), strict=True):
        assert {name: each.tolist() for name, each in one.tensors().items()} == {
            name: each.tolist() for name, each in other.tensors().items()
        }
        assert one.revision == other.revision
        assert (one.pending is None) == (other.pending is None)
    assert hub.updates == before.updates
    driver.hub = hub
    for worker in (1, 2, 3, 4):
        driver.hello(worker)
    return driver.hub


@pytest.mark.parametrize("outer", ["averaging", "delayed-nesterov"])
@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("restart_after", range(4, 12))
def test_a_restart_at_any_point_of_a_window_continues_to_the_bit(
    restart_after: int, snapshot: bool, outer: Any
) -> None:
    rules = quorum_rules(3, outer=HubOptimizer(outer, 0.7, 0.9))
    undisturbed = drive(driver_of(4, rules), None, False)
    assert torch.equal(drive(driver_of(4, rules), restart_after, snapshot), undisturbed)
    assert undisturbed.count_nonzero() == NUMEL


def test_a_merge_that_was_not_stored_is_repeated_after_a_crash() -> None:
    driver = driver_of(2)
    driver.update(1, 0, ONES)
    packet = bytes(PACKING.pack(3 * ONES))
    meta = {"samples": 1.0, "steps": 1, "base": 0}
    (envelope,) = driver.envelopes(HubMessage("update", 2, 0, 0, 0, meta, packet, "fp32"))
    driver.hub.receive(envelope, driver.now)
    driver.journal.commit()  # the update, and not the merge
    driver.journal.crash()
    driver.hub = driver.new_hub()
    assert torch.equal(driver.theta, torch.zeros(NUMEL))
    driver.hello(1)
    assert torch.equal(driver.theta, -2 * ONES)
    assert [each["of"] for each in merges(driver)] == [[1, 2]]


def test_waiting_updates_are_recovered_from_disk(tmp_path: Path) -> None:
    with HubJournal.open(tmp_path, resume=False) as journal:
        driver = driver_of(4, quorum_rules(3), journal)
        for worker in (1, 2, 3):
            driver.update(worker, 0, ONES)
        driver.update(1, 1, ONES, base=3)
        driver.hub.snapshot()
        driver.update(4, 0, randn(4))
        before = {name: each.clone() for name, each in driver.hub.params.tensors().items()}  # type: ignore[union-attr]
    with HubJournal.open(tmp_path, resume=True) as journal:
        driver.journal = journal
        driver.hub = driver.new_hub()
        assert driver.hub.params is not None
        after = driver.hub.params.tensors()
        assert before.keys() == after.keys() == {"0.theta", "0.pending"}
        assert all(torch.equal(before[name], after[name]) for name in before)
        driver.hello(2)
        driver.update(2, 1, 2 * ONES, base=3)
    torch.testing.assert_close(driver.theta, -ONES - (ONES + randn(4) + 2 * ONES) / 3)
    kinds = [each for each in read_ledger(tmp_path) if each["kind"] == "merge"]
    assert [(each["of"], each["late"]) for each in kinds] == [([1, 2, 3], []), ([1, 4, 2], [4])]


def test_the_way_of_merging_may_change_with_a_restart() -> None:
    driver = driver_of(3)
    driver.update(1, 0, 3 * ONES)
    driver.journal.crash()
    driver.rules = HubRules(down="fp32")
    driver.hub = driver.new_hub()
    driver.hello(1)
    torch.testing.assert_close(driver.theta, -2 * ONES)  # one of three, scaled by 2/3
    driver.update(1, 1, 3 * ONES, base=1)
    torch.testing.assert_close(driver.theta, -3 * ONES)
    driver.rules = quorum_rules()
    driver.hub = driver.new_hub()
    driver.hello(1)
    driver.update(1, 2, ONES, base=2)
    torch.testing.assert_close(driver.theta, -3 * ONES)


def test_a_merge_of_other_updates_than_the_journal_has_is_damage() -> None:
    driver = driver_of(2)
    driver.update(1, 0, ONES)
    driver.journal.append(
        {"kind": "merge", "t": 0.0, "fragment": 0, "of": [1, 2], "scale": 1.0, "workers": 2}
    )
    driver.journal.commit()
    with pytest.raises(
        DamagedCheckpoint, match=r"of workers \[1, 2\]; before it, the journal has updates of \[1\]"
    ):
        driver.new_hub()


def test_while_the_disk_fails_nothing_waits_or_is_merged() -> None:
    driver = driver_of(3)
    driver.update(1, 0, ONES)
    append = driver.journal.append

    def refuse(*given: Any) -> int:
        raise CheckpointError("the disk is full", remedy="make room")

    driver.journal.append = refuse
    assert driver.update(2, 0, 3 * ONES) == []
    assert driver.hub.next_due(driver.now) == math.inf
    driver.journal.append = append
    driver.now += 2.0
    driver.commit()
    driver.update(2, 0, 3 * ONES)
    assert torch.equal(driver.theta, -2 * ONES)
    assert [each["of"] for each in merges(driver)] == [[1, 2]]
