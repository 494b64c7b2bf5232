"""Ways in which programs use autograd give the parameters of one process, and none leaves a rank waiting."""

from __future__ import annotations

import pytest
import torch

import model_zoo
import paceline
from engine_cases import ALL, REPLICATED, data, loss_on
from model_zoo import max_difference
from paceline.errors import UsageError
from single_process import pair, same

EVERY = [*ALL, "auto"]

# Each takes the steps' losses (a function of the number of a batch) and runs the backwards of one step.


def retained(model, loss):
    first = loss(0)
    first.backward(retain_graph=True)
    first.backward()


def two_losses(model, loss):
    first, second = loss(0), loss(1)
    first.backward()
    second.backward()


def two_losses_the_last_first(model, loss):
    first, second = loss(0), loss(1)
    second.backward()
    first.backward()


def two_losses_of_one_graph(model, loss):
    first = loss(0)
    second = 3 * first
    first.backward(retain_graph=True)
    second.backward()


def several_forwards(model, loss):
    (loss(0) + 2 * loss(1) + loss(0)).backward()


def evaluation_between(model, loss):
    first = loss(0)
    with torch.no_grad():
        loss(1)
    first.backward()
    with torch.inference_mode():
        loss(1)
    loss(2).backward()


def forward_without_backward(model, loss):
    loss(0)
    loss(1).backward()


def anomaly_detected(model, loss):
    with torch.autograd.detect_anomaly(check_nan=True):
        loss(0).backward()


def some_inputs_only(model, loss):
    loss(0).backward(inputs=[param for param in model.parameters() if param.dim() > 1])


STEPS = {
    each.__name__: each
    for each in (
        retained,
        two_losses,
        two_losses_the_last_first,
        two_losses_of_one_graph,
        several_forwards,
        evaluation_between,
        forward_without_backward,
        anomaly_detected,
        some_inputs_only,
    )
}


def steps_like(rank, size, sync, name):
    """Return the gap to one process that takes the mean of the ranks' losses."""
    model, optim, reference, other = pair(sync, model_zoo.Plain)
    for step in range(4):
        STEPS[name](model, lambda number, step=step: loss_on(model, rank, 10 * step + number))
        optim.step()
        optim.zero_grad()
        for r in range(size):
            STEPS[name](
                reference, lambda number, r=r, step=step: loss_on(reference, r, 10 * step + number) / size
            )
        other.step()
        other.zero_grad()
    return max_difference(model.whole_parameters(), reference.parameters())


@pytest.mark.sweep
@pytest.mark.parametrize("sync", EVERY)
@pytest.mark.parametrize("name", STEPS)
def test_backwards_equal_those_of_one_process(pool, name, sync):
    same(pool(2).run(steps_like, sync, name), 1e-12)


# ------------------------------------------------------------------ torch.autograd.grad


def penalty_on_parameters(model, inputs, targets):
    """Return a loss with the norm of its own gradient: its backward is a double backward."""
    loss = (model(inputs) - targets).square().mean()
    params = [param for param in model.parameters() if param.requires_grad]
    grads = torch.autograd.grad(loss, params, create_graph=True)
    return loss + 0.1 * sum(grad.square().sum() for grad in grads)


