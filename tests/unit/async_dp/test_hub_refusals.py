"""A hub refuses mismatched workers, implausible or stale updates, and foreign messages."""

import math
import random

import pytest
import torch

from hub_driver import NUMEL, ONES, RUN, HubDriver, kinds, net
from paceline.async_dp.hub.hub_settings import HubRules, ScreeningRules
from paceline.async_dp.hub.staleness_policy import StalenessPolicy
from paceline.async_dp.protocol.parameter_layout import ParameterLayout
from paceline.async_dp.protocol.update_codec import UpdateCodec
from paceline.parallel.compression.compression_config import Compression


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"layout": ParameterLayout.of(net(5))}, r"parameter 'weight' has shape \[5, 4\], expected \[3, 4\]"),
        ({"run": "other"}, "this hub serves run 'a run', the worker requests run 'other'"),
        ({"version": 99}, "protocol version 99"),
    ],
)
def test_a_mismatched_worker_is_refused_with_the_reason(changes: dict, why: str) -> None:
    import re

    driver = HubDriver()
    driver.join(1)
    (answer,) = driver.hello(2, **changes)
    assert answer.kind == "refusal"
    assert re.search(why, answer.meta["why"])
    assert kinds(driver.update(2, 0, ONES)) == ["who"]


def test_a_worker_may_join_without_naming_a_run() -> None:
    driver = HubDriver()
    (answer, _) = driver.hello(1, run="")
    assert (answer.kind, answer.meta["run"]) == ("welcome", RUN)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"base": 3}, "implausible"),
        ({"base": -1}, "implausible"),
        ({"base": "x"}, "implausible"),
        ({"samples": -1.0}, "implausible"),
        ({"samples": math.nan}, "implausible"),
        ({"steps": 0}, "implausible"),
        ({"score": 9.0, "before": 1.0}, "worse"),
    ],
)
def test_an_implausible_update_is_refused_and_changes_nothing(changes: dict, why: str) -> None:
    driver = HubDriver()
    driver.join(1)
    (answer,) = driver.update(1, 0, ONES, **changes)
    assert answer.meta["why"].startswith(why)
    assert torch.equal(driver.theta, torch.zeros(NUMEL))
    assert driver.hub.updates == 0
    (again,) = driver.update(1, 0, ONES, **changes)
    assert again.meta["why"].startswith(why), "the same answer, if the first one was lost"


@pytest.mark.parametrize("round", [2**62, int(1e15)])
def test_a_round_far_ahead_is_refused_and_later_updates_are_merged(round: int) -> None:
    """It would make all later updates look repeated, although each is acknowledged."""
    driver = HubDriver()
    driver.join(1)
    driver.update(1, 0, ONES)
    (answer,) = driver.update(1, round, ONES, base=1)
    assert answer.meta["why"] == f"implausible round: {round} after 0"
    assert driver.hub.refused == {"implausible round": 1}
    assert next(iter(driver.hub.members)).refused == 1
    assert driver.hub.updates == 1
    (answer,) = driver.update(1, 1, ONES, base=1)
    assert (answer.meta["why"], driver.hub.updates) == ("", 2)


def test_a_worker_of_an_earlier_run_continues_with_its_rounds() -> None:
    driver = HubDriver()
    driver.join(1)
    for number, round in enumerate((5_000_000, 5_010_000)):
        (answer,) = driver.update(1, round, ONES, base=number)
        assert answer.meta["why"] == ""
    assert driver.hub.updates == 2


def test_an_update_older_than_the_latest_is_not_acknowledged_as_merged() -> None:
    driver = HubDriver()
    driver.join(1)
    for number, round in enumerate((5, 6)):
        driver.update(1, round, ONES, base=number)
    (answer,) = driver.update(1, 5, ONES, base=2)
    assert answer.meta["why"] == "superseded: the hub has round 6 of this worker"
    assert driver.hub.updates == 2


def test_an_update_of_nan_is_refused_and_its_worker_quarantined_after_three() -> None:
    driver = HubDriver(HubRules(screen=ScreeningRules(quarantine_seconds=30)))
    driver.join(1, 2)
    for round in range(3):
        (answer,) = driver.update(1, round, torch.full((NUMEL,), math.nan))
        assert answer.meta["why"].startswith("not finite")
    assert answer.meta["quarantine"] == 30.0
    (answer,) = driver.update(1, 3, ONES)
    assert answer.meta["why"].startswith("in quarantine")
    (answer,) = driver.update(2, 0, ONES)
    assert answer.meta["why"] == ""
    driver.now = 31.0
    (answer,) = driver.update(1, 4, ONES)
    assert answer.meta["why"] == ""


