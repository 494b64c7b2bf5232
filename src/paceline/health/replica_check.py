"""A number that tells whether two tensors hold the same bits: xxh3 on the CPU, a sum of mixed words on a GPU.

[Note: digests on a GPU] Each word of the tensor, with its position, goes through a one-to-one mixing of 64-bit
integers (multiply, shift, exclusive or: as in SplitMix64, Steele, Lea and Flood 2014), and the results are added up,
modulo 2⁶⁴. Integers add up the same in any order, so the digest does not depend on how the device splits the sum. As
each step is one-to-one, one changed word always changes the digest; what several changes cancel is chance, 2⁻⁶⁴.
The host does not wait: the digest stays on the device until it is sent.

Which parameter differs between ranks, and who has not what most have: pure, over digests.

`ReplicaCheck`: parameters that ought to be equal on all ranks are compared now and then, off the critical path.

    step k·every        hash every parameter; begin to gather one digest of them all, 8 bytes a rank
    the next step       look at what came; where ranks differ, gather the digests of the same moment, one a parameter
                        → an error on every rank, or parameters copied from one rank

A bit that flipped in memory, an optimizer step that only one rank made, or a program that touches parameters on one
rank is found so, named, and not averaged into every rank's gradients for weeks.

[Note: what is compared] Parameters, frozen ones too, whole on every rank: all of every strategy but full-shard, whose
shards have no copy to compare with. Buffers only on demand: statistics such as BatchNorm's are each rank's own.
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
from paceline.parallel.comm import broadcast_tensors
from paceline.parallel.data_parallel import DataParallel, check_optimizer_owned
from paceline.world.object_collectives import PendingRows, gather_rows, gather_rows_async, verify_same
from paceline.world.rendezvous import format_ranks

__all__ = ["Divergence", "ReplicaCheck", "digest_of", "find_divergence", "mixed_sum"]

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


_CHUNK = 1 << 22  # words that are mixed at a time: 32 MiB of memory each for a few tensors


_STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, as int64


_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)


_SECOND = 0x94D049BB133111EB - (1 << 64)


def digest_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a digest of the bits of a tensor, in its dtype and order of elements: a scalar int64 on its device."""
    words = _words_of(tensor.detach())
    if words.device.type == "cpu":
        number = xxhash.xxh3_64_intdigest(words.numpy().data)
        return torch.tensor(number - (1 << 63), dtype=torch.int64)
    return mixed_sum(words)


def mixed_sum(words: torch.Tensor) -> torch.Tensor:
    """Return the sum of 1-D integers, each mixed with its position; see [Note: digests on a GPU]."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _CHUNK):
        piece = words[start : start + _CHUNK]
        positions = torch.arange(start + 1, start + 1 + piece.numel(), device=words.device)
        part = positions.mul_(_STEP).add_(piece)
        for factor, shift in ((_FIRST, 30), (_SECOND, 27)):
            part ^= (part >> shift) & ((1 << (64 - shift)) - 1)
            part *= factor
        part ^= (part >> 31) & ((1 << 33) - 1)
        total += part.sum()
    return total


def _words_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements' bits as 1-D integers, in the order of elements."""
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = flat.contiguous().reshape(-1)
    return flat.view(_WORDS[flat.element_size()])


@dataclass(frozen=True)
class Divergence:
    """What differs.

    Attributes:
        name: the first thing that differs. differing: how many do. of: how many were compared.
        ranks: those that hold another `name` than most; where no value has a majority, than rank 0.
        majority: whether more than half of the ranks hold the same `name`.
    """

    name: str
    differing: int
    of: int
    ranks: tuple[int, ...]
    majority: bool

    def __str__(self) -> str:
        noun, verb = ("rank", "holds") if len(self.ranks) == 1 else ("ranks", "hold")
        others = "the majority" if self.majority else "rank 0"
        more = f"; {self.differing} of {self.of} differ" if self.differing > 1 else ""
        return f"{noun} {format_ranks(self.ranks)} {verb} another {self.name} than {others}{more}"


def find_divergence(names: Sequence[str], digests_of_rank: Sequence[Sequence[int]]) -> Divergence | None:
    """Return what differs between ranks, None where nothing does.

    Args:
        names: of what was compared. digests_of_rank: for every rank, one digest per name.

    Example:
        >>> print(find_divergence(["parameter 'a'", "parameter 'b'"], [[1, 2], [1, 2], [1, 3]]))
        rank 2 holds another parameter 'b' than the majority
    """
    differing = [
        at
        for at, held in enumerate(zip(*digests_of_rank, strict=True))
        if any(each != held[0] for each in held)
    ]
    if not differing:
        return None
    held = [digests[differing[0]] for digests in digests_of_rank]
    ((usual, count),) = Counter(held).most_common(1)
    majority = 2 * count > len(held)
    reference = usual if majority else held[0]
    ranks = tuple(rank for rank, digest in enumerate(held) if digest != reference)
    return Divergence(names[differing[0]], len(differing), len(names), ranks, majority)


