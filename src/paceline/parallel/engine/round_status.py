"""What ranks tell one another at the end of a round of synchronisation.

The ledger is a short vector that is summed with the last bucket. Every rank writes its own columns and adds
to shared flags, so that after the sum all ranks hold the same page:

    | samples, high part: N | samples, low part: N | status: N | peaks: N | late gradients | used: one per parameter |

`samples` weigh the mean, so a short last batch, unequal shares, an empty rank and token masks are one
mechanism; `peaks` tell which ranks' own gradients were finite, where that is asked (`gauge`); `used` tells whether any
rank has a gradient (a parameter that nobody used keeps ``grad=None``, as in one process); `late` that a gradient came
after its bucket had left; `status` lets a rank that failed in backward finish the round and say so.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import BackwardFailed, SyncError

__all__ = ["RoundSummary", "Status", "decode", "encode", "peak_index", "replicated_sum", "vector_length"]


class Status(enum.IntEnum):
    """What a rank brought to the round."""

    SAMPLES = 0
    """Gradients weighted by a number of samples (``model.backward(loss, samples=n)``)."""
    EQUAL = 1
    """Gradients that count as every other rank's (``loss.backward()``): the collective averages."""
    SHARE = 2
    """The same, divided by the number of ranks already (``model.backward(loss)``): the collective sums."""
    FAILED = 3
    """An exception in backward; this round has no result."""


@dataclass(frozen=True)
class RoundSummary:
    """A ledger as all ranks read it.

    Attributes:
        samples: per rank. status: per rank. used: per parameter, whether any rank has a gradient.
        late: gradients, over all ranks, that came after their bucket had left.
        peaks: per rank, a number no element of its gradient exceeds; 0 where nobody asked.
    """

    samples: tuple[float, ...]
    status: tuple[Status, ...]
    used: tuple[bool, ...]
    late: int = 0
    peaks: tuple[float, ...] = ()

    @property
    def total(self) -> float:
        """Samples of all ranks."""
        return sum(self.samples)

    def ranks(self, status: Status) -> list[int]:
        """Return the ranks with that status."""
        return [rank for rank, value in enumerate(self.status) if value is status]

    def raise_for_status(self, rank: int, step: int) -> None:
        """Raise if the round has no result; `rank` and `step` are for the message.

        Raises:
            BackwardFailed: a rank raised an exception in backward.
            SyncError: some ranks passed samples and others did not.
        """
        if bad := self.ranks(Status.FAILED):
            raise BackwardFailed(
                f"backward raised an exception on rank {', '.join(map(str, bad))}; no rank has a gradient",
                rank=bad[0],
                step=step,
                remedy="see that rank's own error; training can go on with the next step",
            )
        calls = {
            Status.SAMPLES: "model.backward(loss, samples=...)",
            Status.SHARE: "model.backward(loss)",
            Status.EQUAL: "loss.backward()",
        }
        made = [
            f"ranks {ranks} called {call}" for status, call in calls.items() if (ranks := self.ranks(status))
        ]
        if len(made) > 1:
            raise SyncError(
                " and ".join(made), rank=rank, step=step, remedy="make the same call on every rank"
            )


def vector_length(ranks: int, params: int) -> int:
    """Return the number of elements of a ledger."""
    return 4 * ranks + 1 + params


def peak_index(rank: int, ranks: int) -> int:
    """Return the index of that rank's peak in a ledger."""
    return 3 * ranks + rank


def _float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def encode(
    rank: int, ranks: int, samples: float, status: Status, used: Sequence[bool], late: int = 0
) -> list[float]:
    """Return this rank's ledger, ready to be summed; exact for 48 bits of `samples` in float32."""
    summary = [0.0] * (4 * ranks)
    high = _float32(samples)
    summary[rank], summary[ranks + rank], summary[2 * ranks + rank] = high, samples - high, float(status)
    return [*summary, float(late), *map(float, used)]


def replicated_sum(mine: Sequence[float], rank: int, ranks: int) -> list[float]:
    """Return what `ranks` ledgers sum to if every rank writes into its own columns what `rank` wrote into its.

    Example:
        >>> page = decode(alike(encode(1, 3, 8.0, Status.SAMPLES, [True, False]), 1, 3), 3)
        >>> page.samples, page.used
        ((8.0, 8.0, 8.0), (True, False))
    """
    columns = [mine[part * ranks + rank] for part in range(4) for _ in range(ranks)]
    return [*columns, *(ranks * value for value in mine[4 * ranks :])]


def decode(summed: Sequence[float], ranks: int) -> RoundSummary:
    """Return the page that a summed ledger holds."""
    high, low, status = summed[:ranks], summed[ranks : 2 * ranks], summed[2 * ranks : 3 * ranks]
    return RoundSummary(
        samples=tuple(upper + lower for upper, lower in zip(high, low, strict=True)),
        status=tuple(Status(round(value)) for value in status),
        peaks=tuple(summed[3 * ranks : 4 * ranks]),
        late=round(summed[4 * ranks]),
        used=tuple(value > 0 for value in summed[4 * ranks + 1 :]),
    )
