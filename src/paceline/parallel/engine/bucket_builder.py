"""Building the buckets once, in the order in which gradients become ready, alike on all ranks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from paceline.cost_model.bucket_layout import plan_buckets
from paceline.parallel.compression.compressed_bucket import CompressedBucket
from paceline.parallel.compression.exchange_thread import ExchangeThread
from paceline.parallel.engine import round_status
from paceline.parallel.engine.bucket import ALIGN, Bucket, GradSlot, storage_dtype, storage_numel
from paceline.parallel.engine.comm import Comm
from paceline.parallel.strategy import Sync

__all__ = ["agree_order", "build_buckets", "return_freed_memory"]

_COMPRESSED_UNIT = 64
"""A rank's part of a compressed bucket is a multiple of so many elements."""


def agree_order(comm: Comm, slots: Sequence[GradSlot], firings: Sequence[int]) -> list[int]:
    """Return the ready order that all ranks will use, and set every slot's `expected` firings.

    Both are rank 0's: a parameter is ready at its last firing, and those that rank 0 did not see come last,
    in reverse registration order.

    Args:
        comm: the ranks; blocks for one broadcast.
        slots: the parameters. firings: the slots whose hooks fired in this rank's first backward, in order.
    """
    if not slots:
        return []
    last = {index: position for position, index in enumerate(firings)}
    seen = sorted(last, key=last.__getitem__)
    unseen = [slot.index for slot in reversed(slots) if slot.index not in last]
    order, expected = comm.broadcast_ints(
        [seen + unseen, [slot.fired for slot in slots]], slots[0].param.device
    )
    for slot, count in zip(slots, expected, strict=True):
        slot.expected = max(count, 1)
    return order


def return_freed_memory() -> None:
    """Have the C library give freed memory back, so that what moved into a bucket does not count twice.

    glibc keeps what is freed below its heap's top; elsewhere this does nothing.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def build_buckets(
    slots: Sequence[GradSlot],
    order: Sequence[int],
    plan: Sync,
    comm: Comm,
    *,
    flags: int,
    sharded: bool,
    reduce_dtype: torch.dtype | None,
) -> list[Bucket]:
    """Return the buckets in launch order; the last one carries the ledger.

    `flags` is the number of parameters that the ledger reports on. Gradients that the parameters have are
    moved in. When `sharded`, so are the parameters, and the ledger, which every rank must see whole, gets a
    bucket of its own; as it does where the last bucket's dtype can't count.
    """
    dtypes = [storage_dtype(slot.param, reduce_dtype) for slot in slots]
    sizes = [storage_numel(slot.param) * dtype.itemsize for slot, dtype in zip(slots, dtypes, strict=True)]
    squeeze = plan.compression_config
    sent_whole = [squeeze is None or squeeze.exempts(slot.name, slot.param) for slot in slots]
    kinds = [
        (slot.param.device, dtype, slot.param.dtype, whole)
        for slot, dtype, whole in zip(slots, dtypes, sent_whole, strict=True)
    ]
    grouped = plan_buckets(order, sizes, kinds, plan.bucket_nbytes)
    rank, ranks = comm.rank, comm.size
    tail = round_status.vector_length(ranks, flags)
    countable = bool(grouped) and dtypes[grouped[-1][0]] in (torch.float32, torch.float64)
    inside = countable and not sharded and sent_whole[grouped[-1][0]]
    courier = None
    buckets = []
    for index, members in enumerate(grouped):
        held = [slots[member] for member in members]
        compressed = squeeze is not None and not sent_whole[members[0]]
        buckets.append(
            Bucket(
                index,
                held,
                dtypes[members[0]],
                held[0].param.device,
                tail=tail if inside and index == len(grouped) - 1 else 0,
                shards=ranks if sharded or compressed else 1,
                unit=_COMPRESSED_UNIT if compressed else ALIGN,
                allocate=comm.allocate,
            )
        )
        if squeeze is not None and compressed:
            courier = courier or ExchangeThread(held[0].param.device, on_stream=comm.stream_ordered)
            buckets[-1].compressed = CompressedBucket(buckets[-1], squeeze, comm, courier, sharded=sharded)
        buckets[-1].adopt_gradients()
        return_freed_memory()
        if sharded:
            buckets[-1].adopt_parameters()
            return_freed_memory()
    if not inside:
        device = slots[0].param.device if slots else torch.device("cpu")
        buckets.append(Bucket.for_ledger(len(grouped), device, tail, rank, ranks, comm.allocate))
    return buckets