def test_a_stale_update_is_dropped_or_down_weighted() -> None:
    for rules, moved in (
        (HubRules(staleness=StalenessPolicy("drop", bound=2)), 0.0),
        (HubRules(staleness=StalenessPolicy("down-weight", power=1.0)), 1 / 4),
    ):
        driver = HubDriver(rules)
        driver.join(1)
        for round in range(3):
            driver.update(1, round, torch.zeros(NUMEL), base=round)
        (answer,) = driver.update(1, 3, ONES, base=0)
        assert answer.meta["why"] == ("stale: 3.0 rounds old" if not moved else "")
        torch.testing.assert_close(driver.theta, -moved * ONES)


def test_a_worker_that_is_ahead_waits_until_the_slowest_has_caught_up() -> None:
    driver = HubDriver(HubRules(staleness=StalenessPolicy("wait", bound=2)))
    driver.join(1, 2)
    assert kinds(driver.send("fetch", 1)) == kinds(driver.send("fetch", 2)) == ["global_params"]
    answers: list[str] = []
    for round in range(8):
        driver.update(1, round, ONES, base=driver.hub.updates)
        answers += kinds(driver.send("fetch", 1))
    assert len(answers) < 8
    driver.update(2, 0, ONES, base=0)
    changes = driver.send("fetch", 2)
    assert {each.target for each in changes if each.kind == "global_params"} == {1, 2}


def test_a_silent_worker_does_not_block_those_that_wait() -> None:
    driver = HubDriver(HubRules(staleness=StalenessPolicy("wait", bound=1), silent_after=10))
    driver.join(1, 2)
    for worker in (1, 2):
        driver.send("fetch", worker)
    answers = []
    for round in range(8):
        driver.now += 1.5
        driver.update(1, round, ONES, base=driver.hub.updates)
        answers += [kinds(driver.send("fetch", 1))]
    assert [] in answers
    assert answers[-1] == ["global_params"]


def test_foreign_envelopes_are_counted_and_ignored() -> None:
    driver = HubDriver()
    driver.join(1)
    assert driver.send("strange", 1) == []
    assert driver.update(1, 0, ONES, run="other") == []
    assert driver.hub.refused["foreign"] == 2
    assert driver.hub.updates == 0


def test_a_packet_of_the_wrong_size_is_never_merged() -> None:
    driver = HubDriver()
    driver.join(1)
    driver.send("update", 1, bytes(7), round=0, dtype="fp32", base=0, samples=1.0, steps=1)
    driver.send("update", 1, bytes(1 << 16), round=1, dtype="fp32", base=0, samples=1.0, steps=1)
    driver.send("update", 1, bytes(60), round=2, dtype="topk", base=0, samples=1.0, steps=1)
    assert driver.hub.updates == 0
    assert torch.equal(driver.theta, torch.zeros(NUMEL))


def test_thousands_of_hellos_do_not_grow_the_membership_table_beyond_its_limit() -> None:
    driver = HubDriver()
    driver.join(1)
    driver.update(1, 0, ONES)
    for worker in range(2, 6000):
        driver.hello(worker)
    assert len(list(driver.hub.members)) <= 4096
    member = driver.hub.members.get(1)
    assert member is not None
    assert member.rounds


def test_a_sparse_update_with_indices_out_of_order_is_dropped_as_damaged() -> None:
    layout = ParameterLayout.of(torch.nn.Linear(66, 63), compression=Compression("topk-int2"))
    driver = HubDriver()
    for worker in (1, 2):
        driver.hello(worker, layout=layout)
    plain, sparse = (UpdateCodec(layout.fragments[0], name) for name in ("fp32", "topk-int2"))
    driver.send("parameters", 1, bytes(plain.pack(torch.zeros(layout.numel))), dtype="fp32")
    drawn = random.Random(0)
    for round in range(50):
        driver.send(
            "update",
            1,
            drawn.randbytes(sparse.nbytes),
            round=round,
            dtype="topk-int2",
            samples=1.0,
            steps=1,
            base=0,
        )
    assert driver.hub.refused == {"DamagedEnvelope": 50}
    assert torch.equal(driver.theta, torch.zeros(layout.numel))
    driver.now += 100.0  # its quarantine is over
    drawn_update = torch.linspace(-1, 1, layout.numel)
    packet = bytes(sparse.pack(drawn_update))
    (answer,) = driver.send("update", 2, packet, round=99, dtype="topk-int2", samples=1.0, steps=1, base=0)
    assert answer.meta["why"] == ""
    assert torch.equal(driver.theta[-63:], -drawn_update[-63:] / 2), "biases are sent exactly"
    assert int(driver.theta[:-63].count_nonzero()) == -(-66 * 63 * 64 // 4096)
