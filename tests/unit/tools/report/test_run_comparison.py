"""Comparison of two runs: the ratio of their speed with its interval, what differs, and the sentences."""

from __future__ import annotations

import json

import numpy as np
import pytest

from paceline.tools.report.compare.comparison_page import write_comparison
from paceline.tools.report.compare.comparison_text import comparison_headline, difference
from paceline.tools.report.compare.run_comparison import differing_facts, read_pair, speed_ratio
from recorded_run import write_run


def logged(folder, seconds, *, samples=32, losses=None, facts=None):
    """Write a run without a trace whose steps take these times."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(facts or {}))
    lines = []
    for step, each in enumerate(seconds, start=1):
        line = {"step": step, "step_seconds": float(each), "samples": samples}
        lines.append(json.dumps(line | ({} if losses is None else {"loss": float(losses[step - 1])})))
    (folder / "steps.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def normal(mean, count=200, spread=0.01, seed=0):
    return np.random.default_rng(seed).normal(mean, spread, count)


def test_a_clear_difference_has_an_interval_that_excludes_equal_speed(tmp_path):
    pair = read_pair(logged(tmp_path / "a", normal(0.2)), logged(tmp_path / "b", normal(0.1, seed=1)))
    speed = speed_ratio(*pair)
    assert speed.ratio == pytest.approx(2.0, rel=0.02)
    assert 1.9 < speed.low < speed.ratio < speed.high < 2.1
    sentence = comparison_headline(*pair, speed)[0]
    assert sentence.startswith("b is 2× faster than a: 100 ms per step instead of 200 ms (95 % interval 1.9")


def test_no_difference_is_claimed_within_the_noise(tmp_path):
    one, other = (normal(0.1, 40, 0.02, seed) for seed in (1, 2))
    pair = read_pair(logged(tmp_path / "a", one), logged(tmp_path / "b", other))
    speed = speed_ratio(*pair)
    assert speed.low < 1 < speed.high
    assert comparison_headline(*pair, speed)[0].startswith("No difference in speed can be shown: b takes ")


def test_correlated_steps_widen_the_interval(tmp_path):
    slow_phases = np.repeat(np.random.default_rng(0).choice([0.1, 0.2], 20), 20)  # busy for 20 steps in a row
    shuffled = np.random.default_rng(1).permutation(slow_phases)
    base = normal(0.15, 400)
    widths = []
    for name, times in (("phases", slow_phases), ("shuffled", shuffled)):
        pair = read_pair(
            logged(tmp_path / name / "a", base), logged(tmp_path / name / "b", times + base / 100)
        )
        speed = speed_ratio(*pair)
        widths.append(speed.high - speed.low)
    assert widths[0] >= widths[1]


def test_runs_with_other_batches_are_compared_per_sample(tmp_path):
    first = logged(tmp_path / "a", normal(0.2), samples=64)
    speed = speed_ratio(*read_pair(first, logged(tmp_path / "b", normal(0.1), samples=32)))
    assert speed.per == "sample"
    assert speed.ratio == pytest.approx(1.0, rel=0.02)


def test_few_steps_are_not_compared(tmp_path):
    pair = read_pair(logged(tmp_path / "a", normal(0.2, 5)), logged(tmp_path / "b", normal(0.1)))
    assert speed_ratio(*pair) is None
    assert "can't be compared" in comparison_headline(*pair, None)[0]


def test_losses_are_judged_by_their_noise(tmp_path):
    times = normal(0.1)
    losses = [normal(2.0, 200, 0.05, seed) for seed in (1, 2)]
    pair = read_pair(
        logged(tmp_path / "a", times, losses=losses[0]), logged(tmp_path / "b", times, losses=losses[1])
    )
    assert "within its noise" in comparison_headline(*pair, speed_ratio(*pair))[1]
    worse = logged(tmp_path / "c", times, losses=losses[1] + 1)
    pair = read_pair(tmp_path / "a", worse)
    assert "more than its noise" in comparison_headline(*pair, speed_ratio(*pair))[1]


def test_what_differs_is_listed_and_where_runs_were_written_is_not(tmp_path):
    facts = [
        {"command": "x", "settings": {"out": "a", "lr": 0.1, "seed": 0}, "world": {"size": 2}},
        {"command": "y", "settings": {"out": "b", "lr": 0.2, "seed": 0, "clip": 1.0}, "world": {"size": 2}},
    ]
    folders = [logged(tmp_path / name, [0.1], facts=each) for name, each in zip("ab", facts, strict=True)]
    one, other = read_pair(*folders)
    assert differing_facts(one.run, other.run) == [("settings.lr", 0.1, 0.2), ("settings.clip", None, 1.0)]


def test_folders_of_one_name_are_told_apart(tmp_path):
    one, other = read_pair(logged(tmp_path / "x" / "run", [0.1]), logged(tmp_path / "y" / "run", [0.1]))
    assert (one.name, other.name) == ("x/run", "y/run")
    assert write_comparison(tmp_path / "x" / "run", tmp_path / "y" / "run").name == "compare-x-run.html"


def test_the_page_names_the_phase_that_explains_the_difference(tmp_path):
    slow = write_run(tmp_path / "slow", steps=40, wait=0.1)
    fast = write_run(tmp_path / "fast", steps=40, wait=0.01)
    page = write_comparison(slow, fast).read_text()
    assert "faster than slow" in page
    assert "mostly by 90 ms less exposed communication" in page
    assert '<th scope="row">exposed</th>' in page
    assert "<h2>What differs</h2>" in page


@pytest.mark.parametrize(
    ("ratio", "text"), [(2.5, "2.5× faster"), (1.2, "20 % faster"), (0.8, "20 % slower"), (0.25, "4× slower")]
)
def test_differences_are_written_as_people_say_them(ratio, text):
    assert difference(ratio) == text
