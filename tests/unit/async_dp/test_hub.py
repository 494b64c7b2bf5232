"""The hub merges updates, and answers."""

import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hub_driver import LAYOUT, NUMEL, ONES, HubDriver, kinds
from paceline.async_dp.hub.hub_settings import HubRules, HubShard
from paceline.async_dp.protocol.parameter_layout import ParameterLayout
from paceline.errors import CheckpointError
from paceline.tools.cli.hub_live_table import HubLiveTable


def test_the_first_worker_provides_the_initial_parameters() -> None:
    driver = HubDriver()
    assert kinds(driver.hello(1)) == ["welcome", "ask"]
    assert kinds(driver.hello(2)) == ["welcome"]
    start = torch.arange(NUMEL, dtype=torch.float32)
    from hub_driver import PACKING

    answers = driver.send("parameters", 1, bytes(PACKING.pack(start)), dtype="fp32")
    assert sorted((each.kind, each.target) for each in answers) == [("together", 1), ("together", 2)]
    assert torch.equal(driver.theta, start)
    assert driver.hub.phase == "together"


def test_if_the_first_worker_falls_silent_a_new_one_provides_the_parameters() -> None:
    driver = HubDriver()
    driver.hello(1)
    driver.now = 100.0
    driver.hub.commit(driver.now)
    assert kinds(driver.hello(2)) == ["welcome", "ask"]


def test_if_the_requested_worker_is_lost_a_connected_one_provides_the_parameters() -> None:
    for silent in (True, False):
        driver = HubDriver(HubRules(silent_after=10))
        for worker in (1, 2):
            driver.hello(worker)
        if not silent:
            driver.send("bye", 1)
        driver.now = 8.0
        answers = driver.send("beat", 2)
        driver.now = 15.0
        answers += driver.send("beat", 2)
        assert [(each.kind, each.target) for each in answers] == [("ask", 2)]


def test_initial_parameters_must_be_finite() -> None:
    driver = HubDriver()
    driver.join(1, numbers=torch.full((NUMEL,), math.nan))
    assert driver.hub.phase == "empty"
    assert kinds(driver.hello(2)) == ["welcome", "ask"]


def test_after_parameters_that_are_not_finite_the_next_worker_provides_them() -> None:
    driver = HubDriver()
    driver.join(1, 2, numbers=torch.full((NUMEL,), math.nan))
    driver.now = 2.0
    assert [(each.kind, each.target) for each in driver.send("beat", 1)] == [("ask", 2)]


def test_while_the_disk_fails_nothing_is_merged_and_afterwards_everything_is(capsys) -> None:
    driver = HubDriver()
    driver.join(1, 2)
    commit = driver.journal.commit

    def refuse() -> None:
        raise CheckpointError("the disk is full", remedy="make room")

    driver.journal.commit = refuse
    assert driver.update(1, 0, ONES) == driver.update(2, 0, ONES) == []
    assert (driver.hub.updates, driver.hub.refused) == (1, {"not stored": 1})
    exchange = SimpleNamespace(
        address="here",
        refused=Counter(foreign=2),
        rejected=Counter(foreign=1),
        problem="",
        sent_nbytes=0,
        received_nbytes=0,
    )
    with HubLiveTable(driver.hub, exchange, Path("folder")):  # type: ignore[arg-type]
        pass
    assert "4 refused" in (answers := capsys.readouterr().out)
    assert "nothing is answered: the disk is full → make room" in answers
    driver.journal.commit = commit
    driver.now += 1.0
    assert [(each.kind, each.target) for each in driver.send("beat", 1)] == [("ack", 1)]
    assert kinds(driver.update(2, 0, ONES)) == ["ack"]
    assert driver.hub.updates == 2


def test_dropped_frames_are_counted_as_refused() -> None:
    driver = HubDriver()
    driver.join(1)
    driver.send("update", 1, bytes(1 << 16), dtype="fp32")
    assert driver.hub.refused == {"too long": 1}


def test_an_update_is_merged_and_acknowledged() -> None:
    driver = HubDriver()
    driver.join(1, 2)
    (answer,) = driver.update(1, 0, ONES)
    assert (answer.kind, answer.target, answer.round, answer.meta["why"]) == ("ack", 1, 0, "")
    torch.testing.assert_close(driver.theta, -ONES / 2)
    assert (driver.hub.updates, driver.hub.counters.samples) == (1, 1.0)


def test_a_fetch_returns_the_global_parameters_and_their_revision() -> None:
    driver = HubDriver()
    driver.join(1)
    driver.update(1, 0, ONES)
    (answer,) = driver.send("fetch", 1)
    assert (answer.kind, answer.round, answer.dtype) == ("global_params", 1, "bf16")
    into = torch.empty(NUMEL)
    from paceline.async_dp.protocol.update_codec import UpdateCodec

    UpdateCodec(LAYOUT.fragments[0], "bf16").unpack(answer.payload, into)
    assert torch.equal(into, -ONES)


