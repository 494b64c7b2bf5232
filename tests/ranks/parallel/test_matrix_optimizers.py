"""Optimizers of whole matrices (Muon, SOAP, LARS, Adafactor …) on any number of ranks, with every strategy."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import paceline
from matrix_cases import ADAMW, batches, one_process, optimizers, step_on_ranks, update, wrapped
from matrix_models import MATRIX_MODELS, build_matrices
from matrix_optimizers import PER_PARAMETER, GloballyClippedSGD
from model_zoo import loss_of, max_difference
from paceline.errors import UsageError
from paceline.tools.bench.step.comm_traffic import count_traffic
from paceline.tools.models.gpt import GPT, token_loss
from paceline.tools.models.gpt_sizes import GptSize

TOLERANCE = 1e-11
STRATEGIES = ["bucketed", "sharded", "full-shard"]
SMALL_BUCKETS = paceline.Sync(2**-11, shard="optimizer")
SHARES = {1: [10], 2: [4, 16], 3: [10, 4, 6], 4: [10, 10, 4, 16]}
EMPTY = {1: [10], 2: [0, 16], 3: [10, 0, 6], 4: [10, 10, 0, 16]}
WAYS = {
    "equal": (1, None),
    "accumulated": (3, None),
    "clipped": (1, "model"),
    "clipped by torch": (3, "torch"),
}
"""Micro-steps of a step, and whose clipping is called."""

# ------------------------------------------------------------------ equal to one process


def differences(rank, size, sync, cases):
    """Return, per case, the largest difference of any parameter from one process on the whole batches."""
    found = {}
    for case in cases:
        name, kind, way, has_empty = case
        accumulate, clip = WAYS[way]
        if name == "Transposed" and sync == "full-shard" and clip:
            clip = "model"  # FSDP2 shards no such parameter, and torch's function can't clip what is sharded in part
        data = batches(range(3), (EMPTY if has_empty else SHARES)[size], accumulate)
        model, optims = wrapped(name, sync, kind)
        for micro_steps in data:
            step_on_ranks(model, optims, micro_steps, rank, clip)
        found[case] = max_difference(model.whole_parameters(), one_process(name, kind, data, clip))
    return found


def check(pool, ranks, sync, cases, backend="paceline", tolerance=TOLERANCE):
    for found in pool(ranks, backend).run(differences, sync, cases, timeout=200):
        assert {case: gap for case, gap in found.items() if not gap <= tolerance} == {}
        assert len(found) == len(cases)


FEW = [
    ("Unequal", "Muon", "equal", False),
    ("Fused", "Muon", "accumulated", True),
    ("Experts", "Muon", "clipped", False),
    ("Single", "Soap", "clipped by torch", True),
    ("Unequal", "Lars", "equal", True),
    ("Fused", "FactoredRms", "accumulated", False),
    ("Unequal", "Adafactor", "clipped", False),
    ("Sometimes", "Muon", "accumulated", False),
    ("Transposed", "Soap", "equal", True),
]


@pytest.mark.parametrize(("ranks", "backend"), [(2, "paceline"), (3, "gloo")])
@pytest.mark.parametrize("sync", [*STRATEGIES, SMALL_BUCKETS], ids=str)
def test_equal_to_one_process(pool, sync, ranks, backend):
    check(pool, ranks, sync, FEW, backend)


ALL = list(itertools.product(MATRIX_MODELS, PER_PARAMETER, WAYS))


@pytest.mark.thorough
@pytest.mark.parametrize(("ranks", "backend"), [(1, "gloo"), (2, "gloo"), (3, "paceline"), (4, "gloo")])
@pytest.mark.parametrize("sync", ["sharded", "full-shard", SMALL_BUCKETS], ids=str)
def test_every_optimizer_and_model_in_every_way(pool, sync, ranks, backend):
    """Each (model, optimizer, way) occurs on some number of ranks; all models and optimizers occur on each."""
    some = ALL[ranks - 1 :: 4] if ranks > 1 else ALL[::3]
    check(pool, ranks, sync, [(*case, at % 2 == 1) for at, case in enumerate(some)], backend)


@pytest.mark.thorough
@pytest.mark.parametrize("sync", ["naive", "flat", "overlap", "bucketed", "auto"])
def test_strategies_without_shards(pool, sync):
    # the norm is rounded to float32 where the plan may change
    check(pool, 2, sync, FEW, tolerance=1e-7 if sync == "auto" else TOLERANCE)


def fused_and_separate(rank, size, sync):
    """Train with one matrix for query, key and value, split in three, and with three matrices."""
    data = batches(range(3), SHARES[size])
    made = [wrapped(name, sync) for name in ("Fused", "Separate")]
    for micro_steps in data:
        for model, optims in made:
            step_on_ranks(model, optims, micro_steps, rank)
    fused, separate = (
        dict(
            zip(
                [name for name, _ in build_matrices(name).named_parameters()],
                model.whole_parameters(),
                strict=True,
            )
        )
        for name, (model, _) in zip(("Fused", "Separate"), made, strict=True)
    )
    three = torch.cat([separate.pop(f"each.{at}.weight") for at in range(3)])
    whole = fused.pop("qkv.weight")
    return max_difference([whole, *fused.values()], [three, *separate.values()])


@pytest.mark.parametrize("sync", STRATEGIES)
def test_a_split_matrix_is_updated_as_separate_ones(pool, sync):
    assert max(pool(2).run(fused_and_separate, sync)) <= TOLERANCE


def blocks_of_given_sizes(rank, size, sync):
    data = batches(range(3), SHARES[size])
    split = {"*up.weight": [4, 30, 6], "*wide.weight": 48}
    model = paceline.DataParallel(build_matrices("Unequal"), sync=sync)
    optims = optimizers(model, "Soap", split)
    for micro_steps in data:
        step_on_ranks(model, optims, micro_steps, rank)
    return max_difference(model.whole_parameters(), one_process("Unequal", "Soap", data, split=split))


@pytest.mark.parametrize("sync", STRATEGIES)
def test_blocks_may_be_unequal_or_single_rows(pool, sync):
    assert max(pool(3).run(blocks_of_given_sizes, sync)) <= TOLERANCE


# ------------------------------------------------------------------ to the bit

SMALL = GptSize("bits", d_model=96, d_ff=384, layers=2, heads=4, vocabulary=256, context=32)


def beside_ddp(rank, size, sync, kind):
    """Train a GPT beside torch DDP; return whether all parameters have the same bits after each step.

    DDP divides each rank's gradient by the number of ranks and sums, Paceline sums and divides: with a power of two
    that is the same, as no number of this training is so small that it loses digits.
    """
    torch.manual_seed(5)
    nets = [GPT(SMALL), GPT(SMALL)]
    nets[1].load_state_dict(nets[0].state_dict())
    model, ddp = paceline.DataParallel(nets[0], sync=sync), DistributedDataParallel(nets[1])
    matrices, rest = paceline.matrix_parameters(nets[1])
    cls, options = PER_PARAMETER[kind]
    theirs = [
        cls([param for _, param in matrices], **options),
        torch.optim.AdamW([param for _, param in rest], **ADAMW),
    ]
    ours, same = optimizers(model, kind), []
    drawn = torch.Generator().manual_seed(rank)
    for _ in range(4):
        tokens = torch.randint(256, (2, 33), generator=drawn)
        for net, optims in ((model, ours), (ddp, theirs)):
            token_loss(net(tokens[:, :-1]), tokens[:, 1:]).backward()
            update(optims)
        pairs = zip(model.whole_parameters(), ddp.parameters(), strict=True)
        same.append(all(torch.equal(mine, other) for mine, other in pairs))
    return same


@pytest.mark.parametrize("sync", [*STRATEGIES, paceline.Sync(0.1, shard="optimizer")], ids=str)
def test_the_same_bits_as_ddp_with_muon(pool, sync):
    assert pool(2, "paceline").run(beside_ddp, sync, "Muon") == [[True] * 4] * 2


@pytest.mark.thorough
@pytest.mark.parametrize("kind", PER_PARAMETER)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_same_bits_as_ddp_with_every_optimizer(pool, ranks, kind):
    assert pool(ranks, "paceline").run(beside_ddp, "sharded", kind) == [[True] * 4] * ranks


# ------------------------------------------------------------------ collectives of a step


def collectives(rank, size, layers, bucket_mib):
    """Return the collectives of a step in the steady state, and the number of buckets."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(layers)], torch.nn.Linear(16, 1))
    model = paceline.DataParallel(net, sync=paceline.Sync(bucket_mib, shard="optimizer"))
    matrices = [(name, param) for name, param in model.named_parameters() if param.shape == (16, 16)]
    rest = [(name, param) for name, param in model.named_parameters() if param.shape != (16, 16)]
    optims = [
        paceline.ShardedOptimizer(model, torch.optim.Muon, params=matrices, lr=0.01),
        paceline.ShardedOptimizer(model, torch.optim.AdamW, params=rest, lr=0.01),
    ]

    def step():
        model.backward(model(torch.ones(2, 16)).square().mean())
        update(optims)

    for _ in range(3):
        step()
    counted = count_traffic(step, size)
    return counted.calls, sum(1 for _, names in model.engine.bucket_plan() if names)  # the last is the status


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_two_collectives_for_each_bucket_however_many_matrices_it_has(pool, backend):
    """A reduce-scatter and an all-gather of each bucket, and one all-reduce of the status of the round."""
    found = {}
    for layers, bucket_mib in [(2, 25), (20, 25), (20, 2**-8)]:
        for calls, buckets in pool(2, backend).run(collectives, layers, bucket_mib):
            assert calls == 2 * buckets + 1
            found[layers, bucket_mib] = buckets
    assert found[2, 25] == found[20, 25] <= 2  # one for the matrices and one for the rest, or both in one
    assert found[20, 2**-8] > 4


