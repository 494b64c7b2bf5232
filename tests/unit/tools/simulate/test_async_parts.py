"""Parts of asynchronous simulations: rows, different machines, churn, injected faults, texts and charts."""

import json
import math
from collections import Counter

import pytest

from paceline.errors import UsageError
from paceline.tools.report.charts.simulation_charts import loss_chart, time_to_loss_chart
from paceline.tools.simulate.async_results import (
    AsyncRow,
    LossPoint,
    async_findings,
    seconds_to_loss,
    with_times_to_target,
)
from paceline.tools.simulate.async_settings import AsyncPlan
from paceline.tools.simulate.async_sweep import RandomFaults
from paceline.tools.simulate.simulated_machines import SimulatedMachine, draw_churn, relative_step_times
from paceline.transport.envelope import Envelope
from paceline.transport.header_layout import Header


def points(*losses_: float) -> list[LossPoint]:
    return [LossPoint(float(10 * number), number, number, loss) for number, loss in enumerate(losses_)]


def row(name: str = "k 10, d 5", losses_: tuple[float, ...] = (8.0, 4.0, 1.0), **values) -> AsyncRow:
    every = None if name == "DDP" else 10
    usual = {"best": 1.0, "seconds": 20.0, "steps": 100, "nbytes": 5e6, "digest": "", "initial_loss": 8.0}
    return AsyncRow(
        name=name, every=every, delay=every, loss=losses_[-1], points=points(*losses_), **usual | values
    )


DDP = row("DDP", (8.0, 6.0, 4.0), communication=0.5, waiting=0.3)


def test_the_time_to_a_loss_lies_between_points():
    assert seconds_to_loss(points(4, 2), 3.0) == 5.0
    assert seconds_to_loss(points(4, 2), 1.0) is None
    assert seconds_to_loss(points(4, 2), 4.0) == 0.0
    assert seconds_to_loss(points(math.nan, 2), 3.0) == 10.0
    assert seconds_to_loss([], 3.0) is None


def test_rows_beside_ddp():
    ddp, asynchronous, never = with_times_to_target([DDP, row(), row("k 25, d 0", (8.0, 7.0, 6.0))], 4.0)
    assert (ddp.seconds_to_target, ddp.speedup) == (20.0, 1.0)
    assert (asynchronous.seconds_to_target, asynchronous.speedup) == (10.0, 2.0)
    assert (never.seconds_to_target, never.speedup) == (None, None)
    assert with_times_to_target([row()], None)[0].seconds_to_target is None
    assert with_times_to_target([row()], 4.0)[0].speedup is None


def test_diverging_and_worsening_runs_are_detected():
    assert row(losses_=(8.0, 9.0)).diverged
    assert row(losses_=(8.0, math.nan)).diverged
    assert not row().diverged
    assert row(losses_=(8.0, 1.0, 3.0)).regressed
    assert not row(losses_=(8.0, 0.001, 0.003)).regressed
    assert json.dumps(row(losses_=(8.0, math.inf)).to_record(), allow_nan=False)
    assert row(losses_=(8.0, math.inf)).to_record()["loss"] is None


def test_paces_repeat_and_spread():
    assert relative_step_times(5, [1, 2, 4]) == [4, 2, 1, 4, 2]
    assert relative_step_times(2, [2, 6]) == [3, 1]
    spread = relative_step_times(9, [1], 0.5)
    assert spread == sorted(spread)
    assert spread[0] == 1
    assert spread[4] / spread[0] == pytest.approx(spread[8] / spread[4])
    for wrong in ((0, [1]), (2, []), (2, [0.0]), (2, [1], -1.0)):
        with pytest.raises(UsageError):
            relative_step_times(*wrong)


@pytest.mark.parametrize(("share", "workers"), [(0.05, 4), (0.3, 10), (0.5, 2), (0.5, 3)])
def test_churn_is_planned_and_a_worker_is_always_present(share, workers):
    turns = draw_churn(share, workers, 100.0, seed=3)
    AsyncPlan(machines=[SimulatedMachine()] * workers, seconds=100.0, churn=turns)
    assert turns == draw_churn(share, workers, 100.0, seed=3) != draw_churn(share, workers, 100.0, seed=4)
    away: set[int] = set()
    for each in sorted(turns, key=lambda each: each.seconds):
        (away.discard if each.joins else away.add)(each.worker)
        assert 10 <= each.seconds < 100
    assert not away
    most = max(Counter(each.worker for each in turns).values())
    assert most < len(turns) or workers == 2


