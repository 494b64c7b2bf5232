"""``paceline plan batch``: output, files and refused input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench_harness.markdown import fill, table
from paceline.cost_model.fit_measurements import MeasuredPoint, fit_points
from paceline.cost_model.hardware_catalog import DEVICES, INTERCONNECTS
from paceline.cost_model.profile import Profile
from paceline.cost_model.profile_entries import CollectiveCost, Rate, Source
from paceline.tools.cli.plan.plan_batch_command import show_xxl
from paceline.tools.cli.plan.plan_hardware_command import DEVICE_COLUMNS, LINK_COLUMNS, device_rows, link_rows

OPTIONS = (
    "--model medium --strategy full-shard --hardware rtx-4090 --link 10gbe --gradient-bytes 2 --world-size 8"
    " --global-batch-size 500"
)


@pytest.fixture
def call(command):
    return lambda text: command("plan", "batch", *text.split())


def figures_of(path):
    return {each["key"]: each for each in json.loads(path.read_text())["figures"]}


def test_figures_sentences_and_json(call, tmp_path):
    code, output, _ = call(f"{OPTIONS} --json {tmp_path}/a.json")
    assert code == 0
    assert "At least 1 device: each then holds 5.39 GB of the 19.2 GB" in output
    assert "they have 62 or 63 samples per step, which Paceline weights exactly" in output
    assert "Even splits: 496 or 504, or 500 as 50 × 2 × 5" in output
    assert "communication takes 7.23× as long as the computing that could hide it" in output
    written = json.loads((tmp_path / "a.json").read_text())
    assert written["command"].startswith("paceline plan batch --model medium")
    assert (written["split"]["micro"], written["split"]["accumulation"], written["split"]["ranks"]) == (
        63,
        1,
        8,
    )
    for figure in written["figures"]:
        assert figure["formula"]
        assert figure["shown"] in output
    assert all(sentence in output for sentence in written["sentences"])


def test_xxl_on_devices_of_95_gb(call, tmp_path):
    options = (
        "--model xxl --hardware v5p --usable 100% --divided-activations 50% --flops 460T --link 180GB/s"
        " --strategy full-shard --gradient-bytes 2"
    )
    assert call(f"{options} --context 1024 --json {tmp_path}/a.json")[0] == 0
    found = figures_of(tmp_path / "a.json")
    assert found["devices"]["value"] == 41
    assert "(S + A)/n would give 38" in found["devices"]["wrong"]
    assert found["tokens_full_shard"]["value"] == pytest.approx(460e12 / 180e9 * 40 / 41)
    assert call(f"{options} --context 4096 --json {tmp_path}/b.json")[0] == 0
    assert figures_of(tmp_path / "b.json")["devices"]["value"] == 61


def test_the_derivation_of_xxl_is_shown_whole(capsys):
    show_xxl()
    output = capsys.readouterr().out
    for words in (
        "219.85 G",
        "17,547,264",
        "17,543,808",
        "38 (92.6 GB",
        "41 (95.0 GB",
        "1,581 tokens",
        "1,278",
    ):
        assert words in output


def test_nodes_with_slower_links_between_them(call, tmp_path):
    code, output, _ = call(
        "--parameters 7B --activations 4MB --context 2048 --strategy full-shard --gradient-bytes 2 --hardware h100"
        " --world-size 64 --global-batch-size 1024 --nproc-per-node 8 --link ndr"
        f" --json {tmp_path}/a.json"
    )
    assert code == 0
    found = figures_of(tmp_path / "a.json")
    assert found["tokens_full_shard"]["value"] == pytest.approx(989.4e12 / 50e9 * 63 / 64)
    assert found["tokens_hsdp_inside_a_group"]["value"] == pytest.approx(989.4e12 / 450e9 * 7 / 8)
    assert found["tokens_hsdp_between_groups"]["value"] == pytest.approx(989.4e12 / 50e9 / 8 * 7 / 8)
    assert "A rank's 16 samples don't divide by 3: micro-batches have 5 or 6" in output


def test_measured_rates_come_with_their_errors(call, tmp_path):
    source = Source("paceline bench fit x.json", "2026-01-02T03:04:05+00:00")
    points = [
        MeasuredPoint(n, p, 1e-4 * 2 * (p - 1) + n / 25e6 * 2 * (p - 1) / p)
        for n in (4**k for k in range(6, 14))
        for p in (2, 4)
    ]
    cost = CollectiveCost("gloo", "star", fit_points(points, "all-reduce"), source)
    rate = Rate(
        kind="matmul",
        device="cpu",
        dtype="float32",
        threads=2,
        value=1e11,
        low=0.8e11,
        high=1.1e11,
        shape="1024",
        source=source,
    )
    Profile(collectives=(cost,), rates=(rate,)).save(tmp_path / "profile.json")
    code, output, _ = call(
        "--model mini --device-memory 4GB --world-size 4 --global-batch-size 64 --dtype fp32 --gradient-bytes 2"
        f" --strategy full-shard --profile {tmp_path}/profile.json"
    )
    assert code == 0
    assert "3,000 tokens per micro-batch (2,400 to 3,300)" in output
    assert "fitted: all-reduce on gloo, star, ring, 4 ranks" in " ".join(output.split())


def test_too_few_devices_and_none_that_is_enough(call):
    code, output, _ = call(
        "--parameters 70B --hardware a100 --strategy fsdp --world-size 4 --global-batch-size 8"
    )
    assert code == 0
    assert "4 devices are too few for full-shard" in output
    code, output, _ = call("--parameters 7B --hardware t4 --strategy ddp")
    assert code == 0
    assert "No number of devices is enough: each would have to hold 112 GB whatever their number" in output
    assert "Shard more (--strategy full-shard)" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--hardware h100", "which model?"),
        ("--hardware h100 --model tiny --parameters 7B", "which model?"),
        ("--model tiny", "no device memory"),
        ("--model tyni --hardware h100", "did you mean 'tiny'?"),
        ("--model tiny --hardware h1oo", "unknown device"),
        ("--model tiny --hardware h100 --link warp", "unknown link"),
        ("--model tiny --hardware h100 --link 0GB/s", "--link 0GB/s"),
        ("--model tiny --hardware h100 --nproc-per-node 8 --link 5", "unknown link"),
        ("--model tiny --hardware v100 --dtype bf16", "no unit for bf16"),
        ("--model tiny --hardware h100 --dtype fp9", "unknown number type"),
        ("--model tiny --hardware h100 --world-size 0", "--world-size 0"),
        ("--model tiny --hardware h100 --global-batch-size 0", "--global-batch-size 0"),
        ("--model tiny --hardware h100 --context 0", "--context 0"),
        ("--model tiny --hardware h100 --nproc-per-node 0 --link ndr", "--nproc-per-node 0"),
        ("--model tiny --hardware h100 --nproc-per-node 8", "--nproc-per-node 8 without --link"),
        ("--model tiny --hardware h100 --inside nvlink4", "--inside without --nproc-per-node"),
        ("--model tiny --hardware h100 --usable 0", "usable=0.0"),
        ("--model tiny --hardware h100 --usable 120%", "usable=1.2"),
        ("--model tiny --hardware h100 --divided-activations 150%", "shared"),
        ("--model tiny --hardware h100 --strategy zero9", "unknown strategy"),
        ("--model tiny --hardware h100 --gradient-bytes 3", "--gradient-bytes 3"),
        ("--model tiny --hardware h100 --flops 0", "--flops 0"),
        ("--model tiny --device-memory 0GB", "memory"),
        ("--parameters 0 --device-memory 1GB", "--parameters 0"),
        ("--model tiny --hardware h100 --profile /nowhere.json", "can't read the profile"),
        (f"{OPTIONS} --json /nowhere/a.json", "no such folder"),
    ],
)
def test_bad_input_is_one_clear_message(call, arguments, message):
    code, output, error = call(arguments)
    assert code == 2
    assert message in error
    assert output == ""
    assert "Traceback" not in error


def test_every_name_that_is_known_is_listed(command):
    code, output, _ = command("plan", "hardware", "--sources")
    assert code == 0
    for row in (*DEVICES.values(), *INTERCONNECTS.values()):
        assert f"{row.name} " in output
        assert row.source in output


def test_the_page_has_the_table_as_it_is():
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
    tables = f"{table(DEVICE_COLUMNS, device_rows())}\n\n{table(LINK_COLUMNS, link_rows())}"
    assert fill(page, "hardware", tables) == page, "fill docs/plan.md anew with these tables"
