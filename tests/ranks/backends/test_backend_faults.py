"""Ranks that are killed, leave, fail or stop at any moment: every other rank names them and continues."""

from __future__ import annotations

import atexit
import os
import random
import signal
import socket
import sys
import time
import warnings

import pytest
import torch
import torch.distributed as dist

import random_calls as calls
from backend_scenes import enter, open_resources
from paceline.errors import CollectiveError

RUNS = {"killed": 20, "exits": 8, "raises": 6, "leaves": 6, "stops": 5}
# No other rank may pause this long while one is stopped. Ends are detected well before 60 s, the time-out elsewhere.
STOP_TIMEOUT = 3.0


def describe(error, at, step):
    return {
        "at": at,
        "kind": type(error).__name__,
        "rank": getattr(error, "rank", None),
        "step": getattr(error, "step", None),
        "host": getattr(error, "host", None),
        "exit_code": getattr(error, "exit_code", None),
        "text": str(error),
        "my_step": step,
    }


def stream(group, rank, size, seed, leave=lambda step: None):
    """Make random calls, some of them pending while the next is made, until one fails."""
    rng, step, pending = random.Random(seed), 0, []
    while True:
        group.note_step(step)
        leave(step)
        call = calls.draw(rng, seed * 100_000 + step, size, largest=1 << 20)
        tensors = calls.prepare(call, rank, lambda n, dtype: group.allocate_tensor(n, dtype=dtype))
        work = calls.make(call, tensors, rank, group)
        pending += [work] if work is not None else []
        if step % 5 == 4:
            pending += pass_on(rank, size, rng.choice([10, 5000, 200_000]))
        while len(pending) > 3:
            pending.pop(0).wait()
        step += 1


def pass_on(rank, size, numel):
    """Send a message to the next rank and receive one from the one before."""
    arriving = torch.empty(numel)
    return [dist.isend(torch.ones(numel), (rank + 1) % size), dist.irecv(arriving, (rank - 1) % size)]


def one_rank(report, rank, size, folder, seed, victim, how, delay):
    warnings.simplefilter("ignore", FutureWarning)  # torch renames calls
    before = open_resources()
    group = enter(folder, rank, size, STOP_TIMEOUT if how == "stops" else 60.0)
    when = time.monotonic() + delay

    def leave(step):
        if rank != victim or time.monotonic() < when or how in ("killed", "stops"):
            return
        report({"at": time.monotonic(), "my_step": step})
        if how == "exits":
            sys.exit(3)
        if how == "raises":
            raise FloatingPointError("the loss is not a number")
        dist.destroy_process_group()
        time.sleep(60)  # it continues, and is killed at the end of the scenario

    report("ready")
    try:
        stream(group, rank, size, seed, leave)
    except CollectiveError as error:
        report(describe(error, time.monotonic(), int(group._collectives.control.step)))
    dist.destroy_process_group()
    del group
    report((before, open_resources()))
    others = [each for each in range(size) if each != victim]
    if rank in others:
        group = enter(folder, others.index(rank), len(others), name="again")
        total = group.allocate_tensor(100_000).fill_(rank)
        dist.all_reduce(total)
        assert total.eq(sum(others)).all()
        dist.destroy_process_group()
    if seed % 8:  # taking Python and torch down costs half a second: only every eighth run has the time
        atexit._run_exitfuncs()
        os._exit(0)


def lose_one(fork, folder, size, seed, victim, how, delay):
    """Return when and at which step the victim ended, its exit code, and the reports of the survivors."""
    ranks = [fork(one_rank, rank, size, folder, seed, victim, how, delay) for rank in range(size)]
    assert [each.receive() for each in ranks] == ["ready"] * size
    others = [each for rank, each in enumerate(ranks) if rank != victim]
    exited = {}
    if how in ("killed", "stops"):
        time.sleep(delay)
        exited["at"] = ranks[victim].kill(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    else:
        exited = ranks[victim].receive()
    exited["code"] = ranks[victim].wait() if how in ("killed", "exits", "raises") else None
    reports = [each.receive() for each in others]
    left = [each.receive() for each in others]
    if how == "stops":
        ranks[victim].kill(signal.SIGCONT)
        exited["report"] = ranks[victim].receive()
    codes = [each.wait() for each in others]
    return exited, reports, left, codes


EXPECTED = {
    "killed": ("PeerLost", -9, "ended (ended by SIGKILL)"),
    "exits": ("PeerLost", 3, "ended (exit code 3)"),
    "raises": ("PeerLost", 1, "ended (exit code 1)"),
    "leaves": ("PeerLost", None, "left the group"),
    "stops": (
        "CollectiveTimeout",
        None,
        f"did not arrive within the timeout of {STOP_TIMEOUT:g} s (its process is stopped)",
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("how", "number"), [(how, number) for how, runs in RUNS.items() for number in range(runs)]
)
def test_every_survivor_names_the_lost_rank_and_can_continue(killable, how, number):
    seed = list(RUNS).index(how) * 1000 + number
    rng = random.Random(seed)
    size = rng.randint(2, 4)
    victim, delay = rng.randrange(size), rng.random() * 0.2
    exited, reports, left, codes = killable.run_ranks(lose_one, size, seed, victim, how, delay, timeout=60)
    kind, exit_code, text = EXPECTED[how]
    assert len(reports) == size - 1
    for each in reports:
        assert (each["kind"], each["rank"], each["host"]) == (kind, victim, socket.gethostname()), each
        assert each["exit_code"] == exit_code, each
        assert (
            f"rank {victim} on host {socket.gethostname()} {text} in step {each['step']}, while"
            in each["text"]
        )
        assert each["at"] >= exited["at"]
        assert abs(each["step"] - each["my_step"]) <= 5
        assert each["step"] == exited.get("my_step", each["step"])
    assert len({each["step"] for each in reports}) == 1, "all reports agree"
    assert exited["code"] in (exit_code, None)
    if how == "stops":  # it wakes up and raises, since the others did not wait
        assert (exited["report"]["kind"], exited["report"]["rank"]) == ("CollectiveTimeout", victim)
    for before, after in left:
        assert after == before
    assert codes == [0] * (size - 1)
    assert not [name for name in os.listdir("/dev/shm") if "paceline" in name]
