"""``paceline bench step``: refused options, files, output and exit code; no rank is started."""

from __future__ import annotations

import sys

import pytest
import torch

from paceline.tools.bench.step import step_benchmark as measuring
from paceline.tools.bench.step.step_rows import StepRow
from paceline.tools.bench.step.step_strategies import StrategyVariant
from paceline.tools.bench.turn_statistics import StepBreakdown
from paceline.tools.cli import app as module


def paceline(monkeypatch, *arguments):
    """Run the command in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        module.main()
    return caught.value.code or 0


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    """Keep the command from starting ranks; returns the settings that it would have measured with."""
    requested = []

    def measure(settings, start):
        requested.append(settings)
        return [row("no-sync"), row("ddp", 1.0, best_ddp=True), row("sharded", 1.0)]

    monkeypatch.setattr(measuring, "measure_steps", measure)
    return requested


def row(strategy, bucket_mib=None, *, drift=0.0, best_ddp=False):
    return StepRow(
        model="tiny",
        variant=StrategyVariant(strategy, bucket_mib),
        ranks=2,
        step_ms=10.0,
        ratio_to_ddp=1.0,
        peer=None,
        ratio_to_peer=None,
        breakdown_ms=StepBreakdown(2.0, 4.0, 3.0, 1.0),
        calls=1,
        ms_per_call=3.0,
        mib=3.25,
        peak_mib=None,
        drift=drift,
        best_ddp=best_ddp,
        rounds=(10.0,),
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "tini"], "did you mean 'tiny'"),
        (["--strategy", ""], "--strategy '' is empty"),
        (["--seed", "-5"], "give 0 or more"),
        (["--model", ","], "--model ',' is empty"),
        (["--strategy", "bukketed"], "did you mean 'bucketed'"),
        (["--bucket-mib", "0"], "bucket sizes of 0 MiB"),
        (["--bucket-mib", "-5"], "bucket sizes of -5 MiB"),
        (["--bucket-mib", "big"], "--bucket-mib 'big': 'big' is no number"),
        (["--bucket-mib", ","], "--bucket-mib ',' is empty"),
        (["--backend", "globo"], "did you mean 'gloo'"),
        (["--backend", "mpi4py"], "unknown backend 'mpi4py'"),
        (["--nproc-per-node", "1"], "no peer to synchronise with"),
        (["--steps", "0"], "--steps 0"),
        (["--context", "1000"], "at most 128 tokens"),
        (["--rounds", "many"], "--rounds"),
    ],
)
def test_invalid_options_are_refused_in_one_message(monkeypatch, capsys, measured, arguments, message):
    assert paceline(monkeypatch, "bench", "step", *arguments) == 2
    shown = capsys.readouterr().err
    assert message in " ".join(shown.split())
    assert "Traceback" not in shown
    assert measured == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("what", [["step"], ["parts", "--profile", "profile.json"]])
def test_a_backend_that_needs_a_gpu_is_refused_where_there_is_none(monkeypatch, capsys, tmp_path, what):
    monkeypatch.chdir(tmp_path)
    assert paceline(monkeypatch, "bench", *what, "--backend", "nccl") == 2
    assert "backend 'nccl' needs GPUs" in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_backend_is_refused_before_a_profile_is_touched(monkeypatch, capsys, tmp_path):
    profile = tmp_path / "deep" / "profile.json"
    assert paceline(monkeypatch, "bench", "parts", "--profile", profile, "--backend", "globo") == 2
    assert "did you mean 'gloo'" in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--json", "--csv", "--out"])
def test_a_file_that_can_not_be_written_is_refused_before_measuring(
    monkeypatch, capsys, measured, tmp_path, option
):
    (tmp_path / "file").write_text("")
    assert paceline(monkeypatch, "bench", "step", option, tmp_path / "file" / "x") == 2
    assert "can't write" in capsys.readouterr().err
    assert measured == []


def test_a_folder_is_no_json_file(monkeypatch, capsys, measured, tmp_path):
    assert paceline(monkeypatch, "bench", "step", "--json", tmp_path) == 2
    assert measured == []


def test_two_results_in_one_file_are_refused(monkeypatch, capsys, measured, tmp_path):
    both = tmp_path / "result"
    assert paceline(monkeypatch, "bench", "step", "--json", both, "--csv", both) == 2
    assert "--json and --csv both name" in " ".join(capsys.readouterr().err.split())
    assert measured == []


def test_charts_without_matplotlib_are_refused_before_measuring(monkeypatch, capsys, measured, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert paceline(monkeypatch, "bench", "step", "--out", tmp_path) == 2
    assert "pip install 'paceline[report]'" in capsys.readouterr().err
    assert measured == []
    assert paceline(monkeypatch, "bench", "step") == 0


def test_options_become_settings(monkeypatch, measured):
    arguments = [
        "--model",
        "tiny, mini",
        "--bucket-mib",
        "1,inf",
        "--no-peak-memory",
        "--nproc-per-node",
        "3",
    ]
    assert paceline(monkeypatch, "bench", "step", *arguments) == 0
    (settings,) = measured
    assert (settings.sizes, settings.ranks, settings.memory) == (("tiny", "mini"), 3, False)
    assert settings.bucket_mib == (1.0, float("inf"))
    assert (settings.steps, settings.rounds, settings.threads) == (10, 15, 1)


def test_the_table_is_printed_whole_on_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    assert paceline(monkeypatch, "bench", "step") == 0
    shown = capsys.readouterr().out
    (head,) = (line for line in shown.splitlines() if line.startswith("strategy"))
    assert head.split()[-2:] == ["peak", "MiB"]
    assert "…" not in shown


def test_a_wrong_strategy_is_shown_and_fails_the_command(monkeypatch, capsys, tmp_path):
    rows = [row("no-sync", drift=0.5), row("ddp", 1.0, best_ddp=True), row("sharded", 1.0, drift=0.01)]
    monkeypatch.setattr(measuring, "measure_steps", lambda *_: rows)
    assert paceline(monkeypatch, "bench", "step", "--out", tmp_path) == 1
    assert "WRONG: 1.0e-02" in capsys.readouterr().out
    assert (tmp_path / "step.json").exists()  # the numbers are kept: they show what is wrong


def test_bench_alone_lists_its_commands(monkeypatch, capsys):
    assert paceline(monkeypatch, "bench") == 2
    shown = capsys.readouterr()
    assert "step" in shown.out + shown.err
