"""Which module runs: in forward by hooks, in backward by the sequence number of autograd's node.

Autograd numbers its nodes in the order in which forward makes them. So the numbers at which modules begin and end
in forward tell, for a node that runs in backward, the module that made it; nothing is hung on any tensor.
"""

from __future__ import annotations

import bisect
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

__all__ = ["ModulePaths"]


class ModulePaths:
    """Knows the path of the module that is running; a context."""

    def __init__(self) -> None:
        self._name_of: dict[int, str] = {}
        self._stack: list[str] = []
        self._numbers: list[int] = [0]
        self._paths: list[str] = [""]
        self._handles: list[Any] = []

    def name(self, root: torch.nn.Module) -> None:
        """Learn the names of the modules of `root`."""
        self._name_of.update({id(module): name for name, module in root.named_modules()})

    def __enter__(self) -> ModulePaths:
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: torch.nn.Module, _inputs: object) -> None:
        known = self._name_of.get(id(module))
        self._move([*self._stack, known if known is not None else self.here()])

    def _leave(self, _module: torch.nn.Module, _inputs: object, _output: object) -> None:
        self._move(self._stack[:-1])

    def _move(self, stack: list[str]) -> None:
        self._stack = stack
        number = torch.autograd._get_sequence_nr()
        if number >= self._numbers[-1]:
            self._numbers.append(number)
            self._paths.append(stack[-1] if stack else "")

    def here(self) -> str:
        """Return the path of the module that runs now, or whose backward does; "" outside of all."""
        if self._stack:
            return self._stack[-1]
        number = self.node()
        return self._paths[bisect.bisect_right(self._numbers, number) - 1] if number is not None else ""

    def node(self) -> int | None:
        """Return the number of the node whose backward runs; None outside of backward, −1 for those without one."""
        node = torch._C._current_autograd_node()
        return _number(node) if node is not None else None


def _number(node: Any) -> int:
    """Return the sequence number of a node; those that add up gradients have the largest there is."""
    number = node._sequence_nr()
    return number if number < 2**62 else -1
