"""`paceline simulate async`: output, files and refused input."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys

import pytest

from paceline.tools.cli.simulate import simulate_async_request

QUICK = "--for 20s --every 10 --delay 5"


@pytest.fixture
def call(command):
    return lambda text: command("simulate", "async", *text.split())


def rows_of(path):
    return {row["name"]: row for row in json.loads(path.read_text())["rows"]}


def test_table_sentences_and_files_hold_the_computed_values(call, tmp_path):
    code, output, error = call(
        f"--for 20s --every 4,10 --delay 0,5 --json {tmp_path}/a.json --out {tmp_path}/out"
    )
    assert code == 0
    for name in (
        "setting",
        "best worker",
        "virtual time",
        "× DDP",
        "bytes per worker",
        "staleness",
        "refused",
    ):
        assert name in output
    assert "left out: k 4, d 5: d must be below k" in output
    assert "Use k" in output
    assert "Of a worker's time, DDP waits" in output
    assert "simulated: 400/400" in error
    written = json.loads((tmp_path / "a.json").read_text())
    assert written == json.loads((tmp_path / "out" / "result.json").read_text())
    assert written["command"].startswith("paceline simulate async --for 20s")
    assert [row["name"] for row in written["rows"]] == ["DDP", "k 4, d 0", "k 10, d 0", "k 10, d 5"]
    assert written["settings"]["every"] == "4,10"
    assert all(sentence in output for sentence in written["sentences"])
    for row in written["rows"]:
        assert f"{row['loss']:.4g}" in output
        assert row["points"][-1][0] == pytest.approx(20.0)
        assert row["points"][-1][3] == row["loss"]
    with (tmp_path / "out" / "table.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [float(line["loss"]) for line in table] == [row["loss"] for row in written["rows"]]
    assert [line["digest"] for line in table] == [row["digest"] for row in written["rows"]]
    for name in ("loss.png", "time-to-loss.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
def test_the_same_command_gives_the_same_numbers(call, tmp_path):
    command = (
        f"--for 12s --every 10 --delay 5 --jitter 20% --churn 25% --spoil 2% --seed 3 --json {tmp_path}/"
    )
    assert call(command + "a.json")[0] == call(command + "b.json")[0] == 0
    first, second = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json"))
    assert first["rows"] == second["rows"]
    assert call(f"--for 3s --every 10 --delay 5 --jitter 20% --seed 4 --json {tmp_path}/c.json")[0] == 0
    assert rows_of(tmp_path / "c.json")["DDP"]["digest"] != rows_of(tmp_path / "a.json")["DDP"]["digest"]


def test_merging_by_quorum_is_reported_with_its_merges(call, tmp_path):
    merging = "--merge quorum --quorum 3 --compression int2"
    code, output, _ = call(f"{QUICK} --no-beside {merging} --json {tmp_path}/a.json")
    assert code == 0
    row = rows_of(tmp_path / "a.json")["k 10, d 5"]
    assert row["merges"] > 5
    assert row["grace"] >= 0
    assert (
        f"k 10, d 5: {row['merges']} merges of {row['updates'] / row['merges']:.2g} updates on average"
        in output
    )
    assert f"{row['late']} updates were late." in output


def test_without_ddp_there_is_a_target_only_if_it_is_given(call):
    code, output, _ = call(f"{QUICK} --no-beside")
    assert code == 0
    assert "DDP" not in output.replace("× DDP", "")
    assert "Best at the end: k 10, d 5" in output
    code, output, _ = call(f"{QUICK} --no-beside --target 5")
    assert code == 0
    assert "Use k 10, d 5: it reaches a loss of 5 in" in output


def test_a_full_hub_is_reported_with_a_remedy(call):
    code, output, _ = call(f"{QUICK} --parameters 20M --hub-link 100Mbit/s")
    assert code == 0
    assert "The hub's link is full" in output
    assert re.search(r"k 10, d 5 \((9\d|100) %\)", output)
    assert "Of a worker's time, DDP waits" in output
    assert "for the network" in output


def test_divergence_is_reported_with_its_cause(call, tmp_path):
    command = f"{QUICK} --workers 6 --speeds 1 --outer nesterov --unstable --json {tmp_path}/a.json --out {tmp_path}"
    code, output, _ = call(command)
    assert code == 0
    assert "Nesterov at every arrival treats N similar updates" in output
    row = rows_of(tmp_path / "a.json")["k 10, d 5"]
    assert row["diverged"] or "got worse again" in output


def test_a_population_replaces_a_worker_with_a_bad_rate(call):
    code, output, _ = call(
        f"{QUICK} --population 100 --different --bad-lr 2:9 --every 5 --delay 1 --spread 0.2"
    )
    assert code == 0
    assert "replaced worker 2" in output
    assert "--bad-lr does not affect it" in output


def test_a_hub_and_a_worker_leave_and_return(call, tmp_path):
    code, output, _ = call(f"{QUICK} --churn 5s:-3,8s:+3,10s:-hub,11s:+hub --json {tmp_path}/a.json")
    assert code == 0
    assert "DDP is simulated without churn and faults" in output
    assert rows_of(tmp_path / "a.json")["k 10, d 5"]["updates"] > 20


def test_steps_rather_than_time(call, tmp_path):
    code, output, _ = call(f"--steps 40 --every 4 --delay 1 --json {tmp_path}/a.json")
    assert code == 0
    assert "4 workers, 40 steps each" in output
    rows = rows_of(tmp_path / "a.json")
    assert rows["DDP"]["steps"] == rows["k 4, d 1"]["steps"] == 160


@pytest.mark.thorough
def test_a_gpt_learns(call, tmp_path, monkeypatch):
    monkeypatch.setattr(simulate_async_request, "POINTS", 4)
    command = "--task gpt --steps 12 --every 4 --delay 1 --fragments 2 --workers 2 --speeds 1"
    code, _, _ = call(f"{command} --json {tmp_path}/a.json")
    assert code == 0
    row = rows_of(tmp_path / "a.json")["k 4, d 1"]
    assert row["loss"] < row["initial_loss"] - 0.2


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--workers 0", "--workers 0"),
        ("--task quadratic", "unknown task 'quadratic'; valid: linear, gpt"),
        ("--parameters 0", "--parameters 0"),
        ("--parameters many", "--parameters: 'many' is no count"),
        ("--speeds 1:x", "--speeds '1:x'"),
        ("--speeds 1:0", "--speeds 1:0"),
        ("--spread -1", "--spread: '-1' is no share"),
        ("--step 0ms", "--step 0ms"),
        ("--step 5", "unknown unit ''"),
        ("--jitter 100%", "--jitter 100%"),
        ("--link 0MB/s", "--link 0MB/s"),
        ("--hub-link fast", "--hub-link: 'fast' is no rate"),
        ("--latency soon", "--latency: 'soon' is no time"),
        ("--steps 0", "--steps 0"),
        ("--for 0s", "--for 0s"),
        ("--every 0", "every=0"),
        ("--every ten", "--every 'ten'"),
        ("--every ,", "is empty"),
        ("--every 4 --delay 4", "leaves no setting"),
        ("--every 4 --delay -1", "delay=-1"),
        ("--fragments 0", "fragments=0"),
        ("--every 4 --fragments 5", "leaves no setting"),
        ("--fragments 2", "but the model has 1 layers"),
        ("--compression powersgd", "unknown compression 'powersgd'"),
        ("--down fp8", "'fp8'"),
        ("--outer adam", "unknown outer optimizer 'adam'"),
        ("--outer-lr 0", "outer lr=0"),
        ("--outer-momentum 1", "outer momentum=1"),
        ("--outer nesterov", "unstable"),
        ("--staleness ignore", "unknown policy for stale updates 'ignore'"),
        ("--bound 0", "bound=0"),
        ("--send some", "unknown policy 'some'"),
        ("--receive some", "unknown policy 'some'"),
        ("--task gpt --fragments 2 --send better", "a part of a model has no score"),
        ("--population 0", "population of 0 steps"),
        ("--population 9 --margin 0", "margin=0"),
        ("--bad-lr 5:1", "there is no worker 5"),
        ("--bad-lr 4", "pass worker:rate"),
        ("--bad-lr 4:0", "a learning rate of 0"),
        ("--warmup-steps -1", "--warmup-steps -1"),
        ("--churn 60%", "60%"),
        ("--merge soon", "unknown time of merging 'soon'"),
        ("--quorum 50%", "--quorum 50% with --merge arrival"),
        ("--churn often", "--churn: 'often' is no share"),
        ("--churn 30s:3", "is no event"),
        ("--churn 30s:-9", "there is no worker 9"),
        ("--churn soon:-1", "--churn: 'soon' is no time"),
        ("--churn 30s:-1,40s:-1", "leaves at 30 s and again at 40 s"),
        ("--churn 30s:+hub", "still running"),
        ("--spoil 100%", "--spoil 100%"),
        ("--seed -1", "--seed -1"),
        ("--lr 0", "--lr 0"),
        ("--target nan", "--target nan"),
        ("--json /nowhere/a.json", "no such folder"),
        ("--out /dev/null/a", "can't write --out"),
    ],
)
def test_bad_input_is_one_clear_message_before_anything_is_computed(call, arguments, message):
    code, output, error = call(arguments)
    assert code == 2
    assert message in error
    assert "simulated:" not in error
    assert output == ""


def test_the_help_needs_no_torch():
    program = (
        "import sys, paceline.tools.cli.simulate.simulate_async_command; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_every_option_has_help(call):
    code, output, _ = call("--help")
    assert code == 0
    for option in ("--workers", "--hub-link", "--churn", "--bad-lr", "--spoil", "--no-beside", "--target"):
        assert option in output
    assert "Simulate asynchronous training in virtual time" in output
