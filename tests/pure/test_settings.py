"""Settings of a training: every bad value is refused by name, before anything is started."""

from __future__ import annotations

import math

import pytest

from paceline.errors import UsageError
from paceline.sync.plan import Sync
from paceline.train.settings import Settings


def test_defaults_are_valid_and_survive_json():
    settings = Settings(out="runs/a")
    assert Settings.from_json(settings.to_json()) == settings
    assert settings.plan == Sync.of("sharded")


def test_every_field_survives_json():
    settings = Settings(
        out="a", existing="resume", ranks=3, size="mini", data="text", vocabulary=300, context=7, batch_size=2,
        accumulate=4, steps=9, lr=0.1, weight_decay=0.0, clip=0.0, sync="bucketed", bucket_mib=1.5, seed=8,
        log_every=2, eval_every=0, eval_windows=0, checkpoint_every=0, sample_tokens=0, threads=2, device="cpu",
    )  # fmt: skip
    assert Settings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize("value", [0, -1, 2.0, "2", True])
@pytest.mark.parametrize(
    "name", ["ranks", "batch_size", "accumulate", "steps", "log_every", "context", "threads", "vocabulary"]
)
def test_counts_of_at_least_one(name, value):
    with pytest.raises(UsageError, match=rf"{name}={value!r}, must be a whole number of 1 or more"):
        Settings(out="a", **{name: value})


@pytest.mark.parametrize("name", ["seed", "eval_every", "eval_windows", "checkpoint_every", "sample_tokens"])
def test_counts_of_at_least_zero(name):
    with pytest.raises(UsageError, match=rf"{name}=-1, must be a whole number of 0 or more"):
        Settings(out="a", **{name: -1})


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "1", None])
@pytest.mark.parametrize("name", ["lr", "clip", "weight_decay"])
def test_numbers(name, value):
    with pytest.raises(UsageError, match=rf"{name}={value!r}, must be a number"):
        Settings(out="a", **{name: value})


def test_learning_rate_of_zero():
    with pytest.raises(UsageError, match=r"lr=0, must be a number above 0"):
        Settings(out="a", lr=0)


@pytest.mark.parametrize(
    ("values", "meant"),
    [
        ({"sync": "bukketed"}, "bucketed"),
        ({"sync": "shard"}, "sharded"),
        ({"size": "tinny"}, "tiny"),
        ({"existing": "overwrit"}, "overwrite"),
        ({"device": "cuda:0"}, "cuda"),
    ],
)
def test_near_misses_are_suggested(values, meant):
    with pytest.raises(UsageError, match=f"did you mean '{meant}'"):
        Settings(out="a", **values)


@pytest.mark.parametrize("bucket_mib", [0, -1, -0.5, math.nan])
@pytest.mark.parametrize("sync", ["bucketed", "sharded", "naive"])
def test_bucket_size_zero_names_the_strategies_that_are_meant(sync, bucket_mib):
    with pytest.raises(UsageError, match=r"(?s)must be above 0.*'naive'.*'overlap'"):
        Settings(out="a", sync=sync, bucket_mib=bucket_mib)


@pytest.mark.parametrize("sync", ["naive", "flat", "overlap", "full-shard"])
def test_bucket_size_where_there_is_none(sync):
    with pytest.raises(UsageError, match=f"sync='{sync}', which has no bucket size"):
        Settings(out="a", sync=sync, bucket_mib=4)


def test_bucket_size_is_that_of_the_plan():
    assert Settings(out="a", sync="bucketed", bucket_mib=4).plan == Sync(bucket_mib=4)
    assert Settings(out="a", sync="sharded", bucket_mib=math.inf).plan == Sync(math.inf, shard="optimizer")


def test_folder_without_a_name():
    with pytest.raises(UsageError, match="out is empty"):
        Settings(out="")


def test_vocabulary_is_what_the_data_need_unless_asked_for():
    assert Settings(out="a").model_size(256).vocabulary == 256
    assert Settings(out="a", size="small").model_size(50257).vocabulary == 50257
    assert Settings(out="a", vocabulary=300).model_size(256).vocabulary == 300
    with pytest.raises(UsageError, match="the data hold token 299, but vocabulary=256"):
        Settings(out="a", vocabulary=256).model_size(300)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no JSON"),
        ("[1]", "are list"),
        ("{}", "no run folder"),
        ('{"out": "a", "stepz": 3}', "did you mean 'steps'"),
        ('{"out": "a", "steps": "3"}', "steps='3'"),
    ],
)
def test_settings_that_are_none(text, message):
    with pytest.raises(UsageError, match=message):
        Settings.from_json(text)
