"""Training on the simulated accelerator gives the bits of the CPU, and backward passes call their hooks."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

from simulated_accelerator import simulated_device

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False),
    "SGD, foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "SGD, fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=False),
    "AdamW, foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
}


def network():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3)
    )


def train(net, optimizer, device, steps=3):
    """Return the parameters after a few steps, on the CPU."""
    net, generator = copy.deepcopy(net).to(device), torch.Generator().manual_seed(2)
    optim = optimizer(net.parameters())
    for _ in range(steps):
        x = torch.randn(8, 6, generator=generator).to(device)
        y = torch.randint(0, 3, (8,), generator=generator).to(device)
        optim.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optim.step()
    return [parameter.detach().cpu() for parameter in net.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_gives_the_bits_of_the_cpu(name):
    net = network()
    expected = train(net, OPTIMIZERS[name], "cpu")
    for seed in range(3):
        with simulated_device(seed):
            assert all(map(torch.equal, train(net, OPTIMIZERS[name], "sim"), expected))


@pytest.mark.parametrize("overflow", [False, True])
def test_fused_optimizers_skip_a_step_by_a_flag_on_the_device(overflow):
    net = network()
    with simulated_device() as simulator:
        net = net.to("sim")
        optim = torch.optim.AdamW(net.parameters(), fused=True)
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        before = [parameter.detach().clone() for parameter in net.parameters()]
        optim.grad_scale = torch.ones((), device="sim")
        optim.found_inf = torch.full((), float(overflow), device="sim")
        simulator.run_all()
        simulator.synchronisations.clear()
        optim.step()
        assert simulator.synchronisations == []
        unchanged = [torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True)]
        assert unchanged == [overflow] * len(before)


def test_a_step_waits_for_nothing():
    with simulated_device(seed=4) as simulator:
        net = network().to("sim")
        optim = torch.optim.AdamW(net.parameters(), fused=True)
        x = torch.randn(8, 6, device="sim")
        y = torch.zeros(8, dtype=torch.int64, device="sim")
        simulator.run_all()
        simulator.synchronisations.clear()
        for _ in range(3):
            simulator.next_step()
            nn.functional.cross_entropy(net(x), y).backward()
            optim.step()
            optim.zero_grad()
        assert simulator.synchronisations == []


def test_backward_calls_hooks_and_callbacks_in_the_device_thread():
    with simulated_device(seed=1):
        net, seen = network().to("sim"), []

        def note(name):
            seen.append((name, threading.get_ident() == threading.main_thread().ident))

        def accumulated(parameter):
            if not seen:
                torch.autograd.Variable._execution_engine.queue_callback(lambda: note("end"))
            note("accumulated")
            parameter.grad.mul_(2)

        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(accumulated)
        x = torch.ones(1, 6, device="sim")
        net(x).sum().backward()
        assert seen == [("accumulated", False)] * 8 + [("end", False)]
        doubled = [parameter.grad.cpu() for parameter in net.parameters()]
        plain = network()
        plain(torch.ones(1, 6)).sum().backward()
        assert all(torch.equal(2 * p.grad, d) for p, d in zip(plain.parameters(), doubled, strict=True))


def gradient_of_two_streams(seed):
    """Return a gradient through two streams, and how many of its hooks ran on the stream of their operation."""
    with simulated_device(seed):
        device = torch.get_device_module("sim")
        main, side, right = device.current_stream(), device.Stream(), []
        x = torch.full((3,), 2.0, device="sim", requires_grad=True)
        y = x * x
        side.wait_stream(main)
        with device.stream(side):
            z = y * y
        y.record_stream(side)
        z.register_hook(lambda grad: right.append(device.current_stream() == side))
        y.register_hook(lambda grad: right.append(device.current_stream() == main))
        main.wait_stream(side)
        z.record_stream(main)
        z.sum().backward()
        return x.grad.tolist(), right


def test_backward_runs_on_the_streams_of_forward():
    for seed in range(20):
        assert gradient_of_two_streams(seed) == ([32.0] * 3, [True, True])


def copy_of_another_leafs_gradient(seed, waits):
    """Return whether the hook of a leaf on one stream copies the gradient of a leaf on another one rightly."""
    with simulated_device(seed):
        device = torch.get_device_module("sim")
        main, side = device.current_stream(), device.Stream()
        x = torch.ones(8, device="sim")
        left, right = (torch.full((8,), value, device="sim", requires_grad=True) for value in (2.0, 3.0))
        copied, streams = torch.zeros(8, device="sim"), []

        def left_is_ready(leaf):
            streams.append(device.current_stream())
            if waits:
                main.wait_stream(side)
            with torch.no_grad():
                copied.copy_(right.grad)
            right.grad.record_stream(main)

        right.register_post_accumulate_grad_hook(lambda leaf: streams.append(device.current_stream()))
        left.register_post_accumulate_grad_hook(left_is_ready)
        y = x * left  # its gradient comes last: its node was made first
        side.wait_stream(main)
        with device.stream(side):
            z = (x * right).exp().log()
        main.wait_stream(side)
        z.record_stream(main)
        (y + z).sum().backward()
        assert streams == [side, main]
        return torch.allclose(copied.cpu(), torch.ones(8))


def test_a_hook_that_does_not_wait_for_another_stream_is_found():
    assert all(copy_of_another_leafs_gradient(seed, waits=True) for seed in range(20))
    assert not all(copy_of_another_leafs_gradient(seed, waits=False) for seed in range(20))


def test_inference_mode_is_that_of_the_call():
    for seed in range(10):
        with simulated_device(seed):
            with torch.inference_mode():
                x = torch.ones(3, device="sim") * 2
                y = x.round().add_(1)
            z = torch.zeros(3, device="sim")
            z.copy_(y)
            with torch.inference_mode():
                z.mul_(2)
            assert z.tolist() == [6.0] * 3


def test_random_operations_depend_on_the_seed_of_torch_alone():
    found = []
    for seed in range(3):
        with simulated_device(seed):
            torch.manual_seed(5)
            x = nn.functional.dropout(torch.ones(64, device="sim")) + torch.randn(64, device="sim")
            found.append(x.cpu())
            torch.manual_seed(5)
            assert torch.equal(
                nn.functional.dropout(torch.ones(64, device="sim")) + torch.randn(64, device="sim"), x
            )
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


class Block(nn.Module):
    """Layers of many kinds."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.conv, self.norm = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.groups = nn.GroupNorm(2, 8)

    def forward(self, tokens):
        x = self.words(tokens).transpose(1, 2)
        x = torch.relu(self.norm(self.conv(x))).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.groups(x.transpose(1, 2)).amax(2)


