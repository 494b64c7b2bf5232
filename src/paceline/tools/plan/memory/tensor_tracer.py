"""Traces every block of memory that a program on torch tensors allocates, also on tensors without memory.

`TensorTracer` is a dispatch mode: it sees each operator below autograd, records the storages of its results, and learns
from weak references when they are freed. Under a `FakeTensorMode` nothing is computed and nothing allocated, so a model
of any size can be traced; without one, a real program is traced in the same way.

Where fake tensors behave differently from real ones, the tracer corrects for it:

- Autograd sums the gradients of a node. It does so in place if it holds the only reference, but never on a tensor
  subclass (torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`). The sum is recorded as in place if one of
  the summands is freed with the addition.
- Kernels allocate workspaces and free them before they return; `paceline.tools.plan.memory.kernel_workspaces`.
- Values do not exist. A program that reads one (``.item()``) gets 1, and `value_reads` counts it.

torch's own `torch.distributed._tools.mem_tracker.MemTracker` follows storages by weak references too. It is not used:
it covers one forward and backward of a given module, hooks every module, and knows neither Paceline's buckets nor a
whole step; its variant for FSDP2 labels activations as optimizer state. A test compares the two.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves

from paceline.tools.plan.memory.memory_timeline import MemoryTimeline, TimelineRecorder
from paceline.tools.plan.memory.tracer_hooks import (
    ModulePaths,
    allow_conversion,
    ignore_shape_propagation,
    observe_resizing,
)

__all__ = ["TensorTracer", "plain_tensors"]

_aten = torch.ops.aten
_ENTER, _LEAVE = (
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit,
)
_ALIKE = {_aten.allclose.default, _aten.equal.default}
_COMPRESSED = {
    "row": ("crow_indices", "col_indices", "values"),
    "column": ("ccol_indices", "row_indices", "values"),
}
_PARTS_OF = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _COMPRESSED["row"],
    torch.sparse_bsr: _COMPRESSED["row"],
    torch.sparse_csc: _COMPRESSED["column"],
    torch.sparse_bsc: _COMPRESSED["column"],
}
_GATHERING = ("FSDP::all_gather", "FSDP::pre_forward", "FSDP::pre_backward", "FSDP::backward_prefetch")

Workspace = Callable[[Any, Sequence[Any], dict[str, Any], Any], int]


class TensorTracer(TorchDispatchMode):
    """Records every storage that operators allocate while it is active.

    Args:
        workspace: returns the bytes of an operator's workspace, given the operator, its arguments and its result;
            None: workspaces are ignored.

    Example:
        >>> with TensorTracer() as tracer:
        ...     x = torch.zeros(256)
        >>> tracer.timeline().peak().nbytes
        1024
    """

    def __init__(self, workspace: Workspace | None = None) -> None:
        super().__init__()
        self.recording, self.modules = TimelineRecorder(), ModulePaths()
        self.value_reads = 0
        """Number of values that the program read."""
        self._workspace = workspace
        self._of_storage: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._maker: dict[int, int | None] = {}  # autograd's node that ran when a block was allocated
        self._sections: list[str] = []
        self._sum: tuple[int, list[int]] | None = (
            None  # of gradients: the block of the sum and those of the summands
        )
        self._category: str | None = None
        self._ignored = False
        self._within = ExitStack()

    def __enter__(self) -> TensorTracer:
        self._within.enter_context(self.modules)
        self._within.enter_context(observe_resizing(self._resized))
        self._within.enter_context(allow_conversion())
        self._within.enter_context(ignore_shape_propagation(self._ignoring))
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self._within.close()

    # ------------------------------------------------------------------ called by the program

    def begin(self, step: int, phase: str) -> None:
        """Begin a phase of a step; see `paceline.tools.plan.memory.memory_timeline.PhaseMark`."""
        self._resolve_sum()
        self.recording.begin(step, phase)

    def end(self) -> None:
        """End the steps: frees from now on are ignored."""
        self._resolve_sum()
        self.recording.close()

    @contextmanager
    def label_allocations(self, category: str) -> Iterator[None]:
        """Assign all allocations within the context to `category`."""
        before, self._category = self._category, category
        try:
            yield
        finally:
            self._category = before

    def claim(self, category: str, tensors: Iterable[torch.Tensor | None]) -> None:
        """Set the category of the memory of these tensors."""
        for tensor in tensors:
            for plain in plain_tensors(tensor):
                known = self._of_storage.get(plain.untyped_storage()._cdata)
                if known is not None:
                    self.recording.claim(known[0], category)

    @contextmanager
    def _ignoring(self) -> Iterator[None]:
        before, self._ignored = self._ignored, True
        try:
            yield
        finally:
            self._ignored = before

    def timeline(self) -> MemoryTimeline:
        """Return the timeline so far."""
        return self.recording.timeline()

    # ------------------------------------------------------------------ operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # a DTensor unwraps itself; operators on its parts are dispatched again
        kwargs = kwargs or {}
        if self._ignored:
            return func(*args, **kwargs)
        self._resolve_sum()
        self._note_section(func, args)
        if func is _aten._local_scalar_dense.default and _valueless(args[0]):
            self.value_reads += 1
            return 1 if not args[0].is_floating_point() else 1.0
        if func in _ALIKE and _valueless(args[0]):
            self.value_reads += 1
            return True
        result = func(*args, **kwargs)
        parts = [plain for leaf in tree_leaves(result) for plain in plain_tensors(leaf)]
        born = [number for plain in parts for number in self._note(plain, func, args)]
        if self._workspace is not None:
            nbytes = self._workspace(func, args, kwargs, result)
            if nbytes:
                self._record_workspace(nbytes, func)
        if func is _aten.add.Tensor and born:
            self._note_sum(born[0], args)
        return result

    def _note(self, plain: torch.Tensor, func: Any, args: tuple[Any, ...]) -> Iterator[int]:
        """Note the storage of a result, unless it is known; yield its block."""
        storage = plain.untyped_storage()
        if storage._cdata in self._of_storage or not storage.nbytes():
            return
        if plain.device.type == "meta":  # has no memory in a real program either
            return
        if any(storage._cdata == given for given in _storages(args)):
            return  # a view of what was there before the tracer
        yield self._allocated(storage, storage.nbytes(), self._purpose(func, args), str(func))

    def _allocated(self, storage: Any, nbytes: int, category: str, operator: str) -> int:
        key = storage._cdata
        number = self.recording.allocate(nbytes, category, self.modules.here(), operator)
        self._maker[number] = self.modules.node()
        self._of_storage[key] = number, weakref.ref(storage, lambda _: self._freed(key))
        return number

    def _freed(self, key: int) -> None:
        number, _ = self._of_storage.pop(key)
        self.recording.free(number)

    def _record_workspace(self, nbytes: int, func: Any) -> None:
        number = self.recording.allocate(nbytes, "workspaces", self.modules.here(), str(func))
        self.recording.free(number)

    def _resized(self, storage: Any, nbytes: int) -> None:
        """Record that a storage was freed or allocated again, as FSDP2 does with gathered parameters."""
        known = self._of_storage.get(storage._cdata)
        if known is not None:
            self._of_storage.pop(storage._cdata)
            self.recording.free(known[0])
        if nbytes:
            self._allocated(storage, nbytes, self._purpose(None, ()), "resize_")

    # ------------------------------------------------------------------ categories

    def _purpose(self, func: Any, args: tuple[Any, ...]) -> str:
        """Return the category of a new block, as far as it is known at its allocation."""
        if self._category is not None:
            return self._category
        if section := next((name for name in reversed(self._sections) if name.startswith("FSDP::")), ""):
            return "gathered units" if section.startswith(_GATHERING) else "communication"
        if func is not None and str(func).startswith("c10d."):
            return "communication"
        phase = self.recording.phase
        if func is _aten._to_copy.default and phase == "forward" and self._is_cast_parameter(args[0]):
            return "autocast copies"
        if phase == "backward" and torch.is_grad_enabled() and torch._C._current_autograd_node() is not None:
            return "recomputed"  # a node's own formula runs without gradients
        return "temporaries"

    @staticmethod
    def _is_cast_parameter(tensor: object) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor.is_leaf and tensor.requires_grad

    def _note_section(self, func: Any, args: tuple[Any, ...]) -> None:
        """Track the sections that FSDP2 names for profilers."""
        if func is _ENTER:
            self._sections.append(args[0])
        elif getattr(func, "overloadpacket", None) is _LEAVE:
            self._sections.pop()

    # ------------------------------------------------------------------ sums of gradients

    def _note_sum(self, number: int, args: tuple[Any, ...]) -> None:
        """Remember an addition that is autograd's own: of a gradient from the running node to an earlier one."""
        if self.recording.phase != "backward" or torch.is_grad_enabled():
            return
        summands = [self._of_storage[key][0] for key in _storages(args) if key in self._of_storage]
        here = self.modules.node()
        if len(summands) == 2 and [self._maker.get(each) == here for each in summands].count(True) == 1:
            self._sum = number, summands

    def _resolve_sum(self) -> None:
        """Record the latest sum as in place if a summand of its size was freed with it."""
        if self._sum is None:
            return
        (number, summands), self._sum = self._sum, None
        for summand in summands:
            same = self.recording.nbytes(summand) == self.recording.nbytes(number)
            if same and not self.recording.alive(summand):
                self.recording.reuse(number, summand)
                return


def plain_tensors(tensor: object) -> Iterator[torch.Tensor]:
    """Yield the plain strided tensors that `tensor` consists of.

    These are the parts of a DTensor, or indices and values of a sparse tensor; none for oneDNN's layout, whose memory
    torch does not expose.
    """
    if not isinstance(tensor, torch.Tensor):
        return
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from plain_tensors(getattr(tensor, name))
    elif tensor.layout == torch.strided:
        yield tensor
    else:
        for part in _PARTS_OF.get(tensor.layout, ()):
            yield getattr(tensor, part)()


def _storages(args: tuple[Any, ...]) -> list[int]:
    """Return the addresses of the storages of the tensors among `args`."""
    return [plain.untyped_storage()._cdata for leaf in tree_leaves(args) for plain in plain_tensors(leaf)]


def _valueless(tensor: object) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor) and tensor.constant is None
