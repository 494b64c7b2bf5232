"""The status vector that ranks exchange at the end of a round.

Every rank writes its own columns of a short vector and adds to shared flags. The vector is summed along with the last
bucket, so all ranks read the same summary:

    | samples, high part: N | samples, low part: N | status: N | peaks: N | late gradients | used: one per parameter |

    samples   weight the mean, so that a short last batch, unequal shares, a rank without data and token masks are one
              mechanism; high and low part are exact for 48 bits in float32
    status    how the rank weighted its gradient, or that its backward failed, so that it still completes the round;
              plus 8 times a digest of what only this rank may have changed (`model_changes`), 0 as a rule
    peaks     show which ranks' gradients were finite, if a finite check is installed (`gradient_finite_check`)
    late      gradients that arrived after their bucket was launched
    used      whether any rank has a gradient; a parameter that no rank used keeps ``grad=None``, as in one process.
              1 if this backward computed it, `KEPT` if there is only one from before
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.errors import BackwardFailed, SyncError

__all__ = [
    "KEPT",
    "RoundSummary",
    "Status",
    "add_digest",
    "decode",
    "encode",
    "missing_samples_error",
    "peak_index",
    "replicated_sum",
    "split_samples",
    "totals",
    "vector_length",
]


class Status(enum.IntEnum):
    """How a rank's gradient was weighted, or that it failed."""

    SAMPLES = 0
    """By a number of samples (``model.backward(loss, samples=n)``)."""
    EQUAL = 1
    """As every other rank's (``loss.backward()``): the collective averages."""
    SHARE = 2
    """As every other rank's, divided by the number of ranks already (``model.backward(loss)``): the collective sums."""
    FAILED = 3
    """Backward raised; the round has no result."""
    JOINED = 4
    """No batch is left on this rank (torch's join context): it contributes zeros to ``loss.backward()`` of others."""


KEPT = 2.0**-12
"""Flag of a gradient that this backward did not compute; 3000 of them are less than one that it did."""
_DIGEST_UNIT = 8
"""More than the largest status. With 16 bits of digest the number stays exact in float32, averages included."""

_CALLS = {
    Status.SAMPLES: "model.backward(loss, samples=...)",
    Status.SHARE: "model.backward(loss)",
    Status.EQUAL: "loss.backward()",
}


@dataclass(frozen=True)
class RoundSummary:
    """A summed status vector.

    Attributes:
        samples: per rank.
        status: per rank.
        used: per parameter, whether any rank has a gradient.
        late: number of late gradients, over all ranks.
        peaks: per rank, a number that no element of its gradient exceeds; 0 without a finite check.
        flags: per parameter, the sum of its flags `used`.
        digests: per rank, a number that is the same on all ranks if their models are.
    """

    samples: tuple[float, ...]
    status: tuple[Status, ...]
    used: tuple[bool, ...]
    late: int = 0
    peaks: tuple[float, ...] = ()
    flags: tuple[float, ...] = ()
    digests: tuple[int, ...] = ()

    @property
    def users(self) -> tuple[int, ...]:
        """Per parameter, on how many ranks the latest backward computed its gradient."""
        return tuple(int(flag + 0.25) for flag in self.flags)

    @property
    def total(self) -> float:
        """Samples of all ranks."""
        return sum(self.samples)

    def raise_for_status(self, rank: int, step: int) -> None:
        """Raise if the round has no result; `rank` and `step` are for the message.

        Raises:
            BackwardFailed: a rank raised an exception in backward.
            SyncError: some ranks passed samples and others did not.
        """
        failed = [other for other, status in enumerate(self.status) if status is Status.FAILED]
        if failed:
            raise BackwardFailed(
                f"backward raised an exception on rank {', '.join(map(str, failed))}; no rank has a gradient",
                rank=failed[0],
                step=step,
                remedy="see that rank's own error; training can go on with the next step",
            )
        made = []
        for kind, call in _CALLS.items():
            ranks = [other for other, status in enumerate(self.status) if status is kind]
            made += [f"ranks {ranks} called {call}"] if ranks else []
        if len(made) > 1:
            raise SyncError(
                " and ".join(made), rank=rank, step=step, remedy="make the same call on every rank"
            )


