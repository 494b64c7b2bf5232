"""`ReplicaCheck`: compares parameters that must be equal on all ranks now and then, off the critical path.

    step k·every     hash all compared tensors; start gathering one digest of them all, 8 bytes per rank
    the next step    compare; where ranks differ, gather one digest per tensor, of the same moment
                     → an error on all ranks, or parameters copied from one rank

This finds, and names, a bit that flipped in memory, an optimizer step that only one rank made, or code that changes
parameters on one rank, before these are averaged into every rank's gradients for weeks.

[Note: compared tensors] Parameters, frozen ones too, that every rank holds whole: all of every strategy but
full-shard, whose shards have no replica. Buffers only on demand: BatchNorm's statistics, for instance, differ per rank.

[Note: digests on a GPU] Each word of a tensor and its position go through a bijective mix of 64-bit integers
(multiply, shift, xor: as in SplitMix64, Steele, Lea and Flood 2014), and the results are summed modulo 2⁶⁴. Integer
sums do not depend on the order, so neither does the digest on how the device splits them. As each step is bijective,
one changed word always changes the digest; several cancel with probability 2⁻⁶⁴. The host does not wait: the digest
stays on the device until it is sent.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

from paceline.errors import ReplicasDiverged, UsageError
from paceline.parallel.data_parallel import DataParallel, check_optimizer_owned
from paceline.parallel.ddp import DistributedDataParallel
from paceline.parallel.gradient_collectives import broadcast_tensors
from paceline.world.control_collectives import PendingRows, gather_rows, gather_rows_async, verify_same
from paceline.world.rendezvous import format_ranks

__all__ = ["Divergence", "ReplicaCheck", "find_divergence", "mixed_digest", "tensor_digest"]

log = logging.getLogger("paceline.health")

_WORD_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22  # words per pass: 32 MiB for each of a few temporary tensors
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, as int64
_MIX = ((0xBF58476D1CE4E5B9 - (1 << 64), 30), (0x94D049BB133111EB - (1 << 64), 27))  # (factor, shift)


def tensor_digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return a digest of a tensor's bits as a scalar int64 on its device: xxh3 on the CPU, else `mixed_digest`."""
    words = _words_of(tensor.detach())
    if words.device.type == "cpu":
        number = xxhash.xxh3_64_intdigest(words.numpy().data)
        return torch.tensor(number - (1 << 63), dtype=torch.int64)
    return mixed_digest(words)


def mixed_digest(words: torch.Tensor) -> torch.Tensor:
    """Return the sum of 1-D integers, each mixed with its position; see [Note: digests on a GPU]."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK]
        positions = torch.arange(start + 1, start + 1 + chunk.numel(), device=words.device)
        mixed = positions.mul_(_GAMMA).add_(chunk)
        for factor, shift in _MIX:
            mixed ^= (mixed >> shift) & ((1 << (64 - shift)) - 1)
            mixed *= factor
        mixed ^= (mixed >> 31) & ((1 << 33) - 1)
        total += mixed.sum()
    return total


def _words_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements' bits as 1-D integers, in the order of elements."""
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = flat.contiguous().reshape(-1)
    return flat.view(_WORD_DTYPES[flat.element_size()])


@dataclass(frozen=True)
class Divergence:
    """A difference between ranks.

    Attributes:
        name: the first tensor that differs.
        differing: number of tensors that differ.
        compared: number of tensors compared.
        ranks: those whose `name` differs from the majority's; without a majority, from rank 0's.
        majority: whether more than half of the ranks hold the same `name`.
    """

    name: str
    differing: int
    compared: int
    ranks: tuple[int, ...]
    majority: bool

    def __str__(self) -> str:
        noun, verb = ("rank", "holds") if len(self.ranks) == 1 else ("ranks", "hold")
        others = "the majority" if self.majority else "rank 0"
        more = f"; {self.differing} of {self.compared} differ" if self.differing > 1 else ""
        return f"{noun} {format_ranks(self.ranks)} {verb} another {self.name} than {others}{more}"


def find_divergence(names: Sequence[str], digests_of_rank: Sequence[Sequence[int]]) -> Divergence | None:
    """Return the difference between ranks, None if there is none.

    Args:
        names: of the compared tensors.
        digests_of_rank: one digest per name, for every rank.

    Example:
        >>> print(find_divergence(["parameter 'a'", "parameter 'b'"], [[1, 2], [1, 2], [1, 3]]))
        rank 2 holds another parameter 'b' than the majority
    """
    columns = list(zip(*digests_of_rank, strict=True))
    differing = [number for number, digests in enumerate(columns) if len(set(digests)) > 1]
    if not differing:
        return None
    digests = columns[differing[0]]
    ((usual, count),) = Counter(digests).most_common(1)
    majority = 2 * count > len(digests)
    reference = usual if majority else digests[0]
    ranks = tuple(rank for rank, digest in enumerate(digests) if digest != reference)
    return Divergence(names[differing[0]], len(differing), len(names), ranks, majority)


