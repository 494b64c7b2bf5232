"""A block of local steps that ends and begins again, in a world of one."""

from __future__ import annotations

import copy

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

    def note_merge(*, read=False, finished=False):
        if loop.steps < 20 and not finished:
            delays.append(loop.steps - sent[loop._pending[0]])
        return merge(read=read, finished=finished)

    monkeypatch.setattr(loop, "_send", note_send)
    monkeypatch.setattr(loop, "_merge", note_merge)
    for steps in (2, 18):
        with loop:
            for _ in range(steps):
                model(torch.ones(1, 3)).sum().backward()
                optim.step()
                optim.zero_grad()
    assert delays[0] == 1  # sent at step 1, merged at the end of the first block
    assert delays[1:] == [3] * 7


def test_a_pending_fragment_is_merged_before_it_is_sent_again_by_another_schedule():
    """A run that is resumed with other settings than it was saved with."""

    def start(**options):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optim = torch.optim.SGD(model.parameters(), lr=1.0)
        plain = {"outer_lr": 1.0, "outer_momentum": 0.0, "compression": None}
        return model, optim, paceline.DiLoCo(model, optim, **plain, **options)

    def train(model, optim, steps):
        weights = []
        for _ in range(steps):
            model.weight.grad = torch.full_like(model.weight, 2.0)
            optim.step()
            weights.append(model.weight.item())
        return weights

    model, optim, loop = start(every=6, delay=3)
    with loop:
        assert train(model, optim, 4) == [-1, -3, -5, -7]
        saved = copy.deepcopy((loop.state_dict(), loop.rank_state_dict()))
    model, optim, loop = start(every=5)
    loop.load_state_dict(*saved)
    with loop:
        # Sent at step 3 with -5; at step 5 that is merged, and nothing more has been learnt since.
        assert train(model, optim, 6) == [-5, -7, -9, -11, -13, -15]
        assert loop.syncs == 3
