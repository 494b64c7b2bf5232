"""What an all-reduce costs by a measured profile, with its error."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.collectives.closed_form import CLOSED_FORMS
from paceline.errors import UsageError
from paceline.plan.fit import Fit
from paceline.plan.forms import PLAIN, Form, terms_of
from paceline.plan.segments import Segment, seconds_at
from paceline.simulate.cluster.network import Price

__all__ = ["FittedNetwork"]


@dataclass(frozen=True)
class FittedNetwork:
    """A network as it was measured.

    The fit's own algorithm is what the times looked like, and stands unless another is named; others are priced from
    the same α and β.

    Attributes:
        fit: of the all-reduce.
        per_node: ranks of a node; the fit counts ranks, wherever they are.
    """

    fit: Fit
    per_node: int = 1

    @property
    def own(self) -> str:
        """The algorithm that the times look like."""
        return str(self.fit.form)

    def algorithms(self) -> tuple[str, ...]:
        """Return the fit's own algorithm first, then those that have a closed form."""
        names = [name for op, name in CLOSED_FORMS if op == self.fit.op]
        return (self.own, *(name for name in names if name != self.own))

    def usual(self) -> tuple[str, ...]:
        """Return the fit's own algorithm: the others never ran."""
        return (self.own,)

    def price(self, algorithm: str, nodes: int, nbytes: float) -> Price:
        """Return what one all-reduce costs; arguments and errors as for `Network.price`."""
        if algorithm not in self.algorithms():
            raise UsageError(
                f"{algorithm} on a measured network", remedy=f"valid: {', '.join(self.algorithms())}"
            )
        ranks = nodes * self.per_node
        if ranks == 1:
            return Price(algorithm, 0.0, 0.0)
        form = self.fit.form if algorithm == self.own else Form(algorithm, self.fit.form.shared)
        if self.fit.form == PLAIN and algorithm != self.own:
            raise UsageError(f"{algorithm}: the fit knows no algorithm", remedy=f"use {self.own}")
        terms, segments = terms_of(self.fit.op, form, ranks), self.fit.segments_for(ranks)
        whole = seconds_at(segments, nbytes, terms.messages, terms.sent)
        call = min(whole, _segment(segments, nbytes).line.alpha * terms.messages)
        error = self.fit.error_at(ranks)
        return Price(algorithm, call, whole - call, error.p90 if error else 0.0)


def _segment(segments: tuple[Segment, ...], nbytes: float) -> Segment:
    """Return the segment of a size, or the last one that begins below it."""
    return next((each for each in reversed(segments) if each.low <= nbytes), segments[0])
