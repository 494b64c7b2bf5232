"""The training that all variants do: the reference model `mini` on its corpus, on machines of different speeds.

A step takes as long as on a slower machine because the model waits in the forward and backward of every block. Waiting
is spread as computing is: a third of it in the forward, two thirds in the backward, so that communication has as much
to overlap with. What a step computes is the training thread's own time on a core, so neither waiting for others nor
sharing cores counts as computing.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from paceline.tools.models.corpus import load_corpus
from paceline.tools.models.gpt import GPT, token_loss
from paceline.tools.models.gpt_sizes import gpt_size
from paceline.tools.models.token_windows import HeldOutWindows, TrainingWindows, summed_token_loss

__all__ = ["BATCH", "SIZE", "SPEEDS", "Training", "wait_until"]

SIZE, BATCH = "mini", 2
SPEEDS = (1, 1, 2, 4)
"""Of the four machines, relative to the slowest."""

_NEW = 0.2  # weight of the newest step in the mean of what a step computes


class Training:
    """One machine's model, data and optimizer.

    Args:
        rank: number of the machine.
        seed: of parameters and data.
        lr: the largest learning rate.
        fastest: seconds of a step on the fastest machine, waiting included; a step that computes longer does not wait.

    Attributes:
        net: the model. model: what computes the loss; a wrapper may replace it.
        steps: number of steps made.
    """

    def __init__(self, rank: int, seed: int, lr: float, fastest: float) -> None:
        torch.set_num_threads(1)
        corpus, shape = load_corpus(None), gpt_size(SIZE)
        self._batches = TrainingWindows(
            corpus.train, BATCH, shape.context, rank=rank, size=len(SPEEDS), seed=seed
        )
        self._held_out = HeldOutWindows(corpus.held_out, 16, shape.context, limit=512)
        torch.manual_seed(seed)
        self.net = GPT(shape)
        self.model: nn.Module = self.net
        self.optimizer = torch.optim.AdamW(
            self.net.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.steps, self._lr = 0, lr
        self._seconds, self._computing, self._wait = fastest * max(SPEEDS) / SPEEDS[rank], 0.0, 0.0
        for block in self.net.blocks:
            block.register_forward_pre_hook(self._wait_in_forward)
            block.register_full_backward_pre_hook(self._wait_in_backward)

    def step(self, share: float) -> None:
        """Make a step at this share of the largest learning rate."""
        began = time.thread_time()
        self._wait = max(0.0, self._seconds - self._computing) if self._computing else 0.0
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr * share
        batch = self._batches.at(self.steps)
        token_loss(self.model(batch.inputs), batch.targets).backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        computed = time.thread_time() - began
        self._computing = (1 - _NEW) * self._computing + _NEW * computed if self._computing else computed
        self.steps += 1

    @torch.no_grad()
    def loss(self, parameters: dict[str, Tensor]) -> float:
        """Return the held-out loss with these parameters, in nats per token."""
        for name, param in self.net.named_parameters():
            param.copy_(parameters[name])
        total, count = summed_token_loss(self.net, self._held_out)
        return total / count

    def _wait_in_forward(self, module: nn.Module, inputs: Any) -> None:
        time.sleep(self._wait / 3 / len(self.net.blocks))

    def _wait_in_backward(self, module: nn.Module, grads: Any) -> None:
        time.sleep(self._wait * 2 / 3 / len(self.net.blocks))


def wait_until(at: float) -> None:
    """Wait until a time of day."""
    time.sleep(max(0.0, at - time.time()))
