"""What ranks tell one another outside of gradients: what each of them has, that all mean the same, sums.

Everything here is a collective: all ranks of the group call it, in the same order. A group is a process group
of torch, or None for all ranks; without torch.distributed, a world of one.

[Note: held works] A thread of gloo lets go of a collective's work a little after whoever waited for it goes on. If
nobody else holds the work, that thread lets go of its tensors too, for which it needs Python's lock; and a process
that is forked in this moment (a worker of a DataLoader, at the start of an epoch) hangs before its first line, since
CPython 3.11 has it wait for what the thread was holding. So the works of a group's exchanges are held here until some
exchanges later, or until the group is gone: a work holds its group's connections.
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

__all__ = [
    "PendingRows",
    "barrier",
    "gather_rows",
    "gather_rows_async",
    "gather_texts",
    "rank_and_size",
    "sum_over_ranks",
    "verify_same",
]


_HELD = 16
_held: WeakKeyDictionary[ProcessGroup, deque[dist.Work | None]] = WeakKeyDictionary()
"""The latest exchanges of each group; see [Note: held works]."""


def rank_and_size(group: ProcessGroup | None = None) -> tuple[int, int]:
    """Return (rank, ranks) of this process in `group`; (0, 1) where there is none."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def sum_over_ranks(values: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the sum of `values` over all ranks, where the group communicates; may overwrite `values`."""
    if rank_and_size(group)[1] == 1:
        return values
    values = values.to(_device(group, values))
    work = dist.all_reduce(values, group=group, async_op=True)
    _hold(work, group)
    if work is not None:  # of a member of the group it never is
        with step_state.waiting_for_peers():
            work.wait()
    return values


def barrier(group: ProcessGroup | None = None) -> None:
    """Return once every rank has called this."""
    sum_over_ranks(torch.zeros(1), group).cpu()


@dataclass(frozen=True)
class PendingRows:
    """Every rank's row, on its way."""

    work: dist.Work | None
    rows: list[Tensor]

    def wait(self) -> list[Tensor]:
        """Return the rows, by rank, on the CPU."""
        if self.work is not None:
            with step_state.waiting_for_peers():
                self.work.wait()
        return [row.cpu() for row in self.rows]


def gather_rows_async(row: Tensor, group: ProcessGroup | None = None) -> PendingRows:
    """Begin to gather every rank's `row`, which has the same shape and dtype on all ranks."""
    ranks = rank_and_size(group)[1]
    if ranks == 1:
        return PendingRows(None, [row])
    row = row.to(_device(group, row))
    rows = [torch.empty_like(row) for _ in range(ranks)]
    work = dist.all_gather(rows, row, group=group, async_op=True)
    _hold(work, group)
    return PendingRows(work, rows)


def gather_rows(row: Tensor, group: ProcessGroup | None = None) -> list[Tensor]:
    """Return every rank's `row`, which has the same shape and dtype on all ranks, on the CPU."""
    return gather_rows_async(row, group).wait()


def gather_texts(text: str, group: ProcessGroup | None = None) -> list[str]:
    """Return every rank's `text`, by rank; costs one tiny all-gather where all are empty."""
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


def verify_same(
    lines: Sequence[str],
    subject: str,
    group: ProcessGroup | None = None,
    *,
    remedy: str = "use the same on every rank",
) -> None:
    """Check that all ranks hold the same lines; costs one tiny all-gather where they do.

    Args:
        lines: one fact each, in the same order on all ranks.
        subject: what they are about, for the message: ``"the model"``.
        group: the ranks.
        remedy: what the user can do where they differ.

    Raises:
        MismatchError: on every rank alike, naming the first line that differs from rank 0's and the ranks.
    """
    if rank_and_size(group)[1] == 1:
        return
    text = json.dumps(list(lines))
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
    digests = gather_rows(torch.tensor([digest], dtype=torch.int64), group)
    if len({int(row) for row in digests}) == 1:
        return
    told = [json.loads(each) for each in gather_texts(text, group)]
    raise _first_difference(told, subject, remedy)


def _hold(work: dist.Work | None, group: ProcessGroup | None) -> None:
    """Hold the work of an exchange; see [Note: held works]."""
    place = dist.group.WORLD if group is None else group
    if place is not None:
        _held.setdefault(place, deque(maxlen=_HELD)).append(work)


def _first_difference(told: Sequence[Sequence[str]], subject: str, remedy: str) -> MismatchError:
    """Return the error that names the first line on which a rank differs from rank 0."""
    reference = told[0]
    differing = [rank for rank, lines in enumerate(told) if lines != reference]
    rank = differing[0]
    pairs = itertools.zip_longest(reference, told[rank], fillvalue="nothing more")
    mine, theirs = next((a, b) for a, b in pairs if a != b)
    ranks = ", ".join(map(str, differing))
    return MismatchError(
        f"{subject} differs between ranks: rank 0 has {mine}; rank {rank} has {theirs}"
        + (f" (ranks that differ from rank 0: {ranks})" if len(differing) > 1 else ""),
        rank=rank,
        remedy=remedy,
    )


def _device(group: ProcessGroup | None, values: Tensor) -> torch.device:
    """Return where the group wants tensors."""
    if "nccl" in str(dist.get_backend(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return values.device
