"""`paceline.DistributedDataParallel` beside torch's class: the same gradients, surface and refusals."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import logging
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import model_zoo
import paceline
import paceline.ddp
from engine_cases import loss_on, same_on_all_ranks
from model_zoo import max_difference
from paceline.errors import BackwardFailed, MismatchError, ReplicasDiverged, SyncError, UsageError
from paceline.parallel import ddp
from rank_pool import RankError

OursDDP = paceline.DistributedDataParallel


def train(kind, rank, size, name, options, accumulate=1, steps=4):
    model = kind(model_zoo.build(name), **options)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        for micro in range(accumulate):
            last = micro == accumulate - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss_on(model, rank, accumulate * step + micro, name).backward()
        optim.step()
        optim.zero_grad()
    return list(model.parameters())


def beside_torch(rank, size, *case):
    ours, theirs = train(OursDDP, rank, size, *case), train(TorchDDP, rank, size, *case)
    return same_on_all_ranks(ours), max_difference(ours, theirs)


OPTIONS = {
    "plain": ("Plain", {}),
    "small buckets": ("Plain", {"bucket_cap_mb": 0.0001}),
    "views": ("Plain", {"gradient_as_bucket_view": True}),
    "static graph": ("Unused", {"static_graph": True}),
    "unused parameters": ("Unused", {"find_unused_parameters": True}),
    "branches": ("Branches", {"find_unused_parameters": True, "bucket_cap_mb": 0.0001}),
    "tied": ("Tied", {}),
    "frozen": ("Frozen", {}),
    "buffers stay": ("Plain", {"forward_sync_buffers": False, "init_sync": False}),
}


@pytest.mark.sweep
@pytest.mark.parametrize("way", OPTIONS)
@pytest.mark.parametrize("size", [2, 3])
def test_training_equals_torchs_class(pool, size, way):
    for same, gap in pool(size).run(beside_torch, *OPTIONS[way]):
        assert same
        assert gap < 1e-13


def test_accumulation_under_no_sync_equals_torchs_class(pool):
    for same, gap in pool(2).run(beside_torch, "Plain", {}, 3):
        assert same
        assert gap < 1e-13


# ------------------------------------------------------------------ surface


def test_the_signature_is_torchs():
    ours, theirs = (inspect.signature(kind.__init__).parameters for kind in (OursDDP, TorchDDP))
    assert list(ours) == list(theirs)
    assert [each.default for each in ours.values()] == [each.default for each in theirs.values()]


def looks_like_torchs(rank, size):
    model = OursDDP(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)), device_ids=[0])
    kept = model.state_dict()
    model.load_state_dict(kept)
    model.train().eval()
    return (
        isinstance(model, TorchDDP),
        list(kept),
        model.require_backward_grad_sync,
        model.device_ids,
        type(model.module).__name__,
        model.broadcast_buffers,
    )


def test_libraries_take_it_for_torchs_class(pool):
    names = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    keys = [f"module.0.{name}" for name in names[:2]] + [f"module.1.{name}" for name in names]
    assert pool(2).run(looks_like_torchs) == [(True, keys, True, None, "Sequential", True)] * 2


def logged_options(rank, size):
    records = []
    ddp._logged.clear()  # this process may have logged before
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    log = logging.getLogger("paceline.parallel")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    for _ in range(2):
        OursDDP(torch.nn.Linear(2, 2), find_unused_parameters=True, batched_grad_copy=True, device_ids=[rank])
    log.removeHandler(handler)
    return records


def test_options_without_effect_are_logged_once(pool):
    for records in pool(2).run(logged_options):
        assert len(records) == len(set(records)) == 3
        assert all("has no effect" in text for text in records)


def installed_and_back(rank, size):
    paceline.ddp.install()
    try:
        inside = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    finally:
        paceline.ddp.uninstall()
    return type(inside) is OursDDP, torch.nn.parallel.DistributedDataParallel is TorchDDP


def test_install_replaces_torchs_name_and_uninstall_restores_it(pool):
    assert pool(2).run(installed_and_back) == [(True, True)] * 2


def pickled_and_copied(rank, size):
    model = OursDDP(model_zoo.build("Plain"))
    loss_on(model, rank, 0).backward()
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    again = [
        pickle.loads(pickle.dumps(model)),
        copy.deepcopy(model),
        torch.load(stream, weights_only=False),
    ]
    gaps = []
    for each in again:
        each.zero_grad()
        model.zero_grad()
        loss_on(each, rank, 1).backward()
        loss_on(model, rank, 1).backward()
        gaps.append(max_difference([p.grad for p in each.parameters()], [p.grad for p in model.parameters()]))
    return gaps


def test_a_pickled_or_copied_model_synchronises_as_the_first(pool):
    assert pool(2).run(pickled_and_copied) == [[0.0, 0.0, 0.0]] * 2


def pickled_with_a_group(rank, size):
    model = OursDDP(torch.nn.Linear(2, 2), process_group=dist.new_group())
    pickle.dumps(model)


def test_a_model_with_a_group_of_its_own_is_not_pickled(pool):
    with pytest.raises(RankError) as caught:
        pool(2).run(pickled_with_a_group)
    assert "Pickling/Unpickling are only supported" in str(caught.value.cause)


def on_a_mesh(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    ours = OursDDP(model_zoo.build("Plain"), device_mesh=mesh)
    loss_on(ours, rank, 0).backward()
    return same_on_all_ranks([param.grad for param in ours.parameters()])


def test_a_device_mesh_takes_the_place_of_a_group(pool):
    assert pool(2).run(on_a_mesh) == [True, True]


def test_mixed_precision_is_refused():
    with pytest.raises(UsageError, match=r"mixed_precision.*\n.*torch\.autocast"):
        OursDDP(torch.nn.Linear(2, 2), mixed_precision=object())


# ------------------------------------------------------------------ what the class promises beyond torch's


def models_that_differ(rank, size):
    net = torch.nn.Linear(2, 2)
    if rank == 1:
        net.double()
    OursDDP(net)


def test_ranks_with_another_dtype_are_named(pool):
    with pytest.raises(RankError) as caught:
        pool(3).run(models_that_differ)
    assert isinstance(caught.value.cause, MismatchError)
    assert "rank 1" in str(caught.value.cause)
    assert "float64" in str(caught.value.cause)


def options_that_differ(rank, size):
    OursDDP(torch.nn.Linear(2, 2), bucket_cap_mb=1 + rank)


def test_ranks_with_another_bucket_size_are_named(pool):
    with pytest.raises(RankError) as caught:
        pool(2).run(options_that_differ)
    assert isinstance(caught.value.cause, MismatchError)


def fails_in_backward(rank, size):
    model = OursDDP(model_zoo.build("Plain"))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(3):
        failing = next(model.parameters()).register_hook(lambda _grad: 1 / 0)
        if not (step == 1 and rank == 1):
            failing.remove()
        try:
            loss_on(model, rank, step).backward()
            optim.step()
        except (BackwardFailed, ZeroDivisionError) as error:
            with contextlib.suppress(SyncError):
                model.engine.recover()
            seen.append(type(error).__name__)
        failing.remove()
        optim.zero_grad()
    return seen, same_on_all_ranks(list(model.parameters()))


def test_an_exception_in_one_backward_reaches_all_ranks_and_training_goes_on(pool):
    results = pool(2).run(fails_in_backward)
    assert results == [(["BackwardFailed"], True), (["ZeroDivisionError"], True)]


def steps_under_no_sync(rank, size):
    model = OursDDP(model_zoo.build("Plain"))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        with model.no_sync():
            loss_on(model, rank, step).backward()
        optim.step()
        optim.zero_grad()
    return same_on_all_ranks(list(model.parameters()))


def test_a_step_under_no_sync_uses_the_mean_over_ranks(pool):
    assert pool(2).run(steps_under_no_sync) == [True, True]


def forward_decides(rank, size):
    model = OursDDP(model_zoo.build("Plain"))
    with model.no_sync():
        loss = loss_on(model, rank, 0)
    loss.backward()
    local = same_on_all_ranks([param.grad for param in model.parameters()])
    model.zero_grad()
    loss = loss_on(model, rank, 1)
    with model.no_sync():
        loss.backward()
    return local, same_on_all_ranks([param.grad for param in model.parameters()])


def test_the_forward_decides_about_synchronisation_as_in_torch(pool):
    assert pool(2).run(forward_decides) == [(False, True)] * 2


def flag_set_by_hand(rank, size):
    model = OursDDP(model_zoo.build("Plain"))
    for micro in range(3):
        model.require_backward_grad_sync = micro == 2
        loss_on(model, rank, micro).backward()
    return model.engine.step, same_on_all_ranks([param.grad for param in model.parameters()])


def test_require_backward_grad_sync_saves_rounds(pool):
    assert pool(2).run(flag_set_by_hand) == [(1, True)] * 2


def leaves_a_parameter_out(rank, size):
    model = OursDDP(model_zoo.build("Unused"))
    loss_on(model, rank, 0, "Unused").backward()
    loss_on(model, rank, 1, "Unused")


def test_an_unused_parameter_is_refused_at_the_next_forward_on_all_ranks(pool):
    with pytest.raises(RankError) as caught:
        pool(2).run(leaves_a_parameter_out)
    assert len(caught.value.failures) == 2
    assert isinstance(caught.value.cause, SyncError)
    assert "did not receive grad" in str(caught.value.cause)


def adversaries(kind, rank):
    """Train a generator and a discriminator that is frozen in the generator's step; return what to compare."""
    torch.manual_seed(0)
    maker, judge = kind(torch.nn.Linear(4, 8).double()), kind(torch.nn.Linear(8, 1).double())
    of_maker, of_judge = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (maker, judge))
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)
        noise, real = (torch.randn(6, width, generator=generator).double() for width in (4, 8))
        judge.requires_grad_(True)
        of_judge.zero_grad()
        fake = maker(noise)
        judge(real).square().mean().backward()
        (judge(fake.detach()) - 1).square().mean().backward()
        of_judge.step()
        judge.requires_grad_(False)
        of_maker.zero_grad()
        judge(fake).square().mean().backward()
        of_maker.step()
    return [*maker.parameters(), *judge.parameters()]


