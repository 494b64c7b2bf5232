"""The parts of `paceline train` that need no ranks: learning rate, run folder, progress, bytes sent."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from paceline.errors import UsageError
from paceline.health.straggler import Straggler
from paceline.profiling.metrics_writer import StepMetrics
from paceline.tools.report.run.run_records import read_run
from paceline.tools.train.lr_schedule import cosine_lr
from paceline.tools.train.run_folder import RunFolder
from paceline.tools.train.traffic_counter import SentBytes, float32_gradient_nbytes, interface_nbytes
from paceline.tools.train.training_progress import TrainingProgress, format_step


def test_rate_rises_then_falls_to_a_tenth():
    rates = [cosine_lr(step, steps=100, warmup=10, peak=2.0) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == rates[9] == rates[10] == 2.0
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.2)
    assert rates[54] + rates[55] == pytest.approx(2.0 + 0.2)  # the middle of the cosine


@pytest.mark.parametrize("steps", [1, 2])
def test_rate_of_a_very_short_training(steps):
    assert all(0 < cosine_lr(step, steps=steps, warmup=1, peak=1.0) <= 1.0 for step in range(steps))


def run_in(path, step=3):
    folder = RunFolder(path)
    folder.prepare("refuse")
    folder.add_facts(command="x")
    StepMetrics(folder.path).add(step, {"loss": 1.0})
    return folder


def test_folder_that_holds_a_run_is_refused(tmp_path):
    folder = run_in(tmp_path / "run")
    with pytest.raises(UsageError, match=r"(?s)holds a run already.*--overwrite.*--out") as caught:
        folder.prepare("refuse")
    assert "--resume" not in str(caught.value)  # no checkpoint to resume from
    (folder.checkpoint / "step-00000003.tmp").mkdir(parents=True)  # interrupted: nothing to resume from
    with pytest.raises(UsageError, match="no complete checkpoint"):
        folder.prepare("resume")
    with pytest.raises(UsageError) as caught:
        folder.prepare("refuse")
    assert "--resume" not in str(caught.value)
    (folder.checkpoint / "step-00000003").mkdir()
    with pytest.raises(UsageError, match=r"(?s)holds a run already.*--resume.*--overwrite.*--out"):
        folder.prepare("refuse")


def test_a_failed_start_leaves_a_usable_folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.prepare("refuse")
    folder.add_facts(command="x")
    RunFolder(tmp_path / "run").prepare("refuse")


def test_overwrite_removes_the_run_and_nothing_else(tmp_path):
    folder = run_in(tmp_path / "run")
    (folder.checkpoint / "step-00000003").mkdir(parents=True)
    folder.trace(0).parent.mkdir()
    folder.trace(0).write_text("{}")
    (folder.path / "notes.txt").write_text("mine")
    folder.prepare("overwrite")
    assert sorted(path.name for path in folder.path.iterdir()) == ["logs", "notes.txt"]


def test_resume_needs_a_checkpoint(tmp_path):
    run_in(tmp_path / "run")
    with pytest.raises(UsageError, match="holds no complete checkpoint"):
        RunFolder(tmp_path / "run").prepare("resume")


@pytest.mark.parametrize("existing", ["refuse", "overwrite"])
def test_folder_that_is_a_file(tmp_path, existing):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(UsageError, match=r"can't write the run folder .*/run'"):
        RunFolder(tmp_path / "run").prepare(existing)
    assert (tmp_path / "run").read_text() == "mine"


def test_repeated_steps_replace_the_earlier_lines(tmp_path):
    folder = run_in(tmp_path / "run", step=1)
    before = StepMetrics(folder.path)
    for step in (2, 3, 4, 5):
        before.add(step, {"loss": 1.0})
    with folder.steps.open("a") as file:
        file.write('{"step": 6, "lo')
    again = StepMetrics(folder.path)
    for step in (3, 4):
        again.add(step, {"loss": 2.0})
    lines = [json.loads(line) for line in folder.steps.read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1), (2, 1), (3, 2), (4, 2)]
    assert [step.step for step in read_run(folder.path).steps] == [1, 2, 3, 4]


def test_logs_of_surplus_ranks_are_removed(tmp_path):
    folder = run_in(tmp_path / "run")
    for rank in (0, 1, 2, 10):
        (folder.logs / f"rank{rank}.log").write_text("")
    (folder.logs / "rankings.log").write_text("mine")
    folder.remove_ranks_from(2)
    assert sorted(path.name for path in folder.logs.iterdir()) == ["rank0.log", "rank1.log", "rankings.log"]


def test_facts_are_added(tmp_path):
    folder = run_in(tmp_path / "run")
    folder.add_facts(parameters=7)
    folder.add_facts(command="y")
    assert json.loads(folder.run.read_text()) == {"command": "y", "parameters": 7}


RECORD = {"loss": 2.5, "tokens_per_second": 12_345.0, "exposed_share": 0.071}


def shown(terminal, steps=300):
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=120, highlight=False)
    with TrainingProgress(steps, console=console) as progress:
        progress.held_out(0, 5.6)
        for step in range(1, steps + 1):
            progress.step({"step": step} | (RECORD if step % 5 == 0 else {}))
    return text.getvalue()


def test_plain_lines_where_there_is_no_terminal():
    lines = shown(terminal=False).splitlines()
    assert 20 <= len(lines) <= 35
    assert lines[0].startswith("step      0  held-out loss 5.6000 (8.079 bits per token)")
    assert lines[-1].startswith(
        "step    300/300  loss 2.500 · held-out 5.600 · 12.3 k tokens/s · 7 % exposed"
    )
    assert "\x1b" not in "".join(lines)


def test_live_line_on_a_terminal():
    text = shown(terminal=True)
    assert "held-out loss 5.6000" in text
    assert "300/300" in text
    assert "12.3 k tokens/s · 7 % exposed" in text
    assert "step    300/300" not in text


def test_missing_measurements_are_left_out():
    assert format_step({"step": 3}) == ""
    assert format_step({"val_loss": 2.0}) == "held-out 2.000"


@pytest.mark.parametrize(
    ("factor", "shown"), [(1.02, ""), (1.03, "slowest rank 1: 1.03×"), (2.5, "slowest rank 1: 2.50×")]
)
def test_the_slowest_rank_is_shown_if_it_is_slow_enough(factor, shown):
    assert format_step({"slowest": Straggler(1, "pc1", factor, 0.1)}) == shown


@pytest.mark.parametrize(("width", "shown"), [(90, False), (120, True), (160, True)])
def test_the_slowest_rank_is_shown_on_a_wide_terminal(width, shown):
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=width, highlight=False)
    with TrainingProgress(3, console=console) as progress:
        progress.step({"step": 1} | RECORD, Straggler(1, "pc1", 1.3, 0.1))
    assert ("slowest rank 1: 1.30×" in text.getvalue()) == shown


DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls
    lo: 999999 11 0 0 0 0 0 0 888888 11 0 0 0 0 0 0
  eth0:  5000 12 0 0 0 0 0 0 7000 13 0 0 0 0 0 0
 wlan0:   100 12 0 0 0 0 0 0 20 13 0 0 0 0 0 0
"""


def test_bytes_of_all_interfaces_but_the_loopback():
    assert interface_nbytes(DEV) == (7020, 5100)


def test_sent_bytes_are_compared_with_float32_gradients():
    traffic = SentBytes()
    assert traffic.summary() == ""
    for _ in range(10):
        traffic.add(100_000.0, float32_gradient_nbytes(1_000_000, ranks=4))
    assert traffic.state() == {"sent_nbytes": 1e6, "would_be_nbytes": 6e7}
    assert traffic.summary() == "sent 1 MB per rank; 60× less than float32 gradients every step (60 MB)"
    traffic.add(None, 1.0)
    assert traffic.state()["sent_nbytes"] is None
    assert traffic.summary() == ""


def test_float32_gradients_are_not_compared_with_themselves():
    assert SentBytes(6e6, 6e6).summary() == "sent 6 MB per rank"
