"""Sums of parts that arrive in pieces: the same bits as whole ones, and memory that is freed piece by piece."""

from __future__ import annotations

import weakref

import pytest
import torch

from paceline.parallel.part_exchange import PIECE_NBYTES, PartSum


def _filled(total, sources, parts):
    """Receive `parts`, one per source, piece by piece as they are sent; return the memory of the pieces."""
    pieces = []
    for source in range(sources):
        sent = iter(PartSum.send(parts[source], lambda piece: piece))
        pieces += total.receive(source, lambda piece, sent=sent: piece.copy_(next(sent)))
        assert next(sent, None) is None, "both sides cut alike"
    return pieces


@pytest.mark.parametrize("numel", [1, 1000, PIECE_NBYTES // 4, PIECE_NBYTES // 4 + 1, 3 * PIECE_NBYTES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_place", [True, False])
def test_sums_have_the_bits_of_whole_parts_in_order(numel, dtype, in_place):
    draw = torch.Generator().manual_seed(numel)
    own, *others = (torch.randn(numel, generator=draw).to(dtype) for _ in range(4))
    first, second, third = (other.float() for other in others)
    expected = ((((own.float() + first) + second) + third) / 4).to(dtype)
    result = own if in_place else torch.empty_like(own)
    total = PartSum(own, result, 3)
    _filled(total, 3, others)
    total.add(4)
    assert torch.equal(result, expected)


@pytest.mark.parametrize(("parts", "count"), [(1e-5, 1), (1.5, 1), (1.51, 2), (2.5, 3), (16, 16), (100, 16)])
def test_pieces_are_small_and_not_many(parts, count):
    own = torch.zeros(int(parts * PIECE_NBYTES) // 4)
    sizes = [piece.nbytes for piece in PartSum.send(own, lambda piece: piece)]
    assert sum(sizes) == own.nbytes
    assert len(sizes) == count
    assert max(sizes) - min(sizes) <= 4 * count


def test_pieces_are_freed_once_they_are_added():
    total = PartSum(own := torch.zeros(PIECE_NBYTES), own, 2)
    pieces = _filled(total, 2, [torch.ones(own.numel())] * 2)
    alive = [weakref.ref(piece) for piece in pieces]
    pieces.clear()
    assert all(each() is not None for each in alive)
    total.add()
    assert [each() for each in alive] == [None] * len(alive)
    assert torch.equal(own, torch.full_like(own, 2))
