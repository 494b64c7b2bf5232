"""``paceline plan memory``: output, files and refused input."""

from __future__ import annotations

import csv
import json

import pytest
from typer.testing import CliRunner

from paceline.errors import UsageError
from paceline.tools.cli.plan import app

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x):
        return self.layers(x)

def build(batch):
    return Net(), torch.randn(batch, 16), lambda out: out.square().mean()

def hungry(depth):
    return Net()

nothing = 7
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "plannable.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(*arguments):
        return CliRunner().invoke(app, ["memory", *arguments], catch_exceptions=False, env={"COLUMNS": "200"})

    return run


def test_the_answer_comes_first(run):
    printed = run("--model", "tiny", "--device-memory", "24GiB").stdout
    assert printed.splitlines()[0].startswith("tiny (853 k parameters), alone, 1 device, adamw")
    assert "fits:" in printed.splitlines()[0]
    assert "optimizer state" in printed
    assert "CUDA context" in printed


@pytest.mark.thorough
def test_a_model_that_does_not_fit_gets_computed_advice(run):
    small = ("--device", "cpu", "--device-memory", "40MiB")
    printed = run("--model", "tiny", "--micro-batch-size", "8", *small).stdout
    assert "does not fit" in printed.splitlines()[0]
    assert printed.splitlines()[1].startswith("It fits with")
    assert "a micro-batch of 1" in printed.splitlines()[1]


@pytest.mark.thorough
def test_strategies_and_devices_side_by_side(run):
    printed = run(
        "--model", "tiny", "--world-size", "1,2,64", "--strategy", "bucketed,sharded,full-shard"
    ).stdout
    rows = [line.split()[:2] for line in printed.splitlines()]
    for row in (["alone", "1"], ["bucketed", "2"], ["sharded", "64"], ["full-shard", "64"]):
        assert row in rows


def test_muon_and_masters_are_named_in_the_answer(run):
    options = ("--optimizer", "muon", "--dtype", "bf16", "--master-weights", "fp32")
    printed = run("--model", "tiny", "--world-size", "2", "--strategy", "sharded", *options).stdout
    assert "sharded, 2 devices, muon, bf16, fp32 master weights" in printed.splitlines()[0]


@pytest.mark.parametrize("named", [("plannable:build",), ("plannable:Net", "--inputs", "1x16")])
def test_a_users_model(run, named):
    printed = run("--model", named[0], *named[1:], "--device", "cpu").stdout
    assert "(676 parameters)" in printed.splitlines()[0]


def test_files_hold_the_printed_values(run, tmp_path):
    pytest.importorskip("matplotlib", reason="charts need matplotlib")
    run("--model", "plannable:build", "--micro-batch-size", "4", "--json", "all.json", "--out", "drawn")
    output = json.loads((tmp_path / "all.json").read_text())
    (forecast,) = output["forecasts"]
    assert forecast["device_nbytes"] == sum(line["nbytes"] for line in forecast["ledger"])
    assert forecast["peak_nbytes"] <= forecast["allocated_nbytes"] <= forecast["reserved_nbytes"]
    with (tmp_path / "drawn" / "ledger.csv").open() as file:
        assert sum(int(row["nbytes"]) for row in csv.DictReader(file)) == forecast["device_nbytes"]
    assert (tmp_path / "drawn" / "memory.png").stat().st_size > 10_000


@pytest.mark.thorough
def test_verify_prints_predicted_and_measured(run, tmp_path):
    printed = run(
        "--model", "tiny", "--world-size", "2", "--context", "32", "--verify", "--json", "all.json"
    ).stdout
    assert "off by" in printed
    (checked,) = json.loads((tmp_path / "all.json").read_text())["checks"]
    assert abs(checked["error"]) < 0.10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "smal"], "did you mean 'small'"),
        (["--model", "plannable:nothing"], "name a Module class or a function"),
        (["--model", "plannable:hungry"], "needs depth"),
        (["--model", "plannable:Net"], "has no inputs"),
        (["--model", "plannable:Net", "--inputs", "1xA"], "is not a shape"),
        (["--model", "absent:Net"], "can't import"),
        (["--world-size", "two"], "for example: --world-size 1,2,4,64"),
        (["--world-size", "2,0"], "--world-size 2,0\n.*1 or more"),
        (["--model", "tiny", "--inputs", "3x"], "--inputs 3x with --model tiny"),
        (["--device", "h100"], "a GPU by name is --hardware h100"),
        (["--strategy", "buckted"], "did you mean 'bucketed'"),
        (["--optimizer", "adam"], "is not an optimizer"),
        (["--master-weights", "bf16"], "valid: off, fp32"),
        (["--device-memory", "much"], "is no size"),
        (["--json", "absent/all.json"], "no such folder"),
    ],
)
def test_invalid_options_are_refused(run, arguments, message):
    with pytest.raises(UsageError, match=message):
        run(*arguments)
