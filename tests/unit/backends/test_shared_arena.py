"""The arena: spans never overlap, free ones merge, memory is reused, and other processes map the same."""

from __future__ import annotations

import gc
import itertools
import os
import resource
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forked_child import in_child
from paceline.backends.shm import shared_arena as module
from paceline.backends.shm.shared_arena import Arena, FreeList, Segment

MIB = 1 << 20
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.int64, torch.complex128]


def pages_of(segment):
    """Return the bytes of main memory that a segment takes."""
    return os.fstat(segment.fd).st_blocks * 512


# The free list: offsets alone.


@st.composite
def histories(draw):
    """Size of a free list, and steps: allocations (sizes) and frees (negative; index among those held)."""
    size = draw(st.integers(1, 200))
    steps = draw(st.lists(st.one_of(st.integers(1, 40), st.integers(-50, -1)), max_size=80))
    return size, steps


@given(histories())
@settings(max_examples=300, deadline=None)
def test_a_free_list_never_allocates_a_byte_twice_and_merges_free_spans(history):
    size, steps = history
    free_list, held = FreeList(size), []
    for step in steps:
        if step > 0:
            offset = free_list.allocate(step)
            longest = max((length for _, length, _ in free_list.spans), default=0)
            assert offset is not None or longest < step
            if offset is not None:
                held.append((offset, step))
        elif held:
            merged = free_list.free(*held.pop(step % len(held)))
            assert merged in [(offset, length) for offset, length, _ in free_list.spans]
        every = sorted([*held, *((offset, length) for offset, length, _ in free_list.spans)])
        assert [offset for offset, _ in every] == [
            sum(length for _, length in every[:at]) for at in range(len(every))
        ]
        assert sum(length for _, length in every) == size
        ends = {offset + length for offset, length, _ in free_list.spans}
        assert ends.isdisjoint(offset for offset, _, _ in free_list.spans), "adjacent spans are merged"
        assert free_list.dirty == sum(dirty for _, _, dirty in free_list.spans)
        assert all(0 <= dirty <= length for _, length, dirty in free_list.spans)
    for span in held:
        free_list.free(*span)
    assert [(offset, length) for offset, length, _ in free_list.spans] == [(0, size)]


@given(histories())
@settings(max_examples=300, deadline=None)
def test_a_free_list_knows_which_free_bytes_may_hold_pages(history):
    size, steps = history
    free_list, held, touched = FreeList(size), [], set()
    for step in steps:
        if step > 0 and (offset := free_list.allocate(step)) is not None:
            held.append((offset, step))
            touched |= set(range(offset, offset + step))
        elif step < 0 and held:
            free = free_list.free(*held.pop(step % len(held)))
            if step % 3 == 0:
                free_list.mark_clean(*free)
                touched -= set(range(free[0], sum(free)))
        may = {at for offset, _, dirty in free_list.spans for at in range(offset, offset + dirty)}
        taken = {at for offset, length in held for at in range(offset, offset + length)}
        assert touched - taken <= may


def test_a_free_list_allocates_the_best_fit():
    free_list = FreeList(100)
    assert [free_list.allocate(n) for n in (10, 20, 10, 5, 10, 45)] == [0, 10, 30, 40, 45, 55]
    for span in ((10, 20), (40, 5), (55, 45)):
        free_list.free(*span)
    assert [free_list.allocate(n) for n in (5, 18, 46)] == [40, 10, None]


def test_a_retired_span_is_never_freed():
    free_list = FreeList(100)
    assert (free_list.allocate(30), free_list.allocate(30)) == (0, 30)
    free_list.retire(35)
    assert free_list.free(30, 30) is None
    assert free_list.free(0, 30) == (0, 30)
    assert free_list.allocate(40) == 60
    assert free_list.allocate(31) is None


# The arena.


