"""Selection by score of the updates that a worker sends and the parameters that it applies (pure).

    all      everything
    better   send: what is better than the parameters it started from; receive: what is better than its own
    best     send and receive: what is better than everything that this worker has seen

A score is a number, lower for better parameters, on a slice of held-out data that all workers share. What is not sent
is dropped when the next global parameters are applied; where they are not applied, the worker continues with its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import UsageError, unknown

__all__ = ["SELECTION_POLICIES", "SelectionPolicy"]

SELECTION_POLICIES = ("all", "better", "best")


@dataclass(frozen=True)
class SelectionPolicy:
    """Selects updates to send and global parameters to apply.

    Attributes:
        send: one of `SELECTION_POLICIES`.
        receive: one of `SELECTION_POLICIES`.
        scored: score even where both are ``"all"``, so that the hub can refuse what makes the score worse.

    Example:
        >>> policy = SelectionPolicy(receive="better")
        >>> policy.receives(own=2.0, other=1.9, best=1.8), policy.receives(own=2.0, other=2.1, best=1.8)
        (True, False)
    """

    send: str = "all"
    receive: str = "all"
    scored: bool = False

    def __post_init__(self) -> None:
        for policy in (self.send, self.receive):
            if policy not in SELECTION_POLICIES:
                raise unknown("policy", policy, SELECTION_POLICIES)

    @property
    def scores(self) -> bool:
        """Whether scores are needed."""
        return self.scored or self.send != "all" or self.receive != "all"

    def check(self, has_score: bool, fragments: int) -> None:
        """Raise a UsageError if scores are needed but missing, or the model is sent in fragments."""
        if not self.scores:
            return
        if not has_score:
            raise UsageError(
                f"send={self.send!r}, receive={self.receive!r} without a score",
                remedy="give score=, a function that returns the loss on held-out data that all workers have",
            )
        if fragments > 1:
            raise UsageError(
                f"scores with {fragments} fragments: a part of a model has no score",
                remedy='use fragments=1, or send="all" and receive="all" without score=',
            )

    def sends(self, own: float | None, before: float | None, best: float) -> bool:
        """Return whether an update is sent.

        Args:
            own: score of the worker's parameters.
            before: of the parameters that it started from; None: unknown.
            best: the lowest that this worker has seen.
        """
        if self.send == "all" or own is None:
            return True
        return own <= best if self.send == "best" else before is None or own < before

    def receives(self, own: float | None, other: float | None, best: float) -> bool:
        """Return whether global parameters with score `other` are applied; arguments as for `sends`."""
        if self.receive == "all" or own is None or other is None:
            return True
        return other <= best if self.receive == "best" else other < own