def test_layers_of_many_kinds_compute_what_the_cpu_computes():
    torch.manual_seed(0)
    net, tokens = Block().double(), torch.randint(0, 11, (4, 5))
    expected = net(tokens)
    expected.square().mean().backward()
    with simulated_device(seed=2):
        twin = copy.deepcopy(net).to("sim")
        twin.zero_grad()
        found = twin(tokens.to("sim"))
        found.square().mean().backward()
        torch.testing.assert_close(found.detach().cpu(), expected.detach())
        for mine, theirs in zip(twin.parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.cpu(), theirs.grad)


NUMBERS = {
    "add": lambda x: x + 1,
    "divide": lambda x: x // 2,
    "power": lambda x: 2.0**x,
    "bits": lambda x: (x.to(torch.int64) & 17179869183) << 2,
    "compare": lambda x: x > 1,
    "where": lambda x: torch.where(x > 1, x, 0.5),
    "clamp": lambda x: x.clamp(max=1.5),
    "in place": lambda x: x.clone().mul_(3).sub_(0.5),
    "number": lambda x: x.sum() * 0.1 + 1,
    "reversed": lambda x: 1 - x,
    "norm": lambda x: torch.linalg.vector_norm(x),
    "foreach": lambda x: torch.stack(torch._foreach_mul([x, x], 0.3)),
    "sort": lambda x: x.sort(descending=True)[1],
    "cumulative": lambda x: x.cumsum(0),
    "any": lambda x: (x > 2).any(),
    "isfinite": lambda x: torch.isfinite(x).all(),
    "index_put": lambda x: x.clone().index_put_((torch.tensor([1], device=x.device),), x[:1]),
    "new_zeros": lambda x: x.new_zeros(4) + x.new_full((), 2.0),
    "one_hot": lambda x: nn.functional.one_hot(x.long(), 5),
    "einsum": lambda x: torch.einsum("i,j->ij", x, x),
    "half": lambda x: (x.bfloat16() * 1.1).float(),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_operations_give_the_bits_of_the_cpu(name):
    x = torch.tensor([0.3, 1.7, 2.9])
    with simulated_device(seed=5):
        found = NUMBERS[name](x.to("sim")).cpu()
    expected = NUMBERS[name](x)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
