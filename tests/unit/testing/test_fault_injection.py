"""Fault injection: parsing, time and rank of faults, refused input."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline._core.step_state import step_state
from paceline.errors import UsageError
from paceline.testing import fault_effects, fault_injection

IMPORT = "from paceline.testing import fault_injection as faults; "


@pytest.fixture(autouse=True)
def nothing_armed(monkeypatch):
    monkeypatch.delenv("PACELINE_FAULTS", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    monkeypatch.setattr(fault_injection, "_rank", lambda: 1)
    fault_injection.disarm()
    yield
    fault_injection.disarm()


def armed():
    return [(fault.when, fault.rank, fault.step, fault.restart) for fault in fault_injection.armed]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        ("fail_at(rank=1, step=20)", [("begin", 1, 20, None)]),
        ("fail_at(1, 20)", [("begin", 1, 20, None)]),
        ("fail_at(1, 20, 'kill', restart=0)", [("begin", 1, 20, 0)]),
        (
            " stall_at(rank=0, step=3, seconds=1.5, how='gil'); slow(rank=0, seconds=0.1) ",
            [("begin", 0, 3, None), ("begin", 0, None, None)],
        ),
        (
            "slow(rank=0, factor=2)\ndisk_full(after_nbytes=0)",
            [("begin", 0, None, None), ("write", None, None, None)],
        ),
        ("corrupt(rank=2, step=1, parameter='a.weight')", [("end", 2, 1, None)]),
        ("corrupt(rank=2, step=1, parameter=3)", [("end", 2, 1, None)]),
        ("stall_at(rank=0, step=3, seconds=None, how='stop')", [("begin", 0, 3, None)]),
        ("disk_full(10, rank=1, restart=2)", [("write", 1, None, 2)]),
    ],
)
def test_faults_are_read(text, found):
    fault_injection.arm(text)
    assert armed() == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fail_at", "'fail_at' is no fault"),
        ("fail_at(", "invalid syntax"),
        ("fail_at(rank=1)", r"fail_at: .*missing.*'step'"),
        ("fail_at(rank=1, step=2, speed=3)", "unexpected keyword argument 'speed'"),
        ("fail_at(rank=1, step=-2)", "step=-2"),
        ("fail_at(rank=None, step=2)", "rank=None"),
        ("fail_at(rank=True, step=2)", "rank=True"),
        ("fail_at(rank=1, step=2.5)", r"step=2\.5"),
        ("fail_at(rank=1, step=2, how='melt')", "unknown way to fail 'melt'"),
        ("fail_at(rank=1, step=2, how='rise')", "did you mean 'raise'"),
        ("fail_at(rank=1, step=2, restart=-1)", "restart=-1"),
        ("stall_at(rank=1, step=2, how='kill')", "unknown way to stall 'kill'; valid: sleep, stop, gil"),
        ("stall_at(rank=1, step=2, seconds=-1)", "seconds=-1"),
        ("stall_at(rank=1, step=2, seconds='long')", "seconds='long'"),
        ("slow(rank=1)", "either seconds"),
        ("slow(rank=1, seconds=1, factor=2)", "either seconds"),
        ("slow(rank=1, factor=0.5)", "factor of 1 or more"),
        ("corrupt(rank=1, step=2, parameter=None)", "name a parameter"),
        ("disk_full(after_nbytes=-1)", "after_nbytes=-1"),
        ("disk_full()", "after_nbytes"),
        ("fial_at(rank=1, step=2)", "did you mean 'fail_at'"),
        ("__import__('os').system('true')", "is no fault"),
        ("os.abort()", "is no fault"),
        ("fail_at(rank=1, step=open('/etc/passwd'))", "no plain values"),
        ("fail_at(rank=1, step=1 + 1 if x else 2)", "no plain values"),
        ("fail_at(**{'rank': 1, 'step': 2})", "uses \\*\\*, which is not supported"),
        ("fail_at(*[1, 2])", "no plain values"),
        ("fail_at(rank={[1]: 2}, step=1)", "no plain values"),
        ("import os", "is no fault"),
        ("x = fail_at(rank=1, step=2)", "is no fault"),
        ("lambda: 0", "is no fault"),
        ("fail_at(rank=1, step=2); nonsense(1)", "unknown fault 'nonsense'"),
        ("fail_at(rank=1, step=2)\x00", "invalid syntax"),
    ],
)
def test_invalid_faults_are_refused_and_none_is_armed(text, message):
    with pytest.raises(UsageError, match=message):
        fault_injection.arm(text)
    assert armed() == []


@given(st.text(max_size=60))
def test_any_text_is_parsed_or_refused(text):
    try:
        fault_injection.arm(text)
    except UsageError:
        assert fault_injection.armed == []
    fault_injection.disarm()


def test_the_environment_is_read_once(monkeypatch):
    monkeypatch.setenv("PACELINE_FAULTS", "fail_at(rank=0, step=3)")
    fault_injection.arm_from_environment()
    fault_injection.arm_from_environment()
    assert armed() == [("begin", 0, 3, None)]
    monkeypatch.setenv("PACELINE_FAULTS", "fail_at(rank=0, step=3")
    with pytest.raises(UsageError, match=r"^PACELINE_FAULTS='fail_at\(rank=0, step=3': invalid syntax"):
        fault_injection.arm_from_environment()


@pytest.mark.parametrize(
    ("rank", "step", "restart", "count", "happens"),
    [
        (1, 5, None, None, True),
        (0, 5, None, None, False),
        (1, 4, None, None, False),
        (1, 5, 0, None, True),
        (1, 5, 0, "0", True),
        (1, 5, 0, "1", False),
        (1, 5, 1, "1", True),
        (1, 5, None, "3", True),
    ],
)
def test_a_fault_happens_once_at_its_rank_step_and_restart(monkeypatch, rank, step, restart, count, happens):
    if count is not None:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    fault_injection.fail_at(rank, step, restart=restart)
    fault_injection.begin_step(3)
    if happens:
        with pytest.raises(RuntimeError, match=rf"injected fault: fail_at\(rank={rank}, step={step}"):
            fault_injection.begin_step(5)
        assert not fault_injection.armed
    fault_injection.begin_step(5)


def test_running_out_of_memory_is_a_real_memory_error_and_leaves_the_process_usable():
    fault_injection.fail_at(1, 0, "memory")
    with pytest.raises(MemoryError):
        fault_injection.begin_step(0)
    assert len(bytearray(600 << 20)) == 600 << 20


@pytest.mark.parametrize(
    ("how", "code"), [("exit", fault_effects.FAULT_EXIT_CODE), ("kill", -signal.SIGKILL)]
)
def test_a_rank_that_ends(how, code):
    line = IMPORT + f"faults.fail_at(0, 2, {how!r}); faults.begin_step(1); faults.begin_step(2)"
    ended = subprocess.run([sys.executable, "-c", line], timeout=60, env=os.environ | {"RANK": "0"})
    assert ended.returncode == code


def test_a_stop_that_ends_and_a_lock_that_is_given_back():
    started = time.monotonic()
    line = IMPORT + "faults.stall_at(0, 0, 0.2, 'stop'); faults.begin_step(0)"
    for how in ("gil", "sleep"):
        line += f"; faults.stall_at(0, 1, 0.1, {how!r}); faults.begin_step(1)"
    subprocess.run([sys.executable, "-c", line], timeout=60, check=True)
    assert time.monotonic() - started >= 0.4


def test_a_slow_rank_sleeps_once_a_step(monkeypatch):
    slept = []
    monkeypatch.setattr(fault_effects.time, "sleep", slept.append)
    monkeypatch.setattr(step_state, "latest_busy_seconds", 0.5)
    fault_injection.slow(1, seconds=0.25)
    for step in (0, 0, 1):
        step_state.begin_phase(step, "forward")
        fault_injection.begin_step(step)
    assert slept == [0.25, 0.25]


def test_a_factor_is_of_the_time_without_the_fault(monkeypatch):
    slept = []
    monkeypatch.setattr(fault_effects.time, "sleep", slept.append)
    fault_injection.slow(1, factor=1.5)
    for step in range(4):
        monkeypatch.setattr(step_state, "latest_busy_seconds", 0.2 + (slept[-1] if slept else 0.0))
        step_state.begin_phase(step, "forward")
        fault_injection.begin_step(step)
    assert slept == pytest.approx([0.1] * 4)


def test_one_bit_of_one_parameter_flips_after_its_step():
    model = torch.nn.Linear(3, 2)
    named = list(model.named_parameters())
    before = {name: param.detach().clone() for name, param in named}
    fault_injection.corrupt(1, 4, "weight")
    fault_injection.end_step(3, named)
    assert torch.equal(model.weight, before["weight"])
    fault_injection.end_step(4, named)
    changed = (model.weight != before["weight"]).nonzero()
    assert len(changed) == 1
    assert torch.equal(model.weight.abs(), before["weight"].abs())
    assert torch.equal(model.bias, before["bias"])
    fault_injection.corrupt(1, 5, 1)
    fault_injection.end_step(5, named)
    assert not torch.equal(model.bias, before["bias"])


@pytest.mark.parametrize(
    ("parameter", "message"), [("wieght", "did you mean 'weight'"), (2, "has 2 parameters")]
)
def test_an_unknown_parameter_is_reported_at_its_step(parameter, message):
    fault_injection.corrupt(1, 0, parameter)
    with pytest.raises(UsageError, match=message):
        fault_injection.end_step(0, torch.nn.Linear(3, 2).named_parameters())


def test_the_disk_is_full_after_its_bytes():
    fault_injection.before_write(10**9)
    fault_injection.disk_full(100)
    fault_injection.disk_full(50, rank=0)
    fault_injection.before_write(60)
    fault_injection.before_write(40)
    fault_injection.before_write(0)
    with pytest.raises(OSError, match="No space left") as caught:
        fault_injection.before_write(1)
    assert caught.value.errno == errno.ENOSPC
