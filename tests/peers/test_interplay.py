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


def test_every_way_is_exact_but_clipping_shards_by_accelerate(pool, rank_environments):
    for found in pool(2).run(trials, world=False, env=rank_environments(2)):
        wrong = {
            name: gap for name, gap in found.items() if not (isinstance(gap, float | int) and gap <= EXACT)
        }
        assert set(wrong) == {"clipped_by_accelerate_sharded"}
        assert 1e-3 < wrong["clipped_by_accelerate_sharded"] < 1
        assert len(found) == 8
