"""Digests of parameters that must be equal on all ranks, and the comparison that every training has.

The digest of all parameters travels in the round status, so it needs no message of its own: in rounds 1, 2, 4, 8 … and
every 512th (`PACELINE_REPLICA_CHECK` sets another number, 0 none). If ranks differ, they exchange one digest per
parameter and all raise. A rank that alone clipped, skipped a step or changed a gradient is found in this way.
`paceline.ReplicaCheck` replaces it, and can repair.

[Note: digests on a GPU] Each word of a tensor and its position go through a bijective mix of 64-bit integers
(multiply, shift, xor: as in SplitMix64, Steele, Lea and Flood 2014), and the results are summed modulo 2⁶⁴. Integer
sums do not depend on the order, so neither does the digest on how the device splits them. As each step is bijective,
one changed word always changes the digest; several cancel with probability 2⁻⁶⁴. The host does not wait: the digest
stays on the device until it is sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash

from paceline.errors import UsageError
from paceline.world.rendezvous import format_ranks

__all__ = [
    "Divergence",
    "check_interval",
    "digest_of_all",
    "digest_on_device",
    "find_divergence",
    "is_check_round",
    "mixed_digest",
    "tensor_digest",
]

_DEFAULT_EVERY = 512
_VARIABLE = "PACELINE_REPLICA_CHECK"

_WORD_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22  # words per pass: 32 MiB for each of a few temporary tensors
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, as int64
_MIX = ((0xBF58476D1CE4E5B9 - (1 << 64), 30), (0x94D049BB133111EB - (1 << 64), 27))  # (factor, shift)


def check_interval(environment: Mapping[str, str]) -> int:
    """Return the number of rounds between two comparisons; 0: none.

    Example:
        >>> check_interval({}), check_interval({"PACELINE_REPLICA_CHECK": "0"})
        (512, 0)
    """
    text = environment.get(_VARIABLE, str(_DEFAULT_EVERY))
    if not text.isdecimal():
        raise UsageError(
            f"{_VARIABLE}={text!r} is not a number of steps", remedy="pass 1 or more, or 0 for no check"
        )
    return int(text)


def is_check_round(number: int, every: int) -> bool:
    """Return whether parameters are compared in a round.

    Example:
        >>> [number for number in range(30) if is_check_round(number, 12)]
        [1, 2, 4, 8, 12, 24]
    """
    if not every or not number:
        return False
    return number % every == 0 or (number < every and number & (number - 1) == 0)


def digest_of_all(tensors: Iterable[torch.Tensor]) -> int:
    """Return one digest of the bits of all tensors; waits for those on a GPU."""
    digest = xxhash.xxh3_64()
    others: list[torch.Tensor] = []
    for tensor in tensors:
        words = _words_of(tensor.detach())
        if words.device.type == "cpu":
            digest.update(words.numpy().data)
        else:
            others.append(words)
    for number in [mixed_digest(torch.cat(batch)) for batch in _batches(others)]:
        digest.update(int(number).to_bytes(8, "little", signed=True))
    return digest.intdigest()


def digest_on_device(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return one digest of the bits of all tensors, which are on one accelerator: an int64 scalar there."""
    words = [_words_of(tensor.detach()) for tensor in tensors]
    return mixed_digest(torch.stack([mixed_digest(torch.cat(batch)) for batch in _batches(words)]))


def _batches(words: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors in few groups that can be concatenated: each launch on a GPU costs microseconds."""
    batch: list[torch.Tensor] = []
    for each in words:
        other_kind = batch and (batch[0].dtype, batch[0].device) != (each.dtype, each.device)
        if batch and (other_kind or sum(map(torch.numel, batch)) + each.numel() > _CHUNK):
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch


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
