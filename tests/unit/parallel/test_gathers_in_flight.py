"""Parameters in flight, with gathers that arrive only when they are waited for: who waits, for what, and until when."""

from __future__ import annotations

import contextlib
import gc
import warnings

import pytest
import torch
import torch._dynamo  # as every optimizer imports it
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from forked_child import in_child
from paceline.errors import SyncError
from paceline.parallel.engine import parameter_gather
from paceline.parallel.engine.parameter_gather import ParameterGather
from paceline.parallel.gradient_collectives import Comm


class Arrival:
    """A gather: its memory is NaN until `wait`."""

    ended = None

    def __init__(self, flat, fails=False):
        self.place, self.waited, self.fails = flat.numpy(), 0, fails
        self.real = self.place.copy()
        self.place.fill(float("nan"))

    def poll(self):
        pass

    def wait(self):
        self.waited += 1
        if self.fails:
            raise SyncError("rank 2 ended")
        self.place[:] = self.real


class Model:
    """Layers whose parameters lie in a buffer each, and their gathers."""

    def __init__(self, *layers):
        self.net = nn.Sequential(*(layers or (nn.Linear(3, 3), nn.Linear(3, 3))))
        self.gather = ParameterGather(Comm(), self.net, lambda seconds: None)
        self.flats = []
        for param in self.net.parameters():
            flat = param.detach().reshape(-1).clone()
            param.data = flat.view(param.shape)
            self.flats.append(flat)
        self.whole = [flat.clone() for flat in self.flats]

    def fly(self, fails=False):
        """Launch all gathers and return them."""
        arrivals = [Arrival(flat, fails) for flat in self.flats]
        for flat, arrival in zip(self.flats, arrivals, strict=True):
            self.gather.add(flat, arrival)
        self.gather.leave_in_flight()
        return arrivals

    def arrived(self):
        return [not flat.isnan().any().item() for flat in self.flats_unseen()]

    def flats_unseen(self):
        with torch._C.DisableTorchFunction():
            return [flat.clone() for flat in self.flats]


def stack():
    return [type(mode).__name__ for mode in _get_current_function_mode_stack()]


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch):
    torch._dynamo.reset()  # what other tests have compiled
    monkeypatch.setattr(parameter_gather, "_compiled", parameter_gather._CompiledCode())
    assert stack() == []
    yield
    ParameterGather(Comm(), None, lambda seconds: None)  # as the next model does
    gc.collect()
    left = stack()
    while torch.overrides._len_torch_function_stack():
        torch.overrides._pop_mode()
    assert [name for name in left if name != "_Watch"] == []


X = torch.ones(2, 3)


def test_a_layer_waits_for_its_own_parameters():
    model = Model()
    model.fly()
    assert model.arrived() == [False] * 4
    assert model.net[1](X).isfinite().all()
    assert model.arrived() == [False, False, True, True]
    model.gather.wait_all()
    assert stack() == []


def test_what_concerns_no_values_does_not_wait():
    model = Model()
    model.fly()
    for param in model.net.parameters():
        assert param.grad is None
        param.grad = None
        assert param.requires_grad
        assert param.shape
        assert param in {param: 1}
        assert param.numel() == param.size().numel()
    model.net.zero_grad()
    assert not any(model.arrived())
    model.gather.wait_all()


def test_a_wait_comes_before_a_write():
    model = Model(nn.Linear(3, 3))
    model.fly()
    with torch.no_grad():
        model.net[0].weight.fill_(2.0)
    model.gather.wait_all()
    assert (model.net[0].weight == 2.0).all()


def test_gathers_may_be_added_in_any_order_while_others_are_in_flight():
    model = Model(*(nn.Linear(3, 3) for _ in range(4)))
    arrivals = {}
    for number in (5, 0, 7, 2):
        arrivals[number] = Arrival(model.flats[number])
        model.gather.add(model.flats[number], arrivals[number])
    model.gather.leave_in_flight()
    for number in (6, 1, 3, 4):
        arrivals[number] = Arrival(model.flats[number])
        model.gather.add(model.flats[number], arrivals[number])
        assert (model.net[0].weight.detach() == model.whole[0].view(3, 3)).all()
    for number, param in enumerate(model.net.parameters()):
        assert param.detach().sum() == model.whole[number].view(param.shape).sum()
        assert arrivals[number].waited == 1
    model.gather.end_if_over()


# ---------------------------------------------------------------- modes


