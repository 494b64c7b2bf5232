"""``paceline collective``: output, refused input, and a real run."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def paceline(command, monkeypatch, tmp_path):
    """Run `paceline collective` in an empty folder; return exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: command("collective", *arguments)


TEXTBOOK = ["--world-size", 8, "--bytes", "5MB", "--link", "1MB/s"]


def test_one_algorithm_is_proven_priced_and_explained(paceline):
    code, out, _ = paceline("ring", *TEXTBOOK)
    assert code == 0
    assert "all-reduce by ring on 8 ranks" in out
    assert "proven   every input is in every result exactly once: 14 rounds, 112 messages" in out
    assert "priced   8.75 s for 5 MB (star, 8 ranks)" in out
    assert "14·α + 1.75·βn + 0.875·γn" in out
    assert "busy 100 % of the time" in out
    assert out.count("round ") == 14
    assert "done: 8 of 8 ranks" in out.splitlines()[-1]


def test_the_textbooks_broadcasts_are_ranked(paceline):
    code, out, _ = paceline("broadcast", *TEXTBOOK, "--compare")
    assert code == 0
    lines = [line.split("  ")[0] for line in out.splitlines()[2:7]]
    assert lines == ["chain, 64 segments", "scatter-all-gather", "tree", "one-by-one", "chain"]
    assert " 15 s " in out
    assert " 35 s " in out


def test_an_operation_alone_ranks_its_algorithms(paceline):
    assert paceline("reduce", *TEXTBOOK)[1] == paceline("reduce", *TEXTBOOK, "--compare")[1]


def test_operations_are_named_as_torch_does_too(paceline):
    assert paceline("all_gather", *TEXTBOOK) == paceline("all-gather", *TEXTBOOK)
    assert paceline("tree", "--op", "all_reduce", *TEXTBOOK) == paceline(
        "tree", "--op", "all-reduce", *TEXTBOOK
    )


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [
        (["tree", "--op", "broadcast", *TEXTBOOK], 15),
        (["broadcast/one-by-one", *TEXTBOOK], 35),
        (["chain", *TEXTBOOK, "--segments", 20], 6.5),
        (["tree", "--op", "broadcast", *TEXTBOOK, "--latency", "1s"], 18),
        (["ring", *TEXTBOOK, "--add", "1MB/s"], 8.75 + 5 * 7 / 8),
        (["ring", *TEXTBOOK, "--topology", "switch", "--switch", "2MB/s"], 35),
        (["ring", *TEXTBOOK, "--topology", "ring"], 8.75),
        (["ring", *TEXTBOOK, "--slow", "3=100kB/s"], 87.5),
        (["switch", *TEXTBOOK, "--center", 0], 10),
        (["switch", *TEXTBOOK], 70),
        (["broadcast/tree", *TEXTBOOK, "--root", 5], 15),
        (
            ["two-level", *TEXTBOOK, "--topology", "two-level", "--nproc-per-node", 4, "--inside", "1MB/s"],
            2 * 3 * 1.25 + 2 * 4 * 0.625,
        ),
    ],
)
def test_prices(paceline, arguments, seconds, tmp_path):
    code, _, err = paceline(*arguments, "--json", "price.json")
    assert (code, err) == (0, "")
    written = json.loads((tmp_path / "price.json").read_text())
    assert (written["kind"], written["schema"]) == ("collective", 1)
    assert written["rows"][0]["priced_s"] == pytest.approx(seconds)
    assert written["rows"][0]["measured_s"] is None
    assert written["command"].startswith("paceline collective")


def test_auto_segments(paceline):
    _, out, _ = paceline("chain", *TEXTBOOK, "--segments", "auto", "--latency", "100ms")
    assert "broadcast by chain on 8 ranks, in 16 segments" in out


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["picture.png", "deep/picture.svg"])
@pytest.mark.parametrize("what", [["halving-doubling"], ["all-reduce"]])
def test_draws(paceline, tmp_path, name, what):
    code, out, _ = paceline(*what, "--world-size", 5, "--draw", name)
    assert code == 0
    assert name in out
    assert (tmp_path / name).stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rign"], "did you mean 'ring'"),
        (["broadcats"], "unknown algorithm 'broadcats'"),
        (["ring", "--op", "all-gathr"], "did you mean 'all-gather'"),
        (["ring", "--op", "broadcast"], "unknown algorithm of broadcast 'ring'"),
        (["ring", "--world-size", 0], "ranks=0"),
        (["ring", "--world-size", -3], "ranks=-3"),
        (["ring", "--bytes", "much"], "'much' is no size"),
        (["ring", "--link", "0MB/s"], "must be above 0"),
        (["ring", "--link", "fast"], "'fast' is no rate"),
        (["ring", "--topology", "start"], "did you mean 'star'"),
        (["ring", "--topology", "switch"], "--topology switch needs --switch"),
        (["ring", "--topology", "two-level", "--nproc-per-node", 2], "needs --inside"),
        (["ring", "--switch", "1MB/s"], "--switch is not for --topology star"),
        (["ring", "--slow", "9=1MB/s"], "there is no rank 9"),
        (["ring", "--slow", "1"], "is not N=RATE"),
        (["ring", "--center", 8], "there is no rank 8"),
        (["broadcast/tree", "--root", 8], "ranks 0 to 7"),
        (["ring", "--root", 1], "has no root"),
        (["chain", "--segments", "few"], "--segments few"),
        (["chain", "--segments", 0], "--segments 0"),
        (["ring", "--run", "lap"], "did you mean 'lab'"),
        (["ring", "--run", "lab", "--topology", "ring"], "--run lab emulates a star"),
        (["ring", "--run", "here", "--iterations", 0], "iterations=0"),
        (["ring", "--run", "here", "--bytes", 31], "give 32 bytes or more"),
        (["ring", "--run", "here", "--backend", "globo"], "did you mean 'gloo'"),
        (["ring", "--run", "here", "--backend", "nccl"], "unknown backend 'nccl'"),
        (["ring", "--draw", "ring.gif"], "not a picture"),
        (["ring", "--json", "."], "it is a folder"),
    ],
)
def test_wrong_input_is_refused(paceline, arguments, message, tmp_path):
    code, _, err = paceline(*arguments)
    assert code == 2
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_runs_on_this_machine(paceline, tmp_path):
    code, out, err = paceline(
        "all-reduce",
        "--world-size",
        2,
        "--bytes",
        "40kB",
        "--run",
        "here",
        "--iterations",
        1,
        "--json",
        "ran.json",
    )
    assert code == 0, err
    assert "measured" in out
    rows = json.loads((tmp_path / "ran.json").read_text())["rows"]
    assert {row["algorithm"] for row in rows} >= {"ring", "tree", "switch", "doubling"}
    assert all(len(row["seconds"]) == 1 and row["measured_s"] > 0 for row in rows)
    assert all(len(row["receipts"]) == 2 for row in rows)
