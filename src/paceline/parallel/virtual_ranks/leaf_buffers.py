"""Buffers that forward changes, such as BatchNorm's running statistics, when virtual ranks train.

Every leaf starts from the buffers of the step before. After the step, floating-point buffers are the mean over all
leaves, weighted by their samples and added along the fixed tree in float64; counters, which every leaf advances alike,
are those of the last one. Only what the first step has changed, on any rank, is exchanged.
"""

from __future__ import annotations

import torch

from paceline._core.summation_tree import addition_order, leaves_of
from paceline.errors import SyncError
from paceline.parallel.gradient_collectives import Comm
from paceline.world.control_collectives import gather_rows

__all__ = ["LeafBuffers"]


class LeafBuffers:
    """The changing buffers of a model.

    Args:
        module: the model.
        comm: the ranks.
        virtual_ranks: leaves of a step.

    Attributes:
        samples: of this rank's leaves that have ended in the present step.
    """

    def __init__(self, module: torch.nn.Module, comm: Comm, virtual_ranks: int) -> None:
        self._module, self._comm = module, comm
        self._counts = [len(leaves_of(rank, comm.size, virtual_ranks)) for rank in range(comm.size)]
        self._changing: list[str] | None = None  # names, once all ranks have agreed
        self._start: dict[str, torch.Tensor] = {}
        self._begun = False
        self._ended: list[tuple[float, dict[str, torch.Tensor]]] = []
        self._surprise = ""  # a buffer that changed for the first time after the first step
        self.samples = 0.0

    def begin_step(self) -> None:
        """Note the buffers before the first forward of a step."""
        if self._begun:
            return
        self._begun, self._ended, self.samples = True, [], 0.0
        for name, each in self._module.named_buffers():
            if self._changing is None or name in self._changing or name not in self._start:
                self._start[name] = each.detach().clone()

    def end_step(self) -> None:
        """Forget what was noted in the present step."""
        self._begun, self._ended, self.samples = False, [], 0.0

    def end_leaf(self, samples: float) -> None:
        """Note the buffers that a leaf with this number of samples has changed."""
        self.samples += samples
        changed = {}
        for name, each in self._module.named_buffers():
            known = self._changing is not None and name in self._changing
            if known or (name in self._start and not torch.equal(each, self._start[name])):
                changed[name] = each.detach().clone()
                if self._changing is not None and not known:
                    self._surprise = name
        self._ended.append((samples, changed))

    @torch.no_grad()
    def restore(self) -> None:
        """Go back to the buffers of the step before."""
        if self._begun:
            for name, each in self._module.named_buffers():
                if name in self._start and (self._changing is None or name in self._changing):
                    each.copy_(self._start[name])

    @torch.no_grad()
    def average(self) -> None:
        """Give all ranks the mean of the leaves; all ranks call this.

        Raises:
            SyncError: a buffer changed that did not in the first step.
        """
        if self._surprise:
            raise SyncError(
                f"forward changed buffer {self._surprise!r}, which it left alone in the first step",
                rank=self._comm.rank,
                remedy="train without virtual ranks, or change it in every forward",
            )
        if self._changing is None:
            own = sorted({name for _, held in self._ended for name in held})
            every = self._comm.gather_values(own) if self._comm.size > 1 else [own]
            self._changing = sorted({name for names in every for name in names})
        named = dict(self._module.named_buffers())
        floats = [name for name in self._changing if named[name].is_floating_point()]
        if floats and self._ended:
            rows = self._all_rows([named[name] for name in floats], floats)
            for row in rows:
                row[1:] *= row[0]
            for left, right in addition_order(
                [range(leaf, leaf + 1) for leaf in range(len(rows))], len(rows)
            ):
                rows[left] += rows[right]
            if rows[0][0] > 0:
                mean = (rows[0][1:] / rows[0][0]).split([named[name].numel() for name in floats])
                for name, part in zip(floats, mean, strict=True):
                    named[name].copy_(part.view(named[name].shape))
        self.end_step()

    def _all_rows(self, buffers: list[torch.Tensor], names: list[str]) -> list[torch.Tensor]:
        """Return, per leaf, its samples and its buffers in float64."""
        most, length = max(self._counts), 1 + sum(each.numel() for each in buffers)
        own = torch.zeros(most, length, dtype=torch.float64)
        for row, (samples, held) in zip(own, self._ended, strict=False):
            row[0] = samples
            row[1:] = torch.cat(
                [
                    held.get(name, each).detach().reshape(-1).to("cpu", torch.float64)
                    for name, each in zip(names, buffers, strict=True)
                ]
            )
        gathered = [each.cpu().view(most, length) for each in gather_rows(own.view(-1), self._comm.group)]
        return [row for rows, count in zip(gathered, self._counts, strict=True) for row in rows[:count]]
