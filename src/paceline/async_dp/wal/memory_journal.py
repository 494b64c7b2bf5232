"""A journal in memory: for tests, and for simulations, which append a million records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from paceline.async_dp.wal.hub_snapshot import HubSnapshot
from paceline.async_dp.wal.journal_recovery import RecoveredState
from paceline.errors import UsageError
from paceline.transport.envelope import Bytes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MemoryJournal"]


class MemoryJournal:
    """`HubJournal` without a disk; values are not checked.

    Args:
        keep: keep what is appended; False: only count it, and recover nothing.

    Attributes:
        keeps: as given.
        problem, snapshot_due: as of `HubJournal`; memory is never full, nor too long.

    Example:
        >>> journal = MemoryJournal()
        >>> journal.append({"worker": 7}, b"update")
        0
        >>> journal.commit()
        >>> journal.append({"worker": 8})
        1
        >>> journal.crash()
        >>> list(journal.recovered().records)
        [({'worker': 7}, b'update')]
    """

    problem, snapshot_due = "", False

    def __init__(self, *, keep: bool = True) -> None:
        self.keeps = keep
        self._next = self._durable = 0
        self._values: list[Mapping[str, Any]] = []  # of the whole run
        self._payloads: list[bytes] = []  # since the snapshot
        self._base, self._tensors = HubSnapshot(0, 0, {}), None

    def recovered(self) -> RecoveredState:
        """Return the last snapshot, and the records committed since."""
        base, tensors = self._base, self._tensors
        if tensors is not None:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        numbers = range(base.next, self._durable) if self.keeps else ()
        records = [(dict(self._values[each]), self._payloads[each - base.next]) for each in numbers]
        return RecoveredState(base.revision, base.facts, tensors, iter(records))

    def ledger(self) -> Iterator[dict[str, Any]]:
        """Yield what a hub's ledger would hold: the values of every committed record, with its number."""
        for number, values in enumerate(self._values[: self._durable]):
            yield {"n": number, **values}

    def append(self, values: Mapping[str, Any], payload: Bytes = b"") -> int:
        """Append a record, and return its number among all of the run, from 0."""
        sequence = self._next
        self._next = sequence + 1
        if self.keeps:
            self._values.append(dict(values))
            self._payloads.append(bytes(payload))
        return sequence

    def reserve(self, snapshot_nbytes: int) -> None:
        """Do nothing, see `HubJournal`."""

    def commit(self) -> None:
        """Make all records survive a `crash`."""
        self._durable = self._next

    def crash(self) -> None:
        """Lose what was not committed, as a hub that dies does."""
        self._next = self._durable
        del self._values[self._durable :]
        del self._payloads[max(0, self._durable - self._base.next) :]

    def snapshot(self, revision: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Keep a copy of a state that includes all records so far.

        Raises:
            UsageError: the revision is smaller than that of the previous snapshot.
        """
        if revision < self._base.revision:
            raise UsageError(
                f"snapshot of revision {revision} after that of {self._base.revision}",
                remedy="revisions must not decrease",
            )
        self.commit()
        self._base = HubSnapshot(revision, self._next, dict(facts))
        self._payloads.clear()
        if self.keeps:
            self._tensors = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}

    def __enter__(self) -> MemoryJournal:
        return self

    def __exit__(self, *_: object) -> None:
        self.commit()
