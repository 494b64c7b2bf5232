"""Which optimizers may update parts of parameters, and what their state holds: found by trying them."""

from __future__ import annotations

import pytest
import torch

from paceline.parallel.sharding.optimizer_probe import probe_optimizer

CPU = torch.device("cpu")
ELEMENTWISE = [
    "SGD",
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "ASGD",
    "Rprop",
]


def probe(kind, group=None, **options):
    return probe_optimizer(kind, options, group or {}, CPU, {})


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_torchs_elementwise_optimizers_are_accepted(name):
    found = probe(getattr(torch.optim, name), lr=1e-3)
    assert found.refusal == ""
    assert found.whole_shapes.keys() <= {"step", "eta", "mu", "mu_product"}


@pytest.mark.parametrize(
    "options", [{"fused": True}, {"foreach": True}, {"foreach": False}, {"amsgrad": True}]
)
@pytest.mark.parametrize("rate", [0.0, 1e-6, torch.tensor(1e-3)])
def test_options_change_nothing(options, rate):
    if isinstance(rate, torch.Tensor) and options.get("foreach"):
        pytest.skip("torch refuses a tensor with foreach")
    found = probe(torch.optim.AdamW, lr=rate, **options)
    assert found.refusal == ""
    names = {"exp_avg", "exp_avg_sq"} | ({"max_exp_avg_sq"} if "amsgrad" in options else set())
    assert found.elementwise == names
    assert found.whole_shapes == {"step": ()}


def test_options_of_the_group_count():
    assert probe(torch.optim.SGD, lr=0.1).elementwise == frozenset()
    assert probe(torch.optim.SGD, {"momentum": 0.9, "lr": 0.1}, lr=0.1).elementwise == {"momentum_buffer"}


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_optimizers_of_matrices_need_whole_parameters(name):
    if hasattr(torch.optim, name):
        found = probe(getattr(torch.optim, name), lr=1e-3)
        assert (found.refusal, found.whole) == ("", True)


def test_an_optimizer_that_fails_anyway_is_refused_with_its_own_words():
    assert "closure" in probe(torch.optim.LBFGS).refusal
    assert "AssertionError: If capturable=True" in probe(torch.optim.AdamW, capturable=True).refusal


class ClippedSGD(torch.optim.SGD):
    """Clips the norm of each parameter's gradient."""

    def __init__(self, params, lr=0.1, largest=1e4):
        super().__init__(params, lr=lr)
        self.largest = largest

    def step(self, closure=None):
        for group in self.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], self.largest)
        return super().step(closure)


class ProjectedSGD(torch.optim.SGD):
    """Removes what is parallel to the parameter where it looks invariant to scale, as AdamP does."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                before = param.clone()
                super().step()
                if param.dim() > 1 and torch.cosine_similarity(param.grad, before).abs().max() < 0.01:
                    param.sub_(param * ((param - before) * param).sum(1, keepdim=True))


class RowAdam(torch.optim.SGD):
    """Keeps one number per row in its state, and uses none of them."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["rows"] = torch.zeros(len(param))
        return super().step(closure)


class ClippedToItself(torch.optim.SGD):
    """Clips what is large beside its own average, as StableAdamW does."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                square = self.state[param].setdefault("square", torch.zeros_like(param))
                square.lerp_(param.grad.square(), 0.05)
                rms = (param.grad.square() / square.clamp_min(1e-12)).mean().sqrt()
                param.sub_(param.grad / square.sqrt().add(1e-6) / rms.clamp_min(1), alpha=group["lr"])


class CountsSmallUpdates(torch.optim.SGD):
    """Keeps a number per parameter that it would use later, as SWATS does."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["small"] = int((param.grad.abs() < 0.1).sum())
        return super().step(closure)


class Preconditioner:
    """An object in a state, as ScalableShampoo keeps."""