log = logging.getLogger("paceline.checkpoint")


class ReplicaCheck:
    """Compares the parameters of all ranks every so many optimizer steps, and names what differs and where.

    It hooks onto the optimizer and wraps nothing, and looks away where ranks are meant to differ (inside `LocalSGD` and
    its kin). What was hashed at one step is compared at the next, so no rank
    waits for it.

    Args:
        model: the wrapped model.
        optimizer: its optimizer: a torch one, or `ShardedOptimizer`.
        every: optimizer steps between two comparisons.
        repair: the rank whose parameters are copied to all where some differ, with a warning; None: raise.
        buffers: compare (and repair) buffers too, for models that keep them equal.

    Attributes:
        steps: optimizer steps seen. comparisons: of all ranks, so far. repairs: so far.

    Raises:
        UsageError: `every` is less than 1, `repair` is no rank, the model is not wrapped, or the optimizer is
            another model's.
        MismatchError: ranks have other settings.
        ReplicasDiverged: from ``optimizer.step()`` or `check`, on every rank alike.

    Example:
        >>> drift = ReplicaCheck(model, optim, every=200)
    """

    def __init__(
        self,
        model: DataParallel,
        optimizer: torch.optim.Optimizer,
        every: int = 200,
        *,
        repair: int | None = None,
        buffers: bool = False,
    ) -> None:
        if not isinstance(every, int) or every < 1:
            raise UsageError(f"every={every!r} is no number of steps", remedy="give 1 or more")
        check_optimizer_owned("Drift", model, optimizer)
        if repair is not None and not (isinstance(repair, int) and 0 <= repair < model.comm.size):
            raise UsageError(
                f"repair={repair!r}: there are ranks 0 to {model.comm.size - 1}", remedy="name one of them"
            )
        verify_same([f"every={every}", f"repair={repair}", f"buffers={buffers}"], "Drift", model.comm.group)
        self.steps = self.comparisons = self.repairs = 0
        self._wire, self._optimizer, self._every, self._repair = model.comm, optimizer, every, repair
        self._engine = model.engine
        named = [(f"parameter {name!r}", param) for name, param in model.module.named_parameters()]
        if buffers:
            named += [(f"buffer {name!r}", buffer) for name, buffer in model.module.named_buffers()]
        self._compared = [(name, tensor) for name, tensor in named if not isinstance(tensor, DTensor)]
        self._under_way: tuple[int, torch.Tensor, PendingRows] | None = None
        self._hook = optimizer.register_step_post_hook(self._after_step)

    @property
    def compared(self) -> int:
        """How many tensors are compared."""
        return len(self._compared)

    def remove(self) -> None:
        """Compare no more."""
        self._hook.remove()
        self._under_way = None

    def check(self) -> None:
        """Compare now, and wait for the result: before a checkpoint, say; all ranks call it.

        Raises:
            ReplicasDiverged: parameters differ, and are not to be repaired.
        """
        self._look()
        self._begin()
        self._look()

    def _after_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.steps += 1
        self._look()
        if self.steps % self._every == 0 and not self._engine.local_only:
            self._begin()

    # ------------------------------------------------------------------ compare

    @torch.no_grad()
    def _begin(self) -> None:
        """Hash what is compared, and send one digest of it all."""
        if self._wire.size == 1 or not self._compared:
            return
        device = self._compared[0][1].device if "nccl" in self._wire.backend else torch.device("cpu")
        digests = torch.stack([digest_of(tensor).to(device) for _, tensor in self._compared])
        rows = gather_rows_async(mixed_sum(digests).reshape(1), self._wire.group)
        self._under_way = self.steps, digests, rows

    def _look(self) -> None:
        """Look at the digests that were sent, if any."""
        if self._under_way is None:
            return
        (step, digests, rows), self._under_way = self._under_way, None
        self.comparisons += 1
        if len({row.item() for row in rows.wait()}) == 1:
            return
        held = [row.tolist() for row in gather_rows(digests, self._wire.group)]
        verdict = find_divergence([name for name, _ in self._compared], held)
        assert verdict is not None, "digests of digests differ, so digests do"
        self._act(verdict, step)

    # ------------------------------------------------------------------ and where they differ

    def _act(self, verdict: Divergence, step: int) -> None:
        what = f"after optimizer step {step}, {verdict}"
        source = self._repair
        if source is None or (verdict.majority and source in verdict.ranks):
            refused = f", and rank {source} was to repair it" if source is not None else ""
            raise ReplicasDiverged(
                f"{what}{refused}",
                rank=verdict.ranks[0],
                remedy="go on from the last checkpoint; if it comes again on that rank, suspect its memory, or code "
                "that changes parameters on one rank only",
            )
        broadcast_tensors(self._wire, [tensor for _, tensor in self._compared], source=source)
        self.repairs += 1
        if self._wire.rank == 0:
            suspect = (
                "; its optimizer state may be wrong too" if self._optimizer.state_dict().get("state") else ""
            )
            log.warning("%s: all ranks have rank %d's parameters now%s", what, source, suspect)
