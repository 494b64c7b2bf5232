"""Slices of a run of chunks: together they are the run, and both ends place them alike."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.collectives.catalogue import ALGORITHMS, schedule
from paceline.collectives.chunk_memory import ChunkMemory

EVERY = [(op, name) for op in ALGORITHMS for name in ALGORITHMS[op]]


def memory_of(made, rank, numel):
    output = torch.zeros(numel) if made.op in ("all-to-all", "send-recv") else None
    return ChunkMemory(made, rank, torch.arange(numel, dtype=torch.float32), output)


def elements(regions):
    return [(one.place, element) for one in regions for element in range(one.begin, one.end)]


@pytest.mark.parametrize(("op", "name"), EVERY)
@given(ranks=st.integers(2, 7), share=st.integers(0, 9), count=st.integers(1, 5))
def test_slices_are_the_run_element_by_element(op, name, ranks, share, count):
    made = schedule(op, name, ranks)
    for send in {send for sends in made.rounds for send in sends}:
        for rank in send[:2]:
            memory = memory_of(made, rank, ranks * share)
            whole = elements(memory.regions(send))
            placed = {}
            for number in range(count):
                for offset, region in memory.slices(send, number, count):
                    placed |= {offset + k: element for k, element in enumerate(elements([region]))}
            assert [placed[offset] for offset in sorted(placed)] == whole
            assert sorted(placed) == list(range(len(whole)))


@given(ranks=st.integers(2, 6), share=st.integers(1, 9), count=st.integers(1, 5))
def test_a_slice_of_a_wide_run_is_that_of_each_of_its_chunks(ranks, share, count):
    made = schedule("all-reduce", "halving-doubling", ranks)
    memory = memory_of(made, 0, ranks * share)
    for send in {send for sends in made.rounds for send in sends}:
        for number in range(count):
            alone = [
                region
                for chunk in send.range
                for _, region in memory.slices(send._replace(chunk=chunk, width=1), number, count)
            ]
            mine = memory.slices(send, number, count)
            assert elements(one for _, one in mine) == elements(alone)
