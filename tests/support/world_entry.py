"""Helpers of ranks that enter a world, and rendezvous addresses."""

from __future__ import annotations

import contextlib
import random
import socket

from paceline.world.key_value_store import _implied_port

__all__ = [
    "enter",
    "enter_as",
    "fail_to_enter",
    "free_port",
    "is_free",
    "slurm_job",
    "torchrun_variables",
    "ways_to_meet",
]


def free_port():
    """Return a port below the system's ephemeral range, so that no other process gets it meanwhile."""
    return next(filter(is_free, iter(lambda: random.randrange(10_000, 20_000), None)))


def is_free(port):
    """Return whether a server can listen at this port."""
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


def slurm_job():
    """Return the number of a Slurm job whose step 0 meets at a free port."""
    jobs = iter(lambda: random.randrange(1, 10**6), None)
    return next(job for job in jobs if is_free(_implied_port({"SLURM_JOB_ID": str(job)}, "Slurm")))


def torchrun_variables(size):
    """Return the variables that torchrun gives each of `size` ranks of a host, with a free port."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    local = {"LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": "0"}
    return [shared | local | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def enter(rank, size, arguments=None):
    """Enter a world, add up the ranks in it, and leave it."""
    import torch

    import paceline

    world = paceline.init(**(arguments or {}))
    value = torch.tensor([world.rank + 1.0])
    torch.distributed.all_reduce(value)
    paceline.shutdown()
    assert not torch.distributed.is_initialized()
    return world, value.item()


def enter_as(rank, size, arguments_of_rank):
    return enter(rank, size, arguments_of_rank[rank])


def fail_to_enter(rank, size, arguments_of_rank):
    import paceline

    try:
        paceline.init(**arguments_of_rank[rank])
    except paceline.PacelineError as error:
        return type(error).__name__, str(error)
    return "entered", ""


def ways_to_meet(kind, tmp_path):
    return f"file://{tmp_path}/meet" if kind == "file" else f"tcp://127.0.0.1:{free_port()}"
