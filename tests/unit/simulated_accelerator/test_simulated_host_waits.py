"""The simulated accelerator counts each place where the host waits for the device, with its line."""

from __future__ import annotations

import inspect

import pytest
import torch

from simulated_accelerator import simulated_device


def device():
    return torch.get_device_module("sim")


X = [1.0, 2.0, 0.0]
WAITS = {
    "item": ("item", lambda x: x[0].item()),
    "float": ("item", lambda x: float(x[0])),
    "bool": ("item", lambda x: bool(x[0])),
    "if": ("item", lambda x: 1 if x.sum() > 0 else 0),
    "equal": ("item", lambda x: torch.equal(x, x)),
    "tolist": ("copy to host", lambda x: x.tolist()),
    "cpu": ("copy to host", lambda x: x.cpu()),
    "copy to host": ("copy to host", lambda x: torch.empty(3).copy_(x)),
    "copy to device": ("copy to device", lambda x: x.copy_(torch.ones(3))),
    "pageable": ("pageable copy", lambda x: x.copy_(torch.ones(3), non_blocking=True)),
    "to pageable": ("pageable copy", lambda x: torch.ones(3).copy_(x, non_blocking=True)),
    "nonzero": ("data-dependent shape", lambda x: x.nonzero()),
    "masked_select": ("data-dependent shape", lambda x: x.masked_select(x > 0)),
    "mask": ("data-dependent shape", lambda x: x[x > 0]),
    "unique": ("data-dependent shape", lambda x: x.unique()),
    "stream": ("stream", lambda x: device().current_stream().synchronize()),
    "device": ("device", lambda x: device().synchronize()),
    "event": ("event", lambda x: device().current_stream().record_event().synchronize()),
    "inv": ("item", lambda x: torch.linalg.inv(torch.eye(2, device="sim"))),
    "cholesky": ("item", lambda x: torch.linalg.cholesky(torch.eye(2, device="sim"))),
}
QUIET = {
    "arithmetic": lambda x: (x * 2 + 1).sum(),
    "index": lambda x: x[torch.zeros(2, dtype=torch.int64, device="sim")],
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 1.0),
    "inv_ex": lambda x: torch.linalg.inv_ex(torch.eye(2, device="sim")),
    "qr": lambda x: torch.linalg.qr(torch.eye(2, device="sim")),
    "device copy": lambda x: x.clone().copy_(x),
    "query": lambda x: device().current_stream().query(),
    "later copy": lambda x: x.to("cpu", non_blocking=True),
    "page-locked": lambda x: x.copy_(torch.ones(3).pin_memory(), non_blocking=True),
    "to page-locked": lambda x: torch.empty(3, pin_memory=True).copy_(x, non_blocking=True),
    "dtype": lambda x: x.to(torch.float64).half(),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_is_counted_with_its_line(name):
    kind, act = WAITS[name]
    with simulated_device(seed=1) as simulator:
        x = torch.ones(3, device="sim")
        simulator.run_all()
        assert simulator.synchronisations == []
        simulator.phase = "now"
        simulator.next_step()
        act(x)
    [*waits] = simulator.synchronisations
    assert {wait.kind for wait in waits} == {kind}
    line = inspect.getsourcelines(act)[1]
    assert {wait.site for wait in waits} == {f"{__file__}:{line}"}
    assert {(wait.step, wait.phase) for wait in waits} == {(1, "now")}


@pytest.mark.parametrize("name", QUIET)
def test_what_needs_no_wait_is_not_counted(name):
    with simulated_device(seed=1) as simulator:
        QUIET[name](torch.ones(3, device="sim"))
        assert simulator.synchronisations == []


def test_the_age_of_an_event_is_counted():
    with simulated_device(seed=3) as simulator:
        x = torch.ones(3, device="sim")
        event = device().Event()
        (x + 1).record_stream(device().current_stream())
        event.record()
        simulator.next_step()
        event.synchronize()
        assert [(wait.kind, wait.age) for wait in simulator.synchronisations] == [("event", 1)]


def test_a_copy_to_the_host_that_does_not_block_arrives_later():
    with simulated_device(seed=0) as simulator:
        simulator.hold_back(device().default_stream())
        x = torch.ones(3, device="sim")
        host = torch.zeros(3, pin_memory=True)
        host.copy_(x, non_blocking=True)
        assert host.isnan().all()
        device().synchronize()
        assert host.tolist() == [1.0] * 3
        assert [wait.kind for wait in simulator.synchronisations] == ["device"]


def test_page_locked_memory_is_read_when_the_copy_runs():
    with simulated_device(seed=0) as simulator:
        simulator.hold_back(device().default_stream())
        locked, pageable = torch.ones(3, pin_memory=True), torch.ones(3)
        assert locked.is_pinned()
        assert not pageable.is_pinned()
        x, y = torch.empty(3, device="sim"), torch.empty(3, device="sim")
        x.copy_(locked, non_blocking=True)
        y.copy_(pageable, non_blocking=True)
        locked.zero_(), pageable.zero_()
        assert x.tolist() == [0.0] * 3
        assert y.tolist() == [1.0] * 3


def test_tensors_of_the_host_are_refused():
    with (
        simulated_device(),
        pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"),
    ):
        torch.ones(3, device="sim") + torch.ones(3)