def test_a_workers_weight_is_its_share_of_samples_per_second() -> None:
    driver = HubDriver()
    driver.join(1, 2, 3)
    moved = []
    for round in range(2):
        for worker, rate in ((1, 30.0), (2, 10.0), (3, 20.0)):
            before = driver.theta.clone()
            driver.update(worker, round, ONES, base=driver.hub.updates, rate=rate)
            moved.append(float((before - driver.theta)[0]))
    assert moved[:2] == pytest.approx([1 / 3, 1 / 3]), "until all are known, all count alike"
    assert moved[2:] == pytest.approx([1 / 3, 1 / 2, 1 / 6, 1 / 3])
    driver.send("bye", 1)
    before = driver.theta.clone()
    driver.update(3, 2, ONES, base=driver.hub.updates, rate=20.0)
    assert float((before - driver.theta)[0]) == pytest.approx(2 / 3)


def test_an_update_of_many_steps_after_a_long_absence_has_no_more_weight() -> None:
    driver = HubDriver()
    driver.join(1, 2)
    for round in range(5):
        for worker in (1, 2):
            driver.update(worker, round, ONES, base=driver.hub.updates, rate=10.0, samples=10.0, steps=10)
    before = driver.theta.clone()
    driver.update(2, 9, ONES, base=1, rate=10.0, samples=4000.0, steps=4000)
    torch.testing.assert_close(before - driver.theta, ONES / 2)


def test_a_single_worker_has_full_weight_for_any_number_of_samples() -> None:
    driver = HubDriver()
    driver.join(1)
    for round, samples in enumerate((100.0, 50.0, 3.0, 700.0)):
        driver.update(1, round, ONES, base=round, samples=samples)
    torch.testing.assert_close(driver.theta, -4 * ONES)


def test_a_repeated_update_counts_once_and_is_acknowledged_again() -> None:
    driver = HubDriver()
    driver.join(1)
    driver.update(1, 0, ONES)
    before = driver.theta.clone()
    (answer,) = driver.update(1, 0, ONES)
    assert (answer.kind, answer.meta["why"]) == ("ack", "")
    assert torch.equal(driver.theta, before)
    assert driver.hub.refused["repeated"] == 1


def test_the_same_envelope_twice_is_dropped() -> None:
    driver = HubDriver()
    driver.join(1)
    from hub_driver import PACKING
    from paceline.async_dp.protocol.hub_messages import HubMessage

    packet = bytes(PACKING.pack(ONES))
    meta = {"samples": 1.0, "steps": 1, "base": 0}
    (envelope,) = driver.envelopes(HubMessage("update", 1, 0, 0, 0, meta, packet, "fp32"))
    assert kinds(driver.deliver(envelope, envelope)) == ["ack"]
    assert (driver.hub.updates, driver.hub.refused["repeated"]) == (1, 1)


def test_an_earlier_round_is_not_merged_after_a_later_one() -> None:
    driver = HubDriver()
    driver.join(1)
    driver.update(1, 5, ONES)
    before = driver.theta.clone()
    driver.update(1, 4, ONES)
    assert torch.equal(driver.theta, before)


def test_a_worker_without_a_session_is_notified_and_changes_nothing() -> None:
    driver = HubDriver()
    driver.join(1)
    before = driver.theta.clone()
    assert kinds(driver.update(7, 0, ONES)) == ["who"]
    driver.sessions[1] = 999
    assert kinds(driver.update(1, 0, ONES)) == ["who"]
    assert torch.equal(driver.theta, before)
    assert driver.hub.refused["not in session"] == 2


def test_an_old_hello_does_not_restart_a_session() -> None:
    driver = HubDriver()
    driver.join(1)
    old = driver.sessions[1]
    driver.hello(1)
    now = driver.sessions[1]
    assert kinds(driver.hello(1, session=old)) == []
    driver.sessions[1] = now
    assert kinds(driver.update(1, 0, ONES)) == ["ack"]


def test_a_sharded_hub_serves_its_fragments_only() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(5)))
    layout = ParameterLayout.of(model, 5)
    driver = HubDriver(HubRules(shard=HubShard(1, 2)))
    driver.hello(1, layout=layout)
    assert driver.hub.params is not None
    assert sorted(driver.hub.params.fragments) == [1, 3]
    (answer,) = HubDriver(HubRules(shard=HubShard(1, 2))).hello(1)
    assert "too few for 2 hubs" in answer.meta["why"]


def test_a_heartbeat_updates_the_workers_schedule() -> None:
    driver = HubDriver()
    driver.join(1)
    driver.send("beat", 1, steps=7, every=11, delay=3)
    driver.send("beat", 1, steps=8)
    member = driver.hub.members.get(1)
    assert member is not None
    assert (member.every, member.delay, member.steps) == (11, 3, 8)


def test_a_score_of_the_global_parameters_is_recorded() -> None:
    driver = HubDriver()
    driver.join(1)
    driver.send("score", 1, score=1.25, revision=0)
    assert driver.hub.loss == 1.25
    assert [each["score"] for each in driver.journal.ledger() if each["kind"] == "global_score"] == [1.25]


def test_a_worker_that_left_does_not_count() -> None:
    driver = HubDriver()
    driver.join(1, 2)
    driver.send("bye", 2)
    assert driver.hub.members.alive == {1}
    driver.update(1, 0, ONES)
    torch.testing.assert_close(driver.theta, -ONES)
    assert "leave" in driver.kinds()
