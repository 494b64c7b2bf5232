"""Two axes: shard inside a host, replicate between hosts; equal to one process, and to the bit on all replicas."""

from __future__ import annotations

import itertools
import math
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import model_zoo
import paceline
from model_zoo import max_difference
from paceline.errors import BackwardFailed
from paceline.parallel.gradient_collectives import Comm
from paceline.parallel.two_axis_collectives import TwoAxisComm

ADAMW = {"lr": 0.02, "weight_decay": 0.05}
TOLERANCE = 1e-12
SHARES = [5, 0, 9, 4]
EQUAL = [6, 6, 6, 6]
SHARDED = ["sharded", "full-shard"]

_meshes: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, int], object]] = WeakKeyDictionary()


def mesh_of(replicas, shards):
    """Return a mesh of all ranks, the same one for all cases of a world."""
    known = _meshes.setdefault(dist.group.WORLD, {})
    if (replicas, shards) not in known:
        names = ("replicate", "shard")
        known[replicas, shards] = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=names)
    return known[replicas, shards]


def batches(shares, number):
    """Return the inputs and targets of each rank in one micro-step."""
    generator = torch.Generator().manual_seed(1000 + number)
    x = torch.randn(sum(shares), model_zoo.WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randn(sum(shares), 1, generator=generator, dtype=torch.float64)
    return list(zip(x.split(shares), y.split(shares), strict=True))


class Case:
    """How a model is trained.

    Args:
        name: of the model.
        shares: samples of each rank.
        micro: backwards per step.
        clip: largest norm; None: no clipping.
        kept: gradients of an even step are not used, and not dropped before the next one.
        equal: ``loss.backward()``, by which every rank counts the same.
    """

    def __init__(self, name="Plain", *, shares=SHARES, micro=1, clip=None, kept=False, equal=False):
        self.name, self.shares, self.micro, self.clip = name, shares, micro, clip
        self.kept, self.equal = kept, equal

    def __repr__(self):
        return ", ".join(f"{key}={value}" for key, value in vars(self).items())

    def uses(self, step):
        return not self.kept or step % 2 == 1

    def one_process(self, steps):
        """Train without Paceline; return the parameters and the norms."""
        model, norms = model_zoo.build(self.name), []
        optim = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW)
        rounds, collected = [], []
        for step in steps:
            collected += [batches(self.shares, 10 * step + micro) for micro in range(self.micro)]
            if self.uses(step):
                rounds.append(collected)
                collected = []
        for each in rounds:
            if self.equal:
                for parts in each:
                    x, y = (torch.cat(side) for side in zip(*parts, strict=True))
                    model_zoo.loss_of(model, self.name, x, y).backward()
            else:
                x, y = (torch.cat(side) for side in zip(*itertools.chain(*each), strict=True))
                model_zoo.loss_of(model, self.name, x, y).backward()
            if self.clip:
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip).item())
            optim.step()
            optim.zero_grad()
        return [param.detach() for param in model.parameters()], norms

    def steps(self, model, optim, place, steps):
        """Train on this rank's part of each batch; return the norms."""
        norms = []
        for step in steps:
            for micro in range(self.micro):
                x, y = batches(self.shares, 10 * step + micro)[place]
                if micro < self.micro - 1:
                    with model.accumulate():
                        self.backward(model, x, y)
                else:
                    self.backward(model, x, y)
            if self.uses(step):
                if self.clip:
                    norms.append(model.clip_grad_norm_(self.clip).item())
                optim.step()
                optim.zero_grad()
        return norms

    def backward(self, model, x, y):
        if not len(x):
            model.backward(None, samples=0)
        elif self.equal:
            model_zoo.loss_of(model, self.name, x, y).backward()
        else:
            model.backward(model_zoo.loss_of(model, self.name, x, y), samples=len(x))


CASES = [
    Case(clip=0.3),
    Case(micro=3, clip=0.3),
    Case("Branches"),
    Case("Tied", micro=2),
    Case("Strided"),
    Case("Unused", shares=EQUAL, equal=True, clip=0.3),
    Case("Plain", kept=True),
    Case("Plain", shares=EQUAL, equal=True, kept=True, micro=2),
    Case("CheckpointedReentrant"),
]
PER_PARAMETER = paceline.Sync(bucket_mib=0, shard="optimizer")
"""Many second stages are on their way at the same time."""


def build(name="Plain", sync="sharded", group=None, **options):
    model = paceline.DataParallel(model_zoo.build(name), sync=sync, group=group, **options)
    return model, paceline.ShardedOptimizer(model, torch.optim.AdamW, **ADAMW)


def compared(rank, size, sync, axes, cases):
    """Return, per case, the largest difference from one process, and the parameters."""
    found = {}
    for case in cases:
        model, optim = build(case.name, sync, mesh_of(*axes))
        norms = case.steps(model, optim, rank, range(4))
        expected, expected_norms = case.one_process(range(4))
        gap = max_difference(model.whole_parameters(), expected)
        gaps = [abs(a - b) for a, b in zip(norms, expected_norms, strict=True)]
        found[str(case)] = max(gap, *gaps, 0.0), model.whole_parameters()
    return found


