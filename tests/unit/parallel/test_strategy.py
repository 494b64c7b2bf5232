"""Strategies: names, aliases, labels."""

from __future__ import annotations

import math

import pytest
import torch

import paceline
from paceline.errors import UsageError
from paceline.parallel.gradient_collectives import Comm
from paceline.parallel.sharding.fsdp import FSDPEngine, FSDPModule
from paceline.parallel.strategy import ALIASES, STRATEGIES, Sync
from paceline.tools.train.train_settings import TrainSettings

CANONICAL = {"ddp": "bucketed", "zero1": "sharded", "zero2": "sharded-gradients", "fsdp": "full-shard"}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_has_the_name_it_is_found_by(name):
    assert Sync.of(name).name == name


@pytest.mark.parametrize(("alias", "name"), CANONICAL.items())
def test_an_alias_is_the_strategy_it_stands_for(alias, name):
    assert Sync.of(alias) == Sync.of(name)
    assert Sync.of(alias).name == name
    assert str(Sync.of(alias)) == str(STRATEGIES[name])


def test_aliases_are_not_strategies():
    assert ALIASES == CANONICAL
    assert not ALIASES.keys() & STRATEGIES.keys()


@pytest.mark.parametrize(("alias", "name"), CANONICAL.items())
def test_a_wrapped_model_takes_an_alias(alias, name):
    assert paceline.DataParallel(torch.nn.Linear(2, 2), sync=alias).plan.name == name


@pytest.mark.parametrize(("alias", "name"), CANONICAL.items())
def test_train_takes_an_alias_and_keeps_the_canonical_name(alias, name):
    settings = TrainSettings(out="a", strategy=alias)
    assert (settings.strategy, settings.plan) == (name, Sync.of(name))
    assert f'"strategy": "{name}"' in settings.to_json()


@pytest.mark.parametrize(("given", "meant"), [("fsdp2", "fsdp"), ("zero", "zero2"), ("bukketed", "bucketed")])
def test_an_unknown_name_lists_the_valid_ones_and_suggests_the_nearest(given, meant):
    with pytest.raises(
        UsageError, match=f"(?s)unknown strategy '{given}'.*auto, ddp, zero1, zero2, fsdp.*'{meant}'"
    ):
        Sync.of(given)


@pytest.mark.parametrize(
    ("plan", "label"),
    [
        (Sync(), "bucketed, 25 MiB"),
        (Sync(bucket_mib=0), "overlap"),
        (Sync(bucket_mib=0, overlap=False), "naive"),
        (Sync(bucket_mib=math.inf, overlap=False), "flat"),
        (Sync(bucket_mib=math.inf), "bucketed, one bucket"),
        (Sync(bucket_mib=0.5, overlap=False), "flat, 0.5 MiB"),
        (Sync(bucket_mib=0, shard="optimizer"), "sharded, per parameter"),
        (Sync(shard="parameters"), "full-shard"),
    ],
)
def test_labels(plan, label):
    assert plan.label == label


def test_full_shard_names_the_torch_that_it_needs(monkeypatch):
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params")
    net = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"full-shard needs torch 2\.13 or later; this is 2\."):
        FSDPEngine(net, Comm(), Sync.of("full-shard"), None, None)
    assert type(net) is torch.nn.Linear, "unchanged"
