"""Tasks for simulated training: real models and gradients, with data determined by worker and step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline._core.keyed_random import derive_key
from paceline.tools.models import corpus as corpora
from paceline.tools.models.gpt import GPT
from paceline.tools.models.gpt import token_loss as loss_of
from paceline.tools.models.gpt_sizes import GptSize
from paceline.tools.models.token_windows import HeldOutWindows, TrainingWindows, summed_token_loss

__all__ = ["GPTTask", "Learner", "LearningTask", "LinearTask"]


_BATCH, _BATCHES = 8, 512
"""Samples per batch and number of batches of `LinearTask`."""

_CACHED_RATES = 32

Numbers = NDArray[np.float32]


class Learner(Protocol):
    """One worker's model, optimizer and data.

    Attributes:
        module: the model.
    """

    @property
    def module(self) -> nn.Module: ...

    def steps(self, number: int, count: int, lr: float) -> float:
        """Run local steps and return their number of samples.

        Args:
            number: number of the first step, from 0.
            count: number of steps.
            lr: factor of the learning rate.
        """
        ...

    def gradient(self, number: int) -> float:
        """Accumulate the gradient of a step (from 0) in the parameters; return its number of samples."""
        ...

    def apply(self, lr: float) -> None:
        """Step with the accumulated gradients at this factor of the learning rate, and clear them."""
        ...

    def score(self) -> float:
        """Return the loss on the shared held-out slice."""
        ...

    def forget(self) -> None:
        """Reset the state of the optimizer."""
        ...


class LearningTask(Protocol):
    """Creates learners.

    Attributes:
        lr: default learning rate.
    """

    lr: float

    def learner(
        self, worker: int, workers: int, *, same_init: bool = True, lr: float | None = None
    ) -> Learner:
        """Return the learner of a worker (from 0); with `same_init`, all start from the same parameters."""
        ...


class LinearTask:
    """Least squares: y = A·x plus noise, gradient descent on batches of 8, with a given condition number.

    The gradient of mean |w·x − y|²/2 of a batch is w·mean(x·xᵀ) − mean(y·xᵀ); both means, and the affine map of a step
    at each learning rate, are precomputed.

    Args:
        width: dimension of x; y has half of it.
        lr: learning rate.
        noise: standard deviation of the noise of y.
        seed: seed of all random numbers.
        steepness: curvature of the steepest direction relative to the flattest.
    """

    def __init__(
        self, width: int = 16, lr: float = 0.05, noise: float = 0.1, seed: int = 0, steepness: float = 1.0
    ) -> None:
        self.lr, self.seed = lr, seed
        drawn = np.random.default_rng(derive_key(seed, 1))
        self.truth = drawn.standard_normal((width // 2, width), dtype=np.float32)
        scales = np.geomspace(1.0, steepness**-0.5, width, dtype=np.float32)
        inputs = scales * drawn.standard_normal((_BATCHES, _BATCH, width), dtype=np.float32)
        targets = inputs @ self.truth.T
        targets += noise * drawn.standard_normal(targets.shape, dtype=np.float32)
        turned = inputs.transpose(0, 2, 1) / np.float32(_BATCH)
        self.curvatures = turned @ inputs
        self.slopes = (turned @ targets).transpose(0, 2, 1).copy()
        self.held_out = scales * drawn.standard_normal((256, width), dtype=np.float32)
        self.moves = lru_cache(_CACHED_RATES)(self._moves)

    def learner(
        self, worker: int, workers: int, *, same_init: bool = True, lr: float | None = None
    ) -> Linear:
        """See `LearningTask`."""
        return Linear(self, worker, same_init, lr)

    def _moves(self, rate: float) -> tuple[list[Numbers], list[Numbers]]:
        """Return the affine map w ← w·move + shift of a step with each batch at a learning rate."""
        moves = np.eye(self.curvatures.shape[-1], dtype=np.float32) - np.float32(rate) * self.curvatures
        return list(moves), list(np.float32(rate) * self.slopes)


class Linear:
    """Learner of a `LinearTask`; workers cycle through the same batches from different starts."""

    def __init__(self, task: LinearTask, worker: int, same_init: bool, lr: float | None) -> None:
        self._task, self._lr = task, task.lr if lr is None else lr
        self.module = nn.Linear(task.truth.shape[1], task.truth.shape[0], bias=False)
        drawn = np.random.default_rng(derive_key(task.seed, 2, 0 if same_init else worker + 1))
        with torch.no_grad():
            self.module.weight.copy_(torch.from_numpy(0.1 * drawn.standard_normal(task.truth.shape)).float())
        # Shared memory; numpy is faster for so few numbers.
        self._weight = self.module.weight.detach().numpy()
        self._scratch = np.empty_like(self._weight)
        self._first = derive_key(task.seed, 3, worker) % _BATCHES

    def steps(self, number: int, count: int, lr: float) -> float:
        weight, scratch, add = self._weight, self._scratch, np.add
        moves, shifts = self._task.moves(self._lr * lr)
        for batch in range(self._first + number, self._first + number + count):
            batch %= _BATCHES
            weight.dot(moves[batch], scratch)
            add(scratch, shifts[batch], weight)
        return float(count * _BATCH)

    def gradient(self, number: int) -> float:
        batch = (self._first + number) % _BATCHES
        gradient = self._weight @ self._task.curvatures[batch] - self._task.slopes[batch]
        self.module.weight.grad = torch.from_numpy(gradient)
        return float(_BATCH)

    def apply(self, lr: float) -> None:
        gradient = self.module.weight.grad
        assert gradient is not None, "gradient() makes one"
        self._weight -= np.float32(self._lr * lr) * gradient.numpy()
        self.module.weight.grad = None

    def score(self) -> float:
        with np.errstate(over="ignore", invalid="ignore"):  # divergence is expected
            error = self._task.held_out @ (self._weight - self._task.truth).T
            return float(np.mean(error * error))

    def forget(self) -> None:
        pass


class GPTTask:
    """The reference GPT on its corpus with AdamW, as in `paceline train`.

    Args:
        size: size of the model; its vocabulary must be that of the corpus.
        batch: windows per step of a worker.
        lr: learning rate.
        seed: seed of parameters and data.
        held_out: number of held-out windows.
        betas: betas of AdamW.
        weight_decay: weight decay of AdamW.
        clip: maximum norm of the gradient; 0: no clipping.
    """

    def __init__(
        self,
        size: GptSize,
        batch: int = 8,
        lr: float = 3e-3,
        seed: int = 0,
        held_out: int = 64,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        clip: float = 1.0,
    ) -> None:
        self.size, self.batch, self.lr, self.seed = size, batch, lr, seed
        self.betas, self.weight_decay, self.clip = betas, weight_decay, clip
        self.corpus = corpora.load_corpus(None)
        self.held_out = HeldOutWindows(self.corpus.held_out, 16, size.context, limit=held_out)

    def learner(
        self, worker: int, workers: int, *, same_init: bool = True, lr: float | None = None
    ) -> Learner:
        """See `LearningTask`."""
        return _GPTLearner(self, worker, workers, same_init, lr)


class _GPTLearner:
    def __init__(self, task: GPTTask, worker: int, workers: int, same_init: bool, lr: float | None) -> None:
        self._task, self._lr = task, task.lr if lr is None else lr
        state = torch.get_rng_state()
        torch.manual_seed(derive_key(task.seed, 0 if same_init else worker + 1) % 2**31)
        self.module = GPT(task.size)
        torch.set_rng_state(state)
        self.params: Sequence[Tensor] = list(self.module.parameters())
        self.optimizer = torch.optim.AdamW(
            self.params, lr=self._lr, betas=task.betas, weight_decay=task.weight_decay, fused=True
        )
        self._batches = TrainingWindows(
            task.corpus.train, task.batch, task.size.context, rank=worker, size=workers, seed=task.seed
        )

    def gradient(self, number: int) -> float:
        """See `Learner`."""
        batch = self._batches.at(number)
        loss_of(self.module(batch.inputs), batch.targets).backward()
        return float(batch.samples)

    def apply(self, lr: float) -> None:
        """See `Learner`."""
        if self._task.clip:
            nn.utils.clip_grad_norm_(self.params, self._task.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr * lr
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, number: int, count: int, lr: float) -> float:
        samples = 0.0
        for each in range(number, number + count):
            samples += self.gradient(each)
            self.apply(lr)
        return samples

    def score(self) -> float:
        total, count = summed_token_loss(self.module, self._task.held_out)
        return total / count if count else math.nan

    def forget(self) -> None:
        self.optimizer.state.clear()