def adversaries_beside_torch(rank, size):
    ours = adversaries(OursDDP, rank)
    return same_on_all_ranks(ours), max_difference(ours, adversaries(TorchDDP, rank))


@pytest.mark.parametrize("size", [2, 3])
def test_a_discriminator_may_be_frozen_in_the_generators_step(pool, size):
    for same, gap in pool(size).run(adversaries_beside_torch):
        assert same
        assert gap < 1e-13


def gradients_kept(rank, size, local):
    """Hold the gradients of several backwards, as programs with a gradient per task do."""
    model = OursDDP(model_zoo.build("Plain"))
    kept, copies = [], []
    for step in range(5):
        with model.no_sync() if local and step > 1 else contextlib.nullcontext():
            loss_on(model, rank, step).backward()
        kept += [param.grad for param in model.parameters()]
        copies += [param.grad.clone() for param in model.parameters()]
        model.zero_grad()
    return max_difference(kept, copies)


@pytest.mark.parametrize("local", [False, True])
def test_gradients_that_the_program_holds_are_not_overwritten_by_later_backwards(pool, local):
    assert pool(2).run(gradients_kept, local) == [0.0, 0.0]


def large_gradients(rank, size):
    model = OursDDP(torch.nn.Linear(2, 1, bias=False).half())
    model(torch.full((1, 2), 40000.0, dtype=torch.float16)).sum().backward()
    return model.module.weight.grad.tolist()


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_a_mean_of_float16_gradients_is_finite_though_their_sum_is_not(pool, backend):
    assert pool(2, backend).run(large_gradients) == [[[40000.0, 40000.0]]] * 2


