"""A journal that is kept in memory: for tests, and for simulations, which append a million times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from paceline.async_dp.wal.hub_snapshot import HubSnapshot
from paceline.async_dp.wal.journal_recovery import RecoveredState
from paceline.errors import UsageError
from paceline.transport.envelope import Bytes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MemoryJournal"]


class MemoryJournal:
    """Does as `Journal` does, without a disk; values are taken as they are, not checked.

    Args:
        keep: keep what is appended; False: count it only, and recover nothing.

    Attributes:
        run_facts: facts of the run, told by `describe`. keeps: whether it keeps what is appended.

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

    def __init__(self, *, keep: bool = True) -> None:
        self.run_facts: Mapping[str, Any] = MappingProxyType({})
        self.keeps, self._described = keep, False
        self._next = self._durable = 0
        self._values: list[Mapping[str, Any]] = []  # of the whole run
        self._payloads: list[bytes] = []  # since the snapshot
        self._base, self._tensors = HubSnapshot(0, 0, {}), None

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Remember facts of the run.

        Raises:
            UsageError: others were told before.
        """
        if self._described and dict(facts) != dict(self.run_facts):
            raise UsageError("the run was described before, with other facts", remedy="describe it as it was")
        self.run_facts, self._described = MappingProxyType(dict(facts)), True

    def recovered(self) -> RecoveredState:
        """Return the last snapshot, and the records that were committed since."""
        base, stop = self._base, self._durable
        tensors = self._tensors
        return RecoveredState(
            base.revision,
            base.facts,
            None if tensors is None else {label: tensor.clone() for label, tensor in tensors.items()},
            iter(
                [
                    (dict(self._values[number]), self._payloads[number - base.next])
                    for number in range(base.next, stop)
                ]
                if self.keeps
                else []
            ),
        )

    def ledger(self) -> Iterator[dict[str, Any]]:
        """Yield what the ledger of a hub would hold: the values of every committed record, with its number."""
        for number, values in enumerate(self._values[: self._durable]):
            yield {"n": number, **values}

    def append(self, values: Mapping[str, Any], payload: Bytes = b"") -> int:
        """Take a record, and return its number among all of the run, from 0."""
        sequence = self._next
        self._next = sequence + 1
        if self.keeps:
            self._values.append(dict(values))
            self._payloads.append(bytes(payload))
        return sequence

    def commit(self) -> None:
        """Have all that was appended outlive a `crash`."""
        self._durable = self._next

    def crash(self) -> None:
        """Lose what was not committed, as a hub that dies does."""
        self._next = self._durable
        del self._values[self._durable :]
        del self._payloads[max(0, self._durable - self._base.next) :]

    def snapshot(self, revision: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Keep a copy of a state that all records so far have gone into.

        Raises:
            UsageError: the revision is smaller than that of the snapshot before.
        """
        if revision < self._base.revision:
            raise UsageError(
                f"snapshot of revision {revision} after that of {self._base.revision}",
                remedy="revisions only grow",
            )
        self.commit()
        self._base = HubSnapshot(revision, self._next, dict(facts))
        self._payloads.clear()
        if self.keeps:
            self._tensors = {label: tensor.detach().cpu().clone() for label, tensor in tensors.items()}

    def close(self) -> None:
        """Commit."""
        self.commit()

    def __enter__(self) -> MemoryJournal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
