"""Ledger of a step's memory at its peak, line by line, each with its rule and source.

The first lines are the sums of the blocks at the peak per category; the others come on top: the allocator's rounding
and reserve, and memory outside of it. All lines add up to the total.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.tools.plan.memory.caching_allocator import AllocatorReplay
from paceline.tools.plan.memory.memory_timeline import CATEGORIES, MemoryTimeline
from paceline.tools.plan.memory.non_tensor_memory import NonTensorMemory

__all__ = ["LedgerLine", "MemoryLedger", "make_ledger"]

_TRACED = "traced"
_RULES: dict[str, tuple[str, str]] = {
    "parameters": (
        "every parameter, or this rank's shard, in its own type",
        "traced; ZeRO, arXiv 1910.02054 §3",
    ),
    "buffers": ("tensors that modules register in addition to parameters", _TRACED),
    "optimizer state": ("the optimizer's tensors per parameter or shard", "traced; arXiv 1910.02054 §3.1"),
    "buckets": (
        "gradients as views of flat buffers, padded to 64 bytes",
        "paceline/parallel/buckets/bucket.py",
    ),
    "gradients": (
        "param.grad, from backward to zero_grad()",
        "torch/csrc/autograd/functions/accumulate_grad.h",
    ),
    "gathered units": (
        "whole parameters of the unit in use and of the one fetched ahead",
        "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py",
    ),
    "communication": (
        "send and receive buffers of collectives",
        "paceline/parallel/gradient_collectives.py; torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py",
    ),
    "inputs": ("the micro-batch that the loop holds", _TRACED),
    "activations": (
        "made in forward, held for backward: saved tensors, logits, log-probabilities",
        "traced; Korthikanti et al., arXiv 2205.05198 §4",
    ),
    "autocast copies": (
        "parameters in the lower type, cached until autocast ends, saved for backward",
        "aten/src/ATen/autocast_mode.cpp, `cached_cast`",
    ),
    "recomputed": ("activations that checkpointing makes again in backward", "torch/utils/checkpoint.py"),
    "temporaries": (
        "made and dropped on the way: gradients of activations, the optimizer's intermediates",
        _TRACED,
    ),
    "workspaces": (
        "memory that a kernel allocates while it runs",
        "paceline/tools/plan/memory/kernel_workspaces.py",
    ),
}


@dataclass(frozen=True)
class LedgerLine:
    """One line: bytes, the rule as text, and its source."""

    name: str
    nbytes: int
    rule: str
    source: str


@dataclass(frozen=True)
class MemoryLedger:
    """Memory at the peak.

    Attributes:
        lines: that add up to `nbytes`.
        where: place of the peak as text: step, phase, module and operator.
        largest: (module, operator, bytes) with the most activations and temporaries at the peak.
    """

    lines: Sequence[LedgerLine]
    where: str
    largest: Sequence[tuple[str, str, int]]

    @property
    def nbytes(self) -> int:
        """Sum of all lines."""
        return sum(line.nbytes for line in self.lines)


def make_ledger(
    timeline: MemoryTimeline, replay: AllocatorReplay | None = None, outside: NonTensorMemory | None = None
) -> MemoryLedger:
    """Return the ledger of a timeline's peak.

    Args:
        timeline: of the steps.
        replay: by the allocator; None: it reserves exactly what is requested (on the CPU).
        outside: that is added.
    """
    peak = timeline.peak()
    alive = timeline.alive_at(peak.tick)
    sums: Counter[str] = Counter()
    for block in alive:
        sums[block.category] += block.nbytes
    lines = [LedgerLine(name, sums[name], *_RULES[name]) for name in CATEGORIES if sums[name]]
    if replay is not None:
        lines += _allocator_lines(replay, peak.nbytes)
    lines += _outside_lines(outside or NonTensorMemory())
    held: Counter[tuple[str, str]] = Counter()
    for block in alive:
        if block.category in ("activations", "autocast copies", "recomputed", "temporaries"):
            held[block.module, block.operator] += block.nbytes
    return MemoryLedger(lines, _where(timeline), [(*key, nbytes) for key, nbytes in held.most_common(8)])


def _allocator_lines(replay: AllocatorReplay, requested: int) -> list[LedgerLine]:
    source = "c10/cuda/CUDACachingAllocator.cpp, replayed"
    rounding = replay.allocated_nbytes - requested
    reserve = replay.reserved_nbytes - replay.allocated_nbytes
    return [
        LedgerLine(
            "allocator: rounding", rounding, "blocks of 512 bytes; remainders too small to split off", source
        ),
        LedgerLine("allocator: reserve", reserve, "segments of 2 and 20 MiB; holes between blocks", source),
    ]


def _outside_lines(outside: NonTensorMemory) -> list[LedgerLine]:
    lines = [
        LedgerLine("data on the device", outside.data_nbytes, "as given", "--data-memory"),
        LedgerLine(
            "libraries",
            outside.library_nbytes,
            "cuBLAS's workspace as on Hopper; 8.1 MiB before it",
            "aten/src/ATen/cuda/CublasHandlePool.cpp",
        ),
        LedgerLine(
            "CUDA context",
            outside.context_nbytes,
            "driver and loaded kernels, as given; 781 MB were measured; NCCL adds its own buffers",
            "--cuda-context; github.com/pytorch/pytorch/issues/34323",
        ),
    ]
    return [line for line in lines if line.nbytes]


def _where(timeline: MemoryTimeline) -> str:
    peak = timeline.peak()
    mark = timeline.mark_at(peak.tick)
    made = next((block for block in timeline.blocks if block.born == peak.tick), None)
    text = f"step {mark.step + 1}, {mark.phase}"
    if made is None:
        return text
    operator = made.operator.removeprefix("aten.").removesuffix(".default")
    return f"{text}, {operator} in {made.module or 'the step itself'}"
