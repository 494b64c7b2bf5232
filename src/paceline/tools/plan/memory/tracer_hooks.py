"""Hooks of the tensor tracer: the module that runs, and three torch functions that change memory without operators.

In forward the module is known from module hooks, in backward from the sequence number of autograd's node: autograd
numbers its nodes in the order in which forward makes them, so the numbers at which modules begin and end in forward
identify the module of a node in backward. No tensor needs a hook.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

__all__ = ["ModulePaths", "allow_conversion", "ignore_shape_propagation", "observe_resizing"]


class ModulePaths:
    """Context manager that tracks the path of the running module."""

    def __init__(self) -> None:
        self._name_of: dict[int, str] = {}
        self._stack: list[str] = []
        self._numbers: list[int] = [0]
        self._paths: list[str] = [""]
        self._handles: list[Any] = []

    def name(self, root: torch.nn.Module) -> None:
        """Register the names of the modules of `root`."""
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
        """Return the path of the module whose forward or backward runs; "" outside of modules."""
        if self._stack:
            return self._stack[-1]
        number = self.node()
        return self._paths[bisect.bisect_right(self._numbers, number) - 1] if number is not None else ""

    def node(self) -> int | None:
        """Return the number of the node whose backward runs: None outside of backward, −1 for nodes without one."""
        node = torch._C._current_autograd_node()
        return _number(node) if node is not None else None


def _number(node: Any) -> int:
    """Return the sequence number of a node; −1 for those that accumulate gradients, which have the largest one."""
    number = node._sequence_nr()
    return number if number < 2**62 else -1


@contextmanager
def observe_resizing(callback: Callable[[Any, int], None]) -> Iterator[None]:
    """Call `callback(storage, nbytes)` for every ``resize_`` of a storage; FSDP2 frees gathered parameters with it."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
        before = storage.nbytes()
        result = original(storage, nbytes)
        if storage.nbytes() != before:
            callback(storage, storage.nbytes())
        return result

    torch.UntypedStorage.resize_ = resize_  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original


@contextmanager
def allow_conversion() -> Iterator[None]:
    """Allow modules to be converted: ``net.bfloat16()``, ``net.to(memory_format=…)``.

    Conversion swaps a parameter with its new version, which torch refuses for tensors with weak references; and a fake
    mode keeps weak references to every tensor that it made. So those of the two tensors are removed.
    """
    original = torch.utils.swap_tensors

    def swap(one: Any, other: Any) -> None:
        for fake in (one, other):
            memo = getattr(getattr(fake, "fake_mode", None), "fake_tensor_converter", None)
            known = getattr(memo, "tensor_memo", {})
            for key in [key for key, held in known.items() if held is fake]:
                del known[key]
        original(one, other)

    torch.utils.swap_tensors = swap
    try:
        yield
    finally:
        torch.utils.swap_tensors = original


@contextmanager
def ignore_shape_propagation(ignoring: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Enter `ignoring` where DTensor propagates shapes.

    It does so on fake tensors of the unsharded shape (torch/distributed/tensor/_sharding_prop.py), in the tracer's fake
    mode. A torch version without this function is left unchanged.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    name = "_propagate_tensor_meta_non_cached"
    original = getattr(ShardingPropagator, name, None)
    if original is None:
        yield
        return

    @functools.wraps(original)
    def ignored(*args: Any, **kwargs: Any) -> Any:
        with ignoring():
            return original(*args, **kwargs)

    setattr(ShardingPropagator, name, ignored)
    try:
        yield
    finally:
        setattr(ShardingPropagator, name, original)
