"""``paceline bench fit``: output, profile, charts and refused files, on results of ``paceline bench collectives``."""

from __future__ import annotations

import json
import random
import sys

import pytest

from paceline.collectives.closed_form_cost import closed_form
from paceline.cost_model.profile import Profile
from paceline.tools.cli import app as module

SIZES = [4 * 4**k for k in range(12)]


def paceline(monkeypatch, *arguments):
    """Run the command in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        module.main()
    return caught.value.code or 0


def row(backend, op, algorithm, ranks, nbytes, **changed):
    drawn = random.Random(f"{backend} {op} {ranks} {nbytes}")
    seconds = closed_form(op, algorithm, ranks).seconds(nbytes, 2e-5, 1e-9) * drawn.uniform(0.97, 1.03)
    return {
        **{
            "backend": backend,
            "op": op,
            "ranks": ranks,
            "nbytes": nbytes,
            "dtype": "float32",
            "iterations": 9,
        },
        **{"median_s": seconds, "p95_s": seconds, "min_s": seconds, "max_s": seconds, "slowest_rank": 0},
        **{"algbw": nbytes / seconds, "busbw": nbytes / seconds, "correct": True},
        **changed,
    }


def rows(backend="gloo", op="all-reduce", algorithm="ring", ranks=(2, 4, 6), sizes=SIZES):
    return [row(backend, op, algorithm, p, n) for p in ranks for n in sizes]


def write(path, measured, **changed):
    record = {
        **{"kind": "bench-collectives", "schema": 1, "command": "paceline bench collectives --json x"},
        **{"machine": {"cpu": "a"}, "settings": {"network": "loopback"}, "rows": measured},
        **changed,
    }
    path.write_text(json.dumps(record), encoding="utf-8")
    return path


def test_fits_are_shown_and_added_to_a_profile(monkeypatch, capsys, tmp_path):
    result = write(tmp_path / "x.json", rows() + rows(op="broadcast", algorithm="tree"))
    profile = tmp_path / "profile.json"
    assert paceline(monkeypatch, "bench", "fit", result, "--profile", profile) == 0
    shown = capsys.readouterr().out
    assert "gloo all-reduce looks like ring: " in shown
    assert "gloo broadcast looks like tree: " in shown
    assert " µs ± " in shown
    loaded = Profile.load(profile)
    cost = loaded.collective("all-reduce", "gloo", "loopback")
    truth = closed_form("all-reduce", "ring", 5).seconds(10**6, 2e-5, 1e-9)
    assert cost.predict(10**6, 5).seconds == pytest.approx(truth, rel=0.05)
    assert cost.source.command == "paceline bench collectives --json x"
    [call] = [
        call for call in loaded.calls if (call.op, call.backend, call.ranks) == ("broadcast", "gloo", 4)
    ]
    assert call.nbytes == 4


def test_one_profile_holds_several_networks(monkeypatch, tmp_path):
    profile = tmp_path / "profile.json"
    for network in ("loopback", "lab star 1 Gbit/s"):
        result = write(tmp_path / "x.json", rows(), settings={"network": network})
        assert paceline(monkeypatch, "bench", "fit", result, "--profile", profile) == 0
    assert [cost.network for cost in Profile.load(profile).collectives] == ["loopback", "lab star 1 Gbit/s"]


@pytest.mark.thorough
def test_files_of_one_network_are_joined_and_others_are_fitted_separately(monkeypatch, capsys, tmp_path):
    files = [write(tmp_path / f"{p}.json", rows(ranks=(p,)), command=f"with {p}") for p in (2, 3, 4)]
    files.append(write(tmp_path / "lab.json", rows(ranks=(2,)), settings={"network": "lab star 1 Gbit/s"}))
    assert paceline(monkeypatch, "bench", "fit", *files, "--out", tmp_path / "out") == 0
    shown = capsys.readouterr().out
    assert "loopback: with 2; with 3; with 4" in shown
    loaded = Profile.load(tmp_path / "out" / "profile.json")
    assert loaded.collective("all-reduce", "gloo", "loopback").fit.ranks == (2, 3, 4)
    assert loaded.collective("all-reduce", "gloo", "lab star 1 Gbit/s").fit.ranks == (2,)
    charts = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert charts == {"fit-all-reduce-gloo-loopback.png", "fit-all-reduce-gloo-lab-star-1-Gbit-s.png"}


@pytest.mark.thorough
def test_charts_and_the_profile_go_to_one_folder(monkeypatch, capsys, tmp_path):
    result = write(tmp_path / "x.json", rows(ranks=(2, 4)) + rows("schedule:ring"))
    assert paceline(monkeypatch, "bench", "fit", result, "--out", tmp_path / "out") == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"profile.json", "fit-all-reduce-gloo.png", "fit-all-reduce-schedule-ring.png"}
    assert (tmp_path / "out" / "fit-all-reduce-gloo.png").read_bytes().startswith(b"\x89PNG")


def test_a_schedule_is_fitted_with_its_own_algorithm(monkeypatch, capsys, tmp_path):
    result = write(tmp_path / "x.json", rows("schedule:doubling", algorithm="doubling", ranks=(4,)))
    profile = tmp_path / "profile.json"
    assert paceline(monkeypatch, "bench", "fit", result, "--profile", profile) == 0
    cost = Profile.load(profile).collective("all-reduce", "schedule:doubling")
    assert cost.fit.form.algorithm == "doubling"
    assert cost.fit.segments[0].alpha == pytest.approx(2e-5, rel=0.05)


def test_wrong_and_too_few_rows_are_left_out_and_reported(monkeypatch, capsys, tmp_path):
    bad = [row("gloo", "all-reduce", "ring", 4, 2**20 + 8, median_s=100.0, correct=False)]
    few = rows(op="all-gather", sizes=[8, 1024])
    alone = [row("gloo", "all-reduce", "ring", 2, 2**20, median_s=1e-9) | {"ranks": 1}]
    half = [row("gloo", "all-reduce", "ring", 4, 2**20 + 16, median_s=100.0, dtype="bfloat16")]
    result = write(tmp_path / "x.json", rows() + bad + few + alone + half)
    profile = tmp_path / "profile.json"
    assert paceline(monkeypatch, "bench", "fit", result, "--profile", profile) == 0
    shown = capsys.readouterr().err
    assert "gloo all-reduce: 1 rows left out, their results were wrong" in shown
    assert "gloo all-gather left out: all-gather: 2 sizes are too few" in shown
    (cost,) = Profile.load(profile).collectives
    assert cost.fit.points == 3 * len(SIZES)
    assert cost.fit.segments[0].beta == pytest.approx(1e-9, rel=0.05)


def test_one_number_of_ranks_is_fitted_with_the_usual_algorithm(monkeypatch, capsys, tmp_path):
    result = write(tmp_path / "x.json", rows(ranks=(4,)))
    assert paceline(monkeypatch, "bench", "fit", result) == 0
    shown = capsys.readouterr().out
    assert "ring (assumed)" in shown
    assert "measure two numbers of ranks or more to identify it" in shown


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kind": "bench-step"}, "is no measurement of collectives: its kind is 'bench-step'"),
        ({"schema": 2}, "has schema 2; this version reads up to 1"),
        ({"settings": {}}, "x.json.settings.network is missing"),
        ({"rows": {}}, "x.json.rows is {}: expected `array`"),
        ({"rows": []}, "nothing to fit: the file has no rows"),
        ({"rows": rows(sizes=[8, 16])}, "nothing to fit: gloo all-reduce"),
        ({"rows": [{}]}, "x.json.rows[0].op is missing"),
        (
            {"rows": [row("gloo", "all-reduce", "ring", 2, 8) | {"op": "allreduce"}]},
            'rows[0].op is "allreduce": expected one of',
        ),
        ({"rows": [row("gloo", "all-reduce", "ring", 2, 8, median_s="1")]}, 'rows[0].median_s is "1"'),
        (
            {"rows": [row("gloo", "all-reduce", "ring", 2, 8, median_s=0.0)]},
            "rows[0].median_s is 0.0: expected `float` > 0.0",
        ),
        (
            {"rows": [row("gloo", "all-reduce", "ring", 2, 8) | {"nbytes": 0}]},
            "rows[0].nbytes is 0: expected `int` >= 1",
        ),
        (
            {"rows": [row("gloo", "all-reduce", "ring", 2, 8, correct=1)]},
            "rows[0].correct is 1: expected `bool`",
        ),
    ],
)
def test_a_file_that_is_no_measurement_is_refused_and_the_field_is_named(
    monkeypatch, capsys, tmp_path, changed, message
):
    result, profile = write(tmp_path / "x.json", rows(), **changed), tmp_path / "profile.json"
    assert paceline(monkeypatch, "bench", "fit", result, "--profile", profile) == 2
    shown = capsys.readouterr().err
    assert message in " ".join(shown.split())
    assert "Traceback" not in shown
    assert not profile.exists()


@pytest.mark.parametrize("text", ["", "[1]", "no"])
def test_other_json_is_refused(monkeypatch, capsys, tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    assert paceline(monkeypatch, "bench", "fit", tmp_path / "x.json") == 2
    assert "x.json" in capsys.readouterr().err


def test_a_missing_file_is_reported(monkeypatch, capsys, tmp_path):
    assert paceline(monkeypatch, "bench", "fit", tmp_path / "absent.json") == 2
    assert "No such file" in capsys.readouterr().err


def test_another_file_is_not_overwritten_by_a_profile(monkeypatch, capsys, tmp_path):
    result = write(tmp_path / "x.json", rows())
    before = result.read_text(encoding="utf-8")
    assert paceline(monkeypatch, "bench", "fit", result, "--profile", result) == 2
    assert "is no profile" in capsys.readouterr().err
    assert result.read_text(encoding="utf-8") == before


def test_charts_without_matplotlib_are_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = write(tmp_path / "x.json", rows())
    assert paceline(monkeypatch, "bench", "fit", result, "--out", tmp_path / "out") == 2
    assert "pip install 'paceline[report]'" in capsys.readouterr().err
