"""The timeline in the format of Perfetto: every bar has its time, and bars of a row never overlap."""

from __future__ import annotations

import itertools
import json

import pytest
from test_straggler_detection import timelines

from paceline.tools.report.run.perfetto_export import trace_events
from paceline.tools.report.run.run_records import read_run
from paceline.tools.report.run.trace_reader import read_timeline
from recorded_run import write_run


@pytest.fixture
def events(tmp_path):
    run = read_run(write_run(tmp_path / "r", ranks=2, steps=6))
    events = trace_events({rank: read_timeline(spans) for rank, spans in run.spans_of_rank.items()})
    return json.loads(json.dumps(events))["traceEvents"]


def test_every_track_that_occurs_has_a_name(events):
    named = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    occurring = {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}
    assert occurring == named.keys()
    assert [named[0, tid] for tid in (0, 1, 3, 4, 9)] == ["phases", "waiting", "calls", "calls 2", "calls 7"]


def test_arrows_join_the_calls_of_a_collective_over_all_ranks_and_end_at_the_last():
    trace = json.loads(json.dumps(trace_events(timelines(slow=1, ranks=3, steps=4))))["traceEvents"]
    arrows = [event for event in trace if event["ph"] in "stf"]
    slices = {(e["pid"], e["tid"], e["ts"]): e["name"] for e in trace if e["ph"] == "X" and e["tid"] >= 3}
    flows = {}
    for event in arrows:
        assert event["cat"] == event["name"] == "collective"
        name = slices[event["pid"], event["tid"], event["ts"]]  # each is bound to the slice it begins with
        flows.setdefault(event["id"], []).append((event["ph"], event["pid"], name))
    assert len(flows) == 4  # one call a step
    for steps in flows.values():
        assert [kind for kind, *_ in steps] == ["s", "t", "f"]
        assert {pid for _, pid, _ in steps} == {0, 1, 2}
        assert steps[-1][1] == 1  # the rank that the others wait for
        assert len({name for *_, name in steps}) == 1
    assert all(event.get("bp") == "e" for event in arrows if event["ph"] == "f")


def test_counters_show_bytes_in_flight_and_memory(tmp_path):
    folder = write_run(tmp_path / "r", ranks=2, steps=3)
    path = folder / "trace" / "rank1.jsonl"
    start = json.loads(path.read_text().splitlines()[-1])["start"]
    mark = {"name": "memory", "start": start, "seconds": 0.0, "rank": 1, "resident": 5_000_000}
    path.write_text(path.read_text() + json.dumps(mark) + "\n")
    traces = {rank: read_timeline(spans) for rank, spans in read_run(folder).spans_of_rank.items()}
    counters = [event for event in trace_events(traces)["traceEvents"] if event["ph"] == "C"]
    flying = [e["args"]["bytes"] for e in counters if e["name"] == "bytes in flight" and e["pid"] == 0]
    assert max(flying) == 7 * (26_248_000 // 7)
    assert flying[-1] == 0
    (memory,) = [event for event in counters if event["name"] == "peak memory, resident"]
    assert (memory["pid"], memory["args"]) == (1, {"bytes": 5_000_000})


def test_every_rank_is_a_process_with_named_rows(events):
    names = [
        event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "process_name"
    ]
    assert names == ["rank 0", "rank 1"]
    assert {event["pid"] for event in events} == {0, 1}


def test_bars_have_the_keys_that_readers_need_and_begin_at_zero(events):
    bars = [event for event in events if event["ph"] == "X"]
    assert all({"name", "pid", "tid", "ts", "dur"} <= event.keys() for event in bars)
    assert min(event["ts"] for event in bars) == 0
    assert all(event["dur"] >= 0 for event in bars)
    steps = [event for event in bars if event["name"].startswith("step ") and event["pid"] == 0]
    assert [event["name"] for event in steps] == [f"step {number}" for number in range(1, 7)]


def test_calls_that_overlap_get_rows_of_their_own(events):
    rows = {(event["pid"], event["tid"]) for event in events if event["ph"] == "X" and event["tid"] >= 3}
    assert len(rows) == 2 * 7  # seven at once on each rank
    for row in rows:
        bars = sorted(
            (event["ts"], event["ts"] + event["dur"])
            for event in events
            if event["ph"] == "X" and (event["pid"], event["tid"]) == row
        )
        assert all(before[1] <= after[0] + 0.01 for before, after in itertools.pairwise(bars))


def test_calls_show_bytes_and_first_parameter():
    events = trace_events(timelines(ranks=2, steps=2))["traceEvents"]
    (call, *_) = [event for event in events if event["name"] == "reduce 0"]
    assert call["args"] == {"bytes": 1_000_000, "first_parameter": "a", "ready": 100_000.0}


def test_without_steps_there_are_no_events():
    assert trace_events({}) == {"traceEvents": [], "displayTimeUnit": "ms"}
