"""`paceline plan`: the page of advice."""

from __future__ import annotations

import json
from functools import partial

import pytest

from step_profile import model, profile


@pytest.fixture
def call(command):
    return partial(command, "plan")


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "profile.json"
    profile(call=0.5).save(path)
    return path


def test_a_page_from_a_profile(call, saved, tmp_path):
    out = tmp_path / "plan"
    code, output, _ = call(
        "--model",
        "net",
        "--world-size",
        "1,2,4",
        "--global-batch-size",
        "10",
        "--profile",
        saved,
        "--out",
        out,
    )
    assert code == 0
    assert "Global batch 10: 4 ranks, 1 micro-batch of up to 3 samples." in output
    assert "Synchronise with" in output
    assert "What would help most:" in output
    assert "Does it fit?" not in output
    facts = json.loads((out / "plan.json").read_text())
    assert [point["ranks"] for point in facts["steps"]["points"]] == [1, 2, 4]
    assert facts["batch"]["micro"] == 3
    assert sum(facts["steps"]["shares"].values()) == pytest.approx(1.0)
    assert (out / "scaling.png").stat().st_size > 10_000
    assert (out / "scaling.svg").read_text().startswith("<?xml")


def test_without_a_batch_the_measured_one_is_planned(call, saved):
    _, output, _ = call("--model", "net", "--world-size", "2", "--profile", saved)
    assert "Micro-batches of 4 samples without accumulation: 8 per step of 2 devices." in output


def test_a_context_that_was_not_measured_is_refused_and_the_measured_one_is_usual(call, saved):
    from paceline.tools.cli.plan import plan_command

    options = ("--model", "net", "--world-size", "2", "--profile", saved)
    assert call(*options)[0] == 0
    code, _, output = call(*options, "--context", "16")
    assert code == 2
    assert "it has: context 8" in output
    assert plan_command._context_of(plan_command._Training(model="net", devices=(2,)), profile()) == 8
    assert plan_command._context_of(plan_command._Training(model="other", devices=(2,)), profile()) == 128


@pytest.mark.thorough
def test_the_fit_needs_no_profile(call, tmp_path):
    options = ("--model", "tiny", "--world-size", "2", "--global-batch-size", "8", "--hardware", "rtx-4090")
    code, output, _ = call(*options, "--out", tmp_path / "plan")
    assert [path.name for path in (tmp_path / "plan").iterdir()] == ["plan.json"]  # nothing to draw
    assert "scaling" not in output
    assert code == 0
    assert "bucketed: micro-batches of all of 4 samples; fits:" in output
    assert "sharded: micro-batches of all of 4 samples; fits:" in output
    assert "Unknown without measurements" in output


@pytest.mark.thorough
def test_a_micro_batch_is_at_most_as_given_and_as_fits(call, tmp_path):
    measured, output = tmp_path / "profile.json", tmp_path / "plan.json"
    profile(models=(model(name="tiny"),)).save(measured)
    options = ("--model", "tiny", "--world-size", "2", "--device-memory", "1200MiB", "--profile", measured)
    for micro in (2, 4000):
        code, out, err = call(*options, "--max-micro-batch-size", micro, "--json", output)
        assert code == 0, err
        fits = max(each["samples"] for each in json.loads(output.read_text())["memory"].values())
        assert f"Micro-batches of {min(micro, fits)} samples without accumulation" in out
        assert "Synchronise with" in out
    assert 2 < fits < 4000


@pytest.mark.thorough
def test_a_model_that_does_not_fit_gets_no_further_advice(call):
    code, output, _ = call("--model", "mini", "--world-size", "2", "--device-memory", "850MiB")
    assert code == 0
    assert "bucketed: not even one sample: does not fit" in output
    assert "paceline plan memory --model mini --world-size 2 shows what would make it fit." in output
    assert "Which batch?" not in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to plan with"),
        (["--world-size", "two", "--hardware", "t4"], "--world-size 'two'"),
        (["--world-size", "0", "--hardware", "t4"], "1 or more"),
        (["--hardware", "t5"], "t4"),
        (["--device-memory", "much"], "much"),
        (["--hardware", "t4", "--global-batch-size", "0"], "--global-batch-size 0"),
        (["--hardware", "t4", "--max-micro-batch-size", "-1"], "--max-micro-batch-size -1"),
        (["--profile", "nowhere.json"], "can't read the profile"),
        (["--hardware", "t4", "--json", "/nowhere/at/all/plan.json"], "/nowhere"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_computed(call, arguments, message):
    code, out, err = call("--model", "tiny", *arguments)
    assert code == 2
    assert message in err
    assert out == ""


def test_a_model_that_was_not_measured_is_named_with_those_that_were(call, saved):
    code, out, err = call("--model", "tiny", "--world-size", "2", "--profile", saved)
    assert (code, out) == (2, ""), "nothing is printed before"
    assert "no step with model 'tiny'" in err
    assert "net" in err


def test_without_a_model_there_is_help(call):
    code, output, _ = call()
    assert code == 2
    assert "--model" in output
