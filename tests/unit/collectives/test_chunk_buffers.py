"""Slices of a run of chunks: together they cover the run, at the same places on both ends."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.collectives.algorithms import ALGORITHMS, make_schedule
from paceline.collectives.chunk_buffers import ChunkBuffers

EVERY = [(op, name) for op in ALGORITHMS for name in ALGORITHMS[op]]


def buffers_of(made, rank, numel):
    output = torch.zeros(numel) if made.op in ("all-to-all", "send-recv") else None
    return ChunkBuffers(made, rank, torch.arange(numel, dtype=torch.float32), output)


def elements(regions):
    return [(one.tensor, element) for one in regions for element in range(one.begin, one.end)]


@pytest.mark.sweep
@pytest.mark.parametrize(("op", "name"), EVERY)
@given(ranks=st.integers(2, 7), share=st.integers(0, 9), count=st.integers(1, 5))
def test_slices_cover_the_run_element_by_element(op, name, ranks, share, count):
    made = make_schedule(op, name, ranks)
    for send in {send for sends in made.rounds for send in sends}:
        for rank in send[:2]:
            buffers = buffers_of(made, rank, ranks * share)
            whole = elements(buffers.regions(send))
            placed = {}
            for number in range(count):
                for offset, region in buffers.slices(send, number, count):
                    placed |= {offset + k: element for k, element in enumerate(elements([region]))}
            assert [placed[offset] for offset in sorted(placed)] == whole
            assert sorted(placed) == list(range(len(whole)))


@given(ranks=st.integers(2, 6), share=st.integers(1, 9), count=st.integers(1, 5))
def test_a_slice_of_a_wide_run_has_that_slice_of_each_chunk(ranks, share, count):
    made = make_schedule("all-reduce", "halving-doubling", ranks)
    buffers = buffers_of(made, 0, ranks * share)
    for send in {send for sends in made.rounds for send in sends}:
        for number in range(count):
            alone = [
                region
                for chunk in send.range
                for _, region in buffers.slices(send._replace(chunk=chunk, width=1), number, count)
            ]
            mine = buffers.slices(send, number, count)
            assert elements(one for _, one in mine) == elements(alone)
