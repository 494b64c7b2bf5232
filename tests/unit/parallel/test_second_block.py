"""A block of local steps that ends and begins again, in a world of one."""

from __future__ import annotations

import torch
from torch import nn

import paceline


def test_fragments_keep_their_delay_in_a_second_block(monkeypatch):
    """Pending fragments are merged when the first block ends; later ones are not merged in their place."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = paceline.LocalSGD(model, optim, every=4, fragments=2, delay=3)
    sent, delays = {}, []
    send, merge = loop._send, loop._merge

    def note_send(number, *, finished=False):
        sent[number] = loop.steps
        send(number, finished=finished)

    def note_merge(*, finished=False):
        if loop.steps < 20 and not finished:
            delays.append(loop.steps - sent[loop._pending[0]])
        return merge(finished=finished)

    monkeypatch.setattr(loop, "_send", note_send)
    monkeypatch.setattr(loop, "_merge", note_merge)
    for steps in (5, 15):
        with loop:
            for _ in range(steps):
                model(torch.ones(1, 3)).sum().backward()
                optim.step()
                optim.zero_grad()
    assert delays[:1] == [3]
    assert delays[1] == 1  # sent at step 4, merged at the end of the first block
    assert delays[2:] == [3] * 5