# ------------------------------------------------------------------ wrong use


def refused(rank, size, sync):
    model = paceline.DataParallel(build_matrices("Fused"), sync=sync)
    matrices, rest = paceline.matrix_parameters(model)

    def muon(**options):
        return paceline.ShardedOptimizer(model, torch.optim.Muon, params=matrices, lr=0.02, **options)

    with pytest.raises(UsageError, match=r"(?s)'\*\.qkw\.weight'.*qkv\.weight"):
        muon(split={"*.qkw.weight": 3})
    with pytest.raises(UsageError, match=r"(?s)'qkv\.weight', shape \[24, 8\], into 5 equal blocks.*24 rows"):
        muon(split={"*qkv.weight": 5})
    with pytest.raises(UsageError, match=r"(?s)'qkv\.weight', shape \[24, 8\].*\[8, 8, 9\] rows.*24 rows"):
        muon(split={"*qkv.weight": [8, 8, 9]})
    with pytest.raises(UsageError, match=r"(?s)AdamW, which is elementwise.*whole matrices"):
        paceline.ShardedOptimizer(model, torch.optim.AdamW, params=rest, split={"*": 2})
    for optim in (muon(split={"qkv.weight": 3}), paceline.ShardedOptimizer(model, torch.optim.AdamW, rest)):
        model.backward(loss_of(model, "", *batches([0], SHARES[size])[0][0][rank]))
        optim.step()


