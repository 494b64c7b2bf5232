"""Rows, table, CSV and charts of a measurement, from known numbers."""

from __future__ import annotations

import csv
import json
import math

import pytest
from rich.console import Console

from paceline.errors import UsageError
from paceline.tools.bench.step.step_benchmark import StepSettings, measure_steps
from paceline.tools.bench.step.step_rows import make_step_rows, step_table, write_step_csv
from paceline.tools.bench.step.step_strategies import StrategyVariant, strategy_variants
from paceline.tools.cli.bench import bench_step_charts

PEER_OF = strategy_variants(["naive", "bucketed", "sharded"], [1.0, math.inf], 13 * 2**20)
SECONDS = {"no-sync": 0.05, "naive": 0.12, "bucketed": 0.08, "sharded": 0.06, "ddp": 0.10, "ddp-zero": 0.09}


def found(**drift_of):
    """Return a measurement of two ranks: only backward differs, and `ddp` with 1 MiB is the fastest of DDP."""

    def step(variant):
        whole = SECONDS[variant.strategy] - (0.01 if variant == StrategyVariant("ddp", 1.0) else 0)
        waited = 0.004 if variant.strategy in ("sharded", "ddp-zero") else 0.0
        return [[0.015, whole - 0.03, 0.01, waited], [0.015, whole - 0.025, 0.01, waited]]

    return {
        "seconds": [[[step(variant)] * 3] * 2 for variant in PEER_OF],
        "drift": [drift_of.get(variant.strategy, 0.0) for variant in PEER_OF],
        "calls": [0.0 if variant.strategy == "no-sync" else 4.0 for variant in PEER_OF],
        "nbytes": [0.0 if variant.strategy == "no-sync" else 13.0 * 2**20 for variant in PEER_OF],
        "comm_seconds": [0.02] * len(PEER_OF),
    }


def rows(**drift_of):
    return make_step_rows("mini", 2, PEER_OF, found(**drift_of), [50.0 * 2**20] * len(PEER_OF))


def row_of(strategy, bucket_mib=None, **drift_of):
    return next(row for row in rows(**drift_of) if row.variant == StrategyVariant(strategy, bucket_mib))


def test_there_is_a_row_per_variant_in_order():
    assert [row.variant for row in rows()] == list(PEER_OF)


def test_ratios_are_against_the_fastest_ddp_and_against_the_peer():
    assert [row.variant for row in rows() if row.best_ddp] == [StrategyVariant("ddp", 1.0)]
    sharded = row_of("sharded", 1.0)
    assert sharded.step_ms == pytest.approx(60)
    assert sharded.ratio_to_ddp == pytest.approx(60 / 90)
    assert sharded.ratio_to_peer == pytest.approx(60 / 90)
    assert row_of("naive").ratio_to_peer == pytest.approx(120 / 100)
    assert row_of("ddp", 1.0).ratio_to_ddp == 1.0


def test_parts_add_up_and_exposed_counts_the_wait_in_the_step():
    for row in rows():
        assert sum(vars(row.breakdown_ms).values()) == pytest.approx(row.step_ms)
    assert row_of("sharded", 1.0).breakdown_ms.exposed == pytest.approx(10 + 4)
    assert row_of("no-sync").breakdown_ms.exposed == 0.0


def test_calls_and_bytes():
    row = row_of("bucketed", 1.0)
    assert (row.calls, row.ms_per_call, row.mib, row.peak_mib) == (4.0, pytest.approx(5.0), 13.0, 50.0)
    assert row_of("no-sync").ms_per_call is None


@pytest.mark.parametrize(("drift", "exact"), [(0.0, True), (1e-4, True), (2e-4, False), (math.nan, False)])
def test_a_row_that_drifts_is_wrong(drift, exact):
    assert row_of("sharded", 1.0, sharded=drift).exact is exact
    assert row_of("naive", sharded=drift).exact is True


def test_no_synchronisation_is_neither_exact_nor_wrong():
    assert row_of("no-sync", **{"no-sync": 0.5}).exact is None


def test_rows_are_strict_json_and_hold_every_round():
    records = [row.to_json() for row in rows(sharded=math.inf)]
    text = json.dumps(records, allow_nan=False)
    sharded = next(record for record in json.loads(text) if record["strategy"] == "sharded")
    assert sharded["rounds"] == pytest.approx([60, 60])
    assert sharded["peer"] == {"strategy": "ddp-zero", "bucket_mib": 1.0}
    assert (sharded["exact"], sharded["drift"]) == (False, None)


def test_csv_has_one_line_per_row(tmp_path):
    write_step_csv(tmp_path / "deep" / "step.csv", rows())
    with (tmp_path / "deep" / "step.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(PEER_OF)
    assert lines[0]["strategy"] == "no-sync"
    assert float(lines[1]["ratio_to_peer"]) == pytest.approx(1.2)
    assert lines[1]["peer"] == "torch DDP, parameter"


def printed(made):
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(made)
    return console.export_text()


def test_the_table_marks_wrong_rows():
    assert "WRONG" not in printed(step_table(rows()))
    text = printed(step_table(rows(sharded=0.3)))
    assert text.count("WRONG: 3.0e-01 > 0.0001") == 2
    assert "torch DDP *" in text


def test_charts_show_the_fastest_of_each(tmp_path):
    shown = bench_step_charts.fastest_of_each(rows())
    assert [row.variant.strategy for row in shown] == [
        "no-sync",
        "naive",
        "bucketed",
        "sharded",
        "ddp",
        "ddp-zero",
    ]
    assert next(row for row in shown if row.variant.strategy == "ddp").variant.bucket_mib == 1.0
    bench_step_charts.draw_step_breakdown(tmp_path / "a.svg", rows())
    bench_step_charts.draw_bucket_curve(tmp_path / "b.svg", rows())
    assert "0.67 × DDP" in (tmp_path / "a.svg").read_text()
    assert "mini (3.28 M parameters), 2 ranks" in (tmp_path / "b.svg").read_text()


def test_models_that_do_not_fit_into_memory_are_refused_before_ranks_start():
    def start(argv, ranks, *, env):
        pytest.fail("ranks were started")

    with pytest.raises(UsageError, match=r"(?s)strategies with models of size '2\.7b'.*are available"):
        measure_steps(StepSettings(sizes=("2.7b",), ranks=64), start)
