"""Which parameters `matrix_parameters` takes for hidden matrices, and which it leaves to an elementwise optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline
from matrix_models import build_matrices
from paceline.errors import UsageError
from paceline.tools.models.gpt import GPT
from paceline.tools.models.gpt_sizes import gpt_size

TINY = gpt_size("tiny")
IN_A_BLOCK = ["attention.qkv", "attention.out", "feed_forward.up", "feed_forward.out"]


def names(model, **options):
    """Return the names of matrices and of the rest; every trainable parameter is in one of the two."""
    matrices, rest = paceline.matrix_parameters(model, **options)
    named = {id(param): name for name, param in model.named_parameters() if param.requires_grad}
    assert sorted(id(param) for _, param in [*matrices, *rest]) == sorted(named)
    assert all(named[id(param)] == name for name, param in [*matrices, *rest])
    return [name for name, _ in matrices], [name for name, _ in rest]


@pytest.mark.parametrize("tie", [False, True], ids=["separate head", "tied head"])
def test_matrices_of_a_gpt_are_those_of_its_blocks(tie):
    matrices, rest = names(GPT(TINY, tie=tie))
    assert matrices == [f"blocks.{at}.{each}.weight" for at in range(TINY.layers) for each in IN_A_BLOCK]
    assert "embedding.weight" in rest
    assert ("head.weight" in rest) == (not tie)
    assert sum(name.endswith("norm.weight") for name in rest) == 2 * TINY.layers + 1


class LanguageModel(nn.Module):
    """The usual names: wte, lm_head."""

    def __init__(self, tie):
        super().__init__()
        self.wte = nn.Embedding(50, 8)
        self.wpe = nn.Parameter(torch.zeros(16, 8))
        self.h = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))
        self.lm_head = nn.Linear(8, 50, bias=False)
        if tie:
            self.lm_head.weight = self.wte.weight


@pytest.mark.parametrize("tie", [False, True], ids=["separate head", "tied head"])
def test_embedding_and_head_are_no_hidden_matrices(tie):
    matrices, rest = names(LanguageModel(tie), exclude=("*wpe",))
    in_a_layer = ["self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"]
    assert matrices == [f"h.{at}.{each}" for at in range(2) for each in in_a_layer]
    assert {"wte.weight", "wpe"} <= set(rest)
    assert ("lm_head.weight" in rest) == (not tie)
    assert all(
        param.ndim == 1 for name, param in paceline.matrix_parameters(LanguageModel(tie))[1] if "norm" in name
    )


def test_hidden_layers_of_an_mlp():
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU())
    net.append(nn.Linear(8, 3))
    matrices, rest = names(net, exclude=("5.*",))
    assert matrices == ["0.weight", "3.weight"]
    assert "5.weight" in rest
    assert {"0.bias", "2.weight", "2.bias", "3.bias"} <= set(rest)


def test_bare_weights_with_two_and_three_dimensions_are_matrices():
    matrices, rest = names(build_matrices("Experts"))
    assert sorted(matrices) == ["back", "enter.weight", "experts"]
    assert sorted(rest) == ["enter.bias", "head.bias", "head.weight"]


def test_convolutions_are_left_to_the_elementwise_optimizer():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv1d(4, 4, 3), nn.Flatten(), nn.Linear(8, 8)
    )
    matrices, rest = names(net)
    assert "0.weight" in rest
    assert "2.weight" in rest
    assert set(matrices) <= {"4.weight"}


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_gains_with_two_dimensions_are_no_matrices(kind):
    matrices, _ = names(nn.Sequential(nn.Linear(4, 4), kind((4, 4))))
    assert matrices == ["0.weight"]


def test_frozen_parameters_are_in_neither():
    net = build_matrices("Unequal")
    net.up.weight.requires_grad_(False)
    matrices, rest = names(net)
    assert "up.weight" not in [*matrices, *rest]


def test_what_is_excluded_is_in_the_rest():
    matrices, rest = names(build_matrices("Unequal"), exclude=("up.*", "*wide*"))
    assert matrices == ["enter.weight", "down.weight", "tiny.weight"]
    assert {"up.weight", "wide.weight"} <= set(rest)


def test_a_pattern_that_matches_nothing_is_named():
    with pytest.raises(UsageError, match=r"\*\.lm_haed\.\*"):
        paceline.matrix_parameters(build_matrices("Unequal"), exclude=("*.lm_haed.*",))


def test_a_wrapped_model_gives_the_same_matrices():
    bare = build_matrices("Fused")
    model = paceline.DataParallel(build_matrices("Fused"), sync="sharded")
    for ours, theirs in zip(paceline.matrix_parameters(model), paceline.matrix_parameters(bare), strict=True):
        assert [name.removeprefix("module.") for name, _ in ours] == [name for name, _ in theirs]
