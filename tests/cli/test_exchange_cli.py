"""``paceline exchange``: refusals before anything starts, results, faults, clean exits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

import mpi_worlds
from paceline.errors import RankFailed, UsageError, WorldError
from paceline.launch.targets import mpiexec_command as starting
from paceline.transport.mpi_exchange.exchange_measurement import SlicedWork, overlap_share
from paceline.transport.mpi_exchange.exchange_settings import ExchangeSettings, check_memory
from paceline.world.mpi_world import find_mpiexec, mpi_launcher_size

needs_mpi = pytest.mark.skipif(mpi_worlds.MPIEXEC is None, reason=mpi_worlds.REASON)
PACELINE = [sys.executable, "-m", "paceline"]


@pytest.fixture
def paceline(command):
    """Run `paceline exchange` in this process; return exit code and output."""

    def run(*arguments):
        code, out, err = command("exchange", *arguments)
        return code, " ".join((out + err).split())

    return run


@pytest.fixture
def never_started(monkeypatch):
    """Fail the test if ranks are started."""

    def refuse(*arguments, **options):
        raise AssertionError("it started ranks")

    monkeypatch.setattr(starting, "run_mpi", refuse)
    monkeypatch.setattr(starting, "require_mpi", lambda: "mpiexec")


def test_an_unknown_shape_is_refused_with_the_nearest(paceline, never_started):
    code, output = paceline("rng")
    assert code == 2
    assert "unknown shape of exchange 'rng'; valid: ring, all-to-all" in output
    assert "did you mean 'ring'?" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc-per-node", "0"], "--nproc-per-node 0: no rank"),
        (["--bytes", "many"], "'many' is no size"),
        (["--bytes", "1MB", "--ints", "5"], "exclude each other"),
        (["--ints", "0.5"], "is not a whole number"),
        (["--rounds", "0"], "--rounds 0"),
        (["--compute", "soon"], "'soon' is no time"),
        (["--timeout", "0s"], "time-out above 0"),
        (["--frame", "17MiB"], "16 MiB"),
        (["--inject", "flip-paylod"], "did you mean 'flip-payload'"),
        (["--inject", "lose@7"], "ranks are 0 to 3"),
        (["--bytes", "400TB"], "would fit"),
        (["--json", "/no/such/folder/x.json"], "no such folder"),
    ],
)
@pytest.mark.parametrize("shape", ["ring", "all-to-all"])
def test_invalid_options_are_refused_before_anything_starts(
    paceline, never_started, shape, arguments, message
):
    code, shown = paceline(shape, *arguments)
    assert code == 2
    assert message in shown


def test_without_mpiexec_the_error_explains_how_to_install_it(paceline, monkeypatch):
    monkeypatch.setattr(starting, "find_mpiexec", lambda *_: None)
    code, shown = paceline("ring")
    assert code == 2
    assert "no mpiexec" in shown
    assert "pip install 'paceline[mpi]'" in shown


def test_without_mpi4py_the_error_explains_how_to_install_it(paceline, monkeypatch):
    monkeypatch.setattr(starting, "find_spec", lambda name: None)
    code, shown = paceline("all-to-all")
    assert code == 2
    assert "needs mpi4py" in shown
    assert "pip install 'paceline[mpi]'" in shown


def test_missing_memory_is_reported_with_fitting_settings():
    check_memory(100 << 20, 4, 2 << 30)
    with pytest.raises(
        UsageError, match=r"(?s)4 ranks .* would fit \(--bytes \d+\), or --nproc-per-node 1"
    ) as caught:
        check_memory(1 << 30, 4, 3 << 30)
    fitting = int(str(caught.value).partition("--bytes ")[2].partition(")")[0])
    check_memory(fitting, 4, 3 << 30)


def test_an_all_to_all_shares_its_bytes_among_the_ranks():
    assert ExchangeSettings("all-to-all", 100).nbytes_of_rank(3) == 99
    assert ExchangeSettings("ring", 100).nbytes_of_rank(3) == 100


def test_overlap_is_the_part_of_the_shorter_that_is_hidden():
    assert overlap_share(2.0, 1.0, 2.0) == 1.0
    assert overlap_share(1.0, 2.0, 3.0) == 0.0
    assert overlap_share(1.0, 2.0, 4.0) == -1.0
    assert overlap_share(0.0, 2.0, 2.0) is None


def test_the_same_work_can_be_done_again():
    slices = SlicedWork(0.01)
    done = [0, 0]
    for turn in range(2):
        slices.restart()
        while slices():
            done[turn] += 1
    assert done == [slices.count] * 2
    assert slices.count > 0


def test_an_mpi_world_is_detected_by_its_variables():
    assert mpi_launcher_size({}) is None
    assert mpi_launcher_size({"PMI_RANK": "0", "PMI_SIZE": "3"}) == 3
    assert mpi_launcher_size({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}) == 2
    assert mpi_launcher_size({"RANK": "0", "WORLD_SIZE": "2"}) is None
    with pytest.raises(WorldError, match="disagree"):
        mpi_launcher_size(
            {"PMI_RANK": "0", "PMI_SIZE": "3", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
        )


def test_mpiexec_next_to_python_comes_first(tmp_path):
    for folder in ("beside", "path"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mpiexec").write_text("#!/bin/sh\n")
        (tmp_path / folder / "mpiexec").chmod(0o755)
    python, path = str(tmp_path / "beside" / "python"), str(tmp_path / "path")
    assert find_mpiexec(python, path) == str(tmp_path / "beside" / "mpiexec")
    assert find_mpiexec(str(tmp_path / "python"), path) == str(tmp_path / "path" / "mpiexec")
    assert find_mpiexec(str(tmp_path / "python"), str(tmp_path)) is None


@needs_mpi
def test_ranks_that_do_not_end_in_time_are_killed():
    with pytest.raises(RankFailed, match="had not ended after"):
        starting.run_mpi(["-c", "import time; time.sleep(60)"], 2, timeout=0.5)
    with pytest.raises(UsageError, match="ranks=0"):
        starting.run_mpi(["-c", ""], 0)


@needs_mpi
def test_it_starts_ranks_prints_a_table_and_writes_json(tmp_path):
    file = tmp_path / "exchange.json"
    options = [
        "--nproc-per-node",
        "3",
        "--ints",
        "3e5",
        "--rounds",
        "2",
        "--compute",
        "20ms",
        "--json",
        str(file),
    ]
    ended = mpi_worlds.run([*PACELINE, "exchange", "ring", *options])
    assert ended.code == 0, ended
    assert "ring, 3 ranks, 1.2 MB each, 2 rounds" in ended.out
    assert "6/6" in ended.err
    result = json.loads(file.read_text())
    assert (result["kind"], result["schema"], result["rounds"]) == ("exchange", 1, 2)
    assert [row["rank"] for row in result["rows"]] == [0, 1, 2]
    assert all(row["right"] and row["nbytes"] == 1_200_000 for row in result["rows"])
    assert all(row["told_checksum"] in ended.out for row in result["rows"])
    assert all(0 <= row["under_way"] <= 1 for row in result["rows"])
    assert result["problems"] == []
    sent = [row["sent_checksum"] for row in result["rows"]]
    assert [row["received_checksum"] for row in result["rows"]] == [sent[2], sent[0], sent[1]]


@pytest.mark.thorough
@needs_mpi
def test_an_all_to_all_of_odd_size():
    ended = mpi_worlds.run(
        [*PACELINE, "exchange", "all-to-all", "--nproc-per-node", "3", "--bytes", "1000", "--rounds", "1"]
    )
    assert ended.code == 0, ended
    assert "all-to-all, 3 ranks, 999 B each, 1 round" in ended.out


@pytest.mark.thorough
@needs_mpi
def test_under_mpiexec_it_joins_and_a_fault_names_the_rank():
    ended = mpi_worlds.mpi_world(2, "-m", "paceline", "exchange", "ring", "--bytes", "10MB")
    assert ended.code == 0, ended
    assert "ring, 2 ranks" in ended.out
    inject = ["--bytes", "30MB", "--timeout", "2s", "--inject"]
    ended = mpi_worlds.mpi_world(3, "-m", "paceline", "exchange", "ring", *inject, "drop-end@1")
    assert ended.code == 1
    assert "WRONG: rank 2 found a TruncatedEnvelope of rank 1" in ended.out


@pytest.mark.thorough
@needs_mpi
def test_a_rank_that_stops_sending_is_named_within_its_time_out():
    options = ["--nproc-per-node", "2", "--bytes", "30MB", "--timeout", "1s", "--inject", "stall@1"]
    ended = mpi_worlds.run([*PACELINE, "exchange", "all-to-all", *options])
    assert ended.code == 1
    assert "WRONG: rank 0 found a MissingEnvelope of rank 1" in ended.out
    assert "rank 1 did not send frame 2 of 4" in ended.out


@needs_mpi
def test_under_mpiexec_ranks_may_not_contradict_it():
    ended = mpi_worlds.mpi_world(2, "-m", "paceline", "exchange", "ring", "--nproc-per-node", "3")
    assert ended.code == 2
    assert "--nproc-per-node 3, but mpiexec started 2" in " ".join(ended.err.split())


@pytest.mark.thorough
@needs_mpi
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_the_ranks_end_with_the_command_for_any_exit(number, code):
    options = ["--nproc-per-node", "2", "--bytes", "10MB", "--rounds", "3000"]
    with mpi_worlds.start([*PACELINE, "exchange", "ring", *options]) as command:
        assert command.stderr.readline() == "ring, 2 ranks, 10 MB each: 300/3000\n"  # they exchange
        ranks = [each.pid for each in psutil.Process(command.pid).children(recursive=True)]
        assert len(ranks) >= 3  # mpiexec and its ranks
        os.kill(command.pid, number)
        command.communicate(timeout=20)
        assert command.returncode == code
        assert mpi_worlds.all_ended(ranks)


def test_help_imports_neither_torch_nor_mpi4py():
    code = (
        "import sys\n"
        "from paceline.tools.cli.app import main\n"
        "sys.argv = ['paceline', 'exchange', 'ring', '--help']\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'mpi4py', 'numpy'} & set(sys.modules)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "--inject" in ended.stdout
