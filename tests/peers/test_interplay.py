"""Accelerate as docs/interplay.md describes it: examples/interplay/with_accelerate.py, trial by trial."""

from __future__ import annotations

import sys
from pathlib import Path

import paceline

INTERPLAY = Path(__file__).parents[2] / "examples" / "interplay"

EXACT = 1e-12


def trials(rank, size):
    sys.path.append(str(INTERPLAY))
    import with_accelerate
    from problem import run_trials

    paceline.init(device="cpu")
    try:
        return run_trials(with_accelerate.TRIALS)
    finally:
        paceline.shutdown()


def test_every_way_is_exact(pool, rank_environments):
    for found in pool(2).run(trials, world=False, env=rank_environments(2)):
        assert {name: gap for name, gap in found.items() if not gap <= EXACT} == {}
        assert len(found) == 8
