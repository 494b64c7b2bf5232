"""Futures of collectives and messages: callbacks may start others, and C++ sees errors too."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from both import world


def nested(rank, size, folder, calls):
    """Start collectives whose callbacks start collectives and wait for them, while the program starts others."""

    def reduce_again(future):
        again = dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0]
        dist.broadcast(again, 0)
        return again / size

    with world(rank, size, folder):
        ends = []
        for call in range(calls):
            work = dist.all_reduce(torch.full((5,), float(call)), async_op=True)
            ends.append(work.get_future().then(reduce_again))
            dist.all_reduce(torch.ones(3))
        return [end.wait()[0].item() for end in ends]


@pytest.mark.parametrize("size", [2, 3])
def test_callbacks_make_collectives_and_wait_for_them(pool, tmp_path, size):
    expected = [float(call * size) for call in range(20)]
    assert pool(size).run(nested, str(tmp_path), 20, world=False) == [expected] * size


def builds_graphs(rank, size, folder):
    """Train with tensors made in a callback."""
    with world(rank, size, folder) as group:
        future = dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future()
        weight = future.then(lambda done: done.value()[0] * 2).wait().requires_grad_()
        (weight * torch.ones(3)).sum().backward()
        return weight.grad.tolist()


def test_tensors_made_in_a_callback_can_be_trained(pool, tmp_path):
    assert pool(2).run(builds_graphs, str(tmp_path), world=False) == [[1.0] * 3] * 2


def answer_in_a_callback(rank, size, folder):
    """Answer a message in the callback of its receipt, and wait there for the answer to that."""
    with world(rank, size, folder) as group:
        box, other = torch.zeros(1), 1 - rank
        if rank == 0:
            dist.send(torch.ones(1), other, group=group)
            dist.recv(box, other, group=group)
            dist.send(box + 1, other, group=group)
            return box.item()

        def answer(future):
            dist.send(future.value()[0] + 1, other, group=group)
            dist.recv(box, other, group=group)
            return box

        return dist.irecv(box, other, group=group).get_future().then(answer).wait().item()


def test_callbacks_of_messages_send_and_receive(pool, tmp_path):
    assert pool(2).run(answer_in_a_callback, str(tmp_path), world=False) == [2.0, 3.0]


def fail_in_a_future(rank, size, folder):
    dist.init_process_group("paceline", init_method=f"file://{folder}/world", rank=rank, world_size=size)
    if rank == 1:
        dist.destroy_process_group()
        return []
    work = dist.all_reduce(torch.ones(1), async_op=True)
    future, texts = work.get_future(), []
    for wait in (work.wait, future.wait, future.then(lambda done: done.value()).wait):
        try:
            wait()
        except RuntimeError as error:
            texts.append((type(error).__name__, str(error)))
    return texts


def test_an_error_reaches_all_waiters(pool, tmp_path):
    texts = pool(2).run(fail_in_a_future, str(tmp_path), world=False)[0]
    assert [kind for kind, _ in texts] == ["PeerLost", "RuntimeError", "RuntimeError"]
    assert all("rank 1" in text for _, text in texts)
