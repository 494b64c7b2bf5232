"""Who counts how much: samples behind gradients, and the factors that make a sum the mean over samples.

A rank's gradient is weighted by samples / reference inside its own backward, which costs nothing. The
reference is the total of the previous round, so if the total has not changed, the sum over ranks already is
the mean over all samples. If it has, one multiplication by reference / total mends it.
"""

from __future__ import annotations

from paceline.errors import SyncError
from paceline.parallel.engine.round_status import RoundSummary, Status

__all__ = ["LossWeights", "missing_samples_error"]


def missing_samples_error(rank: int, step: int) -> SyncError:
    """Return the error for a backward without samples on a batch that a loader filled a place with."""
    return SyncError(
        "backward without samples= on a batch that has none: it would count as much as any other rank's",
        rank=rank,
        step=step,
        remedy="call model.backward(loss, samples=batch.samples), which is exact for unequal batches",
    )


class LossWeights:
    """The weights of one rank among `ranks`.

    Attributes:
        status: whether the gradient under way is weighted by samples or counts as every other rank's.
        samples: of this rank, behind gradients that no round has seen.
        total: of all ranks, behind the latest result.
        reference: the total that this round's losses are weighted by; it decides the last bits of the result.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self.reference = float(ranks)
        self.status = Status.EQUAL
        self.samples = 0.0
        self.total = 0.0

    @property
    def averaged(self) -> bool:
        """Whether the collective must average, because nobody scaled the loss (``loss.backward()``)."""
        return self.status is Status.EQUAL

    @property
    def counted(self) -> bool:
        """Whether ranks count by their samples."""
        return self.status is Status.SAMPLES

    def loss_factor(self, samples: float | None) -> float:
        """Return the factor for a loss that is the mean over `samples` samples; None: ranks count the same."""
        return 1 / self._ranks if samples is None else samples / self.reference

    def samples_for(self, weight: float) -> float:
        """Return the samples that a (rounded) factor stands for."""
        return weight * self.reference

    @property
    def carries(self) -> bool:
        """Whether this rank is the one that carries a result into the next round."""
        return self._rank == 0 or self._ranks == 1

    def carry(self) -> float:
        """Take the latest result into the next round; return the factor for the ranks that carry it.

        A result that zero_grad() did not drop must count once, not once per rank. So one rank carries it and
        the others start from zero; when sharded, each rank carries its own shard.
        """
        if not self.counted:
            return float(self._ranks) if self.averaged else 1.0
        self.samples = self.total if self.carries else 0.0
        return self.total / self.reference

    def close(self, summary: RoundSummary) -> float:
        """Take note of a round's totals; return the factor that makes its result the mean.

        Args:
            page: the round's ledger; at least one sample, where samples are counted.
        """
        self.samples, self.total = 0.0, summary.total
        if not self.counted:
            return 1.0
        factor, self.reference = self.reference / summary.total, summary.total
        return factor
