"""A receiver's ledger: which envelopes came, and which may not be delivered (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from paceline.errors import EnvelopeError, ForeignEnvelope, MisplacedEnvelope, RepeatedEnvelope
from paceline.exchange.header import Header

__all__ = ["Inbox"]


class Inbox:
    """Knows every envelope that came to one receiver, and refuses those that may not be delivered.

    Args:
        run: the run that it belongs to.
        me: its number.
        sources: whose envelopes it takes.
        ordered: refuse what comes before its turn; else an envelope may be early, late or lost.

    Attributes:
        counts: how many were ``"delivered"``, and how many were refused, by name of the error.

    Example:
        >>> inbox = Inbox("run", me=0, sources=[1])
        >>> inbox.accept(Header("run", "greeting", source=1, target=0, sequence=0))
        >>> inbox.accept(Header("run", "greeting", source=1, target=0, sequence=0))
        Traceback (most recent call last):
        paceline.errors.RepeatedEnvelope: envelope 0 from 1 to 0 (greeting, round 0) has come before
    """

    def __init__(self, run: str, me: int, sources: Iterable[int], *, ordered: bool = False) -> None:
        self.run, self.me, self.ordered = run, me, ordered
        self.counts: Counter[str] = Counter()
        self._next = dict.fromkeys(sources, 0)  # all before came
        self._early: dict[int, set[int]] = {source: set() for source in self._next}

    def expected(self, source: int) -> int:
        """Return the least sequence number of a source that has not come."""
        return self._next[source]

    def refuse(self, error: EnvelopeError) -> EnvelopeError:
        """Count an envelope that is not delivered for another reason, and return that."""
        self.counts[type(error).__name__] += 1
        return error

    def check(self, header: Header, *, carried_from: int | None = None) -> None:
        """Raise if an envelope may not be delivered; nothing is noted or counted.

        Args:
            header: of the envelope.
            carried_from: who sent it, where the carrier knows.

        Raises:
            ForeignEnvelope: of another run, from an unknown source, for somebody else.
            RepeatedEnvelope: it has come before.
            MisplacedEnvelope: others have to come first, where the order counts.
        """
        error = self._problem(header, carried_from)
        if error is not None:
            raise error

    def accept(self, header: Header, *, carried_from: int | None = None) -> None:
        """Note and count that an envelope came whole, or was refused, and then raise as `check` does."""
        error = self._problem(header, carried_from)
        if error is not None:
            raise self.refuse(error)
        source, early = header.source, self._early[header.source]
        early.add(header.sequence)
        while self._next[source] in early:
            early.remove(self._next[source])
            self._next[source] += 1
        self.counts["delivered"] += 1

    def skip(self, source: int, sequence: int) -> None:
        """Expect no envelope of `source` before `sequence` any more."""
        self._next[source] = max(self._next[source], sequence)
        self._early[source] = {each for each in self._early[source] if each >= sequence}

    def _problem(self, header: Header, carried_from: int | None) -> EnvelopeError | None:
        kind, what = ForeignEnvelope, ""
        if header.run != self.run:
            what = f"is of run {header.run!r}, this is run {self.run!r}"
        elif header.target != self.me:
            what = f"came to {self.me}"
        elif header.source not in self._next:
            what = f"is from nobody known; known are {', '.join(map(str, self._next)) or 'none'}"
        elif carried_from not in (None, header.source):
            what = f"was carried from {carried_from}"
        elif header.sequence < self._next[header.source] or header.sequence in self._early[header.source]:
            kind, what = RepeatedEnvelope, "has come before"
        elif self.ordered and header.sequence > self._next[header.source]:
            kind, what = MisplacedEnvelope, f"came when envelope {self._next[header.source]} was expected"
        if not what:
            return None
        return kind(f"{header} {what}", source=header.source, sequence=header.sequence)