@given(st.lists(st.tuples(st.integers(0, 300_000), st.sampled_from(DTYPES), st.booleans()), max_size=40))
@settings(max_examples=40, deadline=None)
def test_tensors_never_overlap_and_are_found(plan):
    arena, held = Arena(), []
    for number, (numel, dtype, drop) in enumerate(plan):
        tensor = arena.allocate(numel, dtype)
        assert (tensor.numel(), tensor.dtype, tensor.is_contiguous()) == (numel, dtype, True)
        tensor.fill_(number % 2)
        held.append((number, tensor))
        if drop:
            held.pop(number % len(held))
    places = []
    for number, tensor in held:
        assert torch.equal(tensor, torch.full_like(tensor, number % 2))
        if tensor.numel():
            assert tensor.data_ptr() % 64 == 0
            segment, offset = arena.locate(tensor.data_ptr(), tensor.nbytes)
            assert arena.segments[segment].address + offset == tensor.data_ptr()
            places.append((segment, offset, tensor.nbytes))
    places.sort()
    for (left, start, nbytes), (right, following, _) in itertools.pairwise(places):
        assert left != right or start + nbytes <= following


def test_memory_is_reused_after_the_last_view_is_gone():
    arena = Arena()
    whole = arena.allocate(MIB, torch.float32)
    place, view = whole.data_ptr(), whole.view(1024, 1024)[3].view(torch.uint8)[7:9]
    del whole
    other = arena.allocate(MIB, torch.float32)
    assert other.data_ptr() != place
    del view
    assert arena.allocate(MIB, torch.float32).data_ptr() == place


def test_memory_in_a_cycle_is_freed_whenever_the_collector_runs():
    """Also in the middle of an allocation: the collector may free a tensor at any line."""
    arena = Arena()
    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for number in range(2000):
            cycle = [arena.allocate(1 + number % 5000, torch.float32)]
            cycle.append(cycle)
            del cycle
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    arena.allocate(1, torch.uint8)
    assert len(arena.segments) == 1
    assert arena._free_lists[0].spans[0][:2] == (0, arena.segments[0].nbytes)


def test_threads_may_allocate_and_free_concurrently():
    arena, wrong = Arena(), []

    def work(seed):
        generator, held = torch.Generator().manual_seed(seed), []
        for number in range(300):
            numel = int(torch.randint(1, 50_000, (1,), generator=generator))
            tensor = arena.allocate(numel, torch.int32).fill_(seed * 1000 + number)
            held.append((tensor, seed * 1000 + number))
            if len(held) > 5:
                kept, value = held.pop(number % 5)
                if not bool((kept == value).all()) or arena.locate(kept.data_ptr(), kept.nbytes) is None:
                    wrong.append((seed, number))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    arena.allocate(1, torch.uint8)
    assert all(len(free_list.spans) == 1 for free_list in arena._free_lists)


def test_free_memory_beyond_the_kept_part_is_returned_to_the_system():
    arena = Arena()
    held = [arena.allocate(24 * MIB, torch.uint8).fill_(1) for _ in range(8)]
    assert sum(map(pages_of, arena.segments)) >= 192 * MIB
    del held
    assert sum(map(pages_of, arena.segments)) <= module._KEPT_NBYTES + MIB
    again = [arena.allocate(24 * MIB, torch.uint8) for _ in range(8)]
    assert sum(map(pages_of, arena.segments)) <= module._KEPT_NBYTES + MIB
    assert again[-1].fill_(3).sum().item() == 3 * 24 * MIB


def test_alternating_frees_and_allocations_keep_no_more_than_the_kept_part():
    """In any order of sizes: kept memory is counted per segment."""
    arena = Arena()
    held = [arena.allocate(20 * MIB, torch.uint8).fill_(1) for _ in range(6)]
    while held:
        held.pop()
        arena.allocate(30 * MIB, torch.uint8).fill_(1)
    assert sum(map(pages_of, arena.segments)) <= module._KEPT_NBYTES + MIB


def test_a_reused_buffer_keeps_its_pages():
    arena = Arena()
    for _ in range(100):
        arena.allocate(40 * MIB, torch.uint8)[:4096].fill_(1)
        assert pages_of(arena.segments[0]) > 0


def test_segments_stay_few():
    arena = Arena()
    held = [arena.allocate(9 * MIB, torch.uint8) for _ in range(300)]
    assert len(arena.segments) < 25
    assert len(held) == 300


