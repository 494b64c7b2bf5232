"""Trace files: fields of a line, no effect while closed, whole lines after forks and kills."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from paceline.errors import UsageError
from paceline.profiling import trace_file


@pytest.fixture(autouse=True)
def _closed():
    yield
    trace_file.close()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines() if line]


@contextlib.contextmanager
def span(name, **fields):
    """Write how long the block took, with the class of the exception that ended it."""
    started = time.perf_counter()
    try:
        yield
    except BaseException as error:
        fields["error"] = type(error).__name__
        raise
    finally:
        trace_file.add(name, started, time.perf_counter() - started, **fields)


def test_nothing_is_written_while_closed():
    assert trace_file._writer is None
    with span("a"):
        trace_file.mark("b")
        trace_file.add("c", 0.0, 1.0)
    assert trace_file._writer is None


def test_spans_and_marks_share_one_time_line(tmp_path):
    path = tmp_path / "trace" / "rank3.jsonl"
    before = time.time()
    trace_file.open(path, 3)
    with span("outer", step=7):
        with span("inner", step=7, note="x"):
            time.sleep(0.01)
        trace_file.mark("flag", ready=True)
        measured = time.perf_counter()
    trace_file.add("measured", measured - 0.5, 0.25, calls=[1, 2])
    trace_file.close()
    inner, flag, outer, added = lines(path)
    assert {record["rank"] for record in (inner, flag, outer, added)} == {3}
    assert (inner["name"], inner["note"], inner["step"]) == ("inner", "x", 7)
    assert flag["seconds"] == 0
    assert flag["ready"] is True
    assert 0.01 <= inner["seconds"] <= outer["seconds"]
    assert before - 1e-3 <= outer["start"] <= inner["start"] <= flag["start"] <= time.time()
    assert outer["start"] + outer["seconds"] - added["start"] == pytest.approx(0.5, abs=1e-2)
    assert (added["seconds"], added["calls"]) == (0.25, [1, 2])


def test_a_span_that_raises_is_written_with_its_error(tmp_path):
    trace_file.open(tmp_path / "t", 0)
    with pytest.raises(KeyError), span("load"):
        raise KeyError("x")
    assert lines(tmp_path / "t")[0]["error"] == "KeyError"


def test_lines_are_on_disk_before_close(tmp_path):
    trace_file.open(tmp_path / "t", 0)
    trace_file.mark("first")
    assert lines(tmp_path / "t")[0]["name"] == "first"


def test_open_truncates_or_appends_after_a_cut_line(tmp_path):
    path = tmp_path / "t"
    path.write_text('{"name": "cut", "sta')
    trace_file.open(path, 0, append=True)
    trace_file.mark("resumed")
    trace_file.close()
    cut, resumed = (line for line in path.read_text().splitlines() if line)
    assert cut == '{"name": "cut", "sta'
    assert json.loads(resumed)["name"] == "resumed"
    trace_file.open(path, 0)
    trace_file.mark("anew")
    assert [line["name"] for line in lines(path)] == ["anew"]


def test_opening_twice_closes_the_first(tmp_path):
    trace_file.open(tmp_path / "a", 0)
    trace_file.open(tmp_path / "b", 1)
    trace_file.mark("x")
    assert lines(tmp_path / "a") == []
    assert lines(tmp_path / "b")[0]["rank"] == 1


def test_closing_inside_a_span_is_no_error(tmp_path):
    trace_file.open(tmp_path / "t", 0)
    with span("x"):
        trace_file.close()
    assert trace_file._writer is None


def test_numbers_that_json_cannot_represent_become_null(tmp_path):
    trace_file.open(tmp_path / "t", 0)
    trace_file.mark("loss", value=math.nan, deep={"a": [math.inf, 1.0]})
    text = (tmp_path / "t").read_text()
    record = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record["value"] is None
    assert record["deep"] == {"a": [None, 1.0]}


def test_a_field_that_is_no_json_is_named(tmp_path):
    trace_file.open(tmp_path / "t", 0)
    with pytest.raises(UsageError, match=r"trace of 'x'.*object"):
        trace_file.mark("x", value=object())


@pytest.mark.parametrize("field", ["rank", "start", "seconds"])
def test_a_field_that_would_hide_an_own_one_is_refused(tmp_path, field):
    trace_file.open(tmp_path / "t", 0)
    with pytest.raises(UsageError, match=field):
        trace_file.mark("x", **{field: 1})


def test_a_path_that_cannot_be_written_is_a_usage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="can't write the trace"):
        trace_file.open(tmp_path / "file" / "rank0.jsonl", 0)
    assert trace_file._writer is None


def test_a_forked_child_is_closed_and_writes_nothing(tmp_path):
    trace_file.open(tmp_path / "t", 0)
    trace_file.mark("before")
    child = os.fork()
    if child == 0:
        trace_file.mark("child")
        os._exit(7 if trace_file._writer else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    trace_file.mark("after")
    assert [line["name"] for line in lines(tmp_path / "t")] == ["before", "after"]


def test_threads_never_mix_their_lines(tmp_path):
    trace_file.open(tmp_path / "t", 0)
    threads = [
        threading.Thread(
            target=lambda k=k: [trace_file.mark("m", thread=k, pad="x" * 500) for _ in range(100)]
        )
        for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(line["thread"] for line in lines(tmp_path / "t")) == sorted([0, 1, 2, 3] * 100)


def test_a_killed_process_leaves_every_line_it_wrote(tmp_path):
    code = (
        "import os, signal, sys; from paceline.profiling import trace_file; trace_file.open(sys.argv[1], 0); "
        "[trace_file.mark('m', k=k) for k in range(50)]; os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "t"], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [line["k"] for line in lines(tmp_path / "t")] == list(range(50))
