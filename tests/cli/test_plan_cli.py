"""`paceline plan network`: output, files and refused input."""

from __future__ import annotations

import json

import pytest

OPTIONS = "--parameters 20M --world-size 4 --link 200Mbit/s --step 0.97s"


@pytest.fixture
def call(command):
    return lambda text: command("plan", "network", *text.split())


def test_options_advice_and_json(call, tmp_path):
    code, output, _ = call(f"{OPTIONS} --json {tmp_path}/advice.json")
    assert code == 0
    for words in (
        "float32 gradients every step",
        "120 MB",
        "4.8 s",
        "int4 parameters every 2 steps in 2 fragments",
    ):
        assert words in output
    assert "Use int4 parameters every 2 steps" in output
    written = json.loads((tmp_path / "advice.json").read_text())
    assert (written["kind"], written["schema"]) == ("plan-network", 1)
    assert written["command"].startswith("paceline plan network --parameters 20M")
    assert written["bytes_per_second"] == 25e6
    assert [option["flags"] for option in written["options"] if option["chosen"]] == [
        "--every 2 --outer average --compression int4 --fragments 2 --delay 1"
    ]


def test_a_fast_network_needs_no_remedy(call):
    code, output, _ = call("--parameters 20M --world-size 4 --link 10Gbit/s --step 0.97s")
    assert code == 0
    assert "no remedy is needed" in output


def test_a_larger_share_may_be_waited_for(call):
    assert "Use int4 gradients every step (--compression int4)" in call(f"{OPTIONS} --max-wait 15%")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--parameters 20Q --world-size 4 --link 200Mbit/s --step 1s", "unknown unit 'q'"),
        ("--parameters 20M --world-size 0 --link 200Mbit/s --step 1s", "ranks=0"),
        ("--parameters 20M --world-size 4 --link 200 --step 1s", "no rate"),
        ("--parameters 20M --world-size 4 --link 200Mbit/s --step 0s", "step_seconds=0.0"),
        (f"{OPTIONS} --max-wait 0", "share=0.0"),
        (f"{OPTIONS} --max-wait ten", "no share"),
        (f"{OPTIONS} --layers 0", "layers=0"),
        (f"{OPTIONS} --json /nowhere/a.json", "no such folder"),
        ("--world-size 4", "Missing option"),
    ],
)
def test_bad_input_is_one_clear_message(call, arguments, message):
    code, output, error = call(arguments)
    assert code == 2
    assert message in error
    assert output == ""
    assert "Traceback" not in error
