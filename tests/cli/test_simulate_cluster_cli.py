"""``paceline simulate``: training on many nodes."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest

from paceline.cost_model.fit_measurements import MeasuredPoint, fit_points
from paceline.cost_model.profile import Profile
from paceline.cost_model.profile_entries import CollectiveCost, Contention, Source
from step_profile import profile

BASE = "--parameters 20M --step 1s --link 200Mbit/s --latency 100us"
RISKY = "--mtbf 100d --checkpoint-time 60s --restart-time 5min"


@pytest.fixture
def call(command):
    return lambda text: command("simulate", *text.split())


def written(path):
    return json.loads(path.read_text())


@pytest.mark.thorough
def test_table_sentences_and_files_hold_the_simulated_values(call, tmp_path):
    code, output, _ = call(
        f"{BASE} --nnodes 1:64 --strategy flat --spread 5% --jitter 5% {RISKY} --job-time 1000h --price 2"
        f" --json {tmp_path}/a.json --out {tmp_path}/out"
    )
    assert code == 0
    for name in (
        "all-reduce",
        "1 in 20",
        "efficiency",
        "communication",
        "× one rank",
        "recovery",
        "checkpoint every",
        "the job",
        "cost",
    ):
        assert name in output
    found = written(tmp_path / "a.json")
    assert found == written(tmp_path / "out" / "result.json")
    assert found["command"].startswith("paceline simulate --parameters 20M")
    assert (found["parameters"], found["step_seconds"], found["settings"]["strategy"]) == (
        20_000_000,
        1.0,
        "flat",
    )
    assert [(row["nodes"], row["recovery"]) for row in found["rows"]] == [
        (nodes, way) for nodes in (1, 2, 4, 8, 16, 32, 64) for way in ("restart", "live")
    ]
    assert all(sentence in output for sentence in found["sentences"])
    for row in found["rows"]:
        assert sum(row["ledger"].values()) == pytest.approx(1.0)
        assert row["cost"]["mean"] == pytest.approx(2 * row["nodes"] * row["job_seconds"]["mean"] / 3600)
    with (tmp_path / "out" / "table.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [float(line["efficiency_p5"]) for line in lines] == [
        row["efficiency"]["p5"] for row in found["rows"]
    ]
    assert [float(line["lost work"]) for line in lines] == [
        row["ledger"]["lost work"] for row in found["rows"]
    ]
    assert [(line["nodes"], line["recovery"]) for line in lines[-2:]] == [("64", "restart"), ("64", "live")]
    for line, row in zip(lines, found["rows"], strict=True):
        assert float(line["failure: new world"]) == row["failure_cost"]["new world"]
    assert (tmp_path / "out" / "nodes.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_command_gives_the_same_numbers(call, tmp_path):
    options = f"{BASE} --nnodes 3,100 --spread 5% --jitter 5% {RISKY} --json {tmp_path}/"
    assert call(f"{options}a.json --seed 3")[0] == call(f"{options}b.json --seed 3")[0] == 0
    assert call(f"{options}c.json --seed 4")[0] == 0
    first, again, other = (written(tmp_path / f"{name}.json")["rows"] for name in "abc")
    assert first == again != other


def test_ways_of_recovery_are_side_by_side(call, tmp_path):
    options = f"{BASE} --nnodes 500 --nproc-per-node 2 --inside pcie4 --strategy sharded {RISKY}"
    code, output, _ = call(f"{options} --virtual-ranks 3 --json {tmp_path}/both.json")
    assert code == 0
    lines = [line.split() for line in output.splitlines()]
    assert [line[0] for line in lines if line[:1] in (["restart"], ["live"])].count("live") == 2
    assert "A failure of 500 nodes costs, on average:" in output
    for name in ("noticing", "new world", "repeated step", "slower steps", "lost work", "in all"):
        assert name in output
    assert "of the failures lose state, one every" in output
    assert "While one of 1,000 ranks is missing, the global batch stays" in output
    both = written(tmp_path / "both.json")["rows"]
    for way, row in zip(("restart", "live"), both, strict=True):
        extra = "" if way == "restart" else " --virtual-ranks 3"
        assert call(f"{options}{extra} --recovery {way} --json {tmp_path}/{way}.json")[0] == 0
        assert written(tmp_path / f"{way}.json")["rows"] == [row]
    assert "Without virtual ranks" in call(f"{options} --recovery live")[1]


def test_options_of_live_recovery_change_its_costs(call, tmp_path):
    def cost(options):
        arguments = f"{BASE} --nnodes 50 {RISKY} --recovery live {options} --json {tmp_path}/a.json"
        assert call(arguments)[0] == 0
        return written(tmp_path / "a.json")["rows"][0]["failure_cost"]

    plain = cost("")
    assert plain["noticing"] == pytest.approx(0.8 * 0.01 + 0.2 * 5)
    assert plain["new world"] == pytest.approx(2.0)
    assert plain["state"] == pytest.approx(20e6 * 12 / 25e6, rel=1e-3)
    assert cost("--host-loss 0%")["noticing"] == pytest.approx(0.01)
    assert cost("--notice-time 1s:2s")["noticing"] == pytest.approx(1.2)
    assert cost("--rebuild-time 3s")["new world"] == pytest.approx(6.0)
    assert cost("--state-bytes 4")["state"] == pytest.approx(plain["state"] / 3, rel=1e-3)
    assert cost("--replacement-time 0s")["slower steps"] == 0.0
    assert cost("--virtual-ranks 2")["slower steps"] > 3 * plain["slower steps"] > 0


def test_steps_are_drawn_from_a_file(call, tmp_path):
    (tmp_path / "steps.txt").write_text("900ms\n1100ms\n1s\n1\n", encoding="utf-8")
    (tmp_path / "steps.json").write_text("[0.9, 1.1, 1.0, 1.0]", encoding="utf-8")
    for name in ("steps.txt", "steps.json"):
        options = f"--parameters 20M --step {tmp_path}/{name} --nnodes 1000 --link 400gbe"
        assert call(f"{options} --json {tmp_path}/{name}.out")[0] == 0
    one, other = (written(tmp_path / f"steps.{kind}.out") for kind in ("txt", "json"))
    assert one["rows"] == other["rows"]
    assert one["step_seconds"] == pytest.approx(1.0)
    assert one["rows"][0]["ledger"]["varying steps"] == pytest.approx(0.1 / 1.1, rel=0.02)


def test_a_profile_prices_the_network(call, tmp_path):
    points = [
        MeasuredPoint(n, p, 1e-4 * 2 * (p - 1) + n / 25e6 * 2 * (p - 1) / p)
        for n in (4**k for k in range(6, 15))
        for p in (2, 4)
    ]
    source = Source("paceline bench fit x.json", "2026-01-02T03:04:05+00:00")
    cost = CollectiveCost("gloo", "star", fit_points(points, "all-reduce"), source)
    beside = Contention(
        caller="paceline",
        backend="gloo",
        network="star",
        op="all-reduce",
        device="cpu",
        ranks=4,
        threads=1,
        nbytes=1 << 20,
        launch_seconds=0.0,
        computing_slows=1.25,
        calls_slow=1.5,
        source=source,
    )
    elsewhere = replace(beside, network="another", ranks=64, computing_slows=9.0)
    Profile(collectives=(cost,), contentions=(beside, elsewhere)).save(tmp_path / "profile.json")
    options = "--parameters 20M --step 1s --nnodes 8 --strategy flat --algorithm ring"
    assert call(f"{options} --profile {tmp_path}/profile.json --json {tmp_path}/a.json")[0] == 0
    assert call(f"{BASE} --nnodes 8 --strategy flat --algorithm ring --json {tmp_path}/b.json")[0] == 0
    assert [written(tmp_path / "a.json")[name] for name in ("computing_slows", "calls_slow")] == [1.25, 1.5]
    one, other = (written(tmp_path / name)["rows"][0] for name in ("a.json", "b.json"))
    assert one["step"]["mean"] == pytest.approx(other["step"]["mean"], rel=1e-3)


def test_a_profile_of_parts_knows_exchanges_and_contention(call, tmp_path):
    profile(computing=1.25, calls=1.5).save(tmp_path / "profile.json")
    options = f"--parameters 20M --step 1s --nnodes 2 --profile {tmp_path}/profile.json"
    assert call(f"{options} --json {tmp_path}/a.json")[0] == 0
    found = written(tmp_path / "a.json")
    assert (found["computing_slows"], found["calls_slow"]) == (1.25, 1.5)
    code, _, output = call(f"{options} --backend nccl")
    assert code == 2
    assert "it has: all-reduce on gloo, lab" in output


def test_nodes_of_several_devices_and_a_model_by_name(call):
    code, output, _ = call(
        "--model xxl --gradient-bytes 2 --step 20s --nnodes 16:1024:x8 --nproc-per-node 8 --link ndr --inside nvlink4"
    )
    assert code == 0
    assert "8,192" in output
    assert "two-level" in output


def test_an_alias_is_its_strategy(call):
    assert call(f"{BASE} --nnodes 8 --strategy zero1") == call(f"{BASE} --nnodes 8 --strategy sharded")


def test_strong_scaling_reports_where_it_gets_slower(call):
    code, output, _ = call(f"{BASE} --nnodes 1:64 --scaling strong --strategy flat")
    assert code == 0
    assert "Beyond 1 node it gets slower" in output


def test_help_lists_both(call):
    code, output, _ = call("--help")
    assert code == 0
    for name in ("--nnodes", "--mtbf", "async"):
        assert name in output
    assert "--nnodes" in call("")[1]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--parameters 20M", "the time of a step is missing"),
        ("--step 1s", "which model?"),
        ("--step 1s --parameters 20M --model tiny", "which model?"),
        ("--step 1s --model tyni", "did you mean 'tiny'?"),
        ("--step 1s --parameters 0", "--parameters 0"),
        ("--parameters 20M --step 0s", "--step 0s"),
        ("--parameters 20M --step soon", "no time"),
        (f"{BASE} --nnodes 0", "no number of nodes"),
        (f"{BASE} --nnodes 10:1", "makes no progress"),
        (f"{BASE} --nnodes 1:10:3", "is no sweep"),
        (f"{BASE} --nnodes 1:10:x1", "makes no progress"),
        (f"{BASE} --nnodes many", "no number of nodes"),
        (f"{BASE} --nnodes 9999999", "no number of nodes"),
        (f"{BASE} --nproc-per-node 8", "the link between the 8 ranks of a node is missing"),
        (f"{BASE} --nproc-per-node 0 --inside pcie4", "per_node=0"),
        (f"{BASE} --nproc-per-node 2 --inside pcie4 --topology ring", "nodes of 2 ranks in a ring"),
        (f"{BASE} --topology mesh", "unknown topology"),
        ("--parameters 20M --step 1s --link warp", "unknown link"),
        ("--parameters 20M --step 1s --link 0MB/s", "--link 0MB/s"),
        (f"{BASE} --switch fast", "no rate"),
        (f"{BASE} --algorithm rnig", "rnig on a star"),
        (f"{BASE} --algorithm tree --strategy sharded", "reduce-scatter"),
        (f"{BASE} --strategy magic", "unknown strategy"),
        (f"{BASE} --bucket-mib 0", "--bucket-mib 0"),
        (f"{BASE} --gradient-bytes 3", "--gradient-bytes 3"),
        (f"{BASE} --backward 100%", "backward"),
        (f"{BASE} --every 0", "every=0"),
        (f"{BASE} --every 4 --strategy full-shard", "whole parameters"),
        (f"{BASE} --scaling huge", "unknown scaling"),
        (f"{BASE} --speeds 1:fast", "--speeds '1:fast'"),
        (f"{BASE} --speeds 1:0", "speeds"),
        (f"{BASE} --balance fair", "unknown balance"),
        (f"{BASE} --spread lots", "no share"),
        (f"{BASE} --jitter 900%", "jitter"),
        (f"{BASE} --mtbf 100d", "checkpoints that take no time"),
        (f"{BASE} --mtbf 0s --checkpoint-time 1s", "--mtbf 0s"),
        (f"{BASE} --restart-time 5min", "--restart-time without failures"),
        (f"{BASE} --checkpoint-time 5s", "--checkpoint-time without failures"),
        (f"{BASE} --recovery live", "--recovery without failures"),
        (f"{BASE} --virtual-ranks 2", "--virtual-ranks without failures"),
        (f"{BASE} {RISKY} --recovery prayer", "unknown recovery"),
        (f"{BASE} {RISKY} --recovery restart --host-loss 1%", "--host-loss with --recovery restart"),
        (f"{BASE} {RISKY} --host-loss 101%", "node_share=1.01"),
        (f"{BASE} {RISKY} --host-loss lots", "--host-loss: "),
        (f"{BASE} {RISKY} --notice-time 1s", "--notice-time 1s"),
        (f"{BASE} {RISKY} --notice-time 1s:soon", "--notice-time: "),
        (f"{BASE} {RISKY} --rebuild-time soon", "--rebuild-time: "),
        (f"{BASE} {RISKY} --replacement-time never", "--replacement-time: "),
        (f"{BASE} {RISKY} --state-bytes 2", "--state-bytes 2"),
        (f"{BASE} {RISKY} --virtual-ranks -1", "virtual_ranks=-1"),
        (f"{BASE} --checkpoint-interval never", "no time"),
        (f"{BASE} --job-time 0h", "--job-time 0h"),
        (f"{BASE} --price 0", "price=0"),
        (f"{BASE} --jobs 0", "jobs=0"),
        (f"{BASE} --seed -1", "seed=-1"),
        (f"{BASE} --contention 1.3", "write two factors"),
        (f"{BASE} --contention 0.5:1", "computing_slows=0.5"),
        ("--parameters 20M --step 1s --profile /nowhere.json", "can't read the profile"),
        (f"{BASE} --profile /nowhere.json", "both --profile and --link"),
        (f"{BASE} --json /nowhere/a.json", "no such folder"),
        (f"{BASE} --nnodes 4 --out results", "two numbers of --nnodes"),
        (f"{BASE} async --workers 2", "is before async"),
    ],
)
def test_bad_input_is_one_clear_message(call, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, output, error = call(arguments)
    assert code == 2
    assert message in error
    assert output == ""
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds 0 times"),
        ("1s", "holds 1 times"),
        ("1s\n0s", "above 0"),
        ("[1, 'a']", "no list"),
        ("a\nb", "no time"),
    ],
)
def test_a_file_without_steps_is_refused(call, tmp_path, text, message):
    (tmp_path / "steps").write_text(text, encoding="utf-8")
    code, _, error = call(f"--parameters 20M --step {tmp_path}/steps")
    assert code == 2
    assert message in error
