"""Peaks of gradients and the decisions based on them; the ledger that carries them."""

from __future__ import annotations

import math

import pytest
import torch

import paceline
from paceline.errors import NonFiniteGradient, UsageError
from paceline.parallel.engine import round_status
from paceline.parallel.engine.gradient_finite_check import (
    FiniteCheck,
    NonFiniteReport,
    non_finite_flags,
    peak_of,
    surely_finite,
)
from paceline.parallel.engine.round_status import RoundSummary, Status

BAD = [math.nan, math.inf, -math.inf]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_peak_is_finite_and_large_enough_where_all_is_finite(dtype):
    for numel in (1, 2, 33, 1000):
        tensor = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
        assert math.isfinite(peak_of(tensor))
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        assert peak_of(tensor) >= real.abs().max().float() * (1 - 1e-6)
    assert peak_of(torch.ones(0, dtype=dtype)) == 0


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_peak_is_not_finite_where_one_element_is_not(dtype, bad):
    for at in range(0, 70, 23):
        tensor = torch.randn(70).to(dtype)
        tensor[at] = bad
        assert not math.isfinite(peak_of(tensor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_large_numbers_are_no_infinities(dtype):
    tensor = torch.full((100,), torch.finfo(dtype).max, dtype=dtype)
    assert math.isfinite(peak_of(tensor))
    assert peak_of(tensor) >= torch.finfo(dtype).max * (1 - 1e-6)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_flags_show_the_parameters_that_are_not_finite(dtype, bad):
    cpu = torch.device("cpu")
    real = dtype.to_real() if dtype.is_complex else dtype
    largest = torch.full((5,), torch.finfo(real).max, dtype=dtype)
    if dtype.is_complex:
        largest = torch.complex(largest.real, largest.real)  # whose magnitude overflows
    damaged = torch.ones(3, 2, dtype=dtype)
    damaged[1, 1] = bad
    parts = {
        "largest": [largest],
        "damaged": [damaged],
        "unused": [],
        "second part": [torch.ones(2, dtype=dtype), damaged.T],
        "empty": [torch.ones(0, dtype=dtype)],
        "other dtype": [torch.tensor(1e300, dtype=torch.float64)],
        "scalar": [torch.tensor(bad, dtype=dtype)],
    }
    assert non_finite_flags(parts, cpu).tolist() == [0, 1, 0, 1, 0, 0, 1]
    assert non_finite_flags({"unused": []}, cpu).tolist() == [0]


@pytest.mark.parametrize(
    ("peaks", "factor", "largest", "sure"),
    [
        ([1.0, 2.0], 1.0, 3e38, True),
        ([1.0, 2.0], 0.001, 3e38, True),
        ([0.0], 1.0, 3e38, True),
        ([3e4, 3e4], 1.0, 65504.0, False),
        ([3e4], 3.0, 65504.0, False),
        ([1e38, 1e38], 1.0, 3e38, False),
        ([1.0, math.nan], 1.0, 3e38, False),
        ([math.inf, 1.0], 1.0, 3e38, False),
        ([], 1.0, 3e38, False),
    ],
)
def test_a_sum_is_finite_where_the_peaks_prove_it(peaks, factor, largest, sure):
    assert surely_finite(peaks, factor, largest) is sure


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gauge_writes_one_number_and_restarts(dtype):
    finite_check, place = FiniteCheck(3e38), torch.full((3,), 5.0, dtype=dtype)
    finite_check.record_peak(torch.tensor([3.0, 4.0]))
    finite_check.record_peak(torch.tensor([1.0]))
    finite_check.write_peak(place[1])
    assert place.tolist() == [5.0, 6.0, 5.0]
    finite_check.write_peak(place[1])
    assert place.tolist() == [5.0, 0.0, 5.0]
    finite_check.record_peak(torch.tensor([1e300], dtype=torch.float64))
    finite_check.write_peak(place[1])
    assert math.isfinite(place[1]), "finite stays finite in a float32 ledger"
    for bad in BAD:
        finite_check.record_peak(torch.tensor([1.0, bad]))
        finite_check.write_peak(place[0])
        assert not math.isfinite(place[0])
    finite_check.record_peak(torch.tensor([math.nan]))
    finite_check.clear()
    finite_check.write_peak(place[0])
    assert place[0] == 0


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_ledger_carries_the_peak_of_every_rank(ranks):
    pages = []
    for rank in range(ranks):
        page = round_status.encode(rank, ranks, 10.0 + rank, Status.SAMPLES, [True, rank == 0], late=rank)
        assert len(page) == round_status.vector_length(ranks, 2)
        page[round_status.peak_index(rank, ranks)] = math.nan if rank == 1 else float(rank)
        pages.append(page)
    summed = torch.tensor(pages).sum(0).tolist()
    page = round_status.decode(summed, ranks)
    assert [math.isnan(peak) for peak in page.peaks] == [rank == 1 for rank in range(ranks)]
    assert page.samples == tuple(10.0 + rank for rank in range(ranks))
    assert page.used == (True, True)
    assert page.late == sum(range(ranks))
    assert RoundSummary((1.0,), (Status.EQUAL,), ()).peaks == ()


def test_failures_are_summarised():
    one = NonFiniteReport(4, (1,), ("a.weight",), 9)
    assert str(one) == "the gradient of 1 of 9 parameters is NaN or infinite ('a.weight'): from rank 1"
    many = NonFiniteReport(4, (0, 2), ("a", "b", "c", "d"), 9)
    assert "4 of 9 parameters is NaN or infinite ('a', 'b', 'c', …): from ranks 0, 2" in str(many)
    assert "from no rank alone" in str(NonFiniteReport(0, (), ("a",), 1))


# ---------------------------------------------------------------------- in a world of one


def alone(action="skip", **options):
    torch.manual_seed(0)
    model = paceline.DataParallel(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)))
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optim, paceline.NonFiniteGuard(model, optim, action, **options)