def test_without_churn_or_with_one_worker_nobody_leaves():
    assert draw_churn(0.0, 4, 100.0) == draw_churn(0.5, 1, 100.0) == []
    with pytest.raises(UsageError, match="60%"):
        draw_churn(0.6, 4, 100.0)


def test_injected_faults_depend_on_the_seed_and_damage_is_detected():
    envelope = Envelope(Header("run", "update", 1, 0, 7, dtype="fp32", nbytes=64), b"x" * 64)
    faults = RandomFaults(0.4, seed=1)
    received = [faults(envelope) for _ in range(1000)]
    faulty = sum(faults.counts[name] for name in ("lost", "repeated", "late", "damaged"))
    assert 330 < faulty < 470
    assert min(faults.counts.values()) > 50
    assert faults.counts["let through"] == 0
    lengths = Counter(len(each) for each in received)
    assert lengths[0] == faults.counts["lost"] + faults.counts["damaged"]
    assert lengths[2] == faults.counts["repeated"]
    again = RandomFaults(0.4, seed=1)
    assert [again(envelope) for _ in range(1000)] == received
    assert RandomFaults(0.0)(envelope) == [(0.0, envelope)]
    with pytest.raises(UsageError, match=r"faults in 1\.0 of all messages"):
        RandomFaults(1.0)


def test_sentences_name_the_choice_and_its_bound():
    rows = with_times_to_target(
        [DDP, row(hub_busy=0.93), row("k 25, d 0", (8.0, 4.05, 1.0), nbytes=1e6)], 4.0
    )
    findings = "\n".join(async_findings(rows))
    assert "Use k 10, d 5: it reaches DDP's final loss in 10 s, 2× faster than DDP." in findings
    assert "k 25, d 0 is nearly as fast with 20 % of the bytes" in findings
    assert "50 % for the network and 30 % for the slowest machine" in findings
    assert "The hub's link is full" in findings
    assert "k 10, d 5 (93 %)" in findings
    assert "larger k" in findings


def test_sentences_where_ddp_is_better_or_nothing_gets_there():
    slow = with_times_to_target([DDP, row(losses_=(8.0, 7.0, 6.0, 5.0, 4.0))], 4.0)
    assert "Use DDP" in async_findings(slow)[0]
    same = with_times_to_target([DDP, row(losses_=(8.0, 6.0, 4.0))], 4.0)
    assert "No difference" in async_findings(same)[0]
    never = with_times_to_target([DDP, row(losses_=(8.0, 7.0))], 4.0)
    assert "No schedule reaches DDP's final loss" in async_findings(never)[0]
    assert "a loss of 3" in async_findings(with_times_to_target([row(losses_=(8.0, 7.0))], 3.0), 3.0)[0]
    assert async_findings([row()])[0] == "Best at the end: k 10, d 5, loss 1."
    assert async_findings(with_times_to_target([row()], 4.0), 4.0)[0].startswith(
        "Use k 10, d 5: it reaches a loss of 4 in 10 s."
    )


def test_sentences_describe_faults():
    diverged = row(
        losses_=(8.0, 80.0), refused={"exploding": 3, "repeated": 2}, replaced=["worker 4 at 3.0 s: bad"]
    )
    findings = "\n".join(async_findings([DDP, diverged], outer="nesterov"))
    assert "All schedules diverged" in findings
    assert "Nesterov at every arrival" in findings
    assert "refused 3 exploding." in findings
    assert "replaced worker 4" in findings
    counts = {"sent": 10, "skipped": 9, "resent": 2, "spoilt: lost": 4}
    findings = "\n".join(async_findings([row(losses_=(8.0, 1.0, 3.0), counts=counts)]))
    assert "got worse again, from 1 to 3" in findings
    assert "9 updates were skipped" in findings
    assert "4 lost; 2 were resent" in findings


def test_charts_of_anything(tmp_path):
    several = [row(f"k {number}, d 0") for number in range(2, 20)]
    wild = [row(losses_=(math.nan, math.nan)), row(losses_=(8.0, 900.0)), row(losses_=(8.0, 0.0))]
    for number, rows in enumerate((with_times_to_target([DDP, row()], 4.0), [DDP, *several], wild)):
        for draw in (loss_chart(rows, title="any"), time_to_loss_chart(rows, aim="a loss")):
            path = draw.save(tmp_path / f"chart{number}.png")
            assert path.read_bytes().startswith(b"\x89PNG")
