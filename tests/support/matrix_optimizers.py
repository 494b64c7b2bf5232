"""Small optimizers that are not elementwise, for tests: most read one parameter at a time, one reads all of them."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

__all__ = ["PER_PARAMETER", "FactoredRms", "GloballyClippedSGD", "Lars", "Soap", "SplitByHand"]


class Soap(Optimizer):
    """Adam in the eigenbases of both sides' covariances, which it computes anew every few steps (arXiv 2409.11321).

    State of an m×n matrix: two m×m and two n×n tensors beside those of Adam. Parameters of fewer dimensions get plain
    Adam. What makes a rounding error large is avoided: `eps` is not tiny, as it limits the steps along directions
    without a gradient, and a ramp on the diagonals of the covariances keeps their eigenvalues apart.
    """

    def __init__(self, params, lr=3e-3, betas=(0.9, 0.95), eps=1e-3, every=2):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "every": every})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, self.state[param], group)

    def _update(self, param, grad, state, group):
        matrix = grad.flatten(1) if grad.ndim > 1 else grad[None]
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
            if grad.ndim > 1:
                for side, numel in zip(("left", "right"), matrix.shape, strict=True):
                    state[side] = matrix.new_zeros(numel, numel)
                    state[f"{side}_basis"] = torch.eye(numel, dtype=grad.dtype, device=grad.device)
        first, second = group["betas"]
        state["exp_avg"].lerp_(grad, 1 - first)
        average = state["exp_avg"].view(matrix.shape)
        if grad.ndim > 1:
            state["left"].lerp_(matrix @ matrix.T, 1 - second)
            state["right"].lerp_(matrix.T @ matrix, 1 - second)
            if state["step"] % group["every"] == 0:
                for side in ("left", "right"):
                    ramp = torch.linspace(0, 0.05, len(state[side]), dtype=grad.dtype, device=grad.device)
                    state[f"{side}_basis"].copy_(torch.linalg.eigh(state[side] + ramp.diag())[1])
            left, right = state["left_basis"], state["right_basis"]
            matrix, average = left.T @ matrix @ right, left.T @ average @ right
        state["step"] += 1
        squares = state["exp_avg_sq"].view(matrix.shape).lerp_(matrix.square(), 1 - second)
        update = average / (1 - first ** state["step"])
        update = update / ((squares / (1 - second ** state["step"])).sqrt() + group["eps"])
        if grad.ndim > 1:
            update = left @ update @ right.T
        param.add_(update.view(param.shape), alpha=-group["lr"])


class Lars(Optimizer):
    """SGD with momentum whose rate is scaled by ‖parameter‖ ÷ ‖gradient‖ (arXiv 1708.03888).

    It counts its steps in a tensor, as torch's own optimizers do, and divides the rate by the count's root.
    """

    def __init__(self, params, lr=0.1, momentum=0.9, trust=0.02):
        super().__init__(params, {"lr": lr, "momentum": momentum, "trust": trust})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["step"] = torch.zeros(())
                    state["momentum_buffer"] = torch.zeros_like(param)
                state["step"] += 1
                ratio = group["trust"] * param.norm() / (param.grad.norm() + 1e-9)
                state["momentum_buffer"].mul_(group["momentum"]).add_(param.grad * ratio)
                param.sub_(state["momentum_buffer"] * (group["lr"] / state["step"].sqrt().item()))


class FactoredRms(Optimizer):
    """Divides by the root of a product of row and column means of squares; these are a tuple in its state."""

    def __init__(self, params, lr=0.01, decay=0.9):
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                squares = (param.grad.flatten(1) if param.ndim > 1 else param.grad[None]).square() + 1e-6
                rows, columns = squares.mean(1), squares.mean(0)
                before = self.state[param].get("means", (rows, columns))
                means = tuple(
                    old.lerp(new, 1 - group["decay"])
                    for old, new in zip(before, (rows, columns), strict=True)
                )
                self.state[param]["means"] = means
                scale = torch.outer(*means).div_(means[0].mean()).rsqrt_()
                param.sub_(param.grad * scale.view(param.shape), alpha=group["lr"])


class GloballyClippedSGD(torch.optim.SGD):
    """Clips the norm of all its gradients within ``step()``: an update reads every parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        params = [param for group in self.param_groups for param in group["params"]]
        torch.nn.utils.clip_grad_norm_(params, 0.05)
        return super().step(closure)


PER_PARAMETER = {
    "Muon": (torch.optim.Muon, {"lr": 0.02, "weight_decay": 0.05}),
    "Soap": (Soap, {"lr": 0.01}),
    "Lars": (Lars, {}),
    "FactoredRms": (FactoredRms, {}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.02}),
}
"""Class and options of optimizers whose update of a parameter reads that parameter only."""


class SplitByHand:
    """An optimizer of one process that gives its class each block of a parameter as a matrix of its own.

    Args:
        kind: the class. options: its arguments.
        named: names and parameters.
        split: by name, the number of equal blocks along the first dimension, or the rows of each block.
    """

    def __init__(self, kind, named, split, **options):
        self._blocks = []
        for name, param in named:
            sizes = split.get(name, 1)
            if isinstance(sizes, int):
                sizes = [len(param) // sizes] * sizes
            copies = [
                torch.nn.Parameter(self._matrix(block, param.ndim).clone())
                for block in param.detach().split(sizes)
            ]
            self._blocks.append((param, sizes, copies))
        self.inner = kind([copy for _, _, copies in self._blocks for copy in copies], **options)

    @staticmethod
    def _matrix(block, ndim):
        """Return one expert of several without the dimension of experts."""
        return block[0] if ndim == 3 and len(block) == 1 else block

    @torch.no_grad()
    def step(self):
        for param, sizes, copies in self._blocks:
            grads = [None] * len(copies) if param.grad is None else param.grad.split(sizes)
            for copy, block in zip(copies, grads, strict=True):
                copy.grad = None if block is None else self._matrix(block, param.ndim).clone()
        self.inner.step()
        for param, sizes, copies in self._blocks:
            for copy, block in zip(copies, param.split(sizes), strict=True):
                block.copy_(copy.view(block.shape))

    def zero_grad(self):
        for param, _, _ in self._blocks:
            param.grad = None
