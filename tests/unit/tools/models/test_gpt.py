"""The reference GPT: shapes, causality, positions, start, refusals, generation."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.errors import UsageError
from paceline.tools.models.gpt import GPT, rotary_tables, rotate, token_loss
from paceline.tools.models.gpt_sizes import GptSize

SIZE = GptSize("test", d_model=32, d_ff=64, layers=2, heads=2, vocabulary=50, context=16)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT(SIZE).double()


def tokens(batch=3, context=16, seed=1):
    return torch.randint(0, 50, (batch, context), generator=torch.Generator().manual_seed(seed))


def test_shapes(model):
    assert model(tokens()).shape == (3, 16, 50)
    assert model(tokens(2, 5)).shape == (2, 5, 50)
    assert model(tokens(0, 5)).shape == (0, 5, 50)


def test_no_position_depends_on_later_tokens(model):
    before, after = tokens(), tokens()
    after[:, 9:] = (after[:, 9:] + 1) % 50
    assert torch.equal(model(before)[:, :9], model(after)[:, :9])
    assert not torch.equal(model(before)[:, 9:], model(after)[:, 9:])


def test_a_shorter_row_gives_the_same_logits(model):
    torch.testing.assert_close(model(tokens())[:, :5], model(tokens()[:, :5]), rtol=1e-12, atol=1e-12)


def test_order_matters_beyond_the_last_token(model):
    swapped = tokens()
    swapped[:, [0, 1]] = swapped[:, [1, 0]]
    assert not torch.allclose(model(tokens())[:, -1], model(swapped)[:, -1])


def test_rotation_depends_on_distance_only():
    cos, sin = (table.double() for table in rotary_tables(8, 4))
    query, key = torch.randn(2, 1, 1, 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def score(at, to):
        turned = rotate(query, cos[at], sin[at]) * rotate(key, cos[to], sin[to])
        return turned.sum().item()

    assert score(5, 3) == pytest.approx(score(4, 2), abs=1e-6)
    assert score(5, 3) != pytest.approx(score(5, 2), abs=1e-3)


@pytest.mark.parametrize("tie", [False, True])
def test_first_loss_is_that_of_guessing(tie):
    torch.manual_seed(0)
    model = GPT(SIZE, tie=tie)
    assert token_loss(model(tokens()), tokens(seed=2)).item() == pytest.approx(math.log(50), abs=0.1)


def test_tied_weights_are_one_tensor():
    model = GPT(SIZE, tie=True)
    assert model.head.weight is model.embedding.weight
    assert GPT(SIZE).head.weight is not GPT(SIZE).embedding.weight


def test_same_seed_same_weights():
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(GPT(SIZE))
    for one, two in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, two)


def test_recompute_gives_the_same_gradients(model):
    other = GPT(SIZE, recompute=True).double()
    other.load_state_dict(model.state_dict())
    for net in (model, other):
        token_loss(net(tokens()), tokens(seed=2)).backward()
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert one.grad is not None, name
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-12, atol=1e-14)


def test_a_gpt_memorises_a_row(model):
    model = model.float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, targets = tokens()[:, :-1], tokens()[:, 1:]
    for _ in range(60):
        value = token_loss(model(inputs), targets)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    assert value.item() < 0.1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.zeros(16, dtype=torch.int64), r"shape \[16\]"),
        (torch.zeros(2, 3, 4, dtype=torch.int64), r"shape \[2, 3, 4\]"),
        (torch.zeros(2, 0, dtype=torch.int64), r"shape \[2, 0\]"),
        (torch.zeros(2, 8), "torch.float32"),
        (torch.zeros(2, 17, dtype=torch.int64), "17 tokens a row, but the context is 16"),
    ],
)
def test_wrong_tokens_are_refused(model, given, message):
    with pytest.raises(UsageError, match=message):
        model(given)


def test_targets_that_do_not_fit_are_refused(model):
    with pytest.raises(UsageError, match=r"\[3, 16, 50\] and targets of shape \[3, 15\]"):
        token_loss(model(tokens()), tokens()[:, 1:])


def test_generate_adds_tokens_beyond_the_context(model):
    prompt = tokens(2, 4)
    written = model.generate(prompt, 20, generator=torch.Generator().manual_seed(5))
    again = model.generate(prompt, 20, generator=torch.Generator().manual_seed(5))
    assert written.shape == (2, 24)
    assert torch.equal(written[:, :4], prompt)
    assert torch.equal(written, again)
    assert not torch.equal(written, model.generate(prompt, 20, generator=torch.Generator().manual_seed(6)))


def test_temperature_zero_takes_the_likeliest(model):
    prompt = tokens(2, 4)
    written = model.generate(prompt, 1, temperature=0)
    assert torch.equal(written[:, -1], model(prompt)[:, -1].argmax(dim=-1))


@pytest.mark.parametrize(
    "arguments", [{"n": -1}, {"n": 1, "temperature": -0.5}, {"n": 1, "temperature": math.nan}]
)
def test_generate_refuses(model, arguments):
    with pytest.raises(UsageError, match="0 or more"):
        model.generate(tokens(1, 4), **arguments)
