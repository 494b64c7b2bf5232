"""A recorded step becomes one line of the trace."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import pytest

from paceline._core.step_state import StepState
from paceline.profiling import trace_file
from paceline.profiling.step_recorder import StepRecorder, is_quiet


@dataclass
class Round:
    """Of a model."""

    step: int = 0
    comm: object = None


@pytest.fixture
def lines(tmp_path):
    """Record into a file, and return a function that ends that and gives its lines."""
    path = tmp_path / "trace" / "rank3.jsonl"
    trace_file.open(path, 3)

    def read():
        trace_file.close()
        return [json.loads(line) for line in path.read_text().splitlines()]

    yield read
    trace_file.close()


def test_a_step_is_one_line_from_its_forward_to_the_next(lines):
    here, model = StepState(), Round()
    here.recorder = StepRecorder(model)
    for step in (0, 1):
        model.step = step
        here.begin_phase(step, "forward")
        here.begin_phase(step, "backward")
        here.enter_phase("exchange")
        here.begin_wait(2)
        here.end_wait()
        here.enter_phase("optimizer")
        here.enter_phase("optimizer")
    here.recorder.flush()
    here.recorder.flush()
    first, second = lines()
    assert (first["name"], first["rank"], first["step"], second["step"]) == ("step", 3, 0, 1)
    assert [name for name, _ in first["phases"]] == ["forward", "backward", "exchange", "optimizer"]
    assert first["phases"][0][1] == 0
    assert first["start"] + first["seconds"] == pytest.approx(second["start"], abs=2e-6)
    ((bucket, since, until),) = first["waits"]
    assert bucket == 2
    assert 0 <= since <= until <= 1e6 * first["seconds"]


def test_calls_are_recorded_with_their_known_fields(lines):
    recorder = StepRecorder(Round(5))
    start = time.perf_counter()
    recorder.phase("forward", start)
    recorder.launched("reduce", 0, 4096, 2048, start + 0.001, start + 0.002)
    recorder.launched("gather", 0, 2048.0, 1024.0, None, start + 0.003)
    recorder.completed("reduce", 0, None, start + 0.004)
    recorder.completed("reduce", 7, None, start)  # of a step that is over
    recorder.samples = 16.0
    recorder.flush(start + 0.010)
    (line,) = lines()
    reduced, gathered = line["calls"]
    assert reduced[:6] == ["reduce", 0, 4096, 2048, 1000, 2000]
    assert reduced[7:] == [None, 4000]
    assert gathered[:6] == ["gather", 0, 2048, 1024, None, 3000]
    assert gathered[7:] == [None, None]
    assert line["samples"] == 16.0
    assert line["cpu"] >= 0
    assert line["preempted"] >= 0


def test_tasks_and_plans_are_recorded(lines):
    here = StepState()
    here.recorder = StepRecorder(Round())
    here.begin_phase(0, "forward")
    with here.running_task("checkpoint"):
        pass
    buckets = [object()]
    for _ in range(2):
        here.recorder.planned(buckets, lambda: {"step": 0, "buckets": []})
    here.recorder.planned([object()], lambda: {"step": 1, "buckets": []})
    here.recorder.flush()
    recorded = lines()
    assert [line["name"] for line in recorded] == ["plan", "plan", "step"]
    assert recorded[-1]["tasks"][0][0] == "checkpoint"


def test_work_of_another_model_is_part_of_the_step(lines):
    here, model, other = StepState(), Round(comm=object()), Round(17, comm=object())
    here.recorder = StepRecorder(model)
    assert here.recorder_of(model.comm) is here.recorder
    assert here.recorder_of(other.comm) is None
    for _ in range(2):
        for each in (model, other):
            here.begin_phase(each.step, "forward")
            here.begin_phase(each.step, "backward")
            here.begin_phase(each.step, "exchange")
            each.step += 1
            here.enter_phase("optimizer")
    here.recorder.flush()
    recorded = lines()
    # the other's forward follows the round, so it belongs to the next step
    assert [line["step"] for line in recorded] == [0, 1, 2]
    phases = ["forward", "backward", "exchange", "optimizer"]
    assert [[name for name, _ in line["phases"]] for line in recorded] == [phases, 2 * phases, phases]


def test_some_steps_are_quiet():
    assert [step for step in range(300) if is_quiet(step)] == [2, 4, 8, 16, 32, 64, 128, 256]
    assert not is_quiet(0)
    assert sum(map(is_quiet, range(128, 128 * 11))) == 10
