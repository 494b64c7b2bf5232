"""The round status: as short as its ranks and parameters, whatever the plan."""

from __future__ import annotations

import pytest
import torch

from paceline.parallel.buckets.bucket_builder import build_buckets
from paceline.parallel.buckets.grad_slot import GradSlot
from paceline.parallel.engine import round_status
from paceline.parallel.gradient_collectives import Comm
from paceline.parallel.strategy import Sync

RANKS, PARAMETERS = 1024, 1000


@pytest.mark.parametrize("plan", ["bucketed", "sharded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_round_sends_at_most_64_kb_of_status_for_1024_ranks_and_1000_parameters(plan, dtype):
    comm = Comm()
    comm.size = RANKS
    slots = [
        GradSlot(index, f"weight.{index}", torch.nn.Parameter(torch.zeros(4, dtype=dtype)))
        for index in range(PARAMETERS)
    ]
    buckets = build_buckets(
        slots,
        range(PARAMETERS),
        Sync.of(plan),
        comm,
        status_length=round_status.vector_length(RANKS, PARAMETERS),
        sharded=plan == "sharded",
        reduce_dtype=None,
    )
    last = buckets[-1]
    assert last.status.numel() == round_status.vector_length(RANKS, PARAMETERS)
    assert last.status.nbytes <= 64_000
    if not last.slots:  # sent alone
        assert last.flat.nbytes <= 64_000
