"""Who takes part in a measurement, against whom, and which settings are refused."""

from __future__ import annotations

import json
import math

import pytest

from paceline.errors import UsageError
from paceline.parallel.strategy import STRATEGIES
from paceline.tools.bench.step.step_benchmark import StepSettings
from paceline.tools.bench.step.step_strategies import DDP, OURS, TITLES, Entry, entries, parse_bucket

MIB = 2**20


def test_ours_are_the_strategies_of_the_engine():
    assert set(OURS) == set(STRATEGIES)


def test_each_of_ours_has_a_peer_that_takes_part():
    peer_of = entries(OURS, [1, 5, math.inf], 13 * MIB)
    for entry, peer in peer_of.items():
        if entry.strategy in OURS:
            assert peer in peer_of
        else:
            assert peer is None
    assert peer_of[Entry("naive")] == peer_of[Entry("overlap")] == Entry("ddp", 0)
    assert peer_of[Entry("flat")] == Entry("ddp", math.inf)
    assert peer_of[Entry("bucketed", 5)] == Entry("ddp", 5)
    assert peer_of[Entry("sharded", 5)] == Entry("ddp-zero", 5)
    assert peer_of[Entry("full-shard")] == Entry("fully-shard")


@pytest.mark.parametrize("strategies", [[], ["naive"], ["ddp-static"]])
def test_no_synchronisation_and_torch_ddp_always_take_part(strategies):
    everyone = list(entries(strategies, [1.0], 13 * MIB))
    assert everyone[0] == Entry("no-sync")
    assert Entry("ddp") in everyone
    assert Entry("ddp", 1.0) in everyone


def test_sizes_that_hold_the_whole_model_run_once():
    sizes = [entry.bucket_mib for entry in entries(["bucketed"], [1, 25, 100, math.inf], 13 * MIB)]
    assert 25 in sizes
    assert 100 not in sizes
    assert math.inf not in sizes
    kept = [
        entry.bucket_mib for entry in entries(["bucketed"], [1, 5], 13 * MIB) if entry.strategy == "bucketed"
    ]
    assert kept == [1, 5]


def test_flat_brings_its_peer_even_where_no_size_holds_the_model():
    peer_of = entries(["flat"], [1, 5], 13 * MIB)
    assert peer_of[Entry("flat")] == Entry("ddp", math.inf)
    assert Entry("ddp", math.inf) in peer_of


def test_nobody_takes_part_twice_and_ddp_sizes_ascend():
    everyone = list(entries([*OURS, *DDP], [5, 1, 5], 13 * MIB))
    assert len(everyone) == len(set(everyone))
    sizes = [entry.bucket_mib for entry in everyone if entry.strategy == "ddp"]
    assert sizes == [None, 0, 1, 5, math.inf]


@pytest.mark.parametrize(
    ("strategies", "sizes", "message"),
    [
        (["bukketed"], [1], "did you mean 'bucketed'"),
        (["naive"], [0], "above 0"),
        (["naive"], [-1], "above 0"),
        (["naive"], [math.nan], "above 0"),
        (["naive"], [], "above 0"),
    ],
)
def test_what_makes_no_sense_is_refused(strategies, sizes, message):
    with pytest.raises(UsageError, match=f"(?s){message}"):
        entries(strategies, sizes, MIB)


@pytest.mark.parametrize(
    "entry", [Entry("naive"), Entry("ddp", 0), Entry("sharded", math.inf), Entry("ddp", 0.25)]
)
def test_entries_survive_strict_json(entry):
    assert Entry.from_json(json.loads(json.dumps(entry.to_json(), allow_nan=False))) == entry


def test_labels_are_all_different():
    labels = [entry.label for entry in entries(list(TITLES), [1, 5, math.inf], 13 * MIB)]
    assert len(labels) == len(set(labels))
    assert "torch DDP, default" in labels
    assert "bucketed, 5 MiB" in labels


def test_bucket_sizes_are_read():
    assert (parse_bucket("0.25"), parse_bucket("inf")) == (0.25, math.inf)
    for text in ("0", "-1", "x", "nan", "5MiB"):
        with pytest.raises(UsageError, match="is no bucket size"):
            parse_bucket(text)


def test_settings_survive_strict_json():
    settings = StepSettings(ranks=4, bucket_mib=(1.0, math.inf))
    assert StepSettings.from_json(
        json.loads(json.dumps(settings.to_json(), allow_nan=False))
    ) == StepSettings(
        **{**vars(settings), "sizes": list(settings.sizes), "strategies": list(settings.strategies)}
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 1}, "nobody to synchronise with"),
        ({"steps": 0}, "--steps 0"),
        ({"rounds": 0}, "--rounds 0"),
        ({"batch_size": 0}, "--batch-size 0"),
        ({"context": 0}, "--context 0"),
        ({"threads": 0}, "--threads 0"),
        ({"sizes": ()}, "no model size"),
        ({"sizes": ("tini",)}, "did you mean 'tiny'"),
        ({"context": 4096}, "at most 128 tokens"),
        ({"strategies": ("shardd",)}, "did you mean 'sharded'"),
        ({"bucket_mib": (0.0,)}, "above 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(UsageError, match=f"(?s){message}"):
        StepSettings(**changes)
