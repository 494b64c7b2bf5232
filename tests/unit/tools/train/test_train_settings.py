"""`TrainSettings`: every invalid value is refused by name, before anything starts; JSON round trips."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import UsageError
from paceline.parallel.local_sgd.sync_schedule import layers_of
from paceline.parallel.strategy import Sync
from paceline.tools.models.gpt import GPT
from paceline.tools.models.gpt_sizes import SIZES, gpt_size
from paceline.tools.train.local_sgd_settings import LocalSgdSettings, gpt_layers
from paceline.tools.train.train_settings import TrainSettings


def test_defaults_are_valid_and_survive_json():
    settings = TrainSettings(out="runs/a")
    assert TrainSettings.from_json(settings.to_json()) == settings
    assert settings.plan == Sync()


def test_every_field_survives_json():
    settings = TrainSettings(
        out="a", existing="resume", ranks=3, model="mini", data="text", vocabulary=300, context=7, micro_batch_size=2,
        accumulate=4, steps=9, lr=0.1, weight_decay=0.0, clip=0.0, strategy="bucketed", bucket_mib=1.5, seed=8,
        log_every=2, eval_every=0, eval_windows=0, checkpoint_every=0, sample_tokens=0, threads=2, device="cpu",
        compression="int4", every=12, outer="diloco", outer_lr=0.5, outer_momentum=0.8, fragments=3, delay=2,
        outer_warmup_steps=4,
    )  # fmt: skip
    assert TrainSettings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize("value", [0, -1, 2.0, "2", True])
@pytest.mark.parametrize(
    "name",
    ["ranks", "micro_batch_size", "accumulate", "steps", "log_every", "context", "threads", "vocabulary"],
)
def test_counts_of_at_least_one(name, value):
    with pytest.raises(UsageError, match=rf"{name}={value!r}, must be a whole number of 1 or more"):
        TrainSettings(out="a", **{name: value})


@pytest.mark.parametrize("name", ["seed", "eval_every", "eval_windows", "checkpoint_every", "sample_tokens"])
def test_counts_of_at_least_zero(name):
    with pytest.raises(UsageError, match=rf"{name}=-1, must be a whole number of 0 or more"):
        TrainSettings(out="a", **{name: -1})


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "1", None])
@pytest.mark.parametrize("name", ["lr", "clip", "weight_decay"])
def test_numbers(name, value):
    with pytest.raises(UsageError, match=rf"{name}={value!r}, must be a number"):
        TrainSettings(out="a", **{name: value})


def test_learning_rate_of_zero():
    with pytest.raises(UsageError, match=r"lr=0, must be a number above 0"):
        TrainSettings(out="a", lr=0)


@pytest.mark.parametrize(
    ("values", "meant"),
    [
        ({"strategy": "bukketed"}, "bucketed"),
        ({"strategy": "shard"}, "sharded"),
        ({"model": "tinny"}, "tiny"),
        ({"existing": "overwrit"}, "overwrite"),
        ({"device": "cuda:0"}, "cuda"),
    ],
)
def test_near_misses_are_suggested(values, meant):
    with pytest.raises(UsageError, match=f"did you mean '{meant}'"):
        TrainSettings(out="a", **values)


@pytest.mark.parametrize("bucket_mib", [0, -1, -0.5, math.nan])
@pytest.mark.parametrize("sync", ["bucketed", "sharded", "naive"])
def test_bucket_size_of_zero_suggests_strategies_without_buckets(sync, bucket_mib):
    with pytest.raises(UsageError, match=r"(?s)must be above 0.*'naive'.*'overlap'"):
        TrainSettings(out="a", strategy=sync, bucket_mib=bucket_mib)


@pytest.mark.parametrize("sync", ["naive", "flat", "overlap", "full-shard"])
def test_bucket_size_is_refused_for_strategies_without_buckets(sync):
    with pytest.raises(UsageError, match=f"strategy='{sync}', which has no bucket size"):
        TrainSettings(out="a", strategy=sync, bucket_mib=4)


def test_bucket_size_is_that_of_the_plan():
    assert TrainSettings(out="a", strategy="bucketed", bucket_mib=4).plan == Sync(bucket_mib=4)
    assert TrainSettings(out="a", strategy="sharded", bucket_mib=math.inf).plan == Sync(
        math.inf, shard="optimizer"
    )


def test_folder_without_a_name():
    with pytest.raises(UsageError, match="out is empty"):
        TrainSettings(out="")


def test_vocabulary_defaults_to_that_of_the_data():
    assert TrainSettings(out="a").model_size(256).vocabulary == 256
    assert TrainSettings(out="a", model="small").model_size(50257).vocabulary == 50257
    assert TrainSettings(out="a", vocabulary=300).model_size(256).vocabulary == 300
    with pytest.raises(UsageError, match="the data hold token 299, but vocabulary=256"):
        TrainSettings(out="a", vocabulary=256).model_size(300)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "are not JSON"),
        ("[1]", r"settings is \[1\]: expected `object`, got `array`"),
        ("{}", "no run folder"),
        ('{"out": "a", "stepz": 3}', "did you mean 'steps'"),
        ('{"out": "a", "steps": "3"}', r"settings\.steps is \"3\": expected `int`"),
    ],
)
def test_invalid_settings_files_are_refused(text, message):
    with pytest.raises(UsageError, match=message):
        TrainSettings.from_json(text)


def test_default_strategies():
    assert TrainSettings(out="a").strategy == "bucketed"
    assert TrainSettings(out="a", compression="none").strategy == "bucketed"
    assert TrainSettings(out="a", compression="int8").plan == Sync(compression="int8")
    assert TrainSettings(out="a", strategy="sharded", compression="int8").plan == Sync(
        shard="optimizer", compression="int8"
    )
    settings = TrainSettings(out="a", every=4)
    assert (settings.plan, settings.local_sgd) == (Sync(), LocalSgdSettings(every=4))
    assert settings.sync_summary == "averaged every 4 steps, int8"
    assert TrainSettings(out="a", every=4, strategy="naive", compression="none").plan == Sync.of("naive")


@pytest.mark.parametrize("outer", ["average", "diloco"])
def test_steps_during_a_delay_are_kept(outer):
    model = paceline.DataParallel(nn.Linear(2, 2), sync="bucketed")
    settings = LocalSgdSettings(every=4, outer=outer, delay=1, compression="none")
    assert settings.build_loop(model, torch.optim.SGD(model.parameters(), lr=0.1)).keep_local_steps


def test_with_every_compression_is_of_pseudo_gradients():
    settings = TrainSettings(out="a", every=8, outer="diloco", fragments=2, delay=1)
    assert settings.plan.compression is None
    assert settings.sync_summary == "DiLoCo every 8 steps, 2 fragments, 1 step late, int4"
    assert (
        TrainSettings(out="a", every=8, compression="none").sync_summary
        == "averaged every 8 steps, not compressed"
    )
    assert TrainSettings(out="a", every=8, compression="bf16").sync_summary == "averaged every 8 steps, bf16"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"every": 0}, "every=0"),
        ({"every": 2.5}, "every=2.5"),
        (
            {"every": 4, "strategy": "sharded"},
            "every=4 with strategy='sharded', where no rank has whole gradients",
        ),
        ({"every": 4, "strategy": "full-shard"}, "every=4 with strategy='full-shard'"),
        ({"outer_lr": 0.5}, "(?s)outer_lr=0.5 without every.*--outer-lr"),
        ({"outer": "diloco"}, "outer='diloco' without every"),
        ({"fragments": 2}, "fragments=2 without every"),
        ({"delay": 0}, "delay=0 without every"),
        ({"outer_warmup_steps": 3}, "outer_warmup_steps=3 without every"),
        ({"every": 4, "outer": "dilocco"}, "did you mean 'diloco'"),
        ({"every": 4, "outer_lr": 0.5}, "outer_lr=0.5 with outer='average', which has none"),
        ({"every": 4, "outer_momentum": 0.0}, "outer_momentum=0.0 with outer='average'"),
        ({"every": 4, "outer_warmup_steps": 5}, "outer_warmup_steps=5 with outer='average'"),
        ({"every": 4, "outer": "slowmo", "fragments": 2}, "fragments=2 with outer='slowmo'"),
        ({"every": 4, "outer": "slowmo", "delay": 1}, "delay=1 with outer='slowmo'"),
        ({"every": 4, "outer": "diloco", "outer_lr": 0.0}, "outer_lr=0.0"),
        ({"every": 4, "outer": "diloco", "outer_momentum": 1.0}, "outer_momentum=1.0"),
        ({"every": 4, "outer": "slowmo", "outer_momentum": 1.0}, "slow_momentum=1.0"),
        ({"every": 4, "outer": "diloco", "outer_warmup_steps": -1}, "outer_warmup_steps=-1"),
        ({"every": 4, "fragments": 5}, "fragments=5 with every=4"),
        ({"every": 20, "fragments": 8}, "fragments=8, but the model has 7 layers"),
        ({"every": 4, "delay": 4}, "delay=4 with every=4"),
        ({"every": 4, "compression": "powersgd"}, "compression='powersgd' with every=4"),
        ({"compression": "int5"}, "unknown compression 'int5'.*none"),
        ({"compression": "int8", "strategy": "full-shard"}, "compression with shard='parameters'"),
        ({"strategy": "auto", "every": 4}, "every=4 with strategy='auto', which chooses that itself"),
        ({"strategy": "auto", "compression": "int8"}, "compression='int8' with strategy='auto'"),
        ({"strategy": "auto", "bucket_mib": 4.0}, "bucket_mib=4.0 with strategy='auto'"),
    ],
)
def test_contradictory_values_are_refused(values, message):
    with pytest.raises(UsageError, match=message):
        TrainSettings(out="a", **values)


@pytest.mark.parametrize("name", ["tiny", "mini"])
def test_layers_are_counted_without_a_model(name):
    assert len(layers_of(GPT(gpt_size(name)))) == gpt_layers(SIZES[name].layers)
