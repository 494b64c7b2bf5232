"""LocalSGD, DiLoCo, SlowMo: parameters are synchronised every H steps, instead of gradients every step.

    with paceline.DiLoCo(model, optim, every=20):
        for batch in loader:                                  # an ordinary loop
            model.backward(loss_of(model, batch), samples=batch.samples)
            optim.step(); optim.zero_grad()

In the block every rank trains locally. After every H-th ``optim.step()`` the ranks exchange what they have learnt,
weighted by their samples, and continue from the same parameters; all have the same ones when the block ends. The three
differ in the outer optimizer (`outer_optimizers`); all can send the model in fragments, delayed, and compressed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from paceline.parallel.compression.compression_config import Compression
from paceline.parallel.local_sgd.outer_loop import OuterLoop
from paceline.parallel.local_sgd.outer_optimizers import Averaging, Nesterov, SlowMomentum
from paceline.parallel.local_sgd.sync_schedule import SyncSchedule

__all__ = ["DiLoCo", "LocalSGD", "SlowMo"]


class LocalSGD(OuterLoop):
    """Averages parameters every H local steps (local SGD, Stich, arXiv 1805.09767).

    Args:
        model: a `DataParallel`, or a bare module; when the block begins, a bare one gets rank 0's parameters, and
            either rank 0's buffers. See `OuterLoop` for models that synchronise in groups.
        optimizer: the local one; each of its steps counts.
        every: H, local steps between two synchronisations.
        fragments: parts of the model that are synchronised in turn, one every H / fragments steps.
        delay: τ, local steps from sending a fragment to merging the mean, below H; communication overlaps them. What
            a rank learns in them is kept (the delta rule): w ← θ' + (w − w_sent).
        mix: α, the share of its own parameters that a rank keeps when it merges: 0 none; 1 all, so the ranks train
            separately until the block ends.
        compression: of what is sent: a name, a `Compression`, or None.
        piece_mib: MiB of parameters that are compressed and sent together, while the next piece is compressed.
        group: the ranks, as a process group; None: all.

    Raises:
        UsageError: a value is out of range, there are more fragments than layers, the compression is unknown or
            unsupported, or model and optimizer don't belong together.
        MismatchError: a rank has other settings, or another model; it is named.

    Example:
        >>> with LocalSGD(model, optim, every=10):
        ...     train_some_steps()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int,
        *,
        fragments: int = 1,
        delay: int = 0,
        mix: float = 0.0,
        compression: str | Compression | None = "int8",
        piece_mib: float = 8.0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            schedule=SyncSchedule(every, fragments, delay),
            outer=Averaging(),
            mix=mix,
            keep_local_steps=True,
            compression=compression,
            piece_mib=piece_mib,
            group=group,
        )


class DiLoCo(OuterLoop):
    """Uses the mean change of H local steps as the gradient of an outer Nesterov step (arXiv 2311.08105).

    With fragments and a delay this is Streaming DiLoCo (arXiv 2501.18512, Algorithm 2), at the same steps as torchft's:
    a fragment is merged after every H-th step, w ← α·w + (1 − α)·θ', and has been sent τ steps before. So with α = 0
    what a rank learns in these τ steps is lost.

    Args:
        model, optimizer, every, fragments, mix, compression, piece_mib, group: as for `LocalSGD`.
        outer_lr: ε of the outer step.
        outer_momentum: μ of the outer step.
        warmup: local steps before the outer momentum starts; until then parameters are averaged.
        delay: τ, local steps from sending a fragment to merging it, below H; communication overlaps them.
        keep_local_steps: keep what a rank learns in these τ steps, as `LocalSGD` does:
            w ← α·w + (1 − α)·(θ' + (w − w_sent)).

    Raises: as `LocalSGD`.

    Example:
        >>> with DiLoCo(model, optim, every=20, fragments=2, delay=3):
        ...     train_some_steps()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int,
        *,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        warmup: int = 0,
        fragments: int = 1,
        delay: int = 0,
        mix: float = 0.0,
        keep_local_steps: bool = False,
        compression: str | Compression | None = "int4",
        piece_mib: float = 8.0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            schedule=SyncSchedule(every, fragments, delay),
            outer=Nesterov(outer_lr, outer_momentum),
            warmup=warmup,
            mix=mix,
            keep_local_steps=keep_local_steps,
            compression=compression,
            piece_mib=piece_mib,
            group=group,
        )


class SlowMo(OuterLoop):
    """Averages parameters every H local steps, and gives the average a slow momentum (arXiv 1910.00643).

    Args:
        model, optimizer, every, compression, piece_mib, group: as for `LocalSGD`.
        slow_lr: α.
        slow_momentum: β; the paper takes 0.2 with 4 ranks, 0.5 with 8, 0.6 with 16.
        warmup: local steps before the slow momentum starts.

    Raises: as `LocalSGD`.

    Example:
        >>> with SlowMo(model, optim, every=10, slow_momentum=0.2):
        ...     train_some_steps()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int,
        *,
        slow_lr: float = 1.0,
        slow_momentum: float = 0.5,
        warmup: int = 0,
        compression: str | Compression | None = "int8",
        piece_mib: float = 8.0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            schedule=SyncSchedule(every),
            outer=SlowMomentum(slow_lr, slow_momentum),
            warmup=warmup,
            compression=compression,
            piece_mib=piece_mib,
            group=group,
        )
