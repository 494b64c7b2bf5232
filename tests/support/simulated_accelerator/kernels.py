"""What operations on tensors of the simulated device do: queue the CPU's operation on the tensors' twins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from simulated_accelerator import simulator as simulation
from simulated_accelerator.backward_streams import note_forward
from simulated_accelerator.call_sites import call_site, is_called_by_python
from simulated_accelerator.memory import twin_of
from simulated_accelerator.memory_operations import CPU_KEYS, MEMORY_OPERATIONS, allocate, resize_
from simulated_accelerator.output_layouts import output_layouts
from simulated_accelerator.queues import Launch
from simulated_accelerator.streams import current_number, engine_pass

__all__ = ["register"]

aten = torch.ops.aten

METADATA_ONLY = {  # the CPU's kernels of these read no memory, so they take tensors of any device
    aten.as_strided.default,
    aten.view.default,
    aten._reshape_alias.default,
    aten.unfold.default,
    aten.set_.source_Storage_storage_offset,
    aten.set_.source_Tensor,
    aten.set_.source_Storage,
    aten.view_as_real.default,
    aten.view_as_complex.default,
    aten.as_strided_.default,
    aten.is_set_to.default,
}
REPLACED = {  # operations that only other devices implement
    aten.convolution_overrideable.default: aten.convolution.default,
}


class Operation:
    """What the schema of an operator says about its effects."""

    def __init__(self, op: Any) -> None:
        self.call = REPLACED.get(op, op)
        schema = op._schema
        self.written = [
            (place, argument.name if argument.kwarg_only else None)
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self.writes_lists = any("List" in str(schema.arguments[place].type) for place, _ in self.written)
        self.outs = [name for _, name in self.written if name]
        self.tensors = [place for place, each in enumerate(schema.arguments) if str(each.type) == "Tensor"]
        self.packet = op.overloadpacket
        self.returns_written = [
            returned.alias_info is not None and returned.alias_info.is_write for returned in schema.returns
        ]
        self.in_place = bool(self.written) and all(self.returns_written)
        tags = op.tags
        self.host_result = torch.Tag.data_dependent_output in tags
        self.data_dependent = torch.Tag.dynamic_output_shape in tags or self.host_result
        self.is_random = torch.Tag.nondeterministic_seeded in tags
        self.masks = op.name().startswith(("aten::index.", "aten::index_put", "aten::_index_put_impl_"))
        self.is_copy_free = op in METADATA_ONLY

    def written_arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Return the tensors that it writes."""
        found = [
            kwargs.get(name) if name else args[place]
            for place, name in self.written
            if name or place < len(args)
        ]
        if self.writes_lists:
            found = [item for each in found for item in (each if isinstance(each, list) else [each])]
        return [each for each in found if each is not None]

    def results(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the written arguments that the schema returns."""
        found = [kwargs[name] if name else args[place] for place, name in self.written]
        wanted = found[: len(self.returns_written)]
        return None if not wanted else wanted[0] if len(wanted) == 1 else tuple(wanted)


_NUMBERS = (int, float, bool, complex)
_operations: dict[Any, Operation] = {}


def _to_twin(value: Any) -> Any:
    """Return `value` with tensors of the device replaced by their twins."""
    if isinstance(value, Tensor):
        if value.is_cpu:
            if value.dim() or not value.numel():
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, sim:0 and cpu!"
                )
            return value.clone()  # the host may write to it before the device reads it
        return twin_of(value)
    if isinstance(value, (list, tuple)):
        return [_to_twin(item) for item in value]
    if isinstance(value, torch.device) and value.type != "cpu":
        return _CPU
    return value


_CPU = torch.device("cpu")


def fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Queue `op` on the current stream and return tensors that will have its results."""
    operation = _operations.get(op)
    if operation is None:
        operation = _operations[op] = Operation(op)
    if operation.is_copy_free:
        return op.redispatch(CPU_KEYS, *args, **kwargs)
    if operation.data_dependent and _depends_on_data(operation, args):
        return _run_now(operation, args, kwargs)
    if operation.outs:
        _size_outs(operation, args, kwargs)
    twins = [_to_twin(value) for value in args]
    named = {name: _to_twin(value) for name, value in kwargs.items()} if kwargs else {}
    call = operation.call
    if any([type(args[place]) in _NUMBERS for place in operation.tensors if place < len(args)]):
        call = operation.packet  # torch unwraps numbers: another overload takes them
    if operation.is_random:
        call = _seeded(call)
    queues = simulation.active().queues
    number = current_number()
    if number:
        note_forward(number)
    now = engine_pass()
    if now is not None:
        now.read(number, (*args, *kwargs.values()), is_called_by_python())
    if operation.in_place:
        writes = operation.written_arguments(twins, named)
        queues.put(number, Launch(call, twins, named, call_site(), writes))
        return operation.results(args, kwargs)
    layouts, is_list = output_layouts(operation.call, twins, named)
    outputs, targets = [], []
    for layout in layouts:
        output = target = None
        if layout is not None:
            output, _ = allocate(*layout)
            target = twin_of(output)
        outputs.append(output)
        targets.append(target)
    queues.put(number, Launch(_run_into, (call, targets, twins, named), {}, call_site()))
    return outputs if is_list else outputs[0] if len(outputs) == 1 else tuple(outputs)


def _size_outs(operation: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Give tensors passed as ``out=`` their size if they have none yet."""
    outs = [kwargs[name] for name in operation.outs]
    if all(not isinstance(out, Tensor) or out.numel() for out in outs):
        return
    named = {name: _to_twin(value) for name, value in kwargs.items()}
    layouts, _ = output_layouts(operation.call, [_to_twin(value) for value in args], named)
    for out, layout in zip(outs, layouts, strict=True):
        if layout is not None and tuple(out.shape) != layout[0]:
            resize_(out, layout[0])


def _run_into(call: Callable[..., Any], targets: Sequence[Tensor | None], args: Any, kwargs: Any) -> None:
    results = call(*args, **kwargs)
    if isinstance(results, Tensor):
        results = (results,)
    for target, result in zip(targets, results, strict=True):
        if target is not None:
            target.copy_(result)


def _seeded(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call` with random numbers that depend on the order of calls, not on that of execution."""
    now = simulation.active()
    now.random_seeds += 1
    seed = now.random_seeds

    def run(*args: Any, **kwargs: Any) -> Any:
        state = torch.default_generator.get_state()
        torch.default_generator.manual_seed(seed)
        try:
            return call(*args, **kwargs)
        finally:
            torch.default_generator.set_state(state)

    return run


def _depends_on_data(operation: Operation, args: Sequence[Any]) -> bool:
    """Return whether the shape of the results depends on values: of `index`, only with masks."""
    if not operation.masks:
        return True
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _run_now(operation: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Wait for the current stream, as CUDA does, and run the operation."""
    now = simulation.active()
    marker = now.queues.mark(current_number())
    kind = "item" if operation.call is aten._local_scalar_dense.default else "data-dependent shape"
    if operation.host_result and kind != "item":
        kind = "item"
    now.wait(kind, lambda: marker.done)
    with torch._C._AutoDispatchBelowADInplaceOrView():  # type: ignore[attr-defined]
        results = operation.call(
            *[_to_twin(value) for value in args], **{name: _to_twin(value) for name, value in kwargs.items()}
        )
    if operation.in_place:
        return operation.results(args, kwargs)
    return _to_device(results)


def _to_device(value: Any) -> Any:
    if isinstance(value, Tensor):
        tensor, _ = allocate(value.shape, value.stride(), value.dtype)
        target = twin_of(tensor)
        simulation.active().queues.put(current_number(), Launch(target.copy_, (value,), {}, call_site()))
        return tensor
    if isinstance(value, (list, tuple)):
        return type(value)(_to_device(item) for item in value)
    return value


_libraries: list[torch.library.Library] = []


def register() -> None:
    """Register the operations; a second call changes nothing."""
    if _libraries:
        return
    every = torch.library.Library("_", "IMPL")
    every.fallback(fallback, "PrivateUse1")
    library = torch.library.Library("aten", "IMPL")
    _libraries.extend((every, library))
    for name, function in MEMORY_OPERATIONS.items():
        library.impl(name, function, "PrivateUse1")
    for op in (aten.convolution.default, aten.convolution_backward.default, *_with_kernels_of_both()):
        library.impl(op, _through_fallback(op), "PrivateUse1")


def _with_kernels_of_both() -> Iterator[Any]:
    """Yield the operators with a kernel of the CPU and a composite one: the CPU's alone has the CPU's rounding."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key  # type: ignore[attr-defined]
    for name in torch._C._dispatch_get_all_op_names():  # type: ignore[attr-defined]
        if not name.startswith("aten::") or not has_kernel(name, "CPU"):
            continue
        if has_kernel(name, "CompositeExplicitAutograd") and not has_kernel(name, "PrivateUse1"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(aten, packet), overload or "default")
            if all(
                returned.alias_info is None or returned.alias_info.is_write for returned in op._schema.returns
            ):
                yield op


def _through_fallback(op: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: fallback(op, *args, **kwargs)
