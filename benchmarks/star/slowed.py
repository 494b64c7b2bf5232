"""A model whose steps take as long as on a slower machine: it waits in the forward and backward of every block.

Waiting is spread as computing is: a third of it in the forward, two thirds in the backward, the same in every block,
so that whoever overlaps communication with the backward has as much to overlap it with. How much a step computes is
the training thread's own time on a core, so neither waiting for others nor sharing cores counts as computing.
"""

from __future__ import annotations

import time
from typing import Any

from torch import nn

__all__ = ["Slowed"]

_NEW = 0.2  # weight of the newest step in what computing takes


class Slowed:
    """Makes the steps of a model take a given time.

    Args:
        blocks: of the model, in their order.
        seconds: of a step, waiting included; a step that takes longer by itself is not made longer.
    """

    def __init__(self, blocks: nn.ModuleList, seconds: float) -> None:
        self._blocks, self._seconds = len(blocks), seconds
        self._computing = self._wait = self._began = 0.0
        for block in blocks:
            block.register_forward_pre_hook(self._forward)
            block.register_full_backward_pre_hook(self._backward)

    def begin(self) -> None:
        """Begin a step."""
        self._began = time.thread_time()
        self._wait = max(0.0, self._seconds - self._computing) if self._computing else 0.0

    def end(self) -> None:
        """End a step."""
        computed = time.thread_time() - self._began
        first = self._computing == 0.0
        self._computing = computed if first else (1 - _NEW) * self._computing + _NEW * computed

    def _forward(self, module: nn.Module, given: Any) -> None:
        time.sleep(self._wait / 3 / self._blocks)

    def _backward(self, module: nn.Module, given: Any) -> None:
        time.sleep(self._wait * 2 / 3 / self._blocks)
