"""Worlds that are formed again: ranks whose earlier tries differ still meet."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from paceline.world import session

JOINED = "joined"


def form(send, folder, rank, backend, failures):
    """Try in vain to form worlds alone, then form one of two ranks."""
    session._FORM_SECONDS = 0.5
    session._session.world = session.World()
    store = dist.FileStore(f"{folder}/store", 2)
    for number in range(failures):
        alone = dist.PrefixStore(f"{rank}/{number}", store)
        with pytest.raises(RuntimeError):
            session.form_world(alone, 0, 2, backend, 30.0)
    session._FORM_SECONDS = 20.0
    session.form_world(dist.PrefixStore("both", store), rank, 2, backend, 30.0)
    dist.barrier()
    send((JOINED, dist.group.WORLD.group_name))
    session.leave_group()


def run(fork, folder, backend, failures):
    processes = [fork(form, folder, rank, backend, failures[rank]) for rank in range(2)]
    return [process.receive(40.0) for process in processes]


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_ranks_that_failed_differently_before_form_a_world(killable, backend):
    assert killable.run_ranks(run, backend, (0, 2), timeout=60) == [(JOINED, "0")] * 2
