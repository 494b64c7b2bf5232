"""`paceline bench collectives` with real ranks: results checked, finished rows kept."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mpi_worlds import MPIEXEC, REASON, all_ended, mpi_world
from paceline._core.json_codec import encode
from paceline.collectives.algorithms import ALGORITHMS
from paceline.tools.bench.collectives.bus_bandwidth import OPERATIONS
from paceline.tools.bench.collectives.collectives_cases import list_cases
from paceline.tools.bench.collectives.collectives_settings import DTYPES, CollectiveSettings
from paceline.tools.bench.collectives.resume_journal import RowJournal

ALL = ("gloo", "paceline", "paceline:arena")
COMMAND = [sys.executable, "-m", "paceline", "bench", "collectives"]


def settings_of(ranks, **changes):
    base = {
        "backends": ALL,
        "ops": tuple(OPERATIONS),
        "ranks": (ranks,),
        "sizes": (4000, 40),
        "iterations": 3,
    }
    return CollectiveSettings(**{**base, **changes})


def measure(rank, size, settings, file, break_it=None):
    """Measure as a rank of the present world; `break_it` replaces the calls of the paceline backend."""
    import paceline
    from paceline.tools.bench.collectives import collectives_worker

    make_call = collectives_worker.make_call

    def broken(backend, buffers):
        run = make_call(backend, buffers)
        return run if break_it is None or backend.name != "paceline" else break_it(buffers, run)

    collectives_worker.make_call = broken
    try:
        journal = RowJournal(Path(file)) if rank == 0 else None
        collectives_worker.measure_cases(settings, list_cases(settings), paceline.init(), journal)
    finally:
        collectives_worker.make_call = make_call


def rows_of(pool, ranks, tmp_path, break_it=None, **changes):
    settings, journal = settings_of(ranks, **changes), RowJournal(tmp_path / "journal")
    journal.begin(encode(settings), {})
    pool(ranks).run(measure, settings, str(journal.path), break_it)
    return journal.rows()


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_operation_is_right_on_every_backend(pool, tmp_path, ranks):
    rows = rows_of(pool, ranks, tmp_path)
    assert {(row.backend, row.op) for row in rows} == {(backend, op) for backend in ALL for op in OPERATIONS}
    assert len(rows) == 2 * len(ALL) * len(OPERATIONS)
    for row in rows:
        assert row.correct, row
        assert row.times.iterations == 3
        assert 0 < row.times.min_s <= row.times.median_s <= row.times.p95_s <= row.times.max_s
        assert row.times.slowest_rank in range(ranks)
        assert row.busbw > 0


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_schedule_is_right(pool, tmp_path, ranks):
    names = tuple(
        f"schedule:{name}" for name in dict.fromkeys(name for op in OPERATIONS for name in ALGORITHMS[op])
    )
    rows = rows_of(pool, ranks, tmp_path, backends=("gloo", *names), sizes=(4000,), iterations=1)
    expected = {(f"schedule:{name}", op) for op in OPERATIONS for name in ALGORITHMS[op]}
    assert {(row.backend, row.op) for row in rows if row.backend != "gloo"} == expected
    assert all(row.correct for row in rows), rows


@pytest.mark.thorough
def test_every_dtype_is_checked_exactly(pool, tmp_path):
    for dtype in DTYPES:
        rows = rows_of(pool, 3, tmp_path, dtype=dtype, sizes=(3000,), iterations=1)
        assert len(rows) == len(ALL) * len(OPERATIONS)
        assert all(row.correct for row in rows), dtype


def forget(buffers, run):
    return lambda: None


def corrupt_one_element_of_the_last_rank(buffers, run):
    def corrupted():
        run()
        if buffers.rank == buffers.ranks - 1:
            buffers.output[-1] += 1

    return corrupted


class GoesWrongLater:
    """Right at first, and after some calls no more."""

    def __init__(self, buffers, run):
        self.buffers, self.run, self.calls = buffers, run, 0

    def __call__(self):
        self.run()
        self.calls += 1
        if self.calls > 3:
            self.buffers.output[0] += 1


def swap_neighbours(buffers, run):
    def swapped():
        run()
        buffers.output[:2] = buffers.output[:2].flip(0)

    return swapped


@pytest.mark.sweep
@pytest.mark.parametrize(
    "break_it", [forget, corrupt_one_element_of_the_last_rank, GoesWrongLater, swap_neighbours]
)
def test_a_backend_with_wrong_results_is_detected(pool, tmp_path, break_it):
    rows = rows_of(pool, 2, tmp_path, break_it, backends=("gloo", "paceline"), sizes=(4000,))
    assert {(row.backend, row.correct) for row in rows} == {("gloo", True), ("paceline", False)}


def slow_down_rank_1(buffers, run):
    def slow():
        run()
        if buffers.rank == 1:
            time.sleep(0.05)

    return slow


def test_the_slowest_rank_is_named_and_counts(pool, tmp_path):
    rows = rows_of(pool, 2, tmp_path, slow_down_rank_1, backends=("gloo", "paceline"), ops=("all-reduce",))
    for row in rows:
        if row.backend == "paceline":
            assert (row.times.slowest_rank, row.times.slowest_share) == (1, 1.0)
            assert row.times.min_s >= 0.05


def environment():
    return os.environ | {"OMP_NUM_THREADS": "1"}


def start(*arguments):
    """Start the command; it writes to pipes."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*COMMAND, *map(str, arguments)], **pipes, text=True, env=environment())


