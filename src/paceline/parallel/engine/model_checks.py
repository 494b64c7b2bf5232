"""Checks of a model before it is wrapped, and the facts about it on which all ranks must agree."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from paceline.errors import UsageError
from paceline.parallel.compression.compression_config import Compression

__all__ = [
    "check_dtypes",
    "check_no_cuda_graphs",
    "check_no_dtensors",
    "check_not_sharded",
    "check_parameters",
    "model_signature",
]


def model_signature(module: torch.nn.Module, plan: object, ignored: Collection[str] = ()) -> list[str]:
    """Return one line per fact about `module` and `plan` on which all ranks must agree, in order.

    Args:
        module: the model.
        plan: how gradients are synchronised.
        ignored: names of parameters and buffers that may differ.
    """
    lines = [f"sync plan: {plan}"]
    for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in ((name, tensor) for name, tensor in named if name not in ignored):
            grad = "" if kind == "buffer" or tensor.requires_grad else ", frozen"
            dtype = str(tensor.dtype).removeprefix("torch.")
            lines.append(f"{kind} {name!r}: shape {list(tensor.shape)}, {dtype}{grad}")
    return lines


def check_dtypes(**dtypes: object) -> None:
    """Raise for an argument that is neither None nor a floating-point dtype, by its name."""
    for name, dtype in dtypes.items():
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise UsageError(
                f"{name}={dtype!r} is no floating-point dtype",
                remedy="give for example torch.float32, or None for the parameters' own",
            )


def check_parameters(module: torch.nn.Module, compression: Compression | None) -> None:
    """Raise for a parameter that can't be in a dense buffer, or can't be compressed, by its name."""
    for name, child in module.named_modules():
        if isinstance(child, torch.nn.Embedding | torch.nn.EmbeddingBag) and child.sparse:
            raise UsageError(
                f"parameter {f'{name}.weight'.lstrip('.')!r} has sparse gradients",
                remedy="build the embedding with sparse=False",
            )
    for name, param in module.named_parameters():
        if isinstance(param, torch.nn.parameter.UninitializedParameter):
            raise UsageError(
                f"parameter {name!r} has no shape yet (a lazy module)",
                remedy="run one forward before wrapping",
            )
        if param.layout != torch.strided:
            raise UsageError(
                f"parameter {name!r} is stored sparse ({param.layout})",
                remedy="store it dense: torch.nn.Parameter(parameter.to_dense())",
            )
        if compression is not None and param.requires_grad and not compression.exempts(name, param):
            compression.check_supported(name, param)


def check_not_sharded(module: torch.nn.Module) -> None:
    """Raise if FSDP2 has sharded a part of `module`, by its name."""
    for name, child in module.named_modules():
        if isinstance(child, FSDPModule):
            raise UsageError(
                f"module {name!r} is sharded by FSDP2 already"
                if name
                else "the module is sharded by FSDP2 already",
                remedy="build the model anew, and wrap it once",
            )


def check_no_dtensors(module: torch.nn.Module) -> None:
    """Raise if a parameter or buffer of `module` is a DTensor, as tensor parallelism makes them, by its name."""
    for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in named:
            if isinstance(tensor, DTensor):
                mesh, placements = tensor.device_mesh, ", ".join(map(str, tensor.placements))
                axes = mesh.mesh_dim_names or [f"axis {axis}" for axis in range(mesh.ndim)]
                raise UsageError(
                    f"{kind} {name!r} is a DTensor with placements ({placements}) on the mesh of ranks "
                    f"{mesh.mesh.tolist()} ({', '.join(axes)}); norms and checks of its parts need that mesh, and "
                    "DataParallel knows the data axis only",
                    remedy="wrap the model without parallelize_module, or shard it with torch's fully_shard along the "
                    "data axis of the same mesh and train it without DataParallel",
                )


def check_no_cuda_graphs(module: torch.nn.Module, sync: object) -> None:
    """Raise if a part of `module` is a CUDA graph, which keeps reading parameters at their old addresses."""
    for name, child in module.named_modules():
        if "make_graphed_callables" in getattr(getattr(child, "forward", None), "__qualname__", ""):
            raise UsageError(
                f"module {name!r} is a CUDA graph, and sync={str(sync)!r} moves parameters to other memory",
                remedy='use a strategy that leaves them where they are, such as "bucketed"',
            )
