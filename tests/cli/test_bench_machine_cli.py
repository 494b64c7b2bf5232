"""``paceline bench machine``: output, files, refused options."""

from __future__ import annotations

import json
import sys

import pytest

from paceline.cost_model.profile import Profile
from paceline.tools.cli import app as module

SMALL = [
    "--device",
    "cpu",
    "--bytes",
    "1MiB",
    "--matrix-sizes",
    "8,16",
    "--iterations",
    "3",
    "--seconds",
    "0.1",
]


def paceline(monkeypatch, *arguments):
    """Run the command in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        module.main()
    return caught.value.code or 0


def test_rates_are_shown_and_written(monkeypatch, capsys, tmp_path):
    json_file, profile = tmp_path / "new" / "machine.json", tmp_path / "profile.json"
    assert paceline(monkeypatch, "bench", "machine", *SMALL, "--json", json_file, "--profile", profile) == 0
    shown = capsys.readouterr()
    assert "matrix product" in shown.out
    assert "GB/s" in shown.out
    assert "this machine: " in shown.err
    result = json.loads(json_file.read_text(encoding="utf-8"))
    assert (result["kind"], result["schema"]) == ("bench-machine", 1)
    assert result["command"].startswith("paceline bench machine --device cpu")
    assert result["machine"]["torch"]
    rates = Profile.load(profile).rates
    assert [rate.value for rate in rates] == [row["value"] for row in result["rows"]]
    assert rates[0].source.date == result["date"]


def test_a_second_run_takes_the_place_of_the_first_and_leaves_the_rest(monkeypatch, tmp_path):
    profile = tmp_path / "profile.json"
    for dtypes in ("float32", "float64"):
        assert paceline(monkeypatch, "bench", "machine", *SMALL, "--dtype", dtypes, "--profile", profile) == 0
    rates = Profile.load(profile).rates
    assert len({rate.key for rate in rates}) == len(rates)
    assert {rate.dtype for rate in rates if rate.kind == "matmul"} == {"float32", "float64"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "gpu"], "unknown device 'gpu'"),
        (["--bytes", "many"], "'many' is no size"),
        (["--matrix-sizes", "8,x"], "--matrix-sizes '8,x': 'x' is no whole number"),
        (["--matrix-sizes", ","], "--matrix-sizes ',' is empty"),
        (["--dtype", "float31"], "did you mean 'float32'"),
        (["--iterations", "0"], "give a repetition"),
        (["--bytes", "1000TB"], "are free on the cpu"),
    ],
)
def test_invalid_options_are_refused_in_one_message(monkeypatch, capsys, tmp_path, arguments, message):
    out = tmp_path / "m.json"
    assert paceline(monkeypatch, "bench", "machine", *arguments, "--json", out) == 2
    shown = capsys.readouterr()
    assert message in " ".join(shown.err.split())
    assert "Traceback" not in shown.err
    assert not out.exists()


def test_a_file_that_is_no_profile_is_refused_before_measuring(monkeypatch, capsys, tmp_path):
    other = tmp_path / "other.json"
    other.write_text('{"kind": "bench-step"}')
    assert paceline(monkeypatch, "bench", "machine", *SMALL, "--profile", other) == 2
    shown = capsys.readouterr()
    assert "is no profile" in shown.err
    assert shown.out == ""
    assert other.read_text() == '{"kind": "bench-step"}'


def test_one_file_for_both_is_refused(monkeypatch, capsys, tmp_path):
    both = tmp_path / "both.json"
    assert paceline(monkeypatch, "bench", "machine", *SMALL, "--json", both, "--profile", both) == 2
    assert "--json and --profile both name" in " ".join(capsys.readouterr().err.split())
