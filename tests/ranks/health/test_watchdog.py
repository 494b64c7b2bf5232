"""Ranks that raise, end, stop, stall or run out of memory: every other rank names them and can raise."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time

import pytest
import torch

import paceline
from paceline.errors import PeerFailed
from paceline.health.abort_collectives import EXIT_CODE
from paceline.testing import fault_effects, fault_injection

STALL, LOST = 2.0, 1.5
SIZE, FAULTY, STEP = 3, 1, 30
ERROR_FIELDS = ("rank", "host", "step", "pid", "phase", "exit_code", "kind", "stack")


def set_up(folder, rank, backend, sync="bucketed"):
    paceline.init(
        backend, init_method=f"file://{folder}/world", rank=rank, size=SIZE, device="cpu", timeout=120.0
    )
    torch.manual_seed(0)
    model = paceline.DataParallel(torch.nn.Linear(64, 64), sync=sync)
    return model, paceline.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)


def step(model, optim):
    model.backward(model(torch.ones(4, 64)).mean(), samples=4)
    optim.step()
    optim.zero_grad()


def prepare():
    importlib.import_module("torch._dynamo")  # once, rather than in every rank
    importlib.import_module("paceline.health.watchdog")


def train_with_fault(send, rank, folder, backend, sync, fault):
    model, optim = set_up(folder, rank, backend, sync)
    fault_injection.arm(fault)
    finally_ran = False
    try:
        with paceline.Watchdog(stall=STALL, lost=LOST, grace=20.0):
            try:
                while True:
                    step(model, optim)
            finally:
                finally_ran = True
    except Exception as error:  # noqa: BLE001 — the test checks it
        fields = {name: getattr(error, name, None) for name in ERROR_FIELDS}
        send(fields | {"error": type(error).__name__, "text": str(error), "finally": finally_ran})
    paceline.shutdown()
    os._exit(0)


def one_faulty_rank(fork, folder, backend, sync, fault):
    prepare()
    ranks = [fork(train_with_fault, rank, folder, backend, sync, fault) for rank in range(SIZE)]
    others = [each for rank, each in enumerate(ranks) if rank != FAULTY]
    errors = [each.receive() for each in others]
    codes = [each.wait() for each in others]
    ranks[FAULTY].kill(signal.SIGCONT)
    own = ranks[FAULTY].receive() if any(how in fault for how in ("stop", "raise", "memory")) else None
    return ranks[FAULTY].pid, errors, codes, own


def train_until_terminated(send, rank, folder):
    model, optim = set_up(folder, rank, "gloo")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with paceline.Watchdog(stall=STALL, lost=LOST, grace=20.0):
            for number in range(10_000):
                step(model, optim)
                if rank == FAULTY and number == 3:
                    signal.raise_signal(signal.SIGTERM)
    except PeerFailed as error:
        send({"text": str(error), "stack": error.stack})
    except SystemExit:
        pass
    paceline.shutdown()
    os._exit(0)


def errors_of_a_terminated_rank(fork, folder):
    prepare()
    ranks = [fork(train_until_terminated, rank, folder) for rank in range(SIZE)]
    return [each.receive() for rank, each in enumerate(ranks) if rank != FAULTY]


def test_of_a_rank_that_a_signal_ended_the_others_learn_which_and_no_traceback(killable):
    for error in killable.run_ranks(errors_of_a_terminated_rank, timeout=90):
        assert "rank 1" in error["text"]
        assert "raised SystemExit, ended by SIGTERM" in error["text"]
        assert not error["stack"]
        assert "Traceback" not in error["text"]


RAISES = f"fail_at(rank=1, step={STEP}, how='raise')"
MEMORY = f"fail_at(rank=1, step={STEP}, how='memory')"
EXITS = f"fail_at(rank=1, step={STEP}, how='exit')"
KILLED = f"fail_at(rank=1, step={STEP}, how='kill')"
STOPS = f"stall_at(rank=1, step={STEP}, how='stop')"
SLEEPS = f"stall_at(rank=1, step={STEP}, how='sleep')"
HOLDS = "stall_at(rank=1, step=1, how='gil')"  # at once: watching has begun nevertheless

EXPECTED = {
    RAISES: ("raised", "raised RuntimeError: injected fault", "in _raise", None),
    MEMORY: ("raised", "raised MemoryError", "_run_out_of_memory", None),
    EXITS: (
        "gone",
        f"ended with exit code {fault_effects.FAULT_EXIT_CODE}",
        "",
        fault_effects.FAULT_EXIT_CODE,
    ),
    KILLED: ("gone", "was ended by SIGKILL", "", -signal.SIGKILL),
    STOPS: ("stopped", "has been stopped for", "", None),
    SLEEPS: ("stalled", "has stood still for", "in _sleep", None),
    HOLDS: ("held", "has held Python's lock for", "in _hold_the_lock", None),
}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("backend", "sync", "fault"),
    [
        ("gloo", "bucketed", RAISES),
        ("paceline", "bucketed", MEMORY),
        ("gloo", "sharded", EXITS),
        ("gloo", "bucketed", KILLED),
        ("paceline", "sharded", KILLED),
        ("gloo", "sharded", STOPS),
        ("paceline", "bucketed", STOPS),
        ("gloo", "bucketed", SLEEPS),
        ("paceline", "sharded", SLEEPS),
        ("paceline", "bucketed", HOLDS),
        ("gloo", "full-shard", KILLED),
    ],
)
def test_every_other_rank_names_the_faulty_one(killable, backend, sync, fault):
    kind, text, stack, code = EXPECTED[fault]
    pid, errors, codes, own = killable.run_ranks(one_faulty_rank, backend, sync, fault, timeout=90)
    host = socket.gethostname()
    assert codes == [0] * (SIZE - 1)
    for each in errors:
        assert (each["error"], each["kind"], each["rank"]) == ("PeerFailed", kind, FAULTY), each["text"]
        assert (each["host"], each["pid"]) == (host, pid), each
        assert kind == "raised" or each["exit_code"] == code, each
        step = 1 if fault == HOLDS else STEP
        assert step - 1 <= each["step"] <= step, each
        assert f"rank 1 on host {host} (process {pid}" in each["text"], each
        assert f") {text}" in each["text"], each
        assert stack in each["stack"], each
        assert each["finally"], each
    if fault in (RAISES, MEMORY):
        assert {(each["step"], each["phase"]) for each in errors} == {(STEP, "forward")}
        assert own["error"] in ("RuntimeError", "MemoryError"), "the faulty rank raises its own error"
    if fault == STOPS:  # once it continues, it learns that the others did not wait
        assert (own["error"], own["rank"]) == ("PeerFailed", FAULTY), own


def fail_at_once(send, rank, folder):
    model, optim = set_up(folder, rank, "gloo")
    try:
        with paceline.Watchdog(stall=STALL, lost=LOST, grace=20.0):
            if rank == FAULTY:
                raise ValueError("no step was made")
            while True:
                step(model, optim)
    except Exception as error:  # noqa: BLE001 — the test checks it
        send((type(error).__name__, getattr(error, "rank", None), getattr(error, "kind", "")))
    os._exit(0)


def errors_of_a_failure_at_once(fork, folder):
    prepare()
    return [each.receive() for each in [fork(fail_at_once, rank, folder) for rank in range(SIZE)]]


def test_an_error_right_after_the_watchdog_was_made_reaches_all(killable):
    errors = killable.run_ranks(errors_of_a_failure_at_once, timeout=90)
    assert errors == [
        ("ValueError", None, "") if rank == FAULTY else ("PeerFailed", FAULTY, "raised")
        for rank in range(SIZE)
    ]


# ------------------------------------------------------------------ without a with-block, and threads that never move


def train_without_block(send, rank, folder):
    """Train without a with-block and catch nothing, until rank 1 is killed; rank 2 is in a long call in C."""
    sys.stderr = open(f"{folder}/stderr{rank}", "w", buffering=1)  # noqa: SIM115 — closed with the process
    os.dup2(sys.stderr.fileno(), 2)
    model, optim = set_up(folder, rank, "gloo")
    watchdog = paceline.Watchdog(stall=60.0, lost=LOST, grace=1.0)
    for _ in range(STEP):
        step(model, optim)
    send("trained")
    if rank == 2:
        time.sleep(1000)
    while True:
        step(model, optim)
        assert watchdog is not None


def kill_one(fork, folder):
    prepare()
    ranks = [fork(train_without_block, rank, folder) for rank in range(SIZE)]
    assert [each.receive() for each in ranks] == ["trained"] * SIZE
    ranks[FAULTY].kill()
    codes = [ranks[rank].wait() for rank in (0, 2)]
    return codes, [open(f"{folder}/stderr{rank}").read() for rank in (0, 2)]


@pytest.mark.thorough
def test_an_uncaught_error_names_the_faulty_rank_and_a_stuck_rank_ends(killable):
    codes, stderr = killable.run_ranks(kill_one, timeout=90)
    assert codes == [1, EXIT_CODE]
    assert "The above exception was the direct cause" in stderr[0]  # the connection error, and what it meant
    for text in stderr:
        assert "PeerFailed: [rank 1, step" in text, text
        assert "was ended by SIGKILL" in text
    assert "(this process could not be freed and ends)" in stderr[1]
    assert "time.sleep(1000)" in stderr[1] or "in train_without_block" in stderr[1]


# ------------------------------------------------------------------ warnings, and ranks that finish early


def train_past_a_stall(send, rank, folder):
    """Train past a stall that is only logged, with a slow rank, a thread that raises, and a forked child."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("paceline.health").addHandler(handler)
    model, optim = set_up(folder, rank, "paceline")
    step(model, optim)
    hooks = sys.excepthook, threading.excepthook
    fault_injection.arm("stall_at(rank=1, step=10, seconds=1.5); slow(rank=2, seconds=0.05)")
    with paceline.Watchdog(stall=0.8, lost=LOST, on_stall="tell", warn=0.3) as watchdog:
        for at in range(60):
            step(model, optim)
            if at == 20 and rank == 0:
                thread = threading.Thread(target=lambda: [][1], name="prefetch")
                thread.start()
                thread.join()
                if (child := os.fork()) == 0:
                    os._exit(0)
                os.waitpid(child, 0)
        slowest = watchdog.slowest()
    assert (sys.excepthook, threading.excepthook) == hooks
    paceline.shutdown()
    send((messages, slowest.rank, slowest.factor, [each.name for each in threading.enumerate()]))
    os._exit(0)


