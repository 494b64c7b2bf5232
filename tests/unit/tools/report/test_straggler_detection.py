"""Stragglers and their causes, from the times at which ranks reach the exchange, on made-up timelines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.tools.report.run.bottleneck import (
    find_bottleneck,
    straggler_cause,
    straggler_remedy,
    transfer_rate,
)
from paceline.tools.report.run.run_summary import RunSummary, rank_time
from paceline.tools.report.run.straggler_detection import compare_arrivals
from paceline.tools.report.run.trace_reader import (
    RankTrace,
    StepInterval,
    TracedBucket,
    TracedCall,
    TracedStep,
    TracedWait,
)

NETWORK = 0.010


def timelines(
    slow=None, *, ranks=3, steps=20, extra=0.05, part="forward", turns=False, clock_error=0.0, **changes
):
    """Return the timelines of ranks of which one takes longer for a part; with `turns` another one each step."""
    lines = {rank: [] for rank in range(ranks)}
    for step in range(steps):
        late = step % ranks if turns else slow
        longer = {rank: extra if rank == late else 0.0 for rank in range(ranks)}
        arrived = {rank: 0.1 + more for rank, more in longer.items()}
        through = max(arrived.values()) + NETWORK
        for rank in range(ranks):
            lines[rank].append(_line(rank, step, arrived[rank], through, longer[rank], part))
            if rank == late:
                lines[rank][-1] = replace(lines[rank][-1], **changes)
    buckets = ((0, (TracedBucket("all-reduce", 1_000_000, 3, "a"),)),)
    return {
        rank: RankTrace(tuple(each), tuple(each), buckets, clock_error=clock_error)
        for rank, each in lines.items()
    }


def _line(rank, step, arrived, through, longer, part):
    lengths = {"data": 0.001, "forward": 0.040, "backward": 0.059}
    lengths[part] = lengths.get(part, 0.0) + longer
    phases, at = [], 0.0
    for name, seconds in lengths.items():
        phases.append(StepInterval(name, at, at + seconds))
        at += seconds
    phases.append(StepInterval("exchange", at, through))
    calls = (
        TracedCall(
            kind="reduce",
            bucket=0,
            nbytes=1_000_000,
            sent=1_000_000,
            ready=arrived,
            launched=arrived,
            posted=arrived,
            done=None,
            seen=through,
        ),
    )
    waits = (TracedWait(0, arrived, through),)
    return TracedStep(
        step=step,
        rank=rank,
        start=50.0 + step,
        seconds=through,
        phases=tuple(phases),
        waits=waits,
        tasks=(),
        calls=calls,
        samples=8.0,
        cpu=0.1,
        preempted=2,
    )


def summary_of(traces):
    ranks = tuple(rank_time(rank, each) for rank, each in traces.items())
    arrivals = compare_arrivals(traces)
    return RunSummary(
        steps=20,
        step_seconds=0.16,
        tokens_per_second=None,
        exposed_share=None,
        loss_first=None,
        loss_last=None,
        val_loss_first=None,
        val_loss_last=None,
        ranks=ranks,
        calls=1,
        nbytes=1e6,
        arrivals=arrivals,
        timelines=traces,
    )


def test_the_late_rank_is_found_though_all_steps_take_the_same_time():
    arrivals = compare_arrivals(timelines(slow=2))
    found = arrivals.straggler
    assert (found.rank, found.last_share) == (2, 1.0)
    assert found.lateness == pytest.approx(0.05)
    others, own = arrivals.ranks[0], arrivals.ranks[2]
    assert (others.imbalance, others.transfer) == (pytest.approx(0.05), pytest.approx(NETWORK))
    assert (own.imbalance, own.transfer) == (pytest.approx(0.0, abs=1e-9), pytest.approx(NETWORK))


@pytest.mark.parametrize(
    "traces",
    [
        timelines(),
        timelines(slow=1, extra=0.001),  # too little to matter
        timelines(turns=True),  # now one rank, now another
        timelines(slow=1, clock_error=0.05),  # may be nothing but clocks
        timelines(slow=0, ranks=1),
        {},
    ],
)
def test_no_rank_is_called_a_straggler_without_reason(traces):
    assert compare_arrivals(traces).straggler is None


def test_only_steps_that_all_ranks_know_are_compared():
    traces = timelines(slow=1, ranks=2)
    traces[0] = replace(traces[0], warm=traces[0].warm[:7])
    assert compare_arrivals(traces).steps == 7


@pytest.mark.parametrize(
    ("changes", "cause", "done"),
    [
        ({"part": "data"}, "It waits for its data: 51 ms per step, 1 ms on the others.", "num_workers"),
        ({"part": "optimizer"}, "Its optimizer takes many times as long", "doctor"),
        ({"cpu": 0.15}, "and more processor time: its processor is slower", 'shares="measured"'),
        ({"preempted": 60}, "other programs preempt it 60 times per step", "doctor"),
        ({}, "without more processor time: it sleeps", "doctor"),
        (
            {"samples": 12.0, "cpu": 0.15},
            "It has more to do: 12 samples per step, the others 8.",
            "rebalance",
        ),
    ],
)
def test_the_cause_is_inferred_from_what_differs(changes, cause, done):
    found = compare_arrivals(timelines(slow=1, **changes)).straggler
    assert cause in straggler_cause(found)
    assert done in straggler_remedy(found)[1]


def test_the_page_names_the_rank_the_cause_and_the_cost():
    limit = find_bottleneck(summary_of(timelines(slow=1)), {})
    assert limit.kind == "straggler"
    assert limit.sentences[0].startswith(
        "Rank 1 limits this run: it is the last to reach the exchange in 100 % of the"
    )
    assert "forward takes 2.2× as long (90 ms per step, 40 ms on the others)" in limit.sentences[1]
    assert limit.remedies[0].expected == "steps of 110 ms if it kept up"


def test_ranks_that_wait_for_each_other_in_turn_are_not_the_networks_fault():
    limit = find_bottleneck(summary_of(timelines(turns=True)), {})
    assert limit.kind == "uneven"
    assert "a faster network would not help" in limit.sentences[0]


def slow_network(seconds=0.190):
    """Return the summary of two ranks that wait for their network."""
    traces = timelines(ranks=2)
    return summary_of(
        {
            rank: replace(each, warm=tuple(_slower(line, seconds) for line in each.warm))
            for rank, each in traces.items()
        }
    )


def test_a_slow_network_is_named_with_what_it_carries_and_what_would_help():
    limit = find_bottleneck(slow_network(), {"parameters": 250_000, "world": {"nodes": 2}})
    assert limit.kind == "communication"
    assert "sent over the network at 5" in limit.sentences[0]
    assert limit.remedies[0].action == "Send int8 gradients every step"
    assert limit.remedies[0].how == '--compression int8, or paceline.Sync(compression="int8")'
    assert any("--accumulate" in remedy.how for remedy in limit.remedies)


def test_a_custom_loop_is_advised_how_to_exchange_less_often():
    remedies = find_bottleneck(slow_network(seconds=2.0), {"parameters": 250_000}).remedies
    assert remedies[1].action == "Send int4 parameters every 3 steps in 3 fragments, 1 step late"
    assert remedies[1].how == (
        "--every 3 --outer average --compression int4 --fragments 3 --delay 1, or "
        'paceline.LocalSGD(model, optim, every=3, compression="int4", fragments=3, delay=1)'
    )


def test_the_advice_for_a_custom_loop_follows_the_rule_of_the_command_line():
    """DiLoCo with a delay discards local steps, unless it is called with an option; ``paceline train`` keeps them."""
    how = find_bottleneck(slow_network(seconds=20.0), {"parameters": 250_000}).remedies[1].how
    assert "--outer diloco" in how
    assert how.endswith("delay=7, keep_local_steps=True)")


def test_compression_is_not_advised_within_one_host():
    limit = find_bottleneck(slow_network(), {"parameters": 250_000, "world": {"nodes": 1}})
    assert limit.kind == "communication"
    assert "sent between processes of this host at 5" in limit.sentences[0]
    assert not any("Send int" in remedy.action for remedy in limit.remedies)
    assert any("--accumulate" in remedy.how for remedy in limit.remedies)


def test_the_largest_limit_is_named_also_beside_a_slow_rank():
    traces = timelines(slow=1, ranks=2, extra=0.02)
    assert find_bottleneck(summary_of(traces), {}).kind == "straggler"
    slow = {
        rank: replace(each, warm=tuple(_slower(line) for line in each.warm)) for rank, each in traces.items()
    }
    assert compare_arrivals(slow).straggler is not None
    assert find_bottleneck(summary_of(slow), {}).kind == "communication"


def test_data_that_one_rank_waits_for_is_a_stragglers():
    limit = find_bottleneck(summary_of(timelines(slow=1, part="data", ranks=2)), {})
    assert limit.kind == "straggler"
    assert "waits for its data" in limit.sentences[1]


def _slower(line, seconds=0.190):
    (call,), (*phases, exchange) = line.calls, line.phases
    end = call.launched + seconds
    return replace(
        line,
        seconds=end,
        phases=(*phases, replace(exchange, end=end)),
        waits=(TracedWait(0, call.launched, end),),
        calls=(replace(call, seen=end),),
    )


def test_the_rate_counts_from_the_last_launch():
    assert transfer_rate(timelines(slow=1, ranks=2)) == pytest.approx(1_000_000 / NETWORK, rel=1e-6)
    assert transfer_rate(timelines(ranks=4)) == pytest.approx(1_000_000 / NETWORK, rel=1e-6)
    assert transfer_rate(timelines(ranks=1)) is None