class Passing(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def around(model):
    with Passing():
        model.fly()
        assert stack() == ["_Watch", "Passing"]
    assert stack() == ["_Watch"]
    assert model.net(X).isfinite().all()


def after(model):
    model.fly()
    with Passing():
        assert model.net(X).isfinite().all()
        model.gather.end_if_over()
        assert stack() == ["Passing"]


def device_around(model):
    with torch.device("cpu"):
        model.fly()
    assert stack() == ["_Watch"]
    assert model.net(X).isfinite().all()


def device_after(model):
    model.fly()
    with torch.device("cpu"):
        assert model.net(X).isfinite().all()
        model.gather.end_if_over()
    assert stack() == []


def default_device_before(model):
    torch.set_default_device("cpu")
    model.fly()
    torch.set_default_device("meta")
    assert model.net(X).isfinite().all()
    model.gather.end_if_over()
    torch.set_default_device(None)


def default_device_between(model):
    model.fly()
    torch.set_default_device("cpu")
    assert model.net(X).isfinite().all()
    model.gather.end_if_over()
    assert stack() == ["DeviceContext"]
    torch.set_default_device(None)


def two_devices(model):
    torch.set_default_device("cpu")
    with torch.device("cpu"):
        model.fly()
    torch.set_default_device(None)
    assert model.net(X).isfinite().all()


def device_context(model):
    with torch.utils._device.DeviceContext("cpu"):
        model.fly()
    assert stack() == ["_Watch"]
    assert model.net(X).isfinite().all()


CASES = [around, after, device_around, device_after, default_device_before, default_device_between]


@pytest.mark.parametrize("case", [*CASES, two_devices, device_context], ids=lambda case: case.__name__)
def test_other_modes_come_and_go(case):
    model = Model()
    case(model)
    model.gather.wait_all()
    assert stack() == []


def test_a_step_inside_a_watched_function_is_watched():
    """A hook of a backward takes a step: the watch of the gathers before is being called."""
    model = Model()
    model.fly()
    seen = []

    def step(grad):
        model.gather.wait_all()
        model.fly()
        seen.append(model.net(X).isfinite().all().item())

    loss = (X * torch.ones(3, requires_grad=True)).sum()
    loss.register_hook(step)
    loss.backward()
    assert seen == [True]
    model.gather.wait_all()
    gc.collect()
    ParameterGather(Comm(), None, lambda seconds: None)
    assert stack() == []


# ---------------------------------------------------------------- models that are dropped


def test_the_bare_module_waits_after_its_wrapper_is_gone():
    model = Model()
    model.fly()
    net = model.net
    del model
    gc.collect()
    assert net(X).isfinite().all()


def test_parameters_wait_after_their_module_is_gone():
    model = Model()
    model.fly()
    weight, alias = model.net[0].weight, model.net[1].weight.data
    del model
    gc.collect()
    assert weight.isfinite().all()
    assert alias.isfinite().all()


def test_the_next_model_removes_the_watch_of_one_that_is_gone():
    model = Model()
    model.fly()
    assert stack() == ["_Watch"]
    del model
    gc.collect()
    Model()
    assert stack() == []


# ---------------------------------------------------------------- failures


def test_parameters_that_did_not_arrive_raise_at_every_use():
    model = Model()
    arrivals = model.fly(fails=True)
    for _ in range(2):
        with pytest.raises(SyncError, match="rank 2 ended"):
            model.net(X)
    with pytest.raises(SyncError, match="rank 2 ended"):
        model.net.state_dict()
    assert sum(arrival.waited for arrival in arrivals) == 1  # a second wait might never end
    assert model.net[0].weight.grad is None


# ---------------------------------------------------------------- where torch's functions are bypassed


def script_function():
    @torch.jit.script
    def scale(weight, factor: float):
        return weight * factor

    model = Model()
    model.fly()
    return all(model.arrived()) and scale(model.net[0].weight, 2.0).isfinite().all().item()


def traced_function():
    traced = torch.jit.trace(lambda weight: weight * 2, torch.ones(3, 3))
    model = Model()
    model.fly()
    return all(model.arrived()) and traced(model.net[0].weight).isfinite().all().item()


def scripted_layer():
    model = Model()
    model.net[1] = torch.jit.script(model.net[1])
    model.fly()
    return all(model.arrived())


def compiled_before():
    compiled = torch.compile(lambda weight: weight * 2, backend="eager")
    model = Model()
    model.fly()
    return all(model.arrived()) and compiled(model.net[0].weight).isfinite().all().item()


def compiled_in_flight():
    model = Model()
    model.fly()
    assert not any(model.arrived())
    compiled = torch.compile(model.net, backend="eager")
    first = compiled(X).isfinite().all().item() and all(model.arrived()) and not stack()
    model.fly()
    return first and all(model.arrived())  # from now on nothing is left in flight


def after_a_reset():
    model = Model()
    compiled = torch.compile(model.net, backend="eager")
    compiled(X)
    torch._dynamo.reset()
    model.fly()
    return compiled(X).isfinite().all().item() and all(model.arrived()) and not stack()


def conditional():
    model = Model()
    model.fly()
    assert not any(model.arrived())
    weight = model.net[0].weight
    found = torch.cond(X.sum() > 0, lambda x: x @ weight, lambda x: x.sin(), (X,))
    return found.isfinite().all().item()


def quietly(work):
    def run():
        with warnings.catch_warnings(), contextlib.suppress(ImportError):
            warnings.simplefilter("ignore")
            return work()

    return run


@pytest.mark.parametrize(
    "work", [script_function, traced_function, scripted_layer], ids=lambda work: work.__name__
)
def test_nothing_is_left_in_flight_beside_torchscript(work):
    assert in_child(quietly(work)) == 0


@pytest.mark.sweep
@pytest.mark.parametrize(
    "work", [compiled_in_flight, compiled_before, conditional, after_a_reset], ids=lambda work: work.__name__
)
def test_the_compiler_meets_nothing_in_flight(work):
    assert in_child(quietly(work), 240) == 0