class PreconditionedLater(torch.optim.SGD):
    """Keeps an object that it would use later."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["preconditioner"] = Preconditioner()
        return super().step(closure)


class SeveralMomenta(torch.optim.SGD):
    """Keeps tensors in a list."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["momenta"] = [torch.zeros_like(param)]
        return super().step(closure)


class CountingSGD(torch.optim.SGD):
    """Keeps a list in its group that grows in place."""

    def step(self, closure=None):
        for group in self.param_groups:
            group.setdefault("steps", []).append(None)
        return super().step(closure)


def test_a_count_in_the_groups_is_noticed():
    assert probe(CountingSGD, lr=0.1).changes_groups
    assert probe(CountingSGD, {"steps": [None]}, lr=0.1).changes_groups
    assert not probe(torch.optim.AdamW, lr=0.1).changes_groups


class EstimatedDistance(torch.optim.SGD):
    """Keeps a number in its group that depends on all elements, as Prodigy does."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["distance"] = sum(float(param.grad.abs().sum()) for param in group["params"])
        return super().step(closure)


class BlockwiseAdam(torch.optim.Optimizer):
    """Keeps its state in 8 bits with a scale per 256 elements, as bitsandbytes does for large parameters."""

    def __init__(self, params, lr=0.1, smallest=4096):
        super().__init__(params, {"lr": lr})
        self.smallest = smallest

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                average = self.read(state) if state else torch.zeros_like(param)
                average.mul_(0.9).add_(param.grad, alpha=0.1)
                self.write(state, average)
                param.sub_(average, alpha=group["lr"])

    def write(self, state, average):
        if average.numel() < self.smallest:
            state["state1"] = average
            return
        flat = average.flatten()
        blocks = torch.nn.functional.pad(flat, (0, -len(flat) % 256)).view(-1, 256)
        scales = blocks.abs().amax(1)
        codes = (blocks / scales.clamp_min(1e-30)[:, None] * 127).round().to(torch.int8)
        state["state1"] = codes.flatten()[: len(flat)].view(average.shape)
        state["absmax1"] = scales

    def read(self, state):
        codes = state["state1"]
        if "absmax1" not in state:
            return codes.clone()
        scales = state["absmax1"].repeat_interleave(256)[: codes.numel()]
        return codes.float() * scales.view(codes.shape) / 127


REFUSED = [
    (ClippedSGD, "not elementwise"),
    (ProjectedSGD, "not elementwise"),
    (PreconditionedLater, "its state holds 'preconditioner', a Preconditioner"),
    (EstimatedDistance, "groups hold numbers that depend on all elements"),
]
OF_WHOLE_PARAMETERS = [ClippedToItself, CountsSmallUpdates, RowAdam, SeveralMomenta, BlockwiseAdam]


@pytest.mark.parametrize("rate", [0.0, 1e-4, 0.1])
@pytest.mark.parametrize(("kind", "reason"), REFUSED)
def test_optimizers_that_look_at_more_than_one_parameter_are_refused(kind, reason, rate):
    assert reason in probe(kind, lr=rate).refusal


@pytest.mark.parametrize("rate", [0.0, 1e-4, 0.1])
@pytest.mark.parametrize("kind", OF_WHOLE_PARAMETERS)
def test_optimizers_that_look_at_one_whole_parameter_are_known(kind, rate):
    found = probe(kind, lr=rate)
    assert (found.refusal, found.whole) == ("", True)


def test_a_switch_at_a_larger_size_shows_in_the_states():
    found = probe(BlockwiseAdam, smallest=100_000)
    assert found.refusal == ""
    param = torch.nn.Parameter(torch.randn(100_352))
    optimizer = BlockwiseAdam([param], smallest=100_000)
    param.grad = torch.randn(100_352)
    optimizer.step()
    assert "'absmax1' has shape [392] instead of [] or [100352]" in found.misfit(
        optimizer.state[param], 100_352
    )
    assert found.misfit({"state1": torch.zeros(7)}, 7) == ""
    assert "'state1' has shape [6]" in found.misfit({"state1": torch.zeros(6)}, 7)
