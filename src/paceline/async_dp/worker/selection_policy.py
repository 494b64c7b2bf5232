"""What a worker sends and what it takes in, by score (pure).

    all      everything
    better   send: what is better than the centre it began from; receive: a centre that is better than one's own
    best     send and receive: what is better than everything that this worker has seen so far

A score is a number that is lower for better parameters, on a slice of held-out data that all workers have alike. What
is not sent is dropped when the next centre is taken in; when a centre is not taken in, the worker goes on with its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import UsageError, unknown

__all__ = ["SELECTION_POLICIES", "SelectionPolicy"]

SELECTION_POLICIES = ("all", "better", "best")


@dataclass(frozen=True)
class SelectionPolicy:
    """Which updates are sent and which centres are taken in.

    Attributes:
        send, receive: of `SELECTION_POLICIES`.
        scored: score even where both are ``"all"``, so that the hub can refuse what makes the score worse.

    Example:
        >>> policy = SelectionPolicy(receive="better")
        >>> policy.receives(mine=2.0, theirs=1.9, best=1.8), policy.receives(mine=2.0, theirs=2.1, best=1.8)
        (True, False)
    """

    send: str = "all"
    receive: str = "all"
    scored: bool = False

    def __post_init__(self) -> None:
        for given in (self.send, self.receive):
            if given not in SELECTION_POLICIES:
                raise unknown("policy", given, SELECTION_POLICIES)

    @property
    def scores(self) -> bool:
        """Whether anything depends on scores."""
        return self.scored or self.send != "all" or self.receive != "all"

    def check(self, has_score: bool, fragments: int) -> None:
        """Raise where it can't be followed.

        Raises:
            UsageError: there is no score, or the model is taken in by fragments.
        """
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
                remedy="send the model whole (fragments=1), or send and receive all",
            )

    def sends(self, mine: float | None, before: float | None, best: float) -> bool:
        """Tell whether an update is offered.

        Args:
            mine: score of the own parameters. before: of the centre that it began from, None: not known.
            best: the lowest that this worker has seen.
        """
        if self.send == "all" or mine is None:
            return True
        return mine <= best if self.send == "best" else before is None or mine < before

    def receives(self, mine: float | None, theirs: float | None, best: float) -> bool:
        """Tell whether a centre is taken in.

        Args:
            mine, theirs: scores of the own parameters and of the centre. best: the lowest seen so far.
        """
        if self.receive == "all" or mine is None or theirs is None:
            return True
        return theirs <= best if self.receive == "best" else theirs < mine