def step(model, optim, factor=1.0, clip=False):
    before = [param.detach().clone() for param in model.parameters()]
    model.backward(model(torch.ones(2, 3)).mean() * factor, samples=2)
    if clip:
        model.clip_grad_norm_(1.0)
    try:
        optim.step()
    finally:
        optim.zero_grad()
        changed = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return changed


@pytest.mark.parametrize("source", [False, True])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("bad", BAD)
def test_one_process_skips_a_step_and_continues(bad, clip, source, caplog):
    model, optim, finite = alone(source=source)
    assert step(model, optim, clip=clip)
    assert not step(model, optim, bad, clip=clip)
    assert (finite.skipped, finite.latest.ranks, finite.latest.step) == (1, (0,), 1)
    assert "step 1 is skipped: the gradient of 4 of 4 parameters is NaN or infinite" in caplog.text
    assert step(model, optim, clip=clip)
    assert all(torch.isfinite(param).all() for param in model.parameters())
    assert all(torch.isfinite(state["exp_avg"]).all() for state in optim.state.values())


def test_too_many_in_a_row_raise_and_a_good_one_ends_the_row():
    model, optim, finite = alone(in_a_row=2)
    for bad in (math.nan, 1.0, math.nan):
        step(model, optim, bad)
    with pytest.raises(NonFiniteGradient, match=r"\[rank 0, step 3\].*, 2 in a row"):
        step(model, optim, math.nan)
    assert finite.skipped == 3


def test_stop_raises_and_leaves_parameters_and_gradients():
    model, optim, finite = alone("stop")
    with pytest.raises(NonFiniteGradient, match="NaN or infinite") as caught:
        step(model, optim, math.nan)
    assert (caught.value.rank, caught.value.step) == (0, 0)
    assert step(model, optim)
    finite.remove()
    assert step(model, optim, math.nan)


def test_only_the_parameters_concerned_are_named():
    model, optim, finite = alone()
    loss = model(torch.ones(2, 3)).mean()
    model.module[1].weight.register_hook(lambda grad: grad * math.nan)
    model.backward(loss)
    optim.step()
    assert finite.latest.names == ("1.weight",)
    assert "('1.weight')" in str(finite.latest)


def test_a_closure_is_refused():
    _, optim, _ = alone()
    with pytest.raises(UsageError, match="step\\(closure\\)"):
        optim.step(lambda: None)
    optim.step(None)


def test_a_fused_optimizer_that_a_grad_scaler_drives_is_left_alone():
    model = paceline.DataParallel(torch.nn.Linear(3, 1))
    optim = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    finite = paceline.NonFiniteGuard(model, optim, "stop")
    model.backward(model(torch.ones(2, 3)).mean() * math.nan)
    optim.grad_scale, optim.found_inf = torch.ones(()), torch.ones(())
    optim.step()
    assert finite.latest is None
    assert all(torch.isfinite(param).all() for param in model.parameters())


def test_a_grad_scaler_skips_by_itself_and_trains():
    model, optim, finite = alone("stop")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    moved = []
    for factor in (1.0, math.inf, 1.0):
        before = model.module[0].weight.detach().clone()
        loss = scaler.scale(model(torch.ones(2, 3)).mean() * factor)
        model.backward(loss, samples=2)
        scaler.step(optim)
        scaler.update()
        optim.zero_grad()
        moved.append(not torch.equal(before, model.module[0].weight))
    assert moved == [True, False, True]
    assert (finite.skipped, finite.latest, scaler.get_scale()) == (0, None, 2.0)


def other_optimizer():
    return torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)


@pytest.mark.parametrize("kind", ["NonFiniteGuard", "ReplicaCheck"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda model, optim: (model.module, optim), "wrap the model"),
        (lambda model, optim: (model, model), "pass the optimizer"),
        (lambda model, optim: (model, other_optimizer()), "holds no parameter of this model"),
    ],
)
def test_objects_of_another_model_are_refused(kind, damage, message):
    model, optim, _ = alone()
    with pytest.raises(UsageError, match=message):
        getattr(paceline, kind)(*damage(model, optim))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("NonFiniteGuard", {"action": "skipp"}, "did you mean 'skip'"),
        ("NonFiniteGuard", {"in_a_row": 0}, "in_a_row=0"),
        ("ReplicaCheck", {"every": 0}, "every=0"),
        ("ReplicaCheck", {"every": -3}, "every=-3"),
        ("ReplicaCheck", {"every": 1.5}, "every=1.5"),
        ("ReplicaCheck", {"repair": 1}, "pass 0 to 0"),
        ("ReplicaCheck", {"repair": "rank 0"}, "repair='rank 0'"),
    ],
)
def test_wrong_options_are_refused(kind, options, message):
    model, optim, _ = alone()
    with pytest.raises(UsageError, match=message):
        getattr(paceline, kind)(model, optim, **options)


def test_one_process_does_not_drift():
    model, optim, _ = alone()
    drift = paceline.ReplicaCheck(model, optim, every=1)
    for _ in range(3):
        step(model, optim)
    drift.check()
    assert (drift.steps, drift.comparisons, drift.compared) == (3, 0, 4)
    drift.remove()
    step(model, optim)
    assert drift.steps == 3
