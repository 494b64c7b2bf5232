"""Sizes: parameter counts equal those of the module; invalid sizes are refused."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import UsageError
from paceline.tools.models.gpt import GPT
from paceline.tools.models.gpt_sizes import SIZES, GptSize, gpt_size


def test_the_ladder():
    ladder = {name: (size.d_model, size.d_ff, size.layers, size.heads) for name, size in SIZES.items()}
    assert ladder["small"] == (768, 3072, 12, 12)
    assert ladder["medium"] == (1024, 4096, 24, 16)
    assert ladder["large"] == (1280, 5120, 36, 20)
    assert ladder["xl"] == (1600, 6400, 48, 25)
    assert ladder["2.7b"] == (2560, 10240, 32, 32)
    assert {SIZES[name].vocabulary for name in ("small", "medium", "large", "xl", "2.7b")} == {10_000}
    assert {SIZES[name].vocabulary for name in ("tiny", "mini")} == {256}


@pytest.mark.sweep
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_parameter_count_is_that_of_the_module(name, tie):
    with torch.device("meta"):
        model = GPT(SIZES[name], tie=tie)
    assert sum(param.numel() for param in model.parameters()) == SIZES[name].parameters(tie=tie)


def test_override_leaves_the_rest():
    size = gpt_size("small", vocabulary=256, context=64)
    assert (size.vocabulary, size.context, size.d_model) == (256, 64, 768)
    assert gpt_size("small") == SIZES["small"]


def test_unknown_size_suggests_the_nearest():
    with pytest.raises(UsageError, match=r"unknown model size 'smal'.*\n.*did you mean 'small'"):
        gpt_size("smal")


@pytest.mark.parametrize("field", ["d_model", "d_ff", "layers", "heads", "vocabulary", "context"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_bad_values_are_named(field, value):
    good = {"d_model": 8, "d_ff": 16, "layers": 1, "heads": 2}
    with pytest.raises(UsageError, match=f"{field}={value!r}"):
        GptSize("mine", **(good | {field: value}))


@pytest.mark.parametrize(("d_model", "heads"), [(10, 3), (6, 2)])
def test_heads_that_do_not_fit(d_model, heads):
    with pytest.raises(UsageError, match="heads do not fit"):
        GptSize("mine", d_model, 16, 1, heads)