@pytest.mark.parametrize("sync", STRATEGIES)
def test_a_split_that_does_not_fit_is_refused(pool, sync):
    pool(2).run(refused, sync)


def muon_for_everything(rank, size, sync):
    model = paceline.DataParallel(build_matrices("Fused"), sync=sync)
    with pytest.raises(UsageError, match=r"(?s)Muon only supports 2D.*matrix_parameters"):
        paceline.ShardedOptimizer(model, torch.optim.Muon, lr=0.02)


@pytest.mark.parametrize("sync", STRATEGIES)
def test_parameters_that_the_optimizer_rejects_are_named_before_the_first_step(pool, sync):
    pool(2).run(muon_for_everything, sync)


def update_one_parameter_twice(model, batch):
    matrices, rest = paceline.matrix_parameters(model)
    optims = [
        paceline.ShardedOptimizer(model, torch.optim.Muon, params=matrices, lr=0.02),
        paceline.ShardedOptimizer(model, torch.optim.AdamW, params=[*matrices[1:2], *rest], lr=0.02),
    ]
    model.backward(loss_of(model, "", *batch))
    update(optims)


def one_parameter_twice(rank, size, sync):
    """Build two optimizers that share a parameter: refused at once, or when both would update it."""
    model = paceline.DataParallel(build_matrices("Fused"), sync=sync)
    with pytest.raises(UsageError, match=r"'qkv\.weight'.*optimizer"):
        update_one_parameter_twice(model, batches([0], SHARES[size])[0][0][rank])


@pytest.mark.parametrize("sync", STRATEGIES)
def test_a_parameter_of_two_optimizers_is_named(pool, sync):
    pool(2).run(one_parameter_twice, sync)


def one_that_reads_all_gradients(rank, size, sync):
    """Refuse it where parameters have owners; elsewhere every rank has all of them."""
    model = paceline.DataParallel(build_matrices("Unequal"), sync=sync)
    matrices, _ = paceline.matrix_parameters(model)
    if sync == "sharded":
        with pytest.raises(UsageError, match=r"GloballyClippedSGD can't .*depends on others"):
            paceline.ShardedOptimizer(model, GloballyClippedSGD, params=matrices, lr=0.1)
        return 0.0
    optim = paceline.ShardedOptimizer(model, GloballyClippedSGD, params=matrices, lr=0.1)
    net = build_matrices("Unequal")
    plain = GloballyClippedSGD([param for _, param in paceline.matrix_parameters(net)[0]], lr=0.1)
    for micro_steps in batches(range(2), SHARES[size]):
        step_on_ranks(model, [optim], micro_steps, rank)
        model.zero_grad()
        loss_of(net, "", *map(torch.cat, zip(*micro_steps[0], strict=True))).backward()
        plain.step()
        net.zero_grad()
    return max_difference(model.whole_parameters(), net.parameters())


@pytest.mark.parametrize("sync", STRATEGIES)
def test_an_optimizer_whose_update_reads_other_parameters_is_refused_where_sharded(pool, sync):
    assert max(pool(2).run(one_that_reads_all_gradients, sync)) <= TOLERANCE


def without_world(rank, size):
    data = batches(range(3), SHARES[1])
    gaps = {}
    for name, kind in [("Fused", "Muon"), ("Experts", "Muon"), ("Unequal", "Soap")]:
        model, optims = wrapped(name, "sharded", kind)
        for micro_steps in data:
            step_on_ranks(model, optims, micro_steps, 0)
        gaps[name] = max_difference(model.whole_parameters(), one_process(name, kind, data))
    return gaps


def test_a_process_without_a_world(pool):
    (gaps,) = pool(1).run(without_world, world=False)
    assert max(gaps.values()) <= TOLERANCE
