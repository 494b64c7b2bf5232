"""Runs in which ranks died while the others trained on: their records, traces and page."""

from __future__ import annotations

import json

import pytest

from paceline.tools.report.run.perfetto_export import trace_events
from paceline.tools.report.run.restart_records import (
    DepartureRecord,
    HostChangeRecord,
    RecoveryRecord,
    parse_restart_log,
)
from paceline.tools.report.run.run_page import render_run_page
from paceline.tools.report.run.run_records import read_run
from paceline.tools.report.run.trace_reader import read_timeline
from recorded_run import write_run

pytest.importorskip("jinja2")

HEAD = {"restart": 0, "time": "2026-08-01T10:11:42.500+00:00", "written_by": "pc1"}
DEPARTURE = HEAD | {
    "event": "departure",
    "host": "pc1",
    "rank": 1,
    "how": "was ended by SIGKILL",
    "member": "a/1/0",
    "left": 2,
    "replaced": True,
}
CHANGE = HEAD | {"event": "change", "host": "pc2", "how": "was lost", "seconds": 31.5}
RECOVERY = HEAD | {
    "event": "recovery",
    "epoch": 1,
    "ranks": 1,
    "members": ["a/0/0"],
    "step": 6,
    "repeated": True,
}
RECOVERY |= {"seconds": 0.75}
JOINED = RECOVERY | {"epoch": 2, "members": ["a/0/0", "a/1/1"], "step": 9, "repeated": False}


def test_what_several_hosts_record_is_read_once():
    lines = [
        DEPARTURE,
        CHANGE,
        RECOVERY,
        *({**each, "written_by": "pc3"} for each in (CHANGE, RECOVERY)),
        JOINED,
    ]
    notes: list[str] = []
    restarts, live = parse_restart_log(lines, notes)
    assert (restarts, notes) == ((), [])
    assert [type(each) for each in live] == [
        DepartureRecord,
        HostChangeRecord,
        RecoveryRecord,
        RecoveryRecord,
    ]
    assert live[2] == RecoveryRecord(
        restart=0, time=HEAD["time"], epoch=1, members=("a/0/0",), step=6, repeated=True, seconds=0.75
    )


def test_a_restart_that_several_hosts_record_is_read_once():
    first = {"host": "pc2", "rank": 1, "how": "was ended by SIGKILL", "seconds": 31.25, "lines": []}
    restart = HEAD | {"event": "restart", "restart": 1, "ranks_before": 2, "ranks_after": 2, "first": first}
    later = {"time": "2026-08-01T10:11:42.731+00:00", "written_by": "pc2"}
    of_next_job = restart | {"time": "2026-08-02T08:00:00.000+00:00"}
    records = [restart, restart | later, of_next_job, of_next_job | later, restart | {"restart": 2}]
    restarts, _ = parse_restart_log(records, [])
    assert [each.time for each in restarts] == [HEAD["time"], of_next_job["time"], HEAD["time"]]


def test_a_run_that_was_resumed_counts_its_epochs_anew():
    resumed = RECOVERY | {"members": ["b/0/0"]}
    assert len(parse_restart_log([RECOVERY, resumed, RECOVERY | {"restart": 1}], [])[1]) == 3


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (RECOVERY | {"step": "six"}, "recovery.step"),
        (RECOVERY | {"seconds": -1.0}, "recovery.seconds"),
        ({**HEAD, "event": "change", "host": "pc2"}, "change.how is missing"),
        ({**HEAD, "event": "picnic"}, "event 'picnic' is unknown"),
    ],
)
def test_an_invalid_record_is_skipped_and_reported(line, why):
    notes: list[str] = []
    assert parse_restart_log([DEPARTURE, line], notes)[1] == parse_restart_log([DEPARTURE], [])[1]
    [note] = notes
    assert "restarts.jsonl: skipped 1 invalid record(s)" in note
    assert why in note


