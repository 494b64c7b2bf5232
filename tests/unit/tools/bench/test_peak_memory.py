"""Peak memory of a block, without the memory before it; progress bars."""

from __future__ import annotations

import io
import os

import pytest
import torch
from rich.console import Console

from paceline.backends.shm.shared_arena import Arena, Segment
from paceline.tools.bench import peak_memory
from paceline.tools.bench.peak_memory import PeakMemory, borrowed_nbytes
from paceline.tools.bench.progress_bar import ProgressBar

MIB = 2**20


def test_memory_that_is_freed_in_the_block_counts():
    with PeakMemory("cpu") as peak:
        block = torch.ones(16 * MIB)
        del block
    assert 63 * MIB <= peak.nbytes < 96 * MIB  # Linux notes a peak from counts that lag


def test_memory_held_or_freed_before_does_not_count():
    held = torch.ones(16 * MIB)
    freed = torch.ones(32 * MIB)
    del freed
    with PeakMemory("cpu") as peak:
        held.add_(1)
    assert peak.nbytes < 16 * MIB


def test_without_permission_to_reset_the_process_peak_stands_in(monkeypatch, tmp_path):
    monkeypatch.setattr(peak_memory, "_RESET", tmp_path / "missing" / "clear_refs")
    with PeakMemory("cpu") as peak:
        block = torch.ones(16 * MIB)
    assert peak.nbytes >= block.nbytes - 8 * MIB


def test_without_proc_the_peak_of_the_process_stands_in(monkeypatch, tmp_path):
    monkeypatch.setattr(peak_memory, "_STATUS", tmp_path / "missing")
    assert peak_memory.resident_nbytes() > 10 * MIB


def test_shared_memory_counts_where_it_was_allocated():
    theirs = Segment.create(16 * MIB)
    theirs.map[:] = bytes(16 * MIB)
    before = borrowed_nbytes()
    with PeakMemory("cpu") as peak:
        mapped = Segment.from_fd(os.dup(theirs.fd))
        mapped.tensor(0, 4 * MIB, torch.float32).sum()
        assert borrowed_nbytes() - before == 16 * MIB
        peak.begin_part()
    whole = peak.nbytes
    with PeakMemory("cpu") as peak:
        mapped.tensor(0, 4 * MIB, torch.float32).sum()
    assert whole >= 16 * MIB, "what is mapped inside of a part may be its peak"
    assert peak.nbytes < 4 * MIB


def test_free_memory_of_the_arena_counts_as_new_when_it_is_used_again(monkeypatch):
    arena = Arena()
    monkeypatch.setattr(peak_memory, "arena", arena)
    block = arena.allocate(16 * MIB, torch.uint8).fill_(1)
    del block
    with PeakMemory("cpu") as peak:
        block = arena.allocate(16 * MIB, torch.uint8).fill_(1)
    assert 15 * MIB < peak.nbytes < 24 * MIB
    assert int(block.sum()) == 16 * MIB


@pytest.mark.parametrize(("total", "lines"), [(3, 3), (100, 10), (104, 11)])
def test_progress_without_a_terminal_is_about_ten_lines(total, lines):
    out = io.StringIO()
    with ProgressBar("tiny", total, console=Console(file=out)) as advance:
        for _ in range(total):
            advance()
    assert len(out.getvalue().splitlines()) == lines
    assert out.getvalue().splitlines()[-1] == f"tiny: {total}/{total}"
