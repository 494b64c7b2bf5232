"""Random collectives: every rank draws the same ones from a seed; expected results come from a plain loop.

draw(rng, number, size)     the call, its ranks and the kinds of memory; printed on failure
prepare(call, rank, ...)    the tensors of one rank
make(call, ...)             makes the call, on any backend
expected(call, rank, ...)   the values of its results: reduced along the tree over the ranks
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paceline._core.summation_tree import addition_order
from paceline.backends.block_reduction import VALID_DTYPES

SUMMING = (
    "all_reduce", "all_reduce_coalesced", "reduce",
    "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_coalesced",
)  # fmt: skip
COPYING = (
    "all_gather", "all_gather_into_tensor", "all_gather_coalesced",
    "gather", "broadcast", "scatter", "all_to_all", "all_to_all_single",
)  # fmt: skip
OPS = (*SUMMING, *COPYING)
SINGLE = (
    "all_gather_into_tensor", "all_gather_coalesced",
    "reduce_scatter_tensor", "reduce_scatter_coalesced", "all_to_all_single",
)  # fmt: skip
EXCHANGING = ("all_to_all", "all_to_all_single")
IN_PLACE = ("all_reduce", "all_reduce_coalesced", "reduce", "broadcast")
ROOTED = ("reduce", "gather", "broadcast", "scatter")
PLACES = ("ordinary", "arena", "inside", "scattered")
LAYOUTS = ("plain", "transposed", "strided")
COPIED_DTYPES = (
    torch.float32, torch.bfloat16, torch.int64, torch.uint8,
    torch.bool, torch.complex64, torch.float64, torch.int16,
)  # fmt: skip
COMBINE = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
LOW = (torch.float16, torch.bfloat16)
POOL_NUMEL = 100_003
LARGEST_NBYTES = 4 << 20


@dataclass(frozen=True)
class Call:
    """One collective of a group of `size` ranks.

    Attributes:
        number: seed of its values.
        lengths: elements per piece; of all_to_all, from each rank to each.
        places: kind of memory of each rank's tensors.
        layouts: memory layout of each rank's tensors.
        overlap: how each rank's result overlaps its inputs.
        asynchronous: it is waited for later.
        group: index of the group that makes it.
    """

    number: int
    size: int
    op: str
    dtype: torch.dtype
    reduction: str
    lengths: tuple[tuple[int, ...], ...]
    root: int
    places: tuple[str, ...]
    layouts: tuple[str, ...]
    overlap: tuple[str, ...]
    asynchronous: bool
    group: int = 0


def draw(rng: random.Random, number: int, size: int, group: int = 0, largest: int = LARGEST_NBYTES) -> Call:
    """Return a random call; `largest` bounds the bytes of a rank's tensors."""
    op = rng.choice(OPS)
    reduction = rng.choice(list(VALID_DTYPES)) if op in SUMMING else ""
    dtypes = VALID_DTYPES[reduction] if reduction else COPIED_DTYPES
    # Nor in torch.
    dtype = rng.choice([each for each in dtypes if not (reduction == "PRODUCT" and each.is_complex)])
    pieces = 1 if op in ("all_reduce", "reduce", "broadcast") else size
    limit = largest // (dtype.itemsize * pieces)

    def numel() -> int:
        edge = rng.choice([0, 1, 2, 7, 64, 1000, *[32 << 10] * 3, 256 << 10, *[1 << 20] * 2, 5 << 19])
        if edge < 32 << 10:
            return min(edge, limit)
        share = rng.choice([1, pieces])
        return max(0, min(edge // (share * dtype.itemsize) + rng.choice([-64, -1, 0, 1, 63]), limit))

    if op in EXCHANGING:
        same = numel() // size if rng.random() < 0.3 else None
        lengths = [[numel() // size if same is None else same for _ in range(size)] for _ in range(size)]
    else:
        lengths = [[numel()] for _ in range(rng.randint(1, 4) if op.endswith("coalesced") else 1)]
    alike = rng.choice(["arena", "inside"]) if rng.random() < 0.6 else None
    return Call(
        number,
        size,
        op,
        dtype,
        reduction,
        tuple(map(tuple, lengths)),
        rng.randrange(size) if op in ROOTED else -1,
        tuple(alike or rng.choice(PLACES) for _ in range(size)),
        tuple("plain" if rng.random() < 0.6 else rng.choice(LAYOUTS) for _ in range(size)),
        tuple(rng.choice(["", "", "own", "other", "shifted"]) for _ in range(size)),
        rng.random() < 0.4,
        group,
    )


# Inputs and expected results.


@functools.cache
def pool() -> torch.Tensor:
    """Return random numbers of which sums depend on the order."""
    found = torch.randn(POOL_NUMEL, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * 3
    return found.repeat(2 + LARGEST_NBYTES // POOL_NUMEL)


def values(call: Call, rank: int, piece: int, numel: int) -> torch.Tensor:
    """Return the values of piece number `piece` of `rank`."""
    start = random.Random(f"{call.number} {rank} {piece}").randrange(POOL_NUMEL)
    found = pool()[start : start + numel]
    if call.dtype.is_complex:
        return torch.complex(found, found.flip(0)).to(call.dtype)
    if call.dtype == torch.bool:
        return found > 0
    if call.dtype.is_floating_point:
        return found.to(call.dtype)
    return (found * 1e6).to(torch.int64).to(call.dtype)


def given(call: Call, rank: int) -> list[torch.Tensor]:
    """Return the inputs of a rank."""
    if call.op in EXCHANGING:
        numels = call.lengths[rank]
    elif call.op == "scatter" and rank != call.root:
        numels = ()
    else:
        copies = call.size if call.op.startswith("reduce_scatter") or call.op == "scatter" else 1
        numels = [n for (n,) in call.lengths for _ in range(copies)]
    return [values(call, rank, piece, n) for piece, n in enumerate(numels)]


def reduced(call: Call, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Return the inputs reduced pair by pair: the naive version."""
    wide = call.dtype in LOW and len(inputs) > 2 and call.reduction in ("SUM", "AVG", "PRODUCT")
    partial = [each.float() if wide else each.clone() for each in inputs]
    for left, right in addition_order([range(rank, rank + 1) for rank in range(len(inputs))], len(inputs)):
        partial[left] = COMBINE[call.reduction](partial[left], partial[right])
    total = partial[0]
    if call.reduction == "AVG":
        (torch.view_as_real(total) if call.dtype.is_complex else total).div_(len(inputs))
    return total.to(call.dtype)


def expected(call: Call, rank: int) -> list[torch.Tensor]:
    """Return the values of a rank's results after the call, piece by piece."""
    size, ranks = call.size, range(call.size)
    if call.op in EXCHANGING:
        return [given(call, source)[rank] for source in ranks]
    every = [given(call, each) for each in ranks]
    if call.op == "broadcast":
        return every[call.root]
    if call.op == "scatter":
        return [every[call.root][rank]]
    if call.op == "reduce" and rank != call.root:
        return every[rank]
    if call.op.startswith("reduce_scatter"):
        pieces = range(rank, len(every[0]), size)
        return [reduced(call, [every[each][piece] for each in ranks]) for piece in pieces]
    if call.op in SUMMING:
        return [reduced(call, [mine[piece] for mine in every]) for piece in range(len(every[0]))]
    if call.op == "gather" and rank != call.root:
        return []
    return [every[each][piece] for piece in range(len(call.lengths)) for each in ranks]


# Tensors of one rank.


@dataclass
class Tensors:
    """A rank's tensors of one call: inputs and outputs, which are the same if it works in place."""

    given: list[torch.Tensor]
    taken: list[torch.Tensor]


def prepare(call: Call, rank: int, allocate, *, plain: bool = False) -> Tensors:
    """Return the tensors of a rank, filled; `plain`: ordinary and contiguous ones.

    Args:
        allocate: returns arena memory for a number of elements and a dtype.
    """
    place, layout, overlap = call.places[rank], call.layouts[rank], call.overlap[rank]
    if call.op in SINGLE:
        place, layout = "arena" if place == "scattered" else place, "plain"
    if plain:
        place, layout, overlap = "ordinary", "plain", ""
    contents, numels = given(call, rank), [each.numel() for each in expected(call, rank)]
    inputs = adjacent_memory(call, place, layout, [each.numel() for each in contents], allocate)
    tensors = [lay(content, layout, memory) for content, memory in zip(contents, inputs, strict=True)]
    if call.op in IN_PLACE:
        return Tensors(tensors, tensors)
    outputs = adjacent_memory(call, place, layout, numels, allocate)
    if overlap and layout == "plain" and place != "scattered":
        if call.op in EXCHANGING and sum(numels) == sum(map(torch.numel, contents)):
            outputs = list(joined(inputs).split(numels))
        elif len(inputs) == call.size and len(outputs) == 1:
            outputs = [within(inputs, rank, overlap)]
        elif len(outputs) == call.size and len(inputs) == 1:
            tensors = [lay(contents[0], layout, within(outputs, rank, overlap))]
    return Tensors(tensors, [lay(None, layout, memory, n) for n, memory in zip(numels, outputs, strict=True)])


def within(memories: list[torch.Tensor], rank: int, overlap: str) -> torch.Tensor:
    """Return memory of one of many equal pieces: that of this rank, of another, or parts of two."""
    numel = memories[0].numel()
    if overlap == "shifted" and len(memories) > 1:
        return joined(memories)[numel // 2 : numel // 2 + numel]
    return memories[rank] if overlap == "own" else memories[(rank + 1) % len(memories)]


def adjacent_memory(call, place, layout, numels, allocate):
    """Return memory for tensors, adjacent unless "scattered"."""
    needed = [n * (2 if layout == "strided" else 1) for n in numels]
    if place == "ordinary":
        whole = torch.empty(sum(needed) + 1, dtype=call.dtype)
    elif place == "inside":
        whole = allocate(sum(needed) + 333, call.dtype)[131 : 131 + sum(needed) + 1]
    elif place == "arena":
        whole = allocate(sum(needed), call.dtype)
    else:
        return [allocate(n, call.dtype) for n in needed]
    return list(whole[: sum(needed)].split(needed)) if needed else []


def lay(content, layout, memory, numel=None):
    """Return a tensor of that content (None: undefined) in the given memory."""
    numel = content.numel() if content is not None else numel
    if layout == "transposed" and numel > 1:
        rows = next(rows for rows in (7, 3, 2, 1) if numel % rows == 0)
        tensor = memory.view(rows, -1).t()
    elif layout == "strided":
        tensor = memory[::2]
    else:
        tensor = memory if numel != 1 else memory.view(())
    if content is not None:
        tensor.copy_(content.view(tensor.shape))
    return tensor


# The call.


def make(call: Call, tensors: Tensors, rank: int, group, *, asynchronous: bool | None = None):
    """Make the call on a group, and return its work or None."""
    ranks = dist.get_process_group_ranks(group)
    wait_later = call.asynchronous if asynchronous is None else asynchronous
    common = {"group": group, "async_op": wait_later}
    op = getattr(dist.ReduceOp, call.reduction) if call.reduction else None
    mine, taken, size = tensors.given, tensors.taken, call.size
    root = ranks[call.root] if call.root >= 0 else None
    if call.op == "all_reduce":
        return dist.all_reduce(mine[0], op, **common)
    if call.op == "reduce":
        return dist.reduce(mine[0], root, op, **common)
    if call.op == "reduce_scatter":
        return dist.reduce_scatter(taken[0], mine, op, **common)
    if call.op == "reduce_scatter_tensor":
        return dist.reduce_scatter_tensor(taken[0].view(-1), joined(mine), op, **common)
    if call.op == "all_gather":
        return dist.all_gather(taken, mine[0], **common)
    if call.op == "all_gather_into_tensor":
        return dist.all_gather_into_tensor(joined(taken), mine[0].view(-1), **common)
    if call.op == "gather":
        return dist.gather(mine[0], taken if rank == call.root else None, root, **common)
    if call.op == "broadcast":
        return dist.broadcast(mine[0], root, **common)
    if call.op == "scatter":
        return dist.scatter(taken[0], mine if rank == call.root else None, root, **common)
    if call.op == "all_to_all":
        return dist.all_to_all(taken, mine, **common)
    if call.op == "all_to_all_single":
        splits = [each.numel() for each in taken], [each.numel() for each in mine]
        return dist.all_to_all_single(joined(taken), joined(mine), *splits, **common)
    with dist._coalescing_manager(group, async_ops=wait_later) as work:
        for piece in range(len(call.lengths)):
            part = slice(piece * size, (piece + 1) * size)
            if call.op == "all_reduce_coalesced":
                dist.all_reduce(mine[piece], op, group)
            elif call.op == "reduce_scatter_coalesced":
                dist.reduce_scatter_tensor(taken[piece].view(-1), joined(mine[part]), op, group)
            else:
                dist.all_gather_into_tensor(joined(taken[part]), mine[piece].view(-1), group)
    return work if wait_later else None


def joined(tensors):
    """Return adjacent tensors as one."""
    first = tensors[0].view(-1)
    numel = sum(each.numel() for each in tensors)
    adjacent = all(
        each.numel() == 0
        or each.storage_offset() == first.storage_offset() + sum(t.numel() for t in tensors[:at])
        for at, each in enumerate(tensors)
    )
    if adjacent and len({each.untyped_storage().data_ptr() for each in tensors}) == 1:
        return first.as_strided((numel,), (1,))
    raise AssertionError("tensors of a single form are adjacent")