def places_of_gradients(rank, size):
    model = OursDDP(model_zoo.build("Plain"))
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    places = []
    for step in range(4):
        loss_on(model, rank, step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        places.append([id(slot.view) for slot in model.engine.slots])
        optim.zero_grad()
    return places[1:] == places[:-1]


def test_gradients_that_nothing_holds_keep_their_place(pool):
    assert pool(2).run(places_of_gradients) == [True, True]


# ------------------------------------------------------------------ sparse gradients, ignored and delayed parameters


class Embedded(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(12, 4, sparse=True)
        self.head = torch.nn.Linear(4, 1)

    def forward(self, rows):
        return self.head(self.table(rows).mean(1))


def sparse_beside_torch(rank, size, hooked):
    found = []
    for kind in (OursDDP, TorchDDP):
        model = kind(Embedded().double())
        if hooked:
            model.register_comm_hook(None, averaging_sparse)
        optim = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + rank)
            model(torch.randint(0, 12, (4, 2), generator=generator)).sum().backward()
            assert model.module.table.weight.grad.is_sparse
            optim.step()
            optim.zero_grad()
        found.append(list(model.parameters()))
    return max_difference(*found)


def averaging_sparse(state, bucket):
    work = dist.group.WORLD.allreduce([bucket.buffer()])
    return work.get_future().then(lambda future: future.value()[0] / dist.get_world_size())


@pytest.mark.parametrize("hooked", [False, True])
def test_sparse_gradients_are_averaged_as_in_torchs_class(pool, hooked):
    assert all(gap < 1e-14 for gap in pool(2).run(sparse_beside_torch, hooked))


def sparse_on_one_rank(rank, size):
    model = OursDDP(Embedded().double(), find_unused_parameters=True)
    for _ in range(2):
        out = model.module.head(torch.ones(1, 4).double()) if rank else model(torch.tensor([[1, 2]]))
        out.sum().backward()
    grad = model.module.table.weight.grad.to_dense()
    return same_on_all_ranks([grad]), grad[1].abs().sum().item() > 0, grad[3].abs().sum().item()


def test_a_rank_that_did_not_use_the_table_gets_its_gradient(pool):
    assert pool(2).run(sparse_on_one_rank) == [(True, True, 0.0)] * 2


def ignored_parameters(rank, size):
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2 + rank), torch.nn.Linear(2, 1))
    OursDDP._set_params_and_buffers_to_ignore_for_model(net, ["1.weight", "1.bias"])
    model = OursDDP(net)
    hidden = net[0](torch.full((1, 2), rank + 1.0))
    (net[2](hidden).sum() + net[1](hidden).sum()).backward()
    return [
        same_on_all_ranks([net[0].weight.grad]),
        same_on_all_ranks([net[2].weight.grad]),
        net[1].weight.grad.shape[0],
    ], [name for name, _ in model.engine.named_parameters()]


