"""The examples run: the loss falls, and two ranks get the parameters of one process, or of torch's DDP."""

from __future__ import annotations

import contextlib
import difflib
import io
import itertools
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import paceline
from model_zoo import max_difference

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))

STEPS, TOLERANCE = 50, 1e-10
"""Steps of the convolutional network; the largest difference of any parameter, in float64."""


def falls(losses):
    """Return whether a loss fell by a fifth, from its first to its last three steps."""
    return sum(losses[-3:]) < 0.8 * sum(losses[:3])


def precise(model):
    """Return the model with its loss in float64: the library's own is computed in float32, whatever the model is."""

    def loss(logits, labels, **_):
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    model.loss_function = loss
    return model


def learn_lines(rank, size, batch_size, sync):
    import transformers_gpt2

    torch.set_default_dtype(torch.float64)
    net = precise(transformers_gpt2.build())
    model, losses = transformers_gpt2.train(net, steps=10, batch_size=batch_size, sync=sync)
    return model.whole_parameters(), losses


@pytest.mark.thorough
def test_a_hugging_face_model_counts_tokens(pool):
    """Ranks have unequal numbers of tokens; their parameters equal those of one process on both lines."""
    [(expected, losses)] = pool(1).run(learn_lines, 16, "bucketed")
    assert falls(losses)
    for sync in ("sharded", "full-shard"):
        for params, _ in pool(2, "paceline").run(learn_lines, 8, sync):
            assert max_difference(params, expected) <= TOLERANCE


def learn_shapes(rank, size):
    """Train with Paceline, then with DDP on the same batches; return the values to compare."""
    import convnet

    torch.set_default_dtype(torch.float64)
    model, losses = convnet.train(convnet.build(), steps=STEPS, batch_size=16)
    reference = DistributedDataParallel(convnet.build())
    optim = torch.optim.SGD(reference.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    for images, kinds in itertools.islice(paceline.Loader(convnet.Shapes(4096), 16), STEPS):
        functional.cross_entropy(reference(images), kinds).backward()
        optim.step()
        optim.zero_grad()
    before = [buffer.double().clone() for buffer in model.module.buffers()]
    accuracy = convnet.accuracy(model, samples=256)
    gaps = [
        max_difference(model.parameters(), reference.parameters()),
        max_difference([buffer.double() for buffer in model.module.buffers()], before),
    ]
    return *gaps, list(model.module.buffers()), list(reference.module.buffers()), losses, accuracy


@pytest.mark.thorough
def test_a_network_with_batchnorm_is_evaluated_with_rank_0s_statistics(pool):
    """DDP sends rank 0's running statistics in every forward, here that is done once; the weights are the same."""
    first, second = pool(2).run(learn_shapes)
    assert max(first[0], second[0]) <= TOLERANCE
    assert first[1] == 0.0, "rank 0 keeps its statistics"
    assert second[1] > 0.0, "rank 1 had others, of its own batches"
    for _, _, ours, theirs, losses, accuracy in (first, second):
        assert (
            max_difference([each.double() for each in ours], [each.double() for each in first[3]])
            <= TOLERANCE
        )
        assert len(ours) == len(theirs) == 18
        assert falls(losses)
        assert accuracy == first[5] > 0.5  # a quarter by chance


def run_script(rank, size, name, snapshot):
    """Run an example as torchrun would; return the losses that it printed."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), mock.patch.object(sys, "argv", [name, snapshot]):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return [float(line.split()[-1]) for line in output.getvalue().splitlines()]


def test_a_ddp_script_changed_in_one_line_learns_the_same(pool, rank_environments, tmp_path):
    before, after = ((EXAMPLES / name).read_text().splitlines() for name in ("ddp_before.py", "ddp_after.py"))
    changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    assert changed == [
        "- from torch.nn.parallel import DistributedDataParallel",
        "+ from paceline import DistributedDataParallel",
    ]
    output, saved = [], []
    for name in ("ddp_before.py", "ddp_after.py"):
        snapshot = tmp_path / name
        output.append(pool(2).run(run_script, name, str(snapshot), world=False, env=rank_environments(2))[0])
        saved.append(torch.load(snapshot, weights_only=True))
    assert output[0] == output[1]
    assert output[0][-1] < 0.2 * output[0][0]
    assert saved[0]["epoch"] == saved[1]["epoch"] == 4
    assert max_difference(saved[0]["model"].values(), saved[1]["model"].values()) <= 1e-6
