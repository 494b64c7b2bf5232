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
    rows = {(event["pid"], event["tid"]) for event in events if event["ph"] == "X" and event["tid"] >= 2}
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