def finish_early(send, rank, folder):
    """Rank 1 makes fewer steps than the others, and stays alive."""
    model, optim = set_up(folder, rank, "gloo")
    try:
        with paceline.Watchdog(stall=1.0, grace=20.0):
            for _ in range(STEP if rank == FAULTY else 1000):
                step(model, optim)
        time.sleep(60)
    except paceline.PacelineError as error:
        send((getattr(error, "kind", ""), error.rank, error.step, str(error)))
    os._exit(0)


def receive_all(fork, folder, work, senders):
    prepare()
    ranks = [fork(work, rank, folder) for rank in range(SIZE)]
    return [ranks[rank].receive() for rank in senders]


@pytest.mark.thorough
def test_a_stall_that_is_only_logged_does_not_end_the_training(killable):
    results = killable.run_ranks(receive_all, train_past_a_stall, range(SIZE), timeout=90)
    for messages, slowest, factor, threads in results:
        assert (slowest, threads) == (2, ["MainThread"])
        assert factor > 1.03
        assert not any("can't watch" in line or "failed and has stopped" in line for line in messages), (
            messages
        )
    stalls = [line for messages, *_ in results for line in messages if line.startswith("rank 1 on host")]
    assert stalls
    assert "has stood still" in stalls[0]
    for messages, *_ in results[1:]:
        assert any(line.startswith("a thread of rank 0 raised IndexError") for line in messages), messages


@pytest.mark.thorough
def test_a_rank_that_left_its_loop_while_others_wait(killable):
    for kind, rank, at, text in killable.run_ranks(receive_all, finish_early, [0, 2], timeout=90):
        assert (kind, rank, at) == ("finished", FAULTY, STEP - 1)
        assert "has left its loop; rank" in text
