"""`paceline plan step` on a profile of round numbers."""

from __future__ import annotations

import json
from functools import partial

import pytest

from step_profile import model, profile


@pytest.fixture
def call(command):
    return partial(command, "plan", "step")


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "profile.json"
    profile(call=0.02).save(path)
    return path


def steps_file(tmp_path):
    rows = []
    for strategy, size, milliseconds in (
        ("naive", None, 2000.0),
        ("bucketed", 2.0, 1800.0),
        ("ddp", None, 1900.0),
    ):
        parts = {
            "forward_ms": 500.0,
            "backward_ms": 900.0,
            "exposed_ms": milliseconds - 1600.0,
            "optimizer_ms": 200.0,
        }
        row = {"model": "net", "strategy": strategy, "bucket_mib": size, "ranks": 2, "step_ms": milliseconds}
        rows.append(row | parts)
    path = tmp_path / "steps.json"
    path.write_text(json.dumps({"kind": "bench-step", "schema": 1, "rows": rows}))
    return path


def test_table_best_default_and_buckets(call, saved):
    code, output, error = call("--profile", saved, "--bucket-mib", "1,2,5,100", "--compression", "int4")
    assert (code, error) == (0, "")
    lines = output.splitlines()
    assert lines[0].startswith("net, 4 samples per rank (context 8), 2 ranks, gloo, lab")
    assert sum(line.startswith("→") for line in lines) == 1
    (default,) = (line for line in lines if line.startswith("DDP "))
    assert "torch DDP, its default" in default
    for words in ("naive", "bucketed, one bucket", "sharded 5 MiB", "full-shard", "bucketed 25 MiB, int4"):
        assert words in output
    assert "Best bucket for all-reduce:" in output
    assert "o = 20 ms per call, s/w = 100 ms, backward 1 s, so computing decides" in output
    assert "Compressed buckets are lower bounds" in output
    assert "Beyond what was measured" not in output


def test_one_bucket_for_all_is_there_once(call, saved):
    output = call("--profile", saved, "--bucket-mib", "5,100,200,inf")[1]
    assert output.count("bucketed, one bucket") == 1
    assert "100 MiB" not in output


def test_measured_steps_are_compared(call, saved, tmp_path):
    profile(call=0.15).save(saved)  # few large buckets are best, so the closed form's is on the axis
    measured, out = steps_file(tmp_path), tmp_path / "out"
    code, output, _ = call(
        "--profile", saved, "--measured", measured, "--json", tmp_path / "plan.json", "--out", out
    )
    assert code == 0
    assert "bucketed 2 MiB" in output, "what was measured is predicted too"
    assert "Predicted steps compared with measured ones: off by" in output
    assert "3 points" in output
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["command"].startswith("paceline plan step --profile")
    rows = {row["label"]: row for row in written["rows"]}
    assert rows["naive"]["measured"]["seconds"] == 2.0
    assert rows["flat"]["measured"] is None
    assert rows["naive"]["forward"] == 0.5
    assert rows["bucketed, one bucket"]["bucket_mib"] == "inf"
    assert written["best"] in rows
    assert set(written["buckets"]) == {"all-reduce", "reduce-scatter"}
    names = {"step-breakdown.png", "step-breakdown.svg", "step-buckets.png", "step-buckets.svg"}
    assert {path.name for path in out.iterdir()} == names
    assert "bucketed 2 MiB" in (out / "step-breakdown.svg").read_text()
    assert "closed form" in (out / "step-buckets.svg").read_text()


def test_other_numbers_of_ranks_are_noted_as_beyond_measurements(call, saved):
    output = call("--profile", saved, "--world-size", 8)[1]
    assert "Beyond what was measured: computing was measured with 2 ranks at the same time" in output


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bucket-mib", "0"], "--bucket-mib '0'"),
        (["--bucket-mib", "five"], "--bucket-mib 'five'"),
        (["--bucket-mib", ","], "--bucket-mib ',' is empty"),
        (["--compression", "int2"], "int2"),
        (["--world-size", "1"], "1 ranks"),
        (["--model", "nett"], "no step with model 'nett'"),
        (["--network", "wifi"], "it has: lab"),
        (["--backend", "nccl"], "it has: gloo"),
        (["--threads", "9"], "no step with threads 9"),
        (["--measured", "/nowhere/steps.json"], "can't read"),
        (["--json", "/dev/null/a.json"], "can't write"),
    ],
)
def test_bad_input_is_one_clear_message(call, saved, arguments, message):
    code, output, error = call("--profile", saved, *arguments)
    assert code == 2
    assert message in error
    assert output == ""
    assert "Traceback" not in error


def test_a_profile_without_steps_is_refused_with_a_remedy(call, tmp_path):
    type(profile())().save(tmp_path / "p.json")
    assert "measure with paceline bench parts" in call("--profile", tmp_path / "p.json")[2]
    code, _, error = call()
    assert code == 2
    assert "--profile" in error


def test_several_models_need_a_name(call, tmp_path):
    profile(models=(model(), model(name="other"))).save(tmp_path / "p.json")
    assert "differ in model: net, other" in call("--profile", tmp_path / "p.json")[2]
    assert call("--profile", tmp_path / "p.json", "--model", "other")[1].startswith("other,")
