"""Journal, JSON, CSV, table, charts and comparison of bench collectives, from rows that are known."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from paceline._core.format import format_size
from paceline._core.json_codec import encode
from paceline.errors import RankFailed, UsageError
from paceline.tools.bench.collectives.collectives_benchmark import measure_collectives
from paceline.tools.bench.collectives.collectives_cases import list_cases
from paceline.tools.bench.collectives.collectives_rows import (
    CollectiveRow,
    CollectivesResult,
    TimeSummary,
    read_collectives,
    write_collectives_csv,
    write_collectives_json,
)
from paceline.tools.bench.collectives.collectives_settings import CollectiveSettings
from paceline.tools.bench.collectives.collectives_tables import comparison_table as comparison_table
from paceline.tools.bench.collectives.collectives_tables import (
    match_results,
    operation_table,
    operation_tables,
)
from paceline.tools.bench.collectives.resume_journal import RowJournal, is_finished, ordered_rows
from paceline.tools.cli.bench import bench_collectives_files

SETTINGS = CollectiveSettings(("gloo", "paceline"), ("all-reduce",), (2, 4), (1000, 1_000_000))
CASES = list_cases(SETTINGS)
MACHINE = {"cpu": "one", "torch": "2.13.0"}


def row(backend="gloo", op="all-reduce", ranks=2, nbytes=1000, seconds=0.001, correct=True):
    times = TimeSummary(
        iterations=9,
        median_s=seconds,
        p95_s=2 * seconds,
        min_s=seconds / 2,
        max_s=3 * seconds,
        slowest_rank=1,
        slowest_share=0.625,
    )
    return CollectiveRow(
        backend=backend, op=op, ranks=ranks, nbytes=nbytes, dtype="float32", times=times, correct=correct
    )


def rows_of(case):
    return [row(backend, case.op, case.ranks, case.nbytes, 1e-6 * case.nbytes) for backend in case.backends]


ROWS = [each for case in CASES for each in rows_of(case)]


@pytest.fixture
def journal(tmp_path):
    made = RowJournal(tmp_path / "journal.jsonl")
    made.begin(encode(SETTINGS), MACHINE)
    return made


def test_finished_rows_are_in_the_journal_at_once(journal):
    assert journal.rows() == []
    journal.append(ROWS[:2])
    assert RowJournal(journal.path).rows() == ROWS[:2]
    journal.append(ROWS[2:])
    assert RowJournal(journal.path).resume(encode(SETTINGS), MACHINE) == ROWS


def test_a_line_that_was_cut_is_dropped_and_written_over(journal):
    journal.append(ROWS[:2])
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole + b'{"backend": "glo')
    assert journal.rows() == ROWS[:2]
    assert journal.resume(encode(SETTINGS), MACHINE) == ROWS[:2]
    journal.append(ROWS[2:3])
    assert journal.rows() == ROWS[:3]


@pytest.mark.parametrize(
    ("settings", "machine", "message"),
    [
        (replace(SETTINGS, dtype="int32"), MACHINE, "other settings: dtype: 'int32' against 'float32'"),
        (replace(SETTINGS, sizes=(1000,)), MACHINE, "other settings: sizes: .1000. against .1000, 1000000."),
        (SETTINGS, MACHINE | {"torch": "2.9"}, "other machine: torch: '2.9' against '2.13.0'"),
    ],
)
def test_a_journal_of_another_measurement_is_refused_and_left_alone(journal, settings, machine, message):
    journal.append(ROWS[:1])
    before = journal.path.read_bytes()
    with pytest.raises(UsageError, match=message):
        journal.resume(encode(settings), machine)
    assert journal.path.read_bytes() == before


@pytest.mark.parametrize("text", ["", "[]\n", '{"kind": "other", "schema": 1}\n', "no json\n", '{"kind": 1'])
def test_other_files_are_refused_as_journals(tmp_path, text):
    (tmp_path / "j").write_text(text)
    with pytest.raises(UsageError, match="journal"):
        RowJournal(tmp_path / "j").rows()


class Starter:
    """Stands in for the ranks: writes the rows of each case, and fails as the n-th case begins."""

    def __init__(self, fail_at=None):
        self.fail_at, self.cases, self.jobs = fail_at, 0, []

    def __call__(self, argv, ranks, *, env):
        job = json.loads(Path(argv[-1]).read_text())
        self.jobs.append((ranks, job["init_method"]))
        for record in job["cases"]:
            if self.cases == self.fail_at:
                raise RankFailed("was ended by SIGKILL", rank=1)
            case = next(
                each for each in CASES if (each.ranks, each.nbytes) == (record["ranks"], record["nbytes"])
            )
            RowJournal(Path(job["journal"])).append(rows_of(case))
            self.cases += 1


def test_finished_cases_are_not_measured_again(journal):
    with pytest.raises(RankFailed):
        measure_collectives(SETTINGS, CASES, {"ranks": Starter(fail_at=3)}, journal)
    assert journal.rows() == [each for case in CASES[:3] for each in rows_of(case)]
    again = Starter()
    measure_collectives(SETTINGS, CASES, {"ranks": again}, journal)
    assert (again.cases, [ranks for ranks, _ in again.jobs]) == (1, [4])
    assert ordered_rows(CASES, "float32", journal.rows()) == ROWS
    measure_collectives(SETTINGS, CASES, {"ranks": Starter(fail_at=0)}, journal)


def test_the_rendezvous_is_a_file_or_tcp(journal):
    over_tcp = Starter()
    measure_collectives(replace(SETTINGS, rendezvous="tcp"), CASES, {"ranks": over_tcp}, journal)
    assert all(method.startswith("tcp://127.0.0.1:") for _, method in over_tcp.jobs)
    journal.begin(encode(SETTINGS), MACHINE)
    by_file = Starter()
    measure_collectives(SETTINGS, CASES, {"ranks": by_file}, journal)
    methods = [method for _, method in by_file.jobs]
    assert all(method.startswith("file:///") for method in methods)
    assert len(set(methods)) == 2


def test_a_case_is_finished_when_all_its_backends_are_kept():
    assert not is_finished(CASES[0], "float32", {ROWS[0].key})
    assert is_finished(CASES[0], "float32", {ROWS[0].key, ROWS[1].key})
    assert not is_finished(CASES[0], "int32", {ROWS[0].key, ROWS[1].key})


def test_the_latest_row_of_a_case_counts():
    newer = row(seconds=7.0)
    assert ordered_rows(CASES, "float32", [*ROWS, newer])[0] == newer


def result(rows=ROWS, **settings):
    kept = (
        json.loads(json.dumps(encode(SETTINGS)))
        | {"versions": {"torch": "2.13.0"}, "left_out": [], "complete": True}
        | settings
    )
    return CollectivesResult("paceline bench collectives", MACHINE, kept, rows)


def test_results_survive_strict_json(tmp_path):
    write_collectives_json(tmp_path / "r.json", result())
    record = json.loads((tmp_path / "r.json").read_text())
    assert list(record) == ["kind", "schema", "command", "machine", "settings", "rows"]
    assert (record["kind"], record["schema"]) == ("bench-collectives", 1)
    assert record["settings"]["network"] == "loopback"
    assert read_collectives(tmp_path / "r.json") == result()
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_a_result_that_can_not_be_written_leaves_the_old_one(tmp_path):
    write_collectives_json(tmp_path / "r.json", result())
    broken = replace(ROWS[0], times=replace(ROWS[0].times, p95_s=float("nan")))
    with pytest.raises(ValueError, match="JSON compliant"):
        write_collectives_json(tmp_path / "r.json", result([broken]))
    assert read_collectives(tmp_path / "r.json") == result()
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize(
    "text", ["", "{}", '{"kind": "bench-step", "schema": 1}', "[]", '{"kind": 1, "schema": 1}']
)
def test_other_files_are_refused_as_results(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(UsageError, match=r"(?s)r\.json.*paceline bench collectives --json FILE"):
        read_collectives(tmp_path / "r.json")
    with pytest.raises(UsageError, match="can't read"):
        read_collectives(tmp_path / "absent.json")


def test_csv_has_one_line_per_row(tmp_path):
    write_collectives_csv(tmp_path / "r.csv", ROWS)
    with (tmp_path / "r.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(ROWS)
    assert lines[0]["backend"] == "gloo"
    assert float(lines[0]["busbw"]) == pytest.approx(1e6)
    assert lines[0]["slowest_share"] == "0.625"


def printed(made):
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(made)
    return console.export_text()


def test_the_table_has_times_bandwidths_and_the_slowest_rank():
    made = printed(operation_table([row(ranks=4, nbytes=100_000_000, seconds=0.05)]))
    cells = made.splitlines()[-1].split()
    assert cells == ["4", "100", "MB", "gloo", "50", "100", "2", "3", "1", "(62%)", "9"]
    assert "WRONG" not in made


def test_a_wrong_result_is_marked_in_the_table():
    assert printed(operation_table([row(), row("paceline", correct=False)])).count("WRONG RESULT") == 1


def test_there_is_a_table_per_operation():
    assert [made.title for made in operation_tables([row(), row(op="broadcast")])] == [
        "all-reduce, float32",
        "broadcast, float32",
    ]


@pytest.mark.parametrize(
    ("nbytes", "shown"), [(999_984, "1 MB"), (65536, "64 KiB"), (1_024_000_000, "1.02 GB"), (996, "996 B")]
)
def test_sizes_are_shown_in_the_units_that_suit_them(nbytes, shown):
    assert format_size(nbytes) == shown


def test_charts_have_a_line_for_each_backend_and_number_of_ranks(tmp_path):
    (tmp_path / "o").mkdir()
    for name, write in bench_collectives_files.chart_writers(["all-reduce", "broadcast"]).items():
        write(tmp_path / "o" / name, result())
    names = {f"all-reduce-{name}{suffix}" for name in ("time", "busbw") for suffix in (".png", ".svg")}
    assert {path.name for path in (tmp_path / "o").iterdir()} == names  # broadcast has no rows yet
    svg = (tmp_path / "o" / "all-reduce-busbw.svg").read_text()
    for text in ("gloo, 2 ranks", "paceline, 4 ranks", "busbw (GB/s)", "all-reduce of float32, loopback"):
        assert text in svg


def test_two_results_are_compared_case_by_case():
    faster = [replace(each, times=replace(each.times, median_s=each.times.median_s / 4)) for each in ROWS]
    found = match_results(result(ROWS[:3]), result(faster[1:], complete=False))
    assert [pair.ratio for pair in found.pairs] == [0.25, 0.25]
    assert [pair.before for pair in found.pairs] == ROWS[1:3]
    assert (list(found.only_first), list(found.only_second)) == ([ROWS[0]], faster[3:])
    assert list(found.differing) == []
    assert "0.25" in printed(comparison_table(found.pairs))


def test_other_differences_between_results_are_named():
    other = replace(
        result(network="1 Gbit/s star", versions={"torch": "2.9"}), machine={"cpu": "two", "torch": "2.9"}
    )
    assert list(match_results(result(), other).differing) == [
        "machine, cpu: 'one' against 'two'",
        "machine, torch: '2.13.0' against '2.9'",
        "version of torch: '2.13.0' against '2.9'",
        "setting network: 'loopback' against '1 Gbit/s star'",
    ]