def test_adjacent_segments_are_not_one():
    """Their mappings may touch; a row of tensors across the border lies in neither."""
    arena = Arena()
    first = arena.allocate(8 * MIB, torch.uint8)
    last = first[-64:]
    assert arena.locate(last.data_ptr(), 64) is not None
    assert arena.locate(last.data_ptr(), 128) is None
    assert arena.locate(torch.empty(64).data_ptr(), 256) is None


def test_retired_memory_is_never_allocated_again():
    arena = Arena()
    tensor = arena.allocate(MIB, torch.uint8).fill_(1)
    segment, offset = arena.locate(tensor[4096:].data_ptr(), tensor[4096:].nbytes)
    arena.retire(segment, offset)
    place = tensor.data_ptr()
    del tensor
    assert pages_of(arena.segments[segment]) == 0
    held = [arena.allocate(MIB, torch.uint8) for _ in range(7)]
    assert place not in [each.data_ptr() for each in held]
    assert len(arena.segments) == 1
    assert arena.locate(arena.allocate(MIB, torch.uint8).data_ptr(), MIB)[0] == 1


# Other processes.


def test_a_child_maps_the_same_memory():
    segment = Segment.create(2 * MIB)
    mine = segment.tensor(4096, 1000, torch.float32)

    def change():
        theirs = Segment.from_fd(os.dup(segment.fd))
        theirs.tensor(4096, 1000, torch.float32).fill_(2.5)
        return theirs.address != segment.address and theirs.nbytes == segment.nbytes

    assert in_child(change) == 0
    assert mine.eq(2.5).all()


def test_a_forked_child_frees_and_reuses_nothing_of_its_parent():
    arena = module.arena
    held = [arena.allocate(100 * MIB, torch.uint8).fill_(7)]
    spare = arena.allocate(MIB, torch.uint8).data_ptr()  # free again at once

    def work():
        lost = held.pop()
        del lost
        gc.collect()
        own = [arena.allocate(MIB, torch.uint8).fill_(9) for _ in range(3)]
        return spare not in [each.data_ptr() for each in own]

    assert in_child(work) == 0
    assert held[0].eq(7).all()
    assert arena.allocate(MIB, torch.uint8).data_ptr() == spare


def test_a_child_forked_while_a_thread_allocates_does_not_deadlock():
    arena, over = module.arena, threading.Event()

    def allocate():
        while not over.is_set():
            arena.allocate(1000, torch.float32)

    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        assert [in_child(lambda: arena.allocate(10, torch.uint8).numel() == 10) for _ in range(20)] == [
            0
        ] * 20
    finally:
        over.set()
        thread.join()


# Exhausted resources.


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_more_than_the_available_memory_is_refused_at_once():
    before = descriptors()
    with pytest.raises(OSError, match=r"no .*TiB of shared memory: Cannot allocate memory"):
        Arena().allocate(2**45, torch.float32)
    with pytest.raises(OSError, match=r"no .* of shared memory: Cannot allocate memory"):
        Arena().allocate(2**80, torch.float32)
    assert descriptors() == before


def test_no_descriptors_left_is_reported_and_leaves_none_open():
    def work():
        arena = Arena()
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 20, 4096))
        held = []
        while True:
            try:
                held.append(os.dup(0))
            except OSError:
                break
        for spare in range(2):  # one is enough for the memory, not for its mapping
            try:
                arena.allocate(10, torch.float32)
            except OSError as error:
                if "raise the limit (ulimit -n)" not in str(error) or arena.segments:
                    return False
            else:
                return False
            if spare == 0:
                os.close(held.pop())
        os.close(held.pop())
        os.close(held.pop())
        return arena.allocate(10, torch.float32).numel() == 10

    assert in_child(work) == 0


def test_no_address_space_left_is_reported_and_leaves_no_descriptor():
    def work():
        before = descriptors()
        resource.setrlimit(resource.RLIMIT_AS, (MIB, -1))
        try:
            Arena().allocate(64 * MIB, torch.uint8)
        except OSError as error:
            resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
            return "of shared memory: Cannot allocate memory" in str(error) and descriptors() == before
        return False

    assert in_child(work) == 0
