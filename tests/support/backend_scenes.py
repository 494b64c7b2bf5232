"""Helpers of tests that fork ranks: joining a group, errors as text, and the resources of a process."""

from __future__ import annotations

import gc
import os
from datetime import timedelta

import torch.distributed as dist

from paceline.backends.shm.shared_arena import arena

__all__ = ["enter", "error_of", "open_resources", "run_forked"]


def enter(folder, rank, size, timeout=60.0, name="world"):
    dist.init_process_group(
        "paceline",
        init_method=f"file://{folder}/{name}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    return dist.group.WORLD


def open_resources():
    """Return this process's resources of the backend: sockets to peers, pidfds, mapped memory."""
    gc.collect()
    with open("/proc/net/unix") as file:
        unix = {line.split()[6] for line in file.readlines()[1:]}
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if link.removeprefix("socket:[").removesuffix("]") in unix or "pidfd" in link:
            found.append(link)
    with open("/proc/self/maps") as file:
        mapped = sum("memfd:paceline" in line for line in file)
    return sorted(found), mapped - len(arena.segments)


def run_forked(fork, size, work, *args):
    """Fork ranks and return the result of each."""
    children = [fork(work, rank, size, *args) for rank in range(size)]
    results = [child.receive() for child in children]
    assert [child.wait() for child in children] == [0] * size
    return results


def error_of(make):
    """Return the error of a call as (kind, text)."""
    try:
        work = make()
        if work is not None:
            work.wait()
    except Exception as error:  # noqa: BLE001 — the test looks at it
        return type(error).__name__, str(error)
    return "nothing", ""