def recovered(folder):
    """Write a run of 12 steps in which rank 0 dies after 6: the process of rank 1 goes on as rank 0, then with another.

    Its trace has steps 0 to 5 as rank 1 and 6 to 11 as rank 0; a joiner's has 9 to 11 as rank 1.
    """
    write_run(folder, ranks=2, steps=12)
    trace = folder / "trace"
    lines = [json.loads(line) for line in (trace / "rank1.jsonl").read_text().splitlines()]
    dead = [line for line in (trace / "rank0.jsonl").read_text().splitlines() if json.loads(line)["step"] < 6]
    (trace / "rank0.jsonl").write_text("\n".join(dead) + "\n")
    own, joiner = [], []
    for line in lines:
        for step, ranks in ((6, 1), (9, 2)):
            if line["name"] == "step" and line["step"] == step:
                at = {"start": line["start"], "rank": 0, "step": step, "ranks": ranks}
                own.append({"name": "session", "seconds": 0.0, **at})
                own.append({"name": "recovery", "seconds": 0.75, **at})
                joiner += [{"name": "session", "seconds": 0.0, **at, "rank": 1}] if ranks == 2 else []
        own.append(line | {"rank": int(line["step"] < 6)})
        if line["step"] >= 9:
            joiner.append(line)
    for name, found in (("rank1", own), ("rank1.1", joiner)):
        (trace / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in found))
    (folder / "logs").mkdir()
    records = "".join(json.dumps(line) + "\n" for line in (DEPARTURE, CHANGE, RECOVERY, JOINED))
    (folder / "logs" / "restarts.jsonl").write_text(records)
    return folder


def test_steps_belong_to_the_rank_that_a_process_had(tmp_path):
    run = read_run(recovered(tmp_path / "run"))
    assert run.notes == ()
    timelines = {rank: read_timeline(spans) for rank, spans in run.spans_of_rank.items()}
    assert {rank: [line.step for line in each.steps] for rank, each in timelines.items()} == {
        0: list(range(12)),
        1: [*range(6), 9, 10, 11],
    }
    assert [(each.step, each.ranks, each.seconds) for each in timelines[0].recoveries] == [
        (6, 1, 0.75),
        (9, 2, 0.75),
    ]
    slices = [event for event in trace_events(timelines)["traceEvents"] if event["name"] == "recovery"]
    assert [(each["pid"], each["dur"], each["args"]) for each in slices] == [
        (0, 750_000.0, {"step": 7, "ranks": 1}),
        (0, 750_000.0, {"step": 10, "ranks": 2}),
    ]


def test_ranks_that_only_an_earlier_start_had_are_left_out(tmp_path):
    folder = write_run(tmp_path / "run", ranks=3, steps=4)
    later = {"name": "session", "start": 1_785_000_900.0, "seconds": 0.0, "step": 2}
    for rank in (0, 1):
        with (folder / "trace" / f"rank{rank}.jsonl").open("a") as file:
            file.write(json.dumps(later | {"rank": rank}) + "\n")
    assert sorted(read_run(folder).spans_of_rank) == [0, 1]


def test_the_page_shows_departures_and_recoveries(tmp_path):
    page = render_run_page(read_run(recovered(tmp_path / "run")))
    assert "<h2>Live recoveries</h2>" in page
    for text in (
        "30.5 s",
        "rank 1 on pc1 was ended by SIGKILL; it is replaced",
        "pc2 was lost",
        "2 → 1",
        "750 ms",
        "step 7 repeated",
        "recovery, with 1 new rank",
        "1 → 2",
        "from step 10",
    ):
        assert text in page
    assert '"marks":[[6.5,"1 rank",' in page
    assert "<h2>Restarts</h2>" not in page
    calm = render_run_page(read_run(write_run(tmp_path / "calm", steps=12)))
    assert "Live recoveries" not in calm
    assert '"marks":[]' in calm