class ReplicaCheck:
    """Compares the parameters of all ranks every so many optimizer steps, and names what differs and where.

    It hooks onto the optimizer and wraps nothing, and pauses where ranks are meant to differ (inside `LocalSGD` and
    its subclasses). Digests taken at one step are compared at the next, so no rank waits for them.

    Args:
        model: the wrapped model.
        optimizer: its optimizer: one of torch's, or a `ShardedOptimizer`.
        every: optimizer steps between two comparisons.
        repair: the rank whose parameters are copied to all where some differ, with a warning; None: raise.
        buffers: compare (and repair) buffers too, for models that keep them equal.

    Attributes:
        steps: number of optimizer steps.
        comparisons: number of comparisons.
        repairs: number of repairs.

    Raises:
        UsageError: `every` is less than 1, `repair` is not a rank, the model is not wrapped, or the optimizer
            belongs to another model.
        MismatchError: ranks have different settings.
        ReplicasDiverged: from ``optimizer.step()`` or `check`, on all ranks alike.

    Example:
        >>> check = ReplicaCheck(model, optim, every=200)
    """

    def __init__(
        self,
        model: DataParallel | DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        every: int = 200,
        *,
        repair: int | None = None,
        buffers: bool = False,
    ) -> None:
        if not isinstance(every, int) or every < 1:
            raise UsageError(f"every={every!r} is not a number of steps", remedy="pass 1 or more")
        check_optimizer_owned("ReplicaCheck", model, optimizer)
        comm = model.comm
        if repair is not None and not (isinstance(repair, int) and 0 <= repair < comm.size):
            raise UsageError(f"repair={repair!r} is not a rank", remedy=f"pass 0 to {comm.size - 1}, or None")
        settings = [f"every={every}", f"repair={repair}", f"buffers={buffers}"]
        verify_same(settings, "ReplicaCheck", comm.group)
        self.steps = self.comparisons = self.repairs = 0
        self._comm, self._engine, self._optimizer = comm, model.engine, optimizer
        self._every, self._repair = every, repair
        named = [(f"parameter {name!r}", param) for name, param in model.module.named_parameters()]
        if buffers:
            named += [(f"buffer {name!r}", buffer) for name, buffer in model.module.named_buffers()]
        self._compared = [(name, tensor) for name, tensor in named if not isinstance(tensor, DTensor)]
        self._pending: tuple[int, torch.Tensor, PendingRows] | None = None
        self._hook = optimizer.register_step_post_hook(self._after_step)

    @property
    def compared(self) -> int:
        """Number of compared tensors."""
        return len(self._compared)

    def remove(self) -> None:
        """Stop comparing."""
        self._hook.remove()
        self._pending = None

    def check(self) -> None:
        """Compare now and wait for the result, for instance before a checkpoint; all ranks call this.

        Raises:
            ReplicasDiverged: parameters differ, and are not to be repaired.
        """
        self._finish()
        self._start()
        self._finish()

    def _after_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.steps += 1
        self._finish()
        if self.steps % self._every == 0 and not self._engine.local_only:
            self._start()

    @torch.no_grad()
    def _start(self) -> None:
        """Hash the compared tensors, and start gathering one digest of them all."""
        if self._comm.size == 1 or not self._compared:
            return
        device = self._compared[0][1].device if "nccl" in self._comm.backend else torch.device("cpu")
        digests = torch.stack([tensor_digest(tensor).to(device) for _, tensor in self._compared])
        rows = gather_rows_async(mixed_digest(digests).reshape(1), self._comm.group)
        self._pending = self.steps, digests, rows

    def _finish(self) -> None:
        """Compare the gathered digests, if any."""
        if self._pending is None:
            return
        (step, digests, rows), self._pending = self._pending, None
        self.comparisons += 1
        if len({row.item() for row in rows.wait()}) == 1:
            return
        digests_of_rank = [row.tolist() for row in gather_rows(digests, self._comm.group)]
        divergence = find_divergence([name for name, _ in self._compared], digests_of_rank)
        assert divergence is not None, "digests of digests differ, so digests do"
        self._repair_or_raise(divergence, step)

    def _repair_or_raise(self, divergence: Divergence, step: int) -> None:
        found = f"after optimizer step {step}, {divergence}"
        source = self._repair
        if source is None or (divergence.majority and source in divergence.ranks):
            refused = f", and rank {source} was to repair it" if source is not None else ""
            raise ReplicasDiverged(
                f"{found}{refused}",
                rank=divergence.ranks[0],
                remedy="resume from the last checkpoint; if it happens again on that rank, suspect its memory, or "
                "code that changes parameters on one rank only",
            )
        broadcast_tensors(self._comm, [tensor for _, tensor in self._compared], source=source)
        self.repairs += 1
        if self._comm.rank == 0:
            stateful = bool(self._optimizer.state_dict().get("state"))
            suspect = "; its optimizer state may be wrong too" if stateful else ""
            log.warning("%s: all ranks now have rank %d's parameters%s", found, source, suspect)
