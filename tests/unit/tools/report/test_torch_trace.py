"""Traces of ``torch.profiler`` beside a run's timeline: aligned by the clock, named, refused where they don't fit."""

from __future__ import annotations

import gzip
import json

import pytest
import torch
from test_straggler_detection import timelines
from torch.profiler import ProfilerActivity, profile, record_function

import paceline
from paceline.errors import UsageError
from paceline.tools.report.run.perfetto_export import timeline_begin, trace_events
from paceline.tools.report.run.run_records import read_run
from paceline.tools.report.run.torch_trace import merge_torch_traces
from paceline.tools.report.run.trace_reader import RankTrace, read_timeline

STEPS = 4


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return the folder of a short run and the trace that torch.profiler made of it."""
    folder = tmp_path_factory.mktemp("recorded")
    model = paceline.DataParallel(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)))
    with (
        profile(activities=[ProfilerActivity.CPU]) as torch_profile,
        paceline.Profiler(folder / "run", model) as record,
    ):
        for step in range(STEPS):
            with record_function(f"forward of step {step + 1}"):
                loss = model(torch.randn(256, 64)).square().mean()
            model.backward(loss, samples=256)
            record.log(loss=loss, samples=256)
    torch_profile.export_chrome_trace(str(folder / "torch.json"))
    assert not torch.distributed.is_initialized()
    return folder


@pytest.fixture(scope="module")
def merged(recorded):
    traces = {rank: read_timeline(spans) for rank, spans in read_run(recorded / "run").spans_of_rank.items()}
    return merge_torch_traces(trace_events(traces), traces, [recorded / "torch.json"])["traceEvents"]


def test_events_of_torch_lie_in_the_phases_that_they_belong_to(merged):
    slices = [event for event in merged if event["ph"] == "X"]
    steps = {e["name"]: e for e in slices if e["name"].startswith("step ") and e["pid"] == 0}
    forwards = [e for e in slices if e["name"] == "forward" and e["pid"] == 0]
    found = [e for e in slices if str(e["name"]).startswith("forward of step ")]
    assert len(found) == STEPS
    apart = []
    for event in found:  # a forward ends within its step, whatever the system does in between
        step, end = steps[event["name"].removeprefix("forward of ")], event["ts"] + event["dur"]
        assert step["ts"] - 1000 <= end <= step["ts"] + step["dur"] + 1000
        apart += [abs(each["ts"] - event["ts"]) for each in forwards]
    assert min(apart) < 5000  # µs between the two records of the same moment, where nothing came between


def test_every_track_of_torch_has_a_name_and_a_process_of_its_own(merged):
    names = {(e["pid"], e["tid"]) for e in merged if e["ph"] == "M" and e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in merged if e["name"] == "process_name"}
    occurring = {(e["pid"], e["tid"]) for e in merged if e["ph"] == "X"}
    assert occurring <= names
    assert processes[0] == "rank 0"
    assert all(name.startswith("rank 0, torch: ") for pid, name in processes.items() if pid)
    assert {pid for pid, _ in occurring} <= processes.keys()


def test_arrows_of_torch_keep_their_pairs_and_meet_none_of_paceline(merged):
    flows = {}
    for event in merged:
        if event["ph"] in ("s", "t", "f") and event["cat"] != "collective":
            flows.setdefault((event["cat"], event["id"]), set()).add(event["ph"])
    assert flows
    assert all(kinds >= {"s", "f"} for kinds in flows.values())


def fake(path, begin, *, rank=None, base=0, **more):
    """Write a trace with one slice that begins at `begin` unix seconds."""
    event = {"ph": "X", "name": "mm", "pid": 7, "tid": 9, "ts": 1e6 * (begin - base), "dur": 1000.0, "id": 3}
    content = {"baseTimeNanoseconds": int(base * 1e9), "traceEvents": [event]} | more
    if rank is not None:
        content["distributedInfo"] = {"rank": rank}
    data = json.dumps(content).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def test_each_rank_is_moved_by_the_offset_of_its_own_clock(tmp_path):
    traces = timelines(ranks=2, steps=3)
    begin = timeline_begin(traces)
    ahead = RankTrace(traces[1].steps, traces[1].warm, clock_marks=((begin, 5.0),))  # 5 s ahead of rank 0
    files = [
        fake(tmp_path / "torch-rank0.json", begin + 0.1),
        fake(tmp_path / "any.json.gz", begin + 5.1, rank=1, base=int(begin)),
    ]
    traces = {0: traces[0], 1: ahead}
    events = merge_torch_traces(trace_events(traces), traces, files)["traceEvents"]
    found = [event for event in events if event["name"] == "mm"]
    assert [event["ts"] for event in found] == pytest.approx([100_000, 100_000], abs=1)
    assert len({event["pid"] for event in found}) == len({event["id"] for event in found}) == 2
    labels = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == found[0]["pid"]]
    assert labels == ["track 9"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder, begin: [folder / "none.json"], "can't be read as a trace"),
        (lambda folder, begin: [fake(folder / "a.json", begin + 9000)], "does not overlap"),
        (lambda folder, begin: [fake(folder / "a.json", begin, rank=5)], "the run has ranks 0, 1"),
        (
            lambda folder, begin: [
                fake(folder / "a.json", begin, rank=1),
                fake(folder / "b.json", begin, rank=1),
            ],
            "another file is of this rank too",
        ),
        (
            lambda folder, begin: [fake(folder / "a.json", begin), fake(folder / "b.json", begin)],
            "does not say which rank",
        ),
        (lambda folder, begin: [fake(folder / "a.json", begin, traceEvents=3)], "has no traceEvents"),
    ],
)
def test_a_trace_that_does_not_fit_is_refused(tmp_path, make, message):
    traces = timelines(ranks=2, steps=3)
    files = make(tmp_path, timeline_begin(traces))
    with pytest.raises(UsageError, match=message):
        merge_torch_traces(trace_events(traces), traces, files)
