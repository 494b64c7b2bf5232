"""The group inside a group: what makes the calls that ours does not make."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from paceline.backends.membership import Membership

__all__ = ["register_inner"]


def register_inner(group: Membership, options: Any, store: dist.Store, gloo: dist.ProcessGroupGloo) -> None:
    """Register what calls fall through to: gloo for the CPU, NCCL for CUDA where it is there.

    Args:
        group: the group that calls fall through.
        options: what torch asked for: place, ranks, time-out.
        store: where the ranks of the group meet.
        gloo: the group for the CPU.
    """
    gloo._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    if torch.cuda.is_available() and dist.is_nccl_available():
        nccl_options = dist.ProcessGroupNCCL.Options()
        nccl_options._timeout = options.timeout
        nccl = dist.ProcessGroupNCCL(
            dist.PrefixStore("nccl", store), options.group_rank, options.group_size, nccl_options
        )
        nccl._set_sequence_number_for_group()
        group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
