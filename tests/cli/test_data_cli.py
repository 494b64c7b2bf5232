"""``paceline data``: output, files and refused input."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.tools.cli import app as module
from paceline.tools.cli import data_command

SEVEN = ["--samples", 50_000, "--world-size", 7]
POLICIES = ["none", "join", "rebalance", "truncate", "pad", "drop", "error"]


@pytest.fixture
def paceline(monkeypatch, capsys, tmp_path):
    """Return a function that runs `paceline data` in this process: (exit code, out, err)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["paceline", "data", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            module.main()
        shown = capsys.readouterr()
        return caught.value.code or 0, shown.out, shown.err

    return run


def entries(path):
    written = json.loads(path.read_text())
    assert (written["kind"], written["schema"]) == ("dispatch", 1)
    return written["entries"]


def test_the_round_robin_rows(paceline, tmp_path):
    options = [
        "--scheme",
        "round_robin",
        "--block",
        "2,10,100,1000",
        "--micro-batch-size",
        64,
        "--json",
        "rows.json",
    ]
    code, out, err = paceline(*SEVEN, *options)
    assert (code, err) == (0, "")
    for row in ("7144 ×3, 7142 ×4", "7150 ×2, 7140 ×5", "7200 ×3, 7100 ×4", "8000, 7000 ×6"):
        assert row in out
    assert "deadlock in step 111; out of data: ranks 1–6" in out
    assert "full batches (floor)   125, 109 ×6" in out
    assert "all batches (ceiling)  125, 110 ×6" in out
    assert "rows.json" in out.splitlines()[-1]
    assert max(map(len, out.splitlines())) <= 100
    found = entries(tmp_path / "rows.json")
    assert [each["counts"] for each in found] == [
        [7144] * 3 + [7142] * 4,
        [7150] * 2 + [7140] * 5,
        [7200] * 3 + [7100] * 4,
        [8000] + [7000] * 6,
    ]
    assert [each["deadlock"] for each in found] == [False, False, True, True]
    assert found[3]["batches_floor"] == [125] + [109] * 6
    assert found[3]["batches_ceil"] == [125] + [110] * 6
    assert found[3]["starving"] == [{"rank": rank, "after_step": 110} for rank in range(1, 7)]
    assert list(found[3]["policies"]) == POLICIES
    assert found[3]["policies"]["truncate"]["dropped"] == 960
    assert found[3]["imbalance"]["dealt"] == pytest.approx(0.12)
    written = json.loads((tmp_path / "rows.json").read_text())
    assert written["settings"]["samples"] == 50_000
    assert written["command"].startswith("paceline data --samples 50000 --world-size 7")


def test_shares(paceline, tmp_path):
    code, out, _ = paceline(
        "--samples", 50_000, "--shares", ".25,.25,.10,.40", "--scheme", "shares", "--json", "a"
    )
    assert code == 0
    assert "50,000 samples, 4 ranks (0.25 0.25 0.1 0.4), by shares" in out
    assert "12500 ×2, 5000, 20000" in out
    (found,) = entries(tmp_path / "a")
    steps = {name: found["policies"][name]["steps"] for name in ("join", "rebalance", "truncate")}
    assert steps == {"join": 313, "rebalance": 196, "truncate": 79}
    assert found["safe_blocks"] == []
    assert "any sizes: join, and rebalance" in out


def test_random_draws_depend_on_the_seed(paceline, tmp_path):
    for seed, name in ((0, "a"), (1, "b"), (0, "c")):
        code, out, _ = paceline(
            *SEVEN, "--scheme", "random", "--block", 100, "--seed", seed, "--draws", 10, "--json", name
        )
        assert code == 0
        assert f"random, seed {seed}" in out
        assert "10 draws" in out
    a, b, c = ((tmp_path / name).read_text() for name in "abc")
    assert json.loads(a)["entries"] == json.loads(c)["entries"]
    assert json.loads(a)["entries"][0]["counts"] != json.loads(b)["entries"][0]["counts"]


def test_ranks_is_another_name_of_workers_and_names_may_have_hyphens(paceline):
    output = paceline(*SEVEN, "--draws", 0)[1]
    assert (
        paceline("--samples", 50_000, "--world-size", 7, "--scheme", "round-robin", "--draws", 0)[1] == output
    )


def test_loaders_that_leave_out_the_short_batch(paceline, tmp_path):
    options = [*SEVEN, "--block", 7139, "--draws", 0]
    _, out, _ = paceline(*options, "--drop-last", "--json", "full")
    assert "if each loops over its full batches" in out
    assert entries(tmp_path / "full")[0]["deadlock"] is False
    paceline("--samples", 101, "--world-size", 2, "--micro-batch-size", 51, "--drop-last", "--json", "some")
    (found,) = entries(tmp_path / "some")
    assert (found["batches_floor"], found["batches_ceil"], found["deadlock"]) == ([1, 0], [1, 1], True)


def test_several_batch_sizes(paceline, tmp_path):
    paceline(*SEVEN, "--block", "2,1000", "--micro-batch-size", "64,4096", "--draws", 0, "--json", "a")
    found = entries(tmp_path / "a")
    assert [(each["block"], each["batch_size"]) for each in found] == [
        (2, 64),
        (2, 4096),
        (1000, 64),
        (1000, 4096),
    ]
    assert all((each["block"] in each["safe_blocks"]) == (not each["deadlock"]) for each in found)


@pytest.mark.thorough
def test_a_folder_gets_json_table_and_charts(paceline, tmp_path):
    code, out, _ = paceline(*SEVEN, "--block", "2,1000", "--draws", 5, "--out", "deep/folder")
    assert code == 0
    folder = tmp_path / "deep" / "folder"
    names = {"dispatch.json", "dispatch.csv"}
    names |= {f"dispatch-{name}.{suffix}" for name in ("imbalance", "end") for suffix in ("png", "svg")}
    assert {path.name for path in folder.iterdir()} == names
    assert all(f"deep/folder/{name}" in out for name in names)
    with (folder / "dispatch.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["block"], row["policy"]) for row in rows] == [
        (block, policy) for block in ("2", "1000") for policy in POLICIES
    ]
    assert (rows[7]["batches_floor_min"], rows[7]["batches_ceil_max"], rows[7]["deadlock"]) == (
        "109",
        "125",
        "True",
    )


def test_thousands_of_workers_are_summarised(paceline):
    code, out, _ = paceline("--samples", 10**9, "--world-size", 4000, "--scheme", "random", "--block", 100)
    assert code == 0
    assert "4000 ranks" in out
    assert "more later" in out
    assert max(map(len, out.splitlines())) <= 110
    assert len(out.splitlines()) < 60


def test_starvation_runs_with_the_given_data(paceline, monkeypatch):
    played = []
    monkeypatch.setattr(data_command, "starve", lambda balance, **options: played.append((balance, options)))
    assert paceline("--starve")[0] == 0
    arguments = [
        "--samples",
        1000,
        "--shares",
        ".25,.25,.1,.4",
        "--block",
        5,
        "--micro-batch-size",
        16,
        "--timeout",
        "3s",
    ]
    arguments += ["--backend", "paceline"]
    assert paceline("--starve", *arguments, "--json", "a.json")[0] == 0
    (example, default), (balance, options) = played
    assert (example, default) == (None, {"timeout": 10.0, "backend": "gloo", "json_file": None})
    assert (balance.dispatch.counts, balance.batch_size) == ((250, 250, 100, 400), 16)
    assert options == {"timeout": 3.0, "backend": "paceline", "json_file": Path("a.json")}


def test_it_answers_without_torch():
    code = (
        "import sys; from paceline.tools.cli.app import app; import typer\n"
        "typer.main.get_command(app)(['dispatch', '--samples', '100', '--world-size', '3'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--samples", 100], "neither --world-size nor --shares"),
        (["--world-size", 7], "no number of samples"),
        ([], "no number of samples"),
        ([*SEVEN, "--timeout", 3], "--timeout needs --starve"),
        ([*SEVEN, "--backend", "gloo"], "--backend needs --starve"),
        (["--starve", "--backend", "globo"], "did you mean 'gloo'?"),
        (["--starve", *SEVEN, "--block", "1,2"], "--starve takes one block size"),
        (["--starve", "--out", "folder"], "--starve has no charts"),
        (["--starve", "--world-size", 2], "no number of samples"),
        (["--starve", "--block", 50], "runs a built-in example"),
        (["--starve", "--scheme", "random", "--seed", 1], "runs a built-in example"),
        (
            ["--starve", "--samples", 1100, "--world-size", 2, "--block", 100, "--drop-last"],
            "don't drop the last",
        ),
        (["--starve", "--samples", 1000, "--world-size", 2], "none starves"),
        (["--samples", 0, "--world-size", 7], "0 samples: there is nothing to dispatch"),
        (["--samples", -5, "--world-size", 7], "-5 samples"),
        (["--samples", "many", "--world-size", 7], "valid integer"),
        (["--samples", 100, "--world-size", 0], "--world-size 0"),
        (["--samples", 100, "--world-size", 2, "--shares", ".5,.4"], "sum to 0.9, not 1"),
        (["--samples", 100, "--world-size", 2, "--shares", "1.5,-.5"], "share -0.5 of rank 1"),
        (["--samples", 100, "--world-size", 3, "--shares", ".5,.5"], "2 shares (0.5, 0.5) for 3 ranks"),
        (["--samples", 100, "--shares", ".5,half"], "--shares '.5,half'"),
        (["--samples", 100, "--shares", ","], "--shares ',' is empty"),
        (["--samples", 100, "--world-size", 2, "--scheme", "shares"], "--scheme shares without --shares"),
        ([*SEVEN, "--scheme", "round_robbin"], "did you mean 'round_robin'"),
        ([*SEVEN, "--block", "50001"], "a block of 50001 samples is larger than the data"),
        ([*SEVEN, "--block", "2,0"], "block=0"),
        ([*SEVEN, "--block", "2,x"], "--block '2,x'"),
        ([*SEVEN, "--block", "2.5"], "for example: --block 2,10,100"),
        ([*SEVEN, "--micro-batch-size", "64,0"], "batch_size=0"),
        ([*SEVEN, "--micro-batch-size", ""], "--micro-batch-size '' is empty"),
        ([*SEVEN, "--draws", -1], "draws=-1"),
        ([*SEVEN, "--json", "."], "it is a folder"),
    ],
)
def test_wrong_input_is_refused(paceline, arguments, message, tmp_path):
    code, out, err = paceline(*arguments)
    assert code == 2
    assert message in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []
