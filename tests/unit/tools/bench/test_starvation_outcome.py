"""Outcomes from events and ends of processes, settings, cases, and the table."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.sampling.block_dispatch import dispatch_blocks
from paceline.errors import UsageError
from paceline.tools.bench.starvation.starvation_cases import STARVATION_CASES, find_cases
from paceline.tools.bench.starvation.starvation_outcome import (
    EventLog,
    ProcessEnd,
    RankOutcome,
    case_outcome,
    read_events,
    short_message,
)
from paceline.tools.bench.starvation.starvation_settings import (
    EXAMPLE_BALANCE,
    MOST_RANKS,
    StarvationSettings,
)
from paceline.tools.bench.starvation.starvation_table import (
    STARVATION_COLUMNS,
    is_exact,
    row_cells,
    summary_line,
    table_title,
)
from paceline.tools.plan.uneven_batch_outcomes import BatchBalance

SETTINGS = StarvationSettings(EXAMPLE_BALANCE, timeout=10.0)
PLACE = "[/build/third_party/gloo/gloo/transport/tcp/pair.cc:537] "
ABORT = (
    "[W101 Warning: something else\n"
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
    "  what():  [enforce fail at /build/gloo/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 328 vs 8. Received\n"
)


def started(at, step=0):
    return {"event": "started", "at": at, "step": step}


def stepped(at, step=0, samples=64, error=1e-16):
    return {"event": "stepped", "at": at, "step": step, "samples": samples, "error": error}


def dry(at):
    return {"event": "dry", "at": at}


def raised(at, text, kind="RuntimeError"):
    return {"event": "raised", "at": at, "kind": kind, "text": text}


def finished(at, *parameters):
    return {"event": "finished", "at": at, "parameters": list(parameters), "parameter_error": 0.5}


def of(events, code, at=100.0, stderr=""):
    return RankOutcome.of(3, events, ProcessEnd(code, at, stderr), timeout=10.0)


# ---------------------------------------------------------------------- one rank


def test_a_rank_that_ended_as_planned_has_finished():
    one = of([started(1), stepped(2), finished(3, 0.5)], 0)
    assert (one.rank, one.kind, one.seconds) == (3, "finished", None)
    assert (one.steps, one.samples, one.errors) == (1, 64, (1e-16,))
    assert (one.parameters, one.parameter_error) == ((0.5,), 0.5)


def test_an_exception_at_once_is_an_error():
    one = of(
        [started(1), stepped(2), started(3, 1), raised(3.5, f"{PLACE}Connection closed by peer [::1]:4.")], 1
    )
    assert (one.kind, one.error, one.message) == ("error", "RuntimeError", "Connection closed by peer")
    assert one.seconds == pytest.approx(0.5)
    assert one.steps == 1


def test_an_exception_after_the_time_out_is_a_time_out():
    one = of(
        [started(1), raised(11.002, f"{PLACE}Timed out waiting 10000ms for recv operation to complete")], 1
    )
    assert (one.kind, one.message) == (
        "time-out",
        "Timed out waiting 10000ms for recv operation to complete",
    )
    # The other end of a wait that ran out is closed: that is an end by time-out too.
    assert of([dry(1), raised(11.01, "Connection closed by peer")], 1).kind == "time-out"


def test_a_signal_leaves_earlier_events():
    one = of([started(1), stepped(2), dry(3)], -6, at=3.25, stderr=ABORT)
    assert (one.kind, one.error, one.seconds, one.steps) == ("signal", "SIGABRT", 0.25, 1)
    assert one.message == "gloo::EnforceNotMet: op.preamble.length <= op.nbytes. 328 vs 8. Received"


def test_a_rank_that_was_killed_hung():
    assert (of([started(1)], None, at=31).kind, of([started(1)], None, at=31).seconds) == ("hung", 30)
    assert of([], None).kind == "hung"


def test_an_end_without_an_event_is_an_error():
    assert (of([started(1)], 3).kind, of([started(1)], 3).error) == ("error", "exit code 3")
    assert of([started(1), stepped(2), finished(3)], -11).error == "SIGSEGV"  # at its very end
    assert of([], 1).kind == "error"


@settings(deadline=None)
@given(cut=st.integers(0, 8), code=st.one_of(st.none(), st.integers(-64, 255)))
def test_any_prefix_of_the_events_is_understood(cut, code):
    events = [
        started(1),
        stepped(2),
        started(3, 1),
        stepped(4, 1),
        dry(5),
        started(6, 2),
        stepped(7, 2, 0),
        finished(8),
    ][:cut]
    one = of(events, code)
    assert one.steps == sum(event["event"] == "stepped" for event in events)
    assert (one.kind == "finished") == (cut == 8 and code == 0)
    assert one.kind == "finished" or one.seconds >= 0


def test_an_incomplete_line_is_left_out(tmp_path):
    events = EventLog(tmp_path / "events")
    events.write("started", step=0)
    with (tmp_path / "events").open("ab") as file:
        file.write(b'{"event": "st')
    (event,) = read_events(tmp_path / "events")
    assert (event["event"], event["step"]) == ("started", 0)
    assert read_events(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f"{PLACE}Read error [127.0.0.1]:420: Connection reset by peer. This is typically caused by …",
            "Read error: Connection reset by peer",
        ),
        (
            "Got the following error when running the callback: PeerLost: [rank 1, step 3] rank 1 on host a left "
            "the group, while rank 0 was in all_reduce(float64[161], SUM)\n  → see its output",
            "PeerLost: rank 1 on host a left the group",
        ),
        ("first\nsecond", "first"),
        ("", ""),
        ("terminate called without an active exception", "terminate called without an active exception"),
    ],
)
def test_messages_are_shortened(text, message):
    assert short_message(text) == message


# ---------------------------------------------------------------------- settings


def test_the_example_starves_one_rank():
    assert (SETTINGS.balance.batches, SETTINGS.dry_ranks, SETTINGS.steps) == ((10, 8), [1], 10)
    kinds = [SETTINGS.step_kind(step) for step in range(10)]
    assert kinds == ["equal"] * 7 + ["unequal", "dry", "dry"]


@settings(deadline=None)
@given(
    samples=st.integers(20, 400),
    ranks=st.integers(2, 5),
    block=st.integers(1, 20),
    scheme=st.sampled_from(["round_robin", "random"]),
    batch_size=st.integers(1, 16),
    seed=st.integers(0, 9),
)
def test_every_sample_is_in_one_batch(samples, ranks, block, scheme, batch_size, seed):
    dealing = dispatch_blocks(samples, ranks, block=block, scheme=scheme, seed=seed)
    balance = BatchBalance(dealing, batch_size)
    if not balance.starving or not min(balance.batches):
        with pytest.raises(UsageError):
            StarvationSettings(balance)
        return
    bench_settings = StarvationSettings.from_json(
        json.loads(json.dumps(StarvationSettings(balance, 3.0).to_json()))
    )
    assert bench_settings.balance.batches == balance.batches
    assert bench_settings.balance.dispatch.counts == dealing.counts
    own = [bench_settings.batches(rank) for rank in range(ranks)]
    assert [len(batches) for batches in own] == list(balance.batches)
    together = np.concatenate([batch for batches in own for batch in batches])
    by_step = np.concatenate([bench_settings.global_batch(step) for step in range(bench_settings.steps)])
    assert sorted(together) == sorted(by_step) == list(range(samples))
    assert "dry" in {bench_settings.step_kind(step) for step in range(bench_settings.steps)}


def test_the_next_epoch_has_other_batches():
    further = SETTINGS.later_batches(1)
    first = [next(further) for _ in range(20)]
    assert [len(batch) for batch in first[:9]] == [64] * 7 + [52, 64]
    assert set(np.concatenate(first[:8])) != set(np.concatenate(SETTINGS.batches(1)))


@pytest.mark.parametrize(
    ("balance", "timeout", "message"),
    [
        (EXAMPLE_BALANCE, 0.5, "time-out of 0.5 s"),
        (EXAMPLE_BALANCE, float("inf"), "time-out of inf s"),
        (BatchBalance(dispatch_blocks(100, 1), 7), 10, "1 ranks: each is a process here"),
        (BatchBalance(dispatch_blocks(1000, MOST_RANKS + 1), 7), 10, f"{MOST_RANKS + 1} ranks"),
        (BatchBalance(dispatch_blocks(1000, 2), 7), 10, "all ranks have 72 batches, so none starves"),
        (BatchBalance(dispatch_blocks(3, 4), 7), 10, "rank 3 has no batch at all"),
        (
            BatchBalance(dispatch_blocks(1100, 2, block=100), 64, drop_last=True),
            10,
            "including short last ones",
        ),
        (
            BatchBalance(dispatch_blocks(30_000_100, 2, block=100), 100_000),
            10,
            "30000100 samples in 151 steps",
        ),
        (BatchBalance(dispatch_blocks(5001, 2), 1), 10, "5001 samples in 2501 steps"),
    ],
)
def test_invalid_settings_are_refused(balance, timeout, message):
    with pytest.raises(UsageError, match=message):
        StarvationSettings(balance, timeout)


# ---------------------------------------------------------------------- cases and table


def test_cases_are_returned_in_their_order():
    assert [case.name for case in find_cases(["sharded", "exits"])] == ["exits", "sharded"]
    assert tuple(find_cases([])) == STARVATION_CASES
    with pytest.raises(UsageError, match="did you mean 'barrier'"):
        find_cases(["barier"])


def run(name, events, codes, at=100.0, stderr=("", "")):
    ends = {rank: ProcessEnd(codes[rank], at, stderr[rank]) for rank in (0, 1)}
    (wanted,) = find_cases([name])
    return json.loads(json.dumps(case_outcome(wanted, SETTINGS, events, ends).to_json()))


def steps(number, error=1e-16):
    return [
        event for step in range(number) for event in (started(step, step), stepped(step, step, error=error))
    ]


def test_a_case_in_which_a_rank_hangs():
    late = [*steps(8), started(20, 8), raised(30.1, f"{PLACE}Timed out waiting 10000ms for recv operation")]
    outcome = run("idles", {0: late, 1: [*steps(8), dry(8), finished(31)]}, (1, 0))
    assert row_cells(outcome)[1:5] == [
        "does something else",
        "hang, then RuntimeError: Timed out",
        "notices nothing",
        "10.1 s",
    ]
    assert (outcome["finished"], outcome["replicas_apart"], outcome["samples_lost"]) == (
        False,
        None,
        1100 - 16 * 64,
    )
    assert not is_exact(outcome)


def test_a_case_that_ends_by_a_signal():
    events = {
        0: [*steps(8), started(20, 8), raised(20.02, "Connection closed by peer")],
        1: [*steps(8), dry(99.9)],
    }
    outcome = run("metric", events, (1, -6), stderr=("", ABORT))
    assert row_cells(outcome)[2:5] == [
        "RuntimeError: Connection closed by peer",
        "SIGABRT: gloo::EnforceNotMet",
        "20 ms",
    ]
    assert "others: RuntimeError: Connection closed by peer (20 ms)" in summary_line(outcome)


def test_a_case_in_which_all_finish():
    wrong = [
        *steps(8),
        *(event for step in (8, 9) for event in (started(step, step), stepped(step, step, 38, 0.32))),
    ]
    outcome = run(
        "join", {0: [*wrong, finished(11, 1.0, 2.0)], 1: [*steps(8), finished(11, 1.0, 2.5)]}, (0, 0)
    )
    assert outcome["gradient_error_with_a_dry_rank"] == 0.32
    assert outcome["gradient_error_with_equal_batches"] == 1e-16
    assert outcome["replicas_apart"] == 0.5
    assert row_cells(outcome)[2:] == ["finish", "finish", "", "32.0%", "1e-16", "0"]
    assert not is_exact(outcome)
    right = {rank: [*steps(10), finished(11, 1.0)] for rank in (0, 1)}
    exact = run("bucketed", right, (0, 0)) | {"samples_lost": 0}
    assert is_exact(exact)
    assert len(row_cells(exact)) == len(STARVATION_COLUMNS)


def test_killed_ranks_are_reported_as_hung():
    outcome = run("barrier", {0: [started(1)], 1: [dry(1)]}, (None, None))
    assert row_cells(outcome)[2:4] == ["hang for ever", "hang for ever"]


def test_the_title_lists_the_settings():
    assert table_title(SETTINGS.summary()) == (
        "2 ranks, 1100 samples in blocks of 100, batches of 64: 10, 8 batches; gloo, time-out 10 s"
    )
