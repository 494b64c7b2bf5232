"""Peak memory of a block: what it needs is seen, what was there before is not."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from paceline.tools.bench import peak_memory
from paceline.tools.bench.peak_memory import PeakMemory
from paceline.tools.bench.progress_bar import TurnBar

MIB = 2**20


def test_what_a_block_needs_is_seen_even_if_it_is_freed():
    with PeakMemory("cpu") as peak:
        block = torch.ones(16 * MIB)
        del block
    assert 63 * MIB <= peak.nbytes < 96 * MIB  # Linux notes a peak from counts that lag


def test_what_was_held_and_what_was_freed_before_do_not_count():
    held = torch.ones(16 * MIB)
    freed = torch.ones(32 * MIB)
    del freed
    with PeakMemory("cpu") as peak:
        held.add_(1)
    assert peak.nbytes < 16 * MIB


def test_without_permission_to_forget_the_process_peak_stands_in(monkeypatch, tmp_path):
    monkeypatch.setattr(peak_memory, "_FORGET", tmp_path / "missing" / "clear_refs")
    with PeakMemory("cpu") as peak:
        block = torch.ones(16 * MIB)
    assert peak.nbytes >= block.nbytes - 8 * MIB


def test_without_proc_the_peak_of_the_process_stands_in(monkeypatch, tmp_path):
    monkeypatch.setattr(peak_memory, "_STATUS", tmp_path / "missing")
    assert peak_memory.resident_nbytes() > 10 * MIB


@pytest.mark.parametrize(("total", "lines"), [(3, 3), (100, 10), (104, 11)])
def test_progress_elsewhere_than_on_a_terminal_is_about_ten_lines(total, lines):
    out = io.StringIO()
    with TurnBar("tiny", total, console=Console(file=out)) as tick:
        for _ in range(total):
            tick()
    assert len(out.getvalue().splitlines()) == lines
    assert out.getvalue().splitlines()[-1] == f"tiny: {total}/{total}"