def check(found):
    """Compare with one process, and all ranks with each other, to the bit."""
    for case, (_, first) in found[0].items():
        for rank, others in enumerate(found):
            gap, params = others[case]
            assert gap <= TOLERANCE, case
            for one, other in zip(first, params, strict=True):
                assert torch.equal(one, other), (case, rank)


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
@pytest.mark.parametrize("sync", [*SHARDED, PER_PARAMETER], ids=str)
def test_equal_to_one_process_and_alike_on_all_replicas(pool, backend, sync):
    check(pool(4, backend).run(compared, sync, (2, 2), CASES, timeout=240))


@pytest.mark.parametrize("sync", SHARDED)
@pytest.mark.parametrize("axes", [(4, 1), (1, 4)], ids=str)
def test_an_axis_of_one_rank(pool, sync, axes):
    check(pool(4, "paceline").run(compared, sync, axes, CASES[:2], timeout=120))


@pytest.mark.parametrize("sync", ["naive", "flat", "bucketed"])
def test_where_nothing_is_sharded_all_ranks_are_replicas(pool, sync):
    check(pool(4, "paceline").run(compared, sync, (2, 2), CASES[:2]))


# ------------------------------------------------------------------ what each rank holds and sends


def layout_of(rank, size):
    model, optim = build(sync=paceline.Sync(bucket_mib=math.inf, shard="optimizer"), group=mesh_of(2, 2))
    CASES[0].steps(model, optim, rank, range(2))
    model.backward(model_zoo.loss_of(model, "Plain", *batches(EQUAL, 0)[rank]), samples=6)
    sent, nbytes = model.timings.sent_nbytes, model.engine.buckets[0].flat.nbytes
    status = model.engine.buckets[-1].flat.nbytes
    ranges = [
        (name, part["start"], part["stop"])
        for name, parts in optim.state_dict()["shards"].items()
        for part in parts
    ]
    comm = model.comm
    assert isinstance(comm, TwoAxisComm)
    assert (comm.size, comm.shards, comm.ranks) == (4, 2, frozenset(range(4)))
    assert (sent - 1.5 * status) / nbytes == pytest.approx(1 / 2 + 2 / 4)
    return comm.replica, comm.shard, ranges


