"""Predicted steps, worked out by hand from a profile of round numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from paceline.cost_model.backward_simulation import simulate_backward
from paceline.cost_model.bucket_assignment import bucket_caps
from paceline.cost_model.bucket_closed_form import EqualBuckets
from paceline.cost_model.profile_entries import Parameter
from paceline.cost_model.step_costs import pick_step_costs
from paceline.cost_model.step_simulator import Compute, Launch, Wait
from paceline.cost_model.step_strategy import STRATEGIES, StepStrategy, standard_strategies
from paceline.cost_model.step_time import best_simulated_bucket, fastest_step, predict_step, predict_steps
from paceline.cost_model.strategy_step_programs import step_program
from paceline.errors import UsageError
from step_profile import CALL, MIB, OPS, RATE, contention, exchange, model, profile, seconds

COSTS = pick_step_costs(profile())
BARE = 0.5 + 0.9 + 0.2


def exposed(way, costs=COSTS):
    return predict_step(costs, way).exposed


# ---------------------------------------------------------------- ways


def test_predicted_strategies_have_the_names_of_the_engines():
    from paceline.parallel.strategy import STRATEGIES as ENGINES
    from paceline.parallel.strategy import Sync

    assert set(STRATEGIES) - {"ddp"} == set(ENGINES)
    for name in ("naive", "flat", "overlap", "bucketed", "sharded", "sharded-gradients"):
        for total in (MIB, 100 * MIB):
            assert StepStrategy(name).caps(total) == Sync.of(name).bucket_caps(total)
        assert StepStrategy(name).overlaps == Sync.of(name).overlap


def test_torchs_default_starts_with_a_small_bucket():
    assert StepStrategy("ddp").caps(100 * MIB) == (MIB, 25 * MIB)
    assert StepStrategy("ddp").is_default_ddp
    assert StepStrategy("ddp", 25).caps(100 * MIB) == (25 * MIB,)


@pytest.mark.parametrize(
    "arguments",
    [
        ("bucked",),
        ("naive", 5),
        ("full-shard", 5),
        ("bucketed", 0),
        ("bucketed", math.nan),
        ("bucketed", 5, "int2"),
        ("flat", None, "int4"),
        ("ddp", None, "bf16"),
    ],
)
def test_invalid_strategies_are_refused(arguments):
    with pytest.raises(UsageError):
        StepStrategy(*arguments)


# ---------------------------------------------------------------- each way by hand


def test_naive_waits_for_every_parameter():
    each = seconds("all-reduce", MIB)
    assert exposed(StepStrategy("naive")) == pytest.approx(0.1 + 10 * each)  # 0.1: gradients go into buckets


def test_flat_waits_for_one_call():
    assert exposed(StepStrategy("flat")) == pytest.approx(0.1 + seconds("all-reduce", 10 * MIB))


def test_overlap_shows_the_last_call_where_the_network_keeps_up():
    assert seconds("all-reduce", MIB) < 0.1
    assert exposed(StepStrategy("overlap")) == pytest.approx(0.1 + seconds("all-reduce", MIB))


def test_bucketed_is_the_formula_of_equal_buckets():
    small = tuple(Parameter(str(at), MIB / 16, 0.1 * (at + 1)) for at in range(10))  # no bucket need grow
    slow = pick_step_costs(profile(call=0.15, models=(model(parameters=small),)))
    for size, count in ((1 / 16, 10), (2 / 16, 5), (5 / 16, 2)):
        job = EqualBuckets(10 / 16 * MIB, RATE, 0.15, 1.0)
        assert exposed(StepStrategy("bucketed", size), slow) == pytest.approx(
            0.1 + job.overhead(count), rel=1e-6
        )


def test_the_steps_parts_add_up_to_it_for_every_strategy():
    for time in predict_steps(
        COSTS, standard_strategies([1.0, 4.0, math.inf], compressions=["bf16", "int4"])
    ):
        parts = time.forward + time.backward + time.exposed + time.optimizer
        assert parts == pytest.approx(time.seconds)
        assert time.low <= time.seconds <= time.high
        assert min(time.exposed, time.gather, time.optimizer) >= 0
        assert time.gather <= time.exposed + 1e-12
        assert time.seconds >= BARE / 2  # a shard of the update is shorter


def test_sharded_updates_part_by_part_and_gathers():
    whole = step_program(COSTS, StepStrategy("sharded", 2))
    program = whole.steps[whole.earlier :]
    updates = [step for step in program if isinstance(step, Compute) and step.phase == "optimizer"]
    # parts of at least 4 MiB: buckets of 1, 2, 2 and of 2, 2 MiB, then the last one of 1
    assert len(updates) == 3
    assert [step.seconds for step in updates] == pytest.approx([0.001 + 0.05, 0.001 + 0.04, 0.001 + 0.01])
    gathers = [step for step in program if isinstance(step, Launch) and step.phase == "optimizer"]
    assert sorted(step.nbytes for step in gathers) == [MIB] * 2 + [2 * MIB] * 4
    assert program[-1] == gathers[-1], "the gathers are left in flight"
    reduces = [step for step in program if isinstance(step, Launch) and step.phase == "exposed"]
    assert len(reduces) == 7  # six buckets and the ledger
    assert reduces[-2].nbytes < MIB, "the ledger goes right before the last gradients"
    after = program[program.index(reduces[-1]) + 1]
    assert isinstance(after, Wait)
    assert after.key == reduces[-2].key, "only the ledger is waited for in backward"


def test_gradients_are_freed_when_the_second_bucket_after_them_is_launched():
    whole = step_program(COSTS, StepStrategy("sharded-gradients", 2))
    program = whole.steps[whole.earlier :]
    calls = [step for step in program if isinstance(step, Launch | Wait) and step.phase == "exposed"]
    launched = [step.key for step in calls if isinstance(step, Launch)]
    for earlier, latest in ((0, 2), (1, 3)):
        after = calls[calls.index(next(step for step in calls if step.key == launched[latest])) + 1]
        assert after == Wait(launched[earlier], "exposed")
    sharded = predict_step(COSTS, StepStrategy("sharded", 2))
    assert predict_step(COSTS, StepStrategy("sharded-gradients", 2)).seconds == pytest.approx(sharded.seconds)


def test_forward_waits_for_the_gathers_of_the_step_before_where_it_uses_them():
    whole = step_program(COSTS, StepStrategy("sharded", 2))
    sent = [step.key for step in whole.steps[: whole.earlier] if isinstance(step, Launch)][-6:]
    forward = whole.steps[whole.earlier :][:13]
    waits = [step.key for step in forward if isinstance(step, Wait)]
    # the last bucket is used first; within a part, buckets are sent in their order
    assert waits == [sent[0], sent[2], sent[1], sent[5], sent[4], sent[3]]
    computes = [step.seconds for step in forward if isinstance(step, Compute)]
    assert computes == pytest.approx([0, 0.05, 0.1, 0.1, 0.1, 0.1, 0.05], abs=1e-12)


def test_gathers_are_hidden_under_forward_but_for_the_one_it_uses_first():
    found = predict_step(COSTS, StepStrategy("sharded", 2))
    assert found.gather == pytest.approx(seconds("", MIB))


def test_gathers_that_take_longer_than_forward_are_exposed_by_hand():
    slow = pick_step_costs(profile(call=0.4))
    gathers = 4 * seconds("", 2 * MIB, call=0.4) + 2 * seconds("", MIB, call=0.4)
    found = predict_step(slow, StepStrategy("sharded", 2))
    # six in a row after the last update; the last one is used 0.25 s into forward
    assert found.gather == pytest.approx(gathers - 0.25, rel=1e-6)


def test_sharded_by_hand():
    found = predict_step(COSTS, StepStrategy("sharded", math.inf))
    ledger, reduce, gather = (seconds("", n) for n in (80, 10 * MIB, 10 * MIB))
    update = 0.001 + 0.02 * 5
    # the fits' own gap: the reduce-scatter starts when the ledger's gather makes room
    assert found.optimizer == pytest.approx(update)
    assert found.seconds == pytest.approx(0.5 + 1.0 + ledger + reduce + update + gather, rel=1e-6)
    assert found.gather == pytest.approx(gather, rel=1e-6)


def test_full_shard_gathers_units_twice_and_the_root_once():
    program = step_program(COSTS, StepStrategy("full-shard")).steps
    ops = [step.nbytes for step in program if isinstance(step, Launch)]
    assert ops == [5 * MIB] * 5  # root and unit; unit again; both reduced
    found = predict_step(COSTS, StepStrategy("full-shard"))
    assert found.optimizer == pytest.approx(0.1)
    assert found.exposed == pytest.approx(5 * seconds("", 5 * MIB))


def test_torchs_last_bucket_does_not_wait_for_the_end_of_backward():
    early = tuple(Parameter(str(at), MIB, 0.05 * (at + 1)) for at in range(10))
    costs = pick_step_costs(profile(models=(model(parameters=early),)))
    ours, theirs = (predict_step(costs, StepStrategy(name, math.inf)) for name in ("bucketed", "ddp"))
    call = seconds("all-reduce", 10 * MIB)
    assert ours.seconds == pytest.approx(0.5 + 1.0 + call + 0.2)
    assert theirs.seconds == pytest.approx(0.5 + max(1.0, 0.5 + call) + 0.2)


def test_compressed_buckets_cost_their_bytes():
    whole, half = (exposed(StepStrategy("bucketed", 100, name)) for name in ("none", "bf16"))
    assert whole == pytest.approx(0.1 + seconds("all-reduce", 10 * MIB))
    assert half == pytest.approx(0.1 + 2 * seconds("", 5 * MIB))


def test_cores_that_are_shared_slow_both():
    shared = pick_step_costs(profile(computing=1.5, calls=1.3))
    for way in (
        StepStrategy("overlap"),
        StepStrategy("bucketed", 2),
        StepStrategy("sharded", 2),
        StepStrategy("ddp", 2),
    ):
        assert predict_step(shared, way).seconds > predict_step(COSTS, way).seconds
    for way in (StepStrategy("naive"), StepStrategy("flat")):  # nothing overlaps
        assert predict_step(shared, way).seconds == pytest.approx(predict_step(COSTS, way).seconds)


def test_launching_costs_the_rank():
    busy = pick_step_costs(profile(launch=0.002))
    assert exposed(StepStrategy("naive"), busy) == pytest.approx(exposed(StepStrategy("naive")) + 10 * 0.002)


def test_the_best_sends_gradients_whole():
    times = predict_steps(COSTS, standard_strategies([1.0, 5.0], compressions=["int4"]))
    assert fastest_step(times).strategy.compression == "none"
    assert fastest_step(times).seconds == min(
        time.seconds for time in times if time.strategy.compression == "none"
    )


# ---------------------------------------------------------------- buckets


def test_the_closed_forms_values_are_those_of_the_prices():
    job = COSTS.equal_buckets()
    assert job.call_seconds == pytest.approx(CALL, rel=1e-6)
    assert job.bytes_per_second == pytest.approx(RATE, rel=1e-6)
    assert job.nbytes == 10 * MIB
    assert job.backward_seconds == 1.0


def test_the_simulated_bucket_is_at_least_as_good_as_all_that_were_tried():
    slow = pick_step_costs(profile(call=0.15))
    best = best_simulated_bucket(slow)
    assert best.backward.end == min(backward.end for _, backward in best.tried)
    at = slow.equal_buckets().best().nbytes
    ready = [each.ready for each in slow.step.parameters]
    formula = simulate_backward(
        ready, bucket_caps(at, 10 * MIB), slow.engine["all-reduce"].channel, backward_seconds=1.0
    )
    assert best.backward.exposed <= formula.exposed


# ---------------------------------------------------------------- missing and available entries of a profile


def test_ambiguous_or_missing_entries_are_reported():
    with pytest.raises(UsageError, match="has no training step"):
        pick_step_costs(type(profile())())
    with pytest.raises(UsageError, match="no step with model 'nett'"):
        pick_step_costs(profile(), "nett")
    two = profile(models=(model(), model(name="other")))
    with pytest.raises(UsageError, match="differ in model: net, other"):
        pick_step_costs(two)
    assert pick_step_costs(two, "other").step.model == "other"
    with pytest.raises(UsageError, match="differ in batch: 4, 8"):
        pick_step_costs(profile(models=(model(), model(batch=8))))
    more = profile().with_entries(exchanges=[exchange("all-reduce", False, network="wifi")])
    with pytest.raises(UsageError, match="differ in network: lab, wifi"):
        pick_step_costs(more)
    with pytest.raises(UsageError, match="lacks all-reduce"):
        pick_step_costs(more, network="wifi")
    with pytest.raises(UsageError, match="1 ranks"):
        pick_step_costs(profile(), ranks=1)


def test_without_torchs_calls_only_its_ddp_is_missing():
    bare = profile()
    ours = type(bare)(
        exchanges=tuple(each for each in bare.exchanges if each.caller == "paceline"),
        models=bare.models,
        contentions=bare.contentions,
    )
    costs = pick_step_costs(ours)
    predict_step(costs, StepStrategy("sharded", 1))
    with pytest.raises(UsageError, match=r"no all-reduce of torch's"):
        predict_step(costs, StepStrategy("ddp"))


def test_an_exchange_that_was_not_measured_is_named():
    made = profile()
    kept = tuple(each for each in made.exchanges if each.fit.op == "all-reduce")
    costs = pick_step_costs(type(made)(exchanges=kept, models=made.models, contentions=made.contentions))
    assert (
        predict_step(costs, StepStrategy("bucketed", 5)).seconds
        == predict_step(COSTS, StepStrategy("bucketed", 5)).seconds
    )
    for way in (StepStrategy("sharded", 5), StepStrategy("full-shard"), StepStrategy("bucketed", 5, "int8")):
        with pytest.raises(UsageError, match=r"the profile has no (reduce-scatter|all-gather)\n"):
            predict_step(costs, way)


def test_torchs_calls_are_those_of_the_backend_that_torch_has_there():
    nccl = [
        *(exchange("all-reduce", queued, "torch", "nccl", call=1e-6) for queued in (False, True)),
        *(exchange(op, queued, backend="nccl", call=1e-6) for op in OPS for queued in (False, True)),
    ]
    contentions = [contention("all-reduce", "torch", "nccl"), *(contention(op, backend="nccl") for op in OPS)]
    on_nccl = replace(model(), device="H100", backend="nccl")
    both = profile().with_entries(exchanges=nccl, models=[on_nccl], contentions=contentions)
    for backend, call in (("gloo", CALL), ("nccl", 1e-6)):
        costs = pick_step_costs(both, backend=backend)
        assert costs.torch_ddp.alone.backend == backend
        assert costs.torch_ddp.seconds(MIB) == pytest.approx(seconds("all-reduce", MIB, call))
    ours = [exchange(op, queued, backend="paceline") for op in OPS for queued in (False, True)]
    in_memory = both.with_entries(
        exchanges=ours,
        models=[replace(model(), backend="paceline")],
        contentions=[contention(op, backend="paceline") for op in OPS],
    )
    assert pick_step_costs(in_memory, backend="paceline").torch_ddp.alone.backend == "gloo"


def test_other_numbers_of_ranks_are_predicted_and_noted():
    costs = pick_step_costs(profile(), ranks=8)
    found = predict_step(costs, StepStrategy("flat"))
    assert found.seconds > predict_step(COSTS, StepStrategy("flat")).seconds  # a ring of 8 has more to send
    assert "computing was measured with 2 ranks" in found.beyond
    assert "all-reduce was measured with 2 ranks" in found.beyond
    assert predict_step(COSTS, StepStrategy("naive")).beyond is None


def test_sizes_beyond_what_was_measured_are_noted():
    big = (Parameter("w", 1000 * MIB, 1.0),)
    found = predict_step(pick_step_costs(profile(models=(model(parameters=big),))), StepStrategy("flat"))
    assert found.beyond == "all-reduce was measured up to 16 MiB"


def test_the_nearest_number_of_ranks_computes():
    models = (model(), model(ranks=8))
    made = profile(models=models).with_entries(contentions=[contention("all-reduce", ranks=8)])
    assert pick_step_costs(made, ranks=6).step.ranks == 8
    assert pick_step_costs(made, ranks=3).step.ranks == 2