def test_ignored_parameters_are_left_alone(pool):
    for rank, (found, names) in enumerate(pool(2).run(ignored_parameters)):
        assert found == [True, True, 2 + rank]
        assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]


def delayed_beside_torch(rank, size):
    """Compare with torch's class without delay, since on CPUs it does not wait for delayed gradients."""
    found = []
    for kind in (OursDDP, TorchDDP):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
        options = {}
        if kind is OursDDP:
            delayed = [(name, param) for name, param in net.named_parameters() if name.startswith("1")]
            options = {"delay_all_reduce_named_params": delayed, "param_to_hook_all_reduce": net[0].weight}
        model = kind(net, **options)
        model(torch.full((2, 3), rank + 1.0)).sum().backward()
        found.append([param.grad.clone() for param in net.parameters()])
    return max_difference(*found)


def test_delayed_parameters_are_reduced_by_the_end_of_backward(pool):
    assert pool(2).run(delayed_beside_torch) == [0.0, 0.0]


# ------------------------------------------------------------------ buffers


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        start = self.seen.item()
        self.seen += dist.get_rank() + 1
        return self.layer(x) + 0 * start


def buffers_over_steps(rank, size, **options):
    model = OursDDP(Counting(), **options)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    return model.module.seen.item()


def test_buffers_come_from_rank_0_before_every_forward(pool):
    assert pool(2).run(buffers_over_steps) == [2.0, 3.0]