def vector_length(ranks: int, params: int) -> int:
    """Return the number of elements of a status vector."""
    return 4 * ranks + 1 + params


def peak_index(rank: int, ranks: int) -> int:
    """Return the index of a rank's peak in a status vector."""
    return 3 * ranks + rank


def encode(
    rank: int,
    ranks: int,
    samples: float,
    status: Status,
    used: Sequence[float],
    late: int = 0,
    digest: int = 0,
) -> list[float]:
    """Return this rank's status vector, without its peak; `digest` has up to 16 bits."""
    columns = [0.0] * (4 * ranks)
    high = struct.unpack("f", struct.pack("f", samples))[0]
    columns[rank], columns[ranks + rank] = high, samples - high
    columns[2 * ranks + rank] = float(status + _DIGEST_UNIT * digest)
    return [*columns, float(late), *used]


def split_samples(place: torch.Tensor, rank: int, ranks: int, samples: torch.Tensor) -> None:
    """Write samples that are a scalar on the device to this rank's status vector, as `encode` does on the host."""
    high = samples.to(torch.float32).to(torch.float64)
    place[rank].copy_(high)
    place[ranks + rank].copy_(samples - high)


def add_digest(place: torch.Tensor, rank: int, ranks: int, digest: torch.Tensor) -> None:
    """Add 16 bits of a digest, an int64 scalar on the device, to this rank's status vector."""
    place[2 * ranks + rank].add_((digest & 0xFFFF) * _DIGEST_UNIT)


def totals(summed: torch.Tensor, ranks: int, status: Status) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the samples of all ranks, and whether all have this `status`: scalars where the summed vector is."""
    kinds = summed[2 * ranks : 3 * ranks].remainder(_DIGEST_UNIT)
    return (summed[:ranks] + summed[ranks : 2 * ranks]).sum(), (kinds == float(status)).all()


def replicated_sum(mine: Sequence[float], rank: int, ranks: int) -> list[float]:
    """Return the sum of `ranks` status vectors that all report what this `rank` reports in `mine`.

    Example:
        >>> summary = decode(replicated_sum(encode(1, 3, 8.0, Status.SAMPLES, [True, False]), 1, 3), 3)
        >>> summary.samples, summary.used
        ((8.0, 8.0, 8.0), (True, False))
    """
    columns = [mine[part * ranks + rank] for part in range(4) for _ in range(ranks)]
    return [*columns, *(ranks * value for value in mine[4 * ranks :])]


def decode(summed: Sequence[float], ranks: int) -> RoundSummary:
    """Return the summary that a summed status vector holds."""
    high, low = summed[:ranks], summed[ranks : 2 * ranks]
    coded = [divmod(round(value), _DIGEST_UNIT) for value in summed[2 * ranks : 3 * ranks]]
    flags = tuple(summed[4 * ranks + 1 :])
    return RoundSummary(
        samples=tuple(upper + lower for upper, lower in zip(high, low, strict=True)),
        status=tuple(Status(status) for _, status in coded),
        digests=tuple(digest for digest, _ in coded),
        peaks=tuple(summed[3 * ranks : 4 * ranks]),
        late=round(summed[4 * ranks]),
        used=tuple(map((0.0).__lt__, flags)),
        flags=flags,
    )


def missing_samples_error(rank: int, step: int) -> SyncError:
    """Return the error for a backward without samples on a loader's filler batch."""
    return SyncError(
        "backward without samples= on a batch that has none: it would count as much as any other rank's",
        rank=rank,
        step=step,
        remedy="call model.backward(loss, samples=batch.samples), which is exact for unequal batches",
    )