def ranks_below(process, variable="RANK"):
    """Return the started ranks of a command by number, read from a variable of their environment."""
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if "paceline.tools.bench.collectives.collectives_worker" in child.cmdline():
                found[int(child.environ()[variable])] = child
        except (psutil.NoSuchProcess, psutil.ZombieProcess, KeyError):
            continue
    return found


def wait_for_rows(journal, process):
    """Return when the first rows are in the journal."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if journal.exists() and journal.read_bytes().count(b"\n") > 2:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.kill()
    pytest.fail("no rows within a minute")


MANY = [
    "--nproc-per-node",
    "2",
    "--backend",
    "gloo,paceline",
    "--bytes",
    "1kB:60kB:+1kB",
    "--iterations",
    "4",
]


@pytest.mark.thorough
def test_a_killed_rank_is_named_and_finished_rows_are_kept_and_resumed(tmp_path):
    file, journal = tmp_path / "result.json", tmp_path / "result.journal.jsonl"
    with start(*MANY, "--json", file) as process:
        wait_for_rows(journal, process)
        ranks = ranks_below(process)
        ranks[1].kill()
        shown, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    assert "[rank 1] was ended by SIGKILL" in errors
    assert "run the same command with --resume" in errors
    assert all_ended([ranks[0].pid])
    partial = json.loads(file.read_text())
    kept = [row.to_json() for row in RowJournal(journal).rows()]
    assert 0 < len(kept) < 120
    assert partial["rows"] == kept
    assert partial["settings"]["complete"] is False
    assert "busbw GB/s" in shown

    with start(*MANY, "--json", file, "--resume") as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    whole = json.loads(file.read_text())
    assert whole["rows"][: len(kept)] == kept
    assert len(whole["rows"]) == 120
    assert whole["settings"]["complete"] is True
    assert not journal.exists()


@pytest.mark.thorough
def test_ctrl_c_keeps_finished_rows(tmp_path):
    file = tmp_path / "result.json"
    with start(*MANY, "--json", file) as process:
        wait_for_rows(tmp_path / "result.journal.jsonl", process)
        ranks = ranks_below(process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert f"rows are kept in {tmp_path / 'result.journal.jsonl'}" in " ".join(errors.split())
    assert len(json.loads(file.read_text())["rows"]) > 0
    assert all_ended([rank.pid for rank in ranks.values()])


@pytest.mark.thorough
def test_ranks_that_torchrun_started_are_measured_and_rank_0_writes(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = ["bench", "collectives", "--backend", "gloo,paceline", "--bytes", "1kB", "--iterations", "2"]
    ended = subprocess.run(
        [*torchrun, "-m", "paceline", *arguments, "--json", tmp_path / "r.json", "--csv", tmp_path / "r.csv"],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("all-reduce, float32") == 1
    measured = json.loads((tmp_path / "r.json").read_text())
    assert [(row["backend"], row["ranks"], row["correct"]) for row in measured["rows"]] == [
        ("gloo", 2, True),
        ("paceline", 2, True),
    ]
    assert measured["settings"]["ranks"] == [2]
    with (tmp_path / "r.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.csv", "r.json"]


@pytest.mark.thorough
@pytest.mark.skipif(MPIEXEC is None, reason=REASON)
def test_every_operation_is_right_over_mpi_under_mpiexec(tmp_path):
    arguments = ["--backend", "mpi4py", "--bytes", "4kB", "--iterations", "2", "--json", tmp_path / "r.json"]
    ended = mpi_world(3, *COMMAND[1:], "--op", ",".join(OPERATIONS), *arguments, timeout=120)
    assert ended.code == 0, ended
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [(row["backend"], row["op"], row["correct"]) for row in rows] == [
        ("mpi4py", op, True) for op in OPERATIONS
    ]


@pytest.mark.thorough
@pytest.mark.skipif(MPIEXEC is None, reason=REASON)
def test_a_killed_rank_of_mpi_leaves_finished_rows(tmp_path):
    file, journal = tmp_path / "r.json", tmp_path / "r.journal.jsonl"
    with start(*MANY, "--backend", "mpi4py", "--json", file) as process:
        wait_for_rows(journal, process)
        ranks = ranks_below(process, "PMI_RANK")
        ranks[1].kill()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    assert "the 2 ranks under mpiexec ended with exit code" in errors
    assert 0 < len(json.loads(file.read_text())["rows"]) < 60
    assert all_ended([rank.pid for rank in ranks.values()])
