"""Strategies of a measurement with their peers, and refused settings."""

from __future__ import annotations

import json
import math

import pytest

from paceline.errors import UsageError
from paceline.parallel.strategy import STRATEGIES
from paceline.tools.bench.step.step_benchmark import StepSettings
from paceline.tools.bench.step.step_strategies import (
    DDP_STRATEGIES,
    PACELINE_STRATEGIES,
    STRATEGY_TITLES,
    StrategyVariant,
    strategy_variants,
)

MIB = 2**20


def test_all_strategies_of_the_engine_are_benchmarked():
    assert set(PACELINE_STRATEGIES) == set(STRATEGIES)


def test_each_strategy_of_paceline_has_a_benchmarked_peer():
    peer_of = strategy_variants(PACELINE_STRATEGIES, [1, 5, math.inf], 13 * MIB)
    for variant, peer in peer_of.items():
        if variant.strategy in PACELINE_STRATEGIES:
            assert peer in peer_of
        else:
            assert peer is None
    assert (
        peer_of[StrategyVariant("naive")] == peer_of[StrategyVariant("overlap")] == StrategyVariant("ddp", 0)
    )
    assert peer_of[StrategyVariant("flat")] == StrategyVariant("ddp", math.inf)
    assert peer_of[StrategyVariant("bucketed", 5)] == StrategyVariant("ddp", 5)
    assert peer_of[StrategyVariant("sharded", 5)] == StrategyVariant("ddp-zero", 5)
    assert peer_of[StrategyVariant("full-shard")] == StrategyVariant("fully-shard")


@pytest.mark.parametrize("strategies", [[], ["naive"], ["ddp-static"]])
def test_no_synchronisation_and_torch_ddp_are_always_included(strategies):
    variants = list(strategy_variants(strategies, [1.0], 13 * MIB))
    assert variants[0] == StrategyVariant("no-sync")
    assert StrategyVariant("ddp") in variants
    assert StrategyVariant("ddp", 1.0) in variants


def test_sizes_that_hold_the_whole_model_run_once():
    sizes = [
        variant.bucket_mib for variant in strategy_variants(["bucketed"], [1, 25, 100, math.inf], 13 * MIB)
    ]
    assert 25 in sizes
    assert 100 not in sizes
    assert math.inf not in sizes
    kept = [
        variant.bucket_mib
        for variant in strategy_variants(["bucketed"], [1, 5], 13 * MIB)
        if variant.strategy == "bucketed"
    ]
    assert kept == [1, 5]


def test_flat_brings_its_peer_even_where_no_size_holds_the_model():
    peer_of = strategy_variants(["flat"], [1, 5], 13 * MIB)
    assert peer_of[StrategyVariant("flat")] == StrategyVariant("ddp", math.inf)
    assert StrategyVariant("ddp", math.inf) in peer_of


def test_no_variant_runs_twice_and_ddp_sizes_ascend():
    variants = list(strategy_variants([*PACELINE_STRATEGIES, *DDP_STRATEGIES], [5, 1, 5], 13 * MIB))
    assert len(variants) == len(set(variants))
    sizes = [variant.bucket_mib for variant in variants if variant.strategy == "ddp"]
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
def test_invalid_strategies_and_sizes_are_refused(strategies, sizes, message):
    with pytest.raises(UsageError, match=f"(?s){message}"):
        strategy_variants(strategies, sizes, MIB)


@pytest.mark.parametrize(
    "variant",
    [
        StrategyVariant("naive"),
        StrategyVariant("ddp", 0),
        StrategyVariant("sharded", math.inf),
        StrategyVariant("ddp", 0.25),
    ],
)
def test_variants_survive_strict_json(variant):
    assert StrategyVariant.from_json(json.loads(json.dumps(variant.to_json(), allow_nan=False))) == variant


def test_labels_are_all_different():
    labels = [
        variant.label for variant in strategy_variants(list(STRATEGY_TITLES), [1, 5, math.inf], 13 * MIB)
    ]
    assert len(labels) == len(set(labels))
    assert "torch DDP, default" in labels
    assert "bucketed, 5 MiB" in labels


def test_settings_survive_strict_json():
    settings = StepSettings(ranks=4, bucket_mib=(1.0, math.inf))
    record = json.loads(json.dumps(settings.to_json(), allow_nan=False))
    assert record["bucket_mib"] == [1.0, "inf"]
    assert StepSettings.from_json(record) == settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 1}, "no peer to synchronise with"),
        ({"steps": 0}, "--steps 0"),
        ({"rounds": 0}, "--rounds 0"),
        ({"batch_size": 0}, "--micro-batch-size 0"),
        ({"context": 0}, "--context 0"),
        ({"threads": 0}, "--threads 0"),
        ({"sizes": ()}, "no model size"),
        ({"sizes": ("tini",)}, "did you mean 'tiny'"),
        ({"context": 4096}, "at most 128 tokens"),
        ({"strategies": ("shardd",)}, "did you mean 'sharded'"),
        ({"bucket_mib": (0.0,)}, "above 0"),
    ],
)
def test_invalid_settings_are_refused(changes, message):
    with pytest.raises(UsageError, match=f"(?s){message}"):
        StepSettings(**changes)
