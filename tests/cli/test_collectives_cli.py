"""`paceline bench collectives` and `compare`: options, mistakes, exit codes and files; no rank is started."""

from __future__ import annotations

import json
import sys

import pytest

import paceline.tools.bench.collectives.collectives_benchmark as measuring
from paceline.errors import RankFailed
from paceline.tools.bench.collectives import benchmarked_backends, collectives_request
from paceline.tools.bench.collectives.collectives_rows import CollectiveRow, TimeSummary
from paceline.tools.bench.collectives.resume_journal import RowJournal, row_keys
from paceline.tools.cli import app as module
from paceline.tools.cli.bench import bench_collectives_command

GIB = 2**30


def paceline(monkeypatch, *arguments):
    """Run the command in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["paceline", "bench", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        module.main()
    return caught.value.code or 0


class Measurement:
    """Stands in for the ranks: records the settings, adds rows, and can end early."""

    def __init__(self):
        self.requests, self.wrong, self.end = [], None, None

    def __call__(self, settings, cases, starters, journal):
        self.requests.append((settings, cases))
        for number, case in enumerate(cases):
            if number == 1 and self.end is not None:
                raise self.end
            for backend, op, ranks, nbytes, dtype in row_keys(case, settings.dtype):
                times = TimeSummary(
                    iterations=5,
                    median_s=0.001,
                    p95_s=0.002,
                    min_s=0.001,
                    max_s=0.003,
                    slowest_rank=1,
                    slowest_share=0.6,
                )
                row = CollectiveRow(
                    backend=backend,
                    op=op,
                    ranks=ranks,
                    nbytes=nbytes,
                    dtype=dtype,
                    times=times,
                    correct=backend != self.wrong,
                )
                journal.append([row])


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    """Keep the command from starting ranks, on a machine with 64 GiB free."""
    played = Measurement()
    monkeypatch.setattr(measuring, "measure_collectives", played)
    monkeypatch.setattr(collectives_request, "available_nbytes", lambda: 64 * GIB)
    return played


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "glooo"], "did you mean 'gloo'"),
        (["--backend", "schedule:rnig"], "did you mean 'schedule:ring'"),
        (["--backend", ","], "--backend ',' is empty"),
        (["--backend", "nccl"], "torch can use none here"),
        (["--op", "allreduce"], "did you mean 'all-reduce'"),
        (["--nproc-per-node", "0"], "--nproc-per-node 0: one rank has no peer → give 2 or more"),
        (["--nproc-per-node", "1"], "give 2 or more"),
        (["--nproc-per-node", "two"], "is no whole number"),
        (["--bytes", "1TB"], "would fit → give --bytes up to"),
        (["--bytes", "big"], "'big' is no size"),
        (["--bytes", "1MB:2MB"], "is no sweep"),
        (["--dtype", "float31"], "did you mean 'float32'"),
        (["--iterations", "0"], "--iterations 0"),
        (["--seconds", "-1"], "--seconds -1"),
        (["--warmup", "0"], "--warmup 0"),
        (["--init-method", "fiel"], "did you mean 'file'"),
        (["--resume"], "--resume: no measurement is named"),
    ],
)
def test_invalid_options_are_refused_in_one_message(monkeypatch, capsys, measured, arguments, message):
    assert paceline(monkeypatch, "collectives", *arguments) == 2
    shown = capsys.readouterr().err
    assert message in " ".join(shown.split())
    assert "Traceback" not in shown
    assert measured.requests == []


def test_missing_mpi_is_refused_with_how_to_install_it(monkeypatch, capsys, measured):
    monkeypatch.setattr(bench_collectives_command, "find_mpiexec", lambda: None)
    assert paceline(monkeypatch, "collectives", "--backend", "mpi4py") == 2
    assert "pip install 'paceline[mpi]'" in capsys.readouterr().err
    assert paceline(monkeypatch, "collectives") == 0
    assert measured.requests[0][0].backends == ("gloo", "paceline")
    monkeypatch.setattr(benchmarked_backends, "find_spec", lambda name: None)
    assert paceline(monkeypatch, "collectives", "--backend", "gloo,mpi4py") == 2
    errors = " ".join(capsys.readouterr().err.split())
    assert "mpi4py is not installed → pip install 'paceline[mpi]'" in errors


@pytest.mark.parametrize("option", ["--json", "--csv", "--out"])
def test_a_file_that_can_not_be_written_is_refused_before_measuring(
    monkeypatch, capsys, measured, tmp_path, option
):
    (tmp_path / "file").write_text("")
    assert paceline(monkeypatch, "collectives", option, tmp_path / "file" / "x") == 2
    assert "can't write" in capsys.readouterr().err
    assert measured.requests == []


def test_two_results_in_one_file_are_refused(monkeypatch, capsys, measured, tmp_path):
    both = tmp_path / "result"
    assert paceline(monkeypatch, "collectives", "--json", both, "--csv", both) == 2
    assert measured.requests == []


def test_charts_without_matplotlib_are_refused_before_measuring(monkeypatch, capsys, measured, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert paceline(monkeypatch, "collectives", "--out", tmp_path) == 2
    assert "pip install 'paceline[report]'" in capsys.readouterr().err
    assert measured.requests == []


def test_by_default_gloo_and_paceline_reduce_four_sizes_on_2_4_and_6_ranks(monkeypatch, capsys, measured):
    assert paceline(monkeypatch, "collectives") == 0
    ((settings, cases),) = measured.requests
    assert settings.backends[:2] == ("gloo", "paceline")
    assert (settings.ops, settings.ranks) == (("all-reduce",), (2, 4, 6))
    assert [case.nbytes for case in cases] == 3 * [10**6, 10**7, 10**8, 1_024_000_000]
    assert (settings.dtype, settings.rendezvous, settings.network) == ("float32", "file", "loopback")
    assert "left out" not in capsys.readouterr().err


def test_default_sizes_that_do_not_fit_are_left_out_and_named(monkeypatch, capsys, measured, tmp_path):
    monkeypatch.setattr(collectives_request, "available_nbytes", lambda: 7 * GIB)
    assert paceline(monkeypatch, "collectives", "--backend", "gloo", "--json", tmp_path / "r.json") == 0
    errors = capsys.readouterr().err
    assert errors.count("left out: ") == 1
    assert "all-reduce of 1.02 GB with 6 ranks needs about" in errors
    ((_, cases),) = measured.requests
    assert {case.ranks for case in cases if case.nbytes > 10**9} == {2, 4}
    assert len(json.loads((tmp_path / "r.json").read_text())["settings"]["left_out"]) == 1


def test_options_become_settings(monkeypatch, measured):
    options = {
        "--backend": "paceline:arena, gloo",
        "--op": "broadcast,send-recv",
        "--nproc-per-node": "3",
        "--bytes": "1kB:4kB:x2",
        "--dtype": "int64",
        "--iterations": 7,
        "--init-method": "tcp",
        "--network": "my switch",
    }
    assert paceline(monkeypatch, "collectives", *(word for pair in options.items() for word in pair)) == 0
    ((settings, _),) = measured.requests
    assert (settings.backends, settings.ops) == (("paceline:arena", "gloo"), ("broadcast", "send-recv"))
    assert (settings.ranks, settings.sizes) == ((3,), (1000, 2000, 4000))
    assert (settings.dtype, settings.iterations, settings.rendezvous) == ("int64", 7, "tcp")
    assert settings.network == "my switch"


SMALL = ("collectives", "--nproc-per-node", "2", "--bytes", "1kB,2kB", "--backend", "gloo,paceline")


def test_every_file_is_written_and_named(monkeypatch, capsys, tmp_path):
    out = tmp_path / "o"
    more = ["--json", tmp_path / "a" / "r.json", "--csv", tmp_path / "r.csv"]
    assert paceline(monkeypatch, *SMALL, "--op", "all_reduce,broadcast", "--out", out, *more) == 0
    shown = capsys.readouterr().out
    charts = {
        f"{op}-{name}{suffix}"
        for op in ("all-reduce", "broadcast")
        for name in ("time", "busbw")
        for suffix in (".png", ".svg")
    }
    assert {path.name for path in out.iterdir()} == charts | {"collectives.json", "collectives.csv"}
    measured = json.loads((tmp_path / "a" / "r.json").read_text())
    assert measured["command"].startswith("paceline bench collectives --nproc-per-node 2")
    assert len(measured["rows"]) == 8
    assert len((tmp_path / "r.csv").read_text().splitlines()) == 9
    for path in (out / "all-reduce-time.png", tmp_path / "a" / "r.json"):
        assert str(path) in shown
    assert not (tmp_path / "a" / "r.journal.jsonl").exists()


def test_the_table_is_printed_whole_on_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    assert paceline(monkeypatch, *SMALL) == 0
    shown = capsys.readouterr().out
    (head,) = (line for line in shown.splitlines() if line.startswith("ranks"))
    assert head.split()[-2:] == ["slowest", "iterations"]
    assert "as in nccl-tests" in shown


def test_a_wrong_result_is_shown_and_fails_the_command(monkeypatch, capsys, measured, tmp_path):
    measured.wrong = "paceline"
    assert paceline(monkeypatch, *SMALL, "--json", tmp_path / "r.json") == 1
    assert "WRONG RESULT" in capsys.readouterr().out
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [row["correct"] for row in rows] == [True, False] * 2


@pytest.mark.parametrize(
    ("end", "code"),
    [(RankFailed("was ended by SIGKILL", rank=1), 1), (KeyboardInterrupt(), 130), (SystemExit(143), 143)],
)
def test_finished_rows_are_kept_shown_and_resumed(monkeypatch, capsys, measured, tmp_path, end, code):
    measured.end = end
    file, journal = tmp_path / "r.json", tmp_path / "r.journal.jsonl"
    assert paceline(monkeypatch, *SMALL, "--json", file) == code
    shown = capsys.readouterr()
    assert "busbw GB/s" in shown.out
    assert f"2 rows are kept in {journal}" in " ".join(shown.err.split())
    record = json.loads(file.read_text())
    assert (len(record["rows"]), record["settings"]["complete"]) == (2, False)
    assert len(RowJournal(journal).rows()) == 2

    measured.end = None
    assert paceline(monkeypatch, *SMALL, "--json", file) == 2
    assert f"{journal} holds finished rows" in " ".join(capsys.readouterr().err.split())
    assert paceline(monkeypatch, *SMALL, "--dtype", "int32", "--json", file, "--resume") == 2
    assert "other settings: dtype: 'int32' against 'float32'" in " ".join(capsys.readouterr().err.split())
    assert paceline(monkeypatch, *SMALL, "--json", file, "--resume") == 0
    assert json.loads(file.read_text())["settings"]["complete"] is True
    assert not journal.exists()
    assert paceline(monkeypatch, *SMALL, "--json", file, "--resume") == 2
    assert "nothing to resume" in " ".join(capsys.readouterr().err.split())


def test_a_measurement_that_ends_before_its_first_row_leaves_nothing(monkeypatch, capsys, measured, tmp_path):
    def end(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "measure_collectives", end)
    assert paceline(monkeypatch, *SMALL, "--json", tmp_path / "r.json") == 130
    assert "nothing was written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_two_results_are_compared(monkeypatch, capsys, tmp_path):
    files = tmp_path / "a.json", tmp_path / "b.json"
    assert paceline(monkeypatch, *SMALL, "--json", files[0]) == 0
    assert paceline(monkeypatch, *SMALL[:-1], "gloo", "--network", "other", "--json", files[1]) == 0
    capsys.readouterr()
    assert paceline(monkeypatch, "compare", *files) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "differs: setting network: 'loopback' against 'other'" in shown
    assert f"only in {files[0]}: paceline all-reduce, 2 ranks, 1 kB float32" in shown
    assert "all-reduce gloo 2 1 kB 1 ms 1 ms 1.00" in shown


def test_other_files_are_refused_for_comparison(monkeypatch, capsys, tmp_path):
    (tmp_path / "a.json").write_text("{}")
    assert paceline(monkeypatch, "compare", tmp_path / "a.json", tmp_path / "a.json") == 2
    assert "is no result" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "message"), [("2", "leave --nproc-per-node out"), (None, "one rank has no peer")]
)
def test_under_a_launcher_its_ranks_are_measured(monkeypatch, capsys, ranks, message):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert paceline(monkeypatch, "collectives", *([] if ranks is None else ["--nproc-per-node", ranks])) == 2
    assert message in capsys.readouterr().err
