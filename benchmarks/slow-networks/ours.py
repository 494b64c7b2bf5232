"""Paceline's contestants in `step.py`: compressed gradients every step, and pseudo-gradients every 20.

They run over a gloo group, as torch's do.
"""

from __future__ import annotations

from stage import Contestant, Stage
from workload import EVERY, model_and_optimizer, trainer

import paceline

__all__ = ["compressed", "diloco"]

BUCKET_MIB = 5.0


def compressed(stage: Stage, *, compression: str) -> Contestant:
    """Return gradients that are compressed, with error feedback as is usual for that compression."""
    net, optimizer = model_and_optimizer()
    plan = paceline.Sync(bucket_mib=BUCKET_MIB, compression=compression)
    model = paceline.DataParallel(net, sync=plan, group=stage.gloo)
    step = trainer(model, optimizer, stage.batch)
    step()  # learns the order of the buckets
    step()
    return Contestant(step, net, model.timings.sent_nbytes)


def diloco(stage: Stage, *, fragments: int, delay: int) -> Contestant:
    """Return local steps, of which the ranks exchange every 20th time what they have learnt, in 4 bits a number."""
    net, optimizer = model_and_optimizer()
    loop = paceline.DiLoCo(net, optimizer, EVERY, fragments=fragments, delay=delay, group=stage.gloo)
    loop.__enter__()  # as long as the process lives
    step = trainer(net, optimizer, stage.batch)
    for _ in range(delay):  # so that at the end of a turn nothing is under way
        step()
    return Contestant(
        step,
        net,
        loop.round_nbytes / EVERY,
        every=EVERY,
        agreed=lambda: loop.shared().values(),
    )
