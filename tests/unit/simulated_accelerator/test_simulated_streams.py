"""The simulated accelerator's order of execution: missing waits give wrong results for some seeds, right ones never."""

from __future__ import annotations

import pytest
import torch

from simulated_accelerator import DeviceError, simulated_device

SEEDS = range(20)


def two_streams(seed, waits):
    """Return what a program of two streams computes, without its wait if `waits` is False."""
    with simulated_device(seed) as simulator:
        device = torch.get_device_module("sim")
        side = device.Stream()
        x = torch.ones(4, device="sim")
        for _ in range(5):
            x = x * 2
        if waits:
            side.wait_stream(device.current_stream())
        x.record_stream(side)
        with device.stream(side):
            y = x + 1
        device.current_stream().wait_stream(side)
        y.record_stream(device.current_stream())
        result = (y * 1).cpu()
        simulator.run_all()
    return result.tolist()


def test_a_missing_wait_shows():
    assert all(two_streams(seed, waits=True) == [33.0] * 4 for seed in SEEDS)
    wrong = [seed for seed in SEEDS if two_streams(seed, waits=False) != [33.0] * 4]
    assert wrong
    assert all(two_streams(seed, waits=False) != [33.0] * 4 for seed in wrong), (
        "a seed that fails fails again"
    )


def read_on_side(seed, recorded):
    """Return what a side stream reads from memory that the host frees after the call."""
    with simulated_device(seed):
        device = torch.get_device_module("sim")
        side = device.Stream()
        x = torch.full((4,), 3.0, device="sim")
        side.wait_stream(device.current_stream())
        with device.stream(side):
            y = torch.empty(4, device="sim")
            for _ in range(3):
                y.copy_(x)
        if recorded:
            x.record_stream(side)
        del x
        torch.zeros(4, device="sim")
        device.current_stream().wait_stream(side)
        y.record_stream(device.current_stream())
        return y.cpu().tolist()


def test_a_missing_record_stream_shows():
    assert all(read_on_side(seed, recorded=True) == [3.0] * 4 for seed in SEEDS)
    assert any(read_on_side(seed, recorded=False) != [3.0] * 4 for seed in SEEDS)


def test_a_stream_held_back_runs_last():
    for seed in range(5):
        with simulated_device(seed) as simulator:
            device = torch.get_device_module("sim")
            side = device.Stream()
            simulator.hold_back(side)
            x = torch.zeros(1, device="sim")
            side.wait_stream(device.current_stream())
            with device.stream(side):
                x.add_(1)
            assert x.item() == 0
            device.synchronize()
            assert x.item() == 1


def test_events_order_streams():
    for seed in SEEDS:
        with simulated_device(seed):
            device = torch.get_device_module("sim")
            side, event = device.Stream(), device.Event()
            assert event.query()
            x = torch.zeros(1, device="sim")
            side.wait_stream(device.current_stream())
            with device.stream(side):
                assert device.current_stream() == side
                x.add_(5)
                event.record()
                x.record_stream(side)
            event.wait()
            x.mul_(2)
            assert x.item() == 10
            assert event.query()
            assert device.current_stream() == device.default_stream() != side


def test_fresh_memory_is_poisoned():
    with simulated_device():
        assert torch.empty(3, device="sim").isnan().all()
        assert torch.empty(1, dtype=torch.int64, device="sim").item() > 2**62
        assert torch.empty(1, dtype=torch.int16, device="sim").item() % 2


def test_what_fails_on_the_device_surfaces_at_the_next_wait_with_its_line():
    with simulated_device(seed=2) as simulator:
        table = torch.ones(3, device="sim")
        index = torch.tensor([7]).to("sim")
        picked = table[index]  # this line
        with pytest.raises(
            DeviceError, match=r"test_simulated_streams\.py:\d+ failed on the device: index 7"
        ):
            picked.cpu()
        simulator.run_all()


def test_no_memory_is_left():
    with simulated_device(seed=1) as simulator:
        x = torch.ones(100, device="sim")
        y = x + x
        assert simulator.live_bytes() == 800
        del x, y
        assert simulator.live_bytes() == 0


def test_tensors_without_elements():
    with simulated_device(seed=1):
        side = torch.get_device_module("sim").Stream()
        x = torch.ones(4, device="sim")
        for empty in (x[2:2], torch.empty(0, 3, device="sim"), x[:0].clone()):
            empty.zero_()
            empty.record_stream(side)
            assert empty.cpu().numel() == 0
        assert torch.cat([x[:0], x]).tolist() == [1.0] * 4
