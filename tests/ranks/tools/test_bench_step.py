"""`paceline bench step` with real ranks: rows, traffic, correctness, memory, files."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from paceline.launch.process.local_ranks import run_ranks
from paceline.tools.bench.step.step_benchmark import StepSettings, run_step_job
from paceline.tools.bench.step.step_rows import make_step_rows
from paceline.tools.bench.step.step_strategies import (
    AUTO,
    DDP_PACELINE,
    DDP_STRATEGIES,
    PACELINE_STRATEGIES,
    STRATEGY_TITLES,
    StrategyVariant,
    strategy_variants,
)
from paceline.tools.models.gpt_sizes import gpt_size

SIZE = gpt_size("tiny")
MIB = 2**20
ROUNDS, STEPS = 2, 3
PEER_OF = strategy_variants(
    [*PACELINE_STRATEGIES, AUTO, *DDP_STRATEGIES, DDP_PACELINE], [1.0, math.inf], 4 * SIZE.parameters()
)


def measure(rank, size, variants, broken=None, doubled=()):
    """Time the variants; the strategy `broken` does not synchronise, those in `doubled` have doubled gradients."""
    import paceline
    from paceline.tools.bench.step import step_worker

    def build(variant, *args):
        if variant.strategy == broken:
            return replace(build_trainer(StrategyVariant("no-sync"), *args), variant=variant)
        made = build_trainer(variant, *args)
        if variant.strategy in doubled:
            return replace(made, backward=lambda loss: made.backward(2 * loss))
        return made

    build_trainer, step_worker.build_trainer = step_worker.build_trainer, build
    try:
        settings = StepSettings(ranks=size, steps=STEPS, rounds=ROUNDS, batch_size=1, context=8)
        return step_worker.time_strategies(paceline.init(), settings, SIZE, variants)
    finally:
        step_worker.build_trainer = build_trainer


@pytest.fixture(scope="module")
def found(pool):
    zero, one = pool(2, "paceline").run(measure, list(PEER_OF), timeout=240)
    assert zero == one
    return zero


@pytest.fixture(scope="module")
def rows(found):
    return make_step_rows("tiny", 2, PEER_OF, found, [None] * len(PEER_OF))


@pytest.mark.thorough
def test_every_variant_ran_every_step_on_every_rank(found):
    assert len(found["seconds"]) == len(PEER_OF)
    for turns in found["seconds"]:
        assert len(turns) == ROUNDS
        for turn in turns:
            assert len(turn) == STEPS
            for step in turn:
                assert len(step) == 2
                for forward, backward, optimizer, waited in step:
                    assert min(forward, backward, optimizer) > 0
                    assert 0 <= waited <= optimizer


@pytest.mark.thorough
def test_rows_are_finite_positive_and_their_parts_add_up(rows):
    for row in rows:
        assert math.isfinite(row.step_ms)
        assert row.step_ms > 0
        assert row.ratio_to_ddp > 0
        assert min(vars(row.breakdown_ms).values()) >= 0
        assert sum(vars(row.breakdown_ms).values()) == pytest.approx(row.step_ms, rel=1e-9)
    assert sum(row.best_ddp for row in rows) == 1


def test_all_strategies_agree_with_torch_ddp_and_no_synchronisation_does_not(rows):
    assert {row.variant.strategy: row.drift for row in rows if row.exact is False} == {}
    assert {row.variant.strategy for row in rows if row.exact} == set(STRATEGY_TITLES) - {"no-sync"}
    (bare,) = (row for row in rows if not row.variant.synchronises)
    assert bare.drift > 1e-3
    assert bare.exact is None


@pytest.mark.thorough
def test_a_strategy_that_does_not_synchronise_is_detected(pool):
    peer_of = strategy_variants(["naive"], [math.inf], 4 * SIZE.parameters())
    zero, _ = pool(2).run(measure, list(peer_of), "naive", timeout=120)
    made = make_step_rows("tiny", 2, peer_of, zero, [None] * len(peer_of))
    assert [row.variant.strategy for row in made if row.exact is False] == ["naive"]


@pytest.mark.thorough
def test_gradients_that_are_wrong_by_a_factor_are_detected(pool):
    peer_of = strategy_variants(["naive", "sharded"], [math.inf], 4 * SIZE.parameters())
    zero, _ = pool(2).run(measure, list(peer_of), None, ("naive", "sharded"), timeout=120)
    made = make_step_rows("tiny", 2, peer_of, zero, [None] * len(peer_of))
    assert [row.variant.strategy for row in made if row.exact is False] == ["naive", "sharded"]


def test_traffic_is_that_of_each_strategy(rows):
    model_mib = 4 * SIZE.parameters() / MIB
    tensors = 27
    row_of = {row.variant: row for row in rows}
    whole = {
        "naive": (tensors, model_mib),
        "flat": (1, model_mib),
        "overlap": (tensors, model_mib),
        "full-shard": None,
        "fully-shard": None,
    }
    for name, expected in whole.items():
        row = row_of[StrategyVariant(name)]
        if expected is None:
            assert row.mib > 2 * model_mib  # gathered in forward and in backward, then reduced
        else:
            assert (row.calls, row.mib) == (expected[0], pytest.approx(expected[1], rel=1e-3))
        assert row.ms_per_call > 0
    assert (
        row_of[StrategyVariant("bucketed", math.inf)].calls
        == row_of[StrategyVariant("ddp", math.inf)].calls
        == 1
    )
    assert row_of[StrategyVariant("ddp", 0)].calls == tensors
    assert row_of[StrategyVariant(DDP_PACELINE, math.inf)].mib == row_of[StrategyVariant("ddp", math.inf)].mib
    assert row_of[StrategyVariant("ddp-zero", math.inf)].mib == pytest.approx(2 * model_mib, rel=1e-3)
    assert row_of[StrategyVariant("sharded", math.inf)].mib == pytest.approx(2 * model_mib, rel=1e-3)
    assert row_of[StrategyVariant("no-sync")].calls == row_of[StrategyVariant("no-sync")].mib == 0


def count(rank, size, strategies):
    """Return, by strategy, the observed traffic, the engine's own counts, and the seconds of communication."""
    from paceline.tools.bench.step.comm_traffic import count_traffic, measure_comm_seconds
    from paceline.tools.bench.step.strategy_trainers import build_trainer, random_batch, run_step

    batch = random_batch(SIZE, 1, 8, seed=rank, device="cpu")
    counted = {}
    for strategy, bucket_mib in strategies.items():
        trainer = build_trainer(StrategyVariant(strategy, bucket_mib), SIZE, "cpu", seed=0)

        def once(trainer=trainer):
            run_step(trainer, batch)

        once()
        once()
        seen = count_traffic(once, size)
        timings = trainer.model.timings
        counted[strategy] = (
            (seen.calls, seen.nbytes),
            (timings.calls, timings.nbytes),
            measure_comm_seconds(once),
        )
    return counted


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["gloo", "paceline"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_traffic_observed_from_outside_is_that_of_the_engine(pool, ranks, backend):
    strategies = {"naive": None, "bucketed": 1.0, "sharded": 1.0}
    for counted in pool(ranks, backend).run(count, strategies):
        assert list(counted) == list(strategies)
        for seen, timings, seconds in counted.values():
            assert seen == pytest.approx(timings)
            assert seconds > 0


def test_the_command_writes_every_file(tmp_path):
    command = [sys.executable, "-m", "paceline", "bench", "step", "--model", "tiny", "--strategy", "no-sync"]
    command += ["--steps", "1", "--rounds", "2", "--context", "8", "--bucket-mib", "inf", "--no-peak-memory"]
    command += ["--out", tmp_path / "out", "--json", tmp_path / "a" / "r.json", "--csv", tmp_path / "r.csv"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, env=env, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "no synchronisation" in ended.stdout
    names = {
        "step.json",
        "step.csv",
        "step-breakdown.png",
        "step-breakdown.svg",
        "step-buckets.png",
        "step-buckets.svg",
    }
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    measured = json.loads((tmp_path / "a" / "r.json").read_text())
    assert (measured["kind"], measured["schema"]) == ("bench-step", 1)
    assert measured["command"].startswith("paceline bench step --model tiny")
    assert measured["settings"]["bucket_mib"] == ["inf"]
    assert [row["strategy"] for row in measured["rows"]] == ["no-sync", "ddp", "ddp"]
    assert [row["peak_mib"] for row in measured["rows"]] == [None] * 3
    assert len((tmp_path / "r.csv").read_text().splitlines()) == 4


@pytest.mark.thorough
def test_peak_memory_is_that_of_a_training():
    settings = StepSettings(batch_size=1, context=8)
    found = run_step_job(settings, run_ranks, "memory", "tiny", [StrategyVariant("ddp", math.inf)])
    # parameters, gradients and two moments at least; activations are small here, the rest is torch's own
    assert 4 * 4 * SIZE.parameters() < found["peak_nbytes"] < 16 * 4 * SIZE.parameters()