def penalty_on_inputs(model, inputs, targets):
    """Return a loss with the norm of its gradient by the inputs, as WGAN-GP."""
    inputs = inputs.clone().requires_grad_(True)
    outputs = model(inputs)
    (grad,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return (outputs - targets).square().mean() + (grad.norm(2, dim=1) - 1).square().mean()


def saliency(model, inputs, targets):
    """Return a loss whose samples are weighted by the gradient of another forward."""
    inputs = inputs.clone().requires_grad_(True)
    (grad,) = torch.autograd.grad(model(inputs).sum(), inputs)
    return ((model(inputs.detach()) - targets).square() * grad.norm(dim=1, keepdim=True)).mean()


OBJECTIVES = {each.__name__: each for each in (penalty_on_parameters, penalty_on_inputs, saliency)}


def with_inner_grad(rank, size, sync, name, how):
    model, optim, reference, other = pair(sync, model_zoo.Plain)
    rounds = []
    for step in range(3):
        for micro in range(2):
            model.require_backward_grad_sync = micro == 1
            loss = OBJECTIVES[name](model, *data(rank, 10 * step + micro)) / 2
            if how == "samples":
                model.backward(2 * loss, samples=6)
            else:
                loss.backward()
        rounds.append(model.engine.step)
        optim.step()
        optim.zero_grad()
        for r in range(size):
            for micro in range(2):
                loss = OBJECTIVES[name](reference, *data(r, 10 * step + micro))
                (loss / (2 * size)).backward()
        other.step()
        other.zero_grad()
    return max_difference(model.whole_parameters(), reference.parameters()), rounds


@pytest.mark.sweep
@pytest.mark.parametrize("how", ["plain", "samples"])
@pytest.mark.parametrize("sync", [*REPLICATED, "sharded", "auto"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_loss_made_of_gradients(pool, name, sync, how):
    results = pool(2).run(with_inner_grad, sync, name, how)
    same([gap for gap, _ in results])
    assert all(rounds == [1, 2, 3] for _, rounds in results)


def refused_when_sharded_fully(rank, size, name):
    """A step is refused, and training goes on."""
    model, optim, reference, other = pair("full-shard", model_zoo.Plain)
    for step in range(3):
        with pytest.raises(UsageError, match=r"torch\.autograd\.grad through a model with sync='full-shard'"):
            OBJECTIVES[name](model, *data(rank, step))
        loss_on(model, rank, step).backward()
        optim.step()
        optim.zero_grad()
        (sum(loss_on(reference, r, step) for r in range(size)) / size).backward()
        other.step()
        other.zero_grad()
    return max_difference(model.whole_parameters(), reference.parameters())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_full_shard_refuses_a_loss_made_of_gradients(pool, name):
    same(pool(2).run(refused_when_sharded_fully, name))


def gradients_of_one_rank(rank, size, sync):
    """Rank 0 alone looks at gradients, in mid-step too; return the gap to one process."""
    model, optim, reference, other = pair(sync, model_zoo.Plain)
    for step in range(3):
        with model.accumulate():
            model.backward(loss_on(model, rank, step), samples=6)
        if rank == 0:
            torch.autograd.grad(loss_on(model, rank, 7), list(model.parameters()))
            inputs = data(rank, step)[0].requires_grad_(True)
            torch.autograd.grad(model(inputs).sum(), inputs)
        model.backward(loss_on(model, rank, step + 50), samples=6)
        if rank == 0:
            torch.autograd.grad(loss_on(model, rank, 7), next(iter(model.parameters())))
        optim.step()
        optim.zero_grad()
        for r in range(size):
            for number in (step, step + 50):
                (loss_on(reference, r, number) / (2 * size)).backward()
        other.step()
        other.zero_grad()
        if rank == 0:
            torch.autograd.grad(loss_on(model, rank, 7), list(model.parameters()))
    return max_difference(model.whole_parameters(), reference.parameters())


@pytest.mark.parametrize("sync", [*REPLICATED, "sharded", "auto"])
def test_one_rank_may_compute_gradients_that_it_does_not_accumulate(pool, sync):
    same(pool(2).run(gradients_of_one_rank, sync))


def outputs_without_parameters(rank, size, sync):
    """On rank 1 the model passes its inputs through, so its backward reaches no parameter."""
    model, optim, reference, other = pair(sync, PassesThrough)
    for step in range(3):
        for each, ranks, count in ((model, [rank], 1), (reference, range(size), size)):
            for r in ranks:
                inputs, targets = data(r, step)
                inputs.requires_grad_(True)
                (((each(inputs, r == 1) - targets).square().mean()) / count).backward()
        for each in (optim, other):
            each.step()
            each.zero_grad()
    return max_difference(model.whole_parameters(), reference.parameters())


class PassesThrough(torch.nn.Module):
    """A layer that some calls skip."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(model_zoo.WIDTH, 1)

    def forward(self, x, skips):
        return x.sum(1, keepdim=True) if skips else self.layer(x)


@pytest.mark.parametrize("sync", [*REPLICATED, "sharded", "auto"])
def test_a_backward_that_reaches_no_parameter_takes_part(pool, sync):
    same(pool(2).run(outputs_without_parameters, sync))


class ReturnsItsParameter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self):
        return self.scale


def a_parameter_as_output(rank, size, wrap):
    model = getattr(paceline, wrap)(ReturnsItsParameter())
    found = []
    for step in range(3):
        model.zero_grad()
        (model() * (rank + step + 1.0)).backward()
        found.append(model.module.scale.grad.item())
    return found, len(model.module.scale._backward_hooks or ())


@pytest.mark.parametrize("wrap", ["DataParallel", "DistributedDataParallel"])
def test_a_parameter_may_be_an_output_and_collects_no_hooks(pool, wrap):
    assert pool(2).run(a_parameter_as_output, wrap) == [([1.5, 2.5, 3.5], 0)] * 2