def test_replicas_hold_the_same_half_of_the_state(pool):
    found = pool(4).run(layout_of)
    assert [(replica, shard) for replica, shard, _ in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    ranges = [each for *_, each in found]
    assert ranges[0] == ranges[2]
    assert ranges[1] == ranges[3]
    assert set(ranges[0]) != set(ranges[1])


def between_calls_of_the_program(rank, size):
    """Use the mesh's own groups while second stages are on their way."""
    mesh, case = mesh_of(2, 2), CASES[0]
    model, optim = build(sync=PER_PARAMETER, group=mesh)
    total = 0.0
    for step in range(4):
        x, y = batches(SHARES, 10 * step)[rank]
        case.backward(model, x, y)
        for axis in (0, 1):
            number = torch.tensor(float(rank))
            dist.all_reduce(number, group=mesh.get_group(axis))
            total += number.item()
        model.clip_grad_norm_(0.3)
        optim.step()
        optim.zero_grad()
    return max_difference(model.whole_parameters(), case.one_process(range(4))[0]), total


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_the_program_may_use_the_groups_of_the_mesh(pool, backend):
    found = pool(4, backend).run(between_calls_of_the_program)
    assert all(gap <= TOLERANCE for gap, _ in found)
    assert [total for _, total in found] == [
        4.0 * (2 * (rank % 2) + 2 + 4 * (rank // 2) + 1) for rank in range(4)
    ]


def two_models(rank, size):
    """Train two models on one mesh, with both gradients on their way at the same time; give one up in between."""
    case, gaps = CASES[0], []
    pairs = [build(sync=PER_PARAMETER, group=mesh_of(2, 2)) for _ in range(2)]
    for step in range(4):
        x, y = batches(SHARES, 10 * step)[rank]
        for model, _ in pairs:
            case.backward(model, x, y)
        given_up, _ = build(sync=PER_PARAMETER, group=mesh_of(2, 2))
        case.backward(given_up, x, y)
        del given_up
        for model, optim in reversed(pairs):
            model.clip_grad_norm_(0.3)
            optim.step()
            optim.zero_grad()
    expected = case.one_process(range(4))[0]
    gaps += [max_difference(model.whole_parameters(), expected) for model, _ in pairs]
    return max(gaps)


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_models_on_one_mesh_do_not_mix(pool, backend):
    assert max(pool(4, backend).run(two_models)) <= TOLERANCE


def mean_hook(state, bucket):
    dist.all_reduce(bucket.buffer())
    return bucket.buffer().div_(dist.get_world_size())


def hooked(rank, size):
    case = CASES[0]
    model, optim = build(group=mesh_of(2, 2))
    model.register_comm_hook(None, mean_hook)
    case.steps(model, optim, rank, range(3))
    return max_difference(model.whole_parameters(), case.one_process(range(3))[0])


def test_a_communication_hook_sees_all_ranks(pool):
    assert max(pool(4).run(hooked)) <= TOLERANCE


def on_some_ranks(rank, size, sync):
    """Train on ranks 0, 1, 3 and 4 of five, in an order of its own."""
    mesh = DeviceMesh("cpu", [[3, 4], [0, 1]], mesh_dim_names=("between", "inside"))
    if rank == 2:
        with pytest.raises(paceline.errors.UsageError, match="not in the device mesh of ranks"):
            paceline.DataParallel(model_zoo.build("Plain"), sync=sync, group=mesh)
        return 0.0
    place = [3, 4, 0, 1].index(rank)
    gaps = []
    for _ in range(2):
        model, optim = build(sync=sync, group=mesh)
        CASES[1].steps(model, optim, place, range(3))
        gaps.append(max_difference(model.whole_parameters(), CASES[1].one_process(range(3))[0]))
    assert model.comm.ranks == {0, 1, 3, 4}
    return max(gaps)


@pytest.mark.parametrize(
    ("backend", "sync"), [("paceline", "sharded"), ("gloo", "full-shard"), ("gloo", "flat")]
)
def test_a_mesh_of_some_ranks_in_any_order(pool, backend, sync):
    assert max(pool(5, backend).run(on_some_ranks, sync, timeout=120)) <= TOLERANCE


def flat_for_others(rank, size):
    mesh = mesh_of(2, 2)
    model = paceline.DataParallel(model_zoo.build("Plain"), sync="auto", group=mesh)
    loader = paceline.Loader(torch.arange(8.0), 1, group=mesh)
    return type(model.comm) is Comm, model.comm.size, sorted(float(x) for batch in loader for x in batch)


def test_auto_and_loaders_take_a_mesh_as_one_group(pool):
    found = pool(4).run(flat_for_others)
    assert [each[:2] for each in found] == [(True, 4)] * 4
    assert sorted(itertools.chain(*(each[2] for each in found))) == list(range(8))


# ------------------------------------------------------------------ failures


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise FloatingPointError("injected")


def after_a_failed_backward(rank, size):
    case = CASES[0]
    model, optim = build(sync=PER_PARAMETER, group=mesh_of(2, 2))
    case.steps(model, optim, rank, range(2))
    x, y = batches(EQUAL, 99)[rank]
    loss = model_zoo.loss_of(model, "Plain", x, y)
    with pytest.raises(FloatingPointError if rank == 3 else BackwardFailed):
        model.backward(Fails.apply(loss) if rank == 3 else loss, samples=6)
    case.steps(model, optim, rank, range(2, 4))
    return max_difference(model.whole_parameters(), case.one_process(range(4))[0])


def test_training_goes_on_after_a_failed_backward(pool):
    assert max(pool(4, "paceline").run(after_a_failed_backward)) <= TOLERANCE


def guarded(rank, size, sync):
    """Skip the step in which rank 2 has an infinite loss."""
    case = Case(shares=EQUAL)
    model, optim = build(sync=sync, group=mesh_of(2, 2))
    guard = paceline.NonFiniteGuard(model, optim, action="skip")
    for step in (0, 7, 1):
        x, y = batches(EQUAL, 10 * step)[rank]
        loss = model_zoo.loss_of(model, "Plain", x, y)
        model.backward(loss * math.inf if (rank, step) == (2, 7) else loss, samples=6)
        optim.step()
        optim.zero_grad()
    assert guard.latest is not None
    gap = max_difference(model.whole_parameters(), case.one_process(range(2))[0])
    return gap, guard.skipped, guard.latest.ranks, len(guard.latest.names), model.whole_parameters()


@pytest.mark.parametrize("sync", SHARDED)
def test_a_gradient_that_is_not_finite_is_skipped_on_all_ranks(pool, sync):
    found = pool(4, "paceline").run(guarded, sync)
    for gap, skipped, ranks, names, params in found:
        assert gap <= TOLERANCE
        assert (skipped, ranks, names) == (1, (2,), found[0][3])
        assert all(torch.equal(*pair) for pair in zip(params, found[0][4], strict=True))


def one_replica_changes(rank, size):
    model, optim = build(group=mesh_of(2, 2))
    CASES[0].steps(model, optim, rank, range(1))
    if rank == 3:
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
    with pytest.raises(paceline.errors.ReplicasDiverged, match="rank 3 holds another parameter"):
        CASES[0].steps(model, optim, rank, range(1, 3))


def test_a_replica_that_differs_is_found(pool):
    pool(4, "paceline").run(one_replica_changes)
