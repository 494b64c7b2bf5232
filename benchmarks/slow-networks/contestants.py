"""Who takes part in `step.py`: one function each, and the table of their names.

A contestant is built on every rank, takes the :class:`Stage` and returns how one training step is done, what it
expects to send, and how often it synchronises. To add one, write a function and a line of `CONTESTANTS`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

from figures import DDP, DDP_FP16, NO_SYNC, OURS, OURS_STREAMING, SQUEEZED
from ours import compressed, diloco
from stage import Contestant, Stage, ring_nbytes
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from workload import model_and_optimizer, trainer

__all__ = ["CONTESTANTS"]


def no_sync(stage: Stage) -> Contestant:
    """Return a model that every rank trains for itself: what computing takes."""
    model, optimizer = model_and_optimizer()
    return Contestant(trainer(model, optimizer, stage.batch), model, 0.0, equal=False)


def ddp(stage: Stage, *, mib: int, fp16: bool = False) -> Contestant:
    """Return torch's DistributedDataParallel with buckets of `mib` MiB.

    Its best settings: gradients are views into buckets, and buffers, all of them constant here, are not sent.
    """
    net, optimizer = model_and_optimizer()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)  # its successor is too young
        model = DistributedDataParallel(
            net,
            process_group=stage.gloo,
            bucket_cap_mb=mib,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
            static_graph=True,
            init_sync=False,  # all begin with the same parameters
        )
    nbytes = sum(parameter.nbytes for parameter in net.parameters())
    if fp16:
        model.register_comm_hook(stage.gloo, fp16_compress_hook)
        nbytes //= 2
    return Contestant(trainer(model, optimizer, stage.batch), net, ring_nbytes(nbytes, stage.ranks))


CONTESTANTS: dict[str, Callable[[Stage], Contestant]] = {
    NO_SYNC: no_sync,
    **{name: partial(ddp, mib=mib) for mib, name in DDP.items()},
    **{name: partial(ddp, mib=mib, fp16=True) for mib, name in DDP_FP16.items()},
    **{name: partial(compressed, compression=how) for how, name in SQUEEZED.items()},
    OURS: partial(diloco, fragments=1, delay=0),
    OURS_STREAMING: partial(diloco, fragments=2, delay=5),
}
