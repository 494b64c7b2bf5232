"""Small collectives outside of gradients: rows and texts of all ranks, sums, and checks that all ranks agree.

All ranks of the group must call them, in the same order. A group is a process group of torch, or None for all ranks;
without torch.distributed, a world of one.

[Note: held works] A thread of gloo releases a collective's work slightly after the waiting thread continues. If nothing
else holds the work, that thread releases its tensors too, for which it needs Python's lock; and a process forked at
this moment (a worker of a DataLoader, at the start of an epoch) hangs before its first line, since CPython 3.11 makes
it wait for what the thread was holding. So the works of a group's exchanges are held here until some exchanges later,
or until the group is gone: a work holds the connections of its group.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from paceline._core.step_state import step_state
from paceline.errors import MismatchError
from paceline.world.group_devices import group_device

__all__ = [
    "PendingRows",
    "barrier",
    "broadcast_text",
    "gather_rows",
    "gather_rows_async",
    "gather_texts",
    "rank_and_size",
    "sum_over_ranks",
    "verify_same",
]

_TEXT_NBYTES, _LENGTH_NBYTES = 512, 8
_HELD = 16
_held: WeakKeyDictionary[ProcessGroup, deque[dist.Work | None]] = WeakKeyDictionary()
"""The latest exchanges of each group; see [Note: held works]."""


def rank_and_size(group: ProcessGroup | None = None) -> tuple[int, int]:
    """Return rank and number of ranks in `group`; (0, 1) without a process group."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def sum_over_ranks(values: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the sum of `values` over all ranks, on the group's device; may overwrite `values`."""
    if rank_and_size(group)[1] == 1:
        return values
    values = values.to(group_device(group, values.device))
    _wait(_hold(dist.all_reduce(values, group=group, async_op=True), group))
    return values


def barrier(group: ProcessGroup | None = None) -> None:
    """Return once every rank has called this."""
    sum_over_ranks(torch.zeros(1), group).cpu()


@dataclass(frozen=True)
class PendingRows:
    """Every rank's row, being gathered."""

    work: dist.Work | None
    rows: list[Tensor]

    def wait(self) -> list[Tensor]:
        """Return the rows, by rank, on the CPU."""
        _wait(self.work)
        return [row.cpu() for row in self.rows]


def gather_rows_async(row: Tensor, group: ProcessGroup | None = None) -> PendingRows:
    """Start to gather every rank's `row`, of the same shape and dtype on all ranks."""
    ranks = rank_and_size(group)[1]
    if ranks == 1:
        return PendingRows(None, [row])
    row = row.to(group_device(group, row.device))
    rows = [torch.empty_like(row) for _ in range(ranks)]
    return PendingRows(_hold(dist.all_gather(rows, row, group=group, async_op=True), group), rows)


def gather_rows(row: Tensor, group: ProcessGroup | None = None) -> list[Tensor]:
    """Return every rank's `row`, of the same shape and dtype on all ranks, on the CPU."""
    return gather_rows_async(row, group).wait()


def gather_texts(text: str, group: ProcessGroup | None = None) -> list[str]:
    """Return every rank's `text`, by rank; one tiny all-gather if all are empty."""
    if rank_and_size(group)[1] == 1:
        return [text]
    data = text.encode()
    lengths = [int(row) for row in gather_rows(torch.tensor([len(data)], dtype=torch.int64), group)]
    if not any(lengths):
        return [""] * len(lengths)
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
    rows = gather_rows(padded, group)
    return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, lengths, strict=True)]


def broadcast_text(text: str = "", group: ProcessGroup | None = None) -> str:
    """Return rank 0's `text` on all ranks; one broadcast of 512 bytes, and another for what exceeds them."""
    if rank_and_size(group)[1] == 1:
        return text
    data = text.encode()
    first = len(data).to_bytes(_LENGTH_NBYTES, "little") + data[: _TEXT_NBYTES - _LENGTH_NBYTES]
    received = _broadcast_bytes(first.ljust(_TEXT_NBYTES, b"\0"), group)
    nbytes = int.from_bytes(received[:_LENGTH_NBYTES], "little")
    begin = received[_LENGTH_NBYTES : _LENGTH_NBYTES + nbytes]
    if len(begin) == nbytes:
        return begin.decode()
    return (begin + _broadcast_bytes(data[len(begin) :].ljust(nbytes - len(begin), b"\0"), group)).decode()


def _broadcast_bytes(data: bytes, group: ProcessGroup | None) -> bytes:
    row = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    row = row.to(group_device(group, row.device))
    _wait(_hold(dist.broadcast(row, group=group, group_src=0, async_op=True), group))
    return row.cpu().numpy().tobytes()


def verify_same(
    lines: Sequence[str],
    subject: str,
    group: ProcessGroup | None = None,
    *,
    remedy: str = "use the same on every rank",
) -> None:
    """Check that all ranks hold the same lines; one tiny all-gather if they do.

    Args:
        lines: one fact each, in the same order on all ranks.
        subject: of the lines, for the message: ``"the model"``.
        group: the ranks.
        remedy: what the user can do if they differ.

    Raises:
        MismatchError: on every rank, naming the first line that differs from rank 0's and the ranks.
    """
    if rank_and_size(group)[1] == 1:
        return
    text = json.dumps(list(lines))
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
    digests = gather_rows(torch.tensor([digest], dtype=torch.int64), group)
    if len({int(row) for row in digests}) == 1:
        return
    reference, *others = [json.loads(each) for each in gather_texts(text, group)]
    differing = [rank for rank, held in enumerate(others, start=1) if held != reference]
    rank = differing[0]
    pairs = itertools.zip_longest(reference, others[rank - 1], fillvalue="nothing more")
    expected, found = next((a, b) for a, b in pairs if a != b)
    ranks = ", ".join(map(str, differing))
    raise MismatchError(
        f"{subject} differs between ranks: rank 0 has {expected}; rank {rank} has {found}"
        + (f" (ranks that differ from rank 0: {ranks})" if len(differing) > 1 else ""),
        rank=rank,
        remedy=remedy,
    )


def _hold(work: dist.Work | None, group: ProcessGroup | None) -> dist.Work | None:
    """Return the work of an exchange, held; see [Note: held works]."""
    place = dist.group.WORLD if group is None else group
    if place is not None:
        _held.setdefault(place, deque(maxlen=_HELD)).append(work)
    return work


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        with step_state.waiting_for_peers():
            work.wait()
