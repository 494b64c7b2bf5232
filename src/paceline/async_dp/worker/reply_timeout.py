"""What a worker waits for from its hub, for how long, and what that tells of the network (pure).

An answer is waited for far longer than it took before, and twice that after each repetition. How long it took is only
learnt from what was said once: else nobody knows which of two questions was answered (Karn's algorithm: RFC 6298,
section 3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.async_dp.worker.session_state import SessionRequest

__all__ = ["ReplyTimeout", "FragmentExchange"]

_UNKNOWN_SECONDS, _LEAST_SECONDS, _MOST_DOUBLINGS = 10.0, 1.0, 4
_EARLY = 1.3  # a centre is asked for this many times the last one's duration before it is due


@dataclass(slots=True)
class FragmentExchange:
    """What is under way for a fragment: waiting to be acknowledged, to be asked for, to come.

    Attributes:
        order: of the training thread.
        begun, asked: when. due: when it is time to ask, or to ask again; infinity as long as the question has not left.
        once: what is waited for was said once.
    """

    order: SessionRequest
    stage: str  # "acknowledge" | "wait" | "come"
    begun: float = 0.0
    asked: float = 0.0
    due: float = math.inf
    once: bool = True


class ReplyTimeout:
    """How long answers take.

    Attributes:
        update_seconds: from the last update to its acknowledgement. fetch_seconds: from asking for the last centre to
            having it; both 0 while that is not known.
    """

    def __init__(self) -> None:
        self.update_seconds = self.fetch_seconds = 0.0
        self._doublings = 0

    def seconds(self) -> float:
        """Return how long an answer is waited for before the question is repeated."""
        took = self.fetch_seconds + self.update_seconds
        return (_LEAST_SECONDS + 4 * took if took else _UNKNOWN_SECONDS) * 2**self._doublings

    def ask_at(self, by: float) -> float:
        """Return when the centre is to be asked for, so that it is there by then and no older than it must be."""
        return by - _EARLY * self.fetch_seconds

    def repeated(self) -> None:
        """Note that something was said again."""
        self._doublings = min(self._doublings + 1, _MOST_DOUBLINGS)

    def answered(self) -> None:
        """Note that an answer came."""
        self._doublings = 0
