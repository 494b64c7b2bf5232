"""Reading run folders: complete, truncated, damaged, and missing ones."""

from __future__ import annotations

import json
import math

import pytest

from paceline.errors import UsageError
from paceline.tools.report.run.run_records import TraceSpan, read_run
from recorded_run import write_run


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "run", ranks=3, steps=12)


def append(path, text):
    with path.open("a") as file:
        file.write(text)


def test_a_whole_run_is_read_without_notes(folder):
    run = read_run(folder)
    assert run.notes == ()
    assert [step.step for step in run.steps] == list(range(1, 13))
    assert sorted(run.spans_of_rank) == [0, 1, 2]
    assert run.facts["settings"]["sync"] == "sharded"
    assert run.sample.startswith("def parse")
    assert run.steps[0].val_loss == pytest.approx(5.55)
    assert run.steps[1].val_loss is None


def test_spans_keep_their_own_fields(folder):
    spans = [span for span in read_run(folder).spans_of_rank[2] if span.name == "step"]
    assert len(spans) == 12
    assert spans[0].rank == 2
    assert spans[0].fields["step"] == 0
    assert len(spans[0].fields["calls"]) == 7
    assert TraceSpan("a", 2.0, 0.5, 0).end == 2.5


@pytest.mark.parametrize("cut", ["", '{"step": 13, "lo', '{"step": 13, "loss": 2.0', "\n"])
def test_a_truncated_last_line_is_skipped_and_reported(folder, cut):
    append(folder / "steps.jsonl", cut)
    run = read_run(folder)
    assert len(run.steps) == 12
    assert ["steps.jsonl is truncated" in note for note in run.notes] == ([True] if cut.strip() else [])


def test_a_cut_trace_names_the_rank(folder):
    path = folder / "trace" / "rank1.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    (note,) = read_run(folder).notes
    assert "trace/rank1.jsonl is truncated" in note


def test_damage_in_the_middle_is_counted_with_its_first_line(folder):
    path = folder / "steps.jsonl"
    lines = path.read_text().splitlines()
    lines[3], lines[5] = "\x00\x00", '["no object"]'
    path.write_text("\n".join(lines) + "\n")
    run = read_run(folder)
    assert len(run.steps) == 10
    assert run.notes == ("steps.jsonl: skipped 2 damaged line(s), the first is line 4.",)


def test_a_resumed_run_may_repeat_steps_and_the_last_line_counts(folder):
    append(folder / "steps.jsonl", json.dumps({"step": 5, "loss": 9.0}) + "\n")
    run = read_run(folder)
    assert len(run.steps) == 12
    assert run.steps[4].loss == 9.0
    assert run.steps[4].tokens_per_second is None


@pytest.mark.parametrize("loss", ["null", "NaN"])
def test_a_loss_that_is_no_number_is_nan(folder, loss):
    append(folder / "steps.jsonl", f'{{"step": 13, "loss": {loss}}}\n')
    assert math.isnan(read_run(folder).steps[-1].loss)


def test_a_step_without_a_loss_has_the_other_logged_values(folder):
    append(folder / "steps.jsonl", '{"step": 13, "samples_per_second": 5, "accuracy": 0.5, "note": "x"}\n')
    step = read_run(folder).steps[-1]
    assert (step.loss, step.samples_per_second, step.numbers) == (None, 5.0, {"accuracy": 0.5})


def test_a_run_that_has_just_begun(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    run = read_run(tmp_path)
    assert run.steps == ()
    assert run.sample == ""
    assert any("No step was logged" in note for note in run.notes)
    assert any("There is no trace" in note for note in run.notes)


def test_other_files_in_the_trace_folder_are_ignored(folder):
    (folder / "trace" / "rank0.jsonl.bak").write_text("x")
    (folder / "trace" / "notes.txt").write_text("x")
    assert sorted(read_run(folder).spans_of_rank) == [0, 1, 2]


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(UsageError, match="is no folder"):
        read_run(tmp_path / "nothing")


def test_a_folder_of_runs_suggests_one(folder):
    with pytest.raises(UsageError, match=f"(?s)has no run.json.*did you mean {folder}"):
        read_run(folder.parent)


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_a_run_json_that_cannot_be_read(folder, text):
    (folder / "run.json").write_text(text, encoding="latin-1")
    with pytest.raises(UsageError, match=r"run\.json"):
        read_run(folder)


def test_restarts_name_the_first_failure(folder):
    assert read_run(folder).restarts == ()
    (folder / "logs").mkdir(exist_ok=True)
    first = {
        "host": "pc1",
        "rank": 3,
        "how": "ended with exit code 1",
        "lines": ["x", "[rank3]: ValueError: bad"],
    }
    lines = [
        {"restart": 1, "time": "2026-01-02T03:04:05", "ranks_before": 4, "ranks_after": 4, "first": first},
        {"restart": 2, "ranks_before": 4, "ranks_after": 2, "lost": ["pc2"], "joined": [], "why": "late"},
        {
            "event": "end",
            "restart": 3,
            "ranks_before": 2,
            "ranks_after": 2,
            "first": {"host": "pc1", "how": "lost"},
        },
    ]
    (folder / "logs" / "restarts.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + "{cut"
    )
    run = read_run(folder)
    assert [each.reason for each in run.restarts] == [
        "rank 3 on pc1 ended with exit code 1: ValueError: bad", "pc2 lost; late", "pc1 lost",
    ]  # fmt: skip
    assert [(each.number, each.ranks_before, each.ranks_after) for each in run.restarts] == [
        (1, 4, 4),
        (2, 4, 2),
        (3, 2, 0),
    ]
    assert any("restarts.jsonl is truncated" in note for note in run.notes)