def buffers_kept(rank, size):
    return buffers_over_steps(rank, size, forward_sync_buffers=False)


def test_buffers_stay_without_synchronisation(pool):
    assert pool(2).run(buffers_kept) == [2.0, 4.0]


# ------------------------------------------------------------------ join


def uneven_beside_torch(rank, size, initial, first):
    found = []
    for kind in (OursDDP, TorchDDP):
        model = kind(model_zoo.build("Plain"))
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with model.join(divide_by_initial_world_size=initial):
            for step in range(first + 2 * rank):
                loss_on(model, rank, step).backward()
                optim.step()
                optim.zero_grad()
        found.append(list(model.parameters()))
    return same_on_all_ranks(found[0]), max_difference(*found)


@pytest.mark.sweep
@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("first", [0, 1, 3])
@pytest.mark.parametrize("size", [2, 3])
def test_join_equals_torchs_class(pool, size, first, initial):
    for same, gap in pool(size).run(uneven_beside_torch, initial, first):
        assert same
        assert gap < 1e-13


def mean_over_ranks_with_a_batch(rank, size):
    model = OursDDP(torch.nn.Linear(1, 1, bias=False))
    grads = []
    with model.join(divide_by_initial_world_size=False):
        for _ in range(1 + rank):
            model(torch.full((1, 1), rank + 1.0)).sum().backward()
            grads.append(model.module.weight.grad.item())
            model.zero_grad()
    return grads


def test_join_without_the_initial_size_is_the_exact_mean_of_the_ranks_with_a_batch(pool):
    assert pool(2).run(mean_over_ranks_with_a_batch) == [[1.5], [1.5, 2.0]]


def joined_with_optimizer(rank, size, sharded):
    model = OursDDP(model_zoo.build("Plain"))
    if sharded:
        optim = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    else:
        optim = torch.optim.Adam(model.parameters(), lr=0.01)
    with Join([model, optim] if sharded else [model]):
        for step in range(3 + 2 * rank):
            loss_on(model, rank, step).backward()
            optim.step()
            optim.zero_grad()
    return list(model.parameters()), [param.grad for param in model.parameters()]


def sharded_beside_whole(rank, size):
    (sharded, left), (whole, _) = (joined_with_optimizer(rank, size, each) for each in (True, False))
    return max_difference(sharded, whole), left == [None] * len(left)


@pytest.mark.parametrize("size", [2, 3])
def test_torchs_sharded_optimizer_steps_with_the_mean_on_ranks_without_a_batch(pool, size):
    """With torch's class, a rank that has ended updates its shard with the gradient of its last batch."""
    for gap, nothing_left in pool(size).run(sharded_beside_whole):
        assert gap < 1e-14
        assert nothing_left


def ends_early(rank, size):
    model = OursDDP(torch.nn.Linear(1, 1))
    with model.join(throw_on_early_termination=True):
        for _ in range(1 + rank):
            model(torch.ones(1, 1)).sum().backward()


def test_join_may_raise_when_a_rank_has_no_batch(pool):
    with pytest.raises(RankError) as caught:
        pool(2).run(ends_early)
    assert "exhausted" in str(caught.value.cause)


# ------------------------------------------------------------------ with the rest of Paceline


def guarded(rank, size, folder):
    model = OursDDP(model_zoo.build("Plain"))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    paceline.NonFiniteGuard(model, optim, "skip")
    check = paceline.ReplicaCheck(model, optim, every=1)
    with paceline.Profiler(f"{folder}/profile", model):
        for step in range(3):
            loss = loss_on(model, rank, step)
            (loss * (float("nan") if step == 1 and rank == 1 else 1.0)).backward()
            optim.step()
            optim.zero_grad()
    finite = all(param.isfinite().all() for param in model.parameters())
    with torch.no_grad():
        next(model.parameters()).add_(rank)
    assert finite
    check.check()


