"""DiLoCo by hand, as one contestant of `peers.py`: what a single all-reduce of torch costs, without any library.

It needs no installation of its own, so it is also the pattern for one contestant more: build what synchronises, and
return a :class:`peer_turn.Peer`.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from peer_turn import OUTER_LR, OUTER_MOMENTUM, Peer, Place, play, ring_nbytes
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from workload import EVERY

from paceline.tools.models.gpt import GPT


def build(place: Place, model: GPT, optimizer: torch.optim.Optimizer) -> Peer:
    """Return the inner optimizer, and every so many steps a Nesterov step with the mean of what was moved."""
    base = torch.nn.Parameter(parameters_to_vector(model.parameters()).detach().clone())
    outer = torch.optim.SGD([base], lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
    steps = 0

    @torch.no_grad()
    def go_back() -> None:
        vector_to_parameters(base.detach().clone(), model.parameters())

    @torch.no_grad()
    def finish() -> None:
        nonlocal steps
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps % EVERY == 0:
            moved = base - parameters_to_vector(model.parameters())
            dist.all_reduce(moved)
            base.grad = moved.div_(place.ranks)
            outer.step()
            go_back()

    return Peer(finish, nullcontext(), ring_nbytes(model, place.ranks), begin=go_back)


if __name__ == "__main__":
    play(build)