def test_guards_and_the_profiler_take_the_model(pool, tmp_path):
    with pytest.raises(RankError) as caught:
        pool(2).run(guarded, str(tmp_path))
    assert isinstance(caught.value.cause, ReplicasDiverged)
    assert (tmp_path / "profile" / "run.json").exists()


def changed_on_one_rank(rank, size):
    model = OursDDP(model_zoo.build("Plain"))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        loss_on(model, rank, step).backward()
        optim.step()
        optim.zero_grad()
        if step == 0 and rank == 1:
            with torch.no_grad():
                next(model.parameters()).add_(1e-3)


def test_parameters_changed_on_one_rank_are_named(pool):
    with pytest.raises(RankError) as caught:
        pool(3).run(changed_on_one_rank)
    assert isinstance(caught.value.cause, ReplicasDiverged)
    assert "rank 1 holds another parameter" in str(caught.value.cause)


def joined_for_long(rank, size):
    model = OursDDP(model_zoo.build("Plain"))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(1 + 9 * rank):
            loss_on(model, rank, step).backward()
            optim.step()
            optim.zero_grad()
    return same_on_all_ranks(list(model.parameters()))


def test_parameters_of_ranks_that_have_joined_are_not_compared(pool):
    assert pool(2).run(joined_for_long) == [True, True]


def checkpointed(rank, size, folder):
    found = []
    for kinds in ((OursDDP, TorchDDP), (TorchDDP, OursDDP)):
        path = f"{folder}/{kinds[0].__module__}"
        models = []
        for kind in kinds:
            model = kind(model_zoo.build("Plain"))
            optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            checkpoint = paceline.Checkpoint(path, model, optim)
            if models:
                checkpoint.load()
            for step in range(2 if models else 4):
                if not models and step == 2:
                    checkpoint.save()
                loss_on(model, rank, step + 2 * bool(models)).backward()
                optim.step()
                optim.zero_grad()
            checkpoint.close()
            models.append(list(model.parameters()))
        found.append(max_difference(*models))
    return found


def test_a_checkpoint_goes_from_torchs_class_to_ours_and_back(pool, tmp_path):
    for gaps in pool(2).run(checkpointed, str(tmp_path)):
        assert max(gaps) < 1e-13


# ------------------------------------------------------------------ small cases of torch's own tests


def only_sparse(rank, size):
    torch.manual_seed(0)
    model = OursDDP(torch.nn.EmbeddingBag(10, 10, sparse=True))
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 10, (2 * size, 2), generator=generator)
    alone = copy.deepcopy(model.module)
    alone(rows).mean().backward()
    model(rows.chunk(size)[rank]).mean().backward()
    return (alone.weight.grad.to_dense() - model.module.weight.grad.to_dense()).abs().max().item()


def test_a_model_with_sparse_gradients_only(pool):
    assert all(gap < 1e-8 for gap in pool(2).run(only_sparse))


def outputs_not_used(rank, size, unused):
    model = OursDDP(model_zoo.build("Unused" if unused else "Plain"), find_unused_parameters=unused)
    for _ in range(4):
        output = model(torch.ones(2, model_zoo.WIDTH).double())
        del output
    for step in range(3):
        loss_on(model, rank, step, "Unused" if unused else "Plain").backward()
    return same_on_all_ranks([param.grad for param in model.parameters() if param.grad is not None])


@pytest.mark.parametrize("unused", [False, True])
def test_outputs_may_be_ignored(pool, unused):
    assert pool(2).run(outputs_not_used, unused) == [True, True]


def sparse_and_wrapped_again(rank, size):
    net = Embedded().double()
    first = OursDDP(net)
    first(torch.tensor([[1, 2]])).sum().backward()
    first.zero_grad()
    again = OursDDP(net)
    again(torch.tensor([[rank, 2]])).sum().backward()
    return same_on_all_ranks([net.table.weight.grad.to_dense(), net.head.weight.grad])


def test_a_model_with_sparse_gradients_may_be_wrapped_again(pool):
    assert pool(2).run(sparse_and_wrapped_again) == [True, True]
