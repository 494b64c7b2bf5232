"""The forms that a measured time may take: T = α·a + β·b·n, with a and b known for every number of ranks (pure).

n is the size in bytes as nccl-tests defines it. a and b are the algorithm's own: the messages and the parts of the
vector that go one after another (`paceline.collectives.closed_form_cost`), so that a fit holds for a number of ranks
that was never measured. Adding costs β too: where `added` is in proportion to `sent`, no data can tell γ from β.

Ranks with links of their own send at the same time. Ranks of one machine share its cores and its memory: what each
of them does waits for the others, and both terms count p times. Such a form is written ``ring, shared``.

Two plain forms stand beside them, to say how far one gets without knowing the algorithm: ``plain`` is α + β·n, and
``messages`` is α·P + β·n with P the messages of the operation's usual algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.collectives.closed_form_cost import CLOSED_FORMS, Terms, closed_form
from paceline.errors import unknown

__all__ = ["MESSAGES", "OPS", "PLAIN", "USUAL", "AlgorithmTerms", "candidates", "forms_by_name", "terms_of"]

USUAL = {
    "all-reduce": "ring",
    "reduce-scatter": "ring",
    "all-gather": "ring",
    "all-to-all": "pairwise",
    "broadcast": "tree",
    "reduce": "tree",
    "send-recv": "direct",
}
"""The algorithm that is assumed where the data can't tell."""

OPS = tuple(USUAL)
_SHARED = ", shared"


@dataclass(frozen=True)
class AlgorithmTerms:
    """An algorithm's name, and whether its ranks share what carries the bytes.

    Example:
        >>> str(AlgorithmTerms("ring", shared=True))
        'ring, shared'
    """

    algorithm: str
    shared: bool = False

    def __str__(self) -> str:
        return self.algorithm + _SHARED * self.shared


PLAIN, MESSAGES = AlgorithmTerms("plain"), AlgorithmTerms("messages")


def terms_of(op: str, form: AlgorithmTerms, ranks: int) -> Terms:
    """Return a (`messages`) and b (`sent`) of T = α·a + β·b·n.

    Args:
        op: such as ``"all-reduce"``.
        form: such as ``AlgorithmTerms("ring")``.
        ranks: p, at least 1.

    Raises:
        UsageError: there is no such operation or algorithm.

    Example:
        >>> terms_of("all-reduce", AlgorithmTerms("ring"), 4)
        Terms(messages=6, sent=1.5, added=0.0)
        >>> terms_of("all-reduce", AlgorithmTerms("ring", shared=True), 4)
        Terms(messages=24, sent=6.0, added=0.0)
    """
    if op not in USUAL:
        raise unknown("operation", op, OPS)
    if form == PLAIN:
        return Terms(1, 1.0)
    if form == MESSAGES:
        return Terms(closed_form(op, USUAL[op], ranks).messages, 1.0)
    own, times = closed_form(op, form.algorithm, ranks), ranks if form.shared else 1
    return Terms(own.messages * times, own.sent * times)


def candidates(op: str) -> list[AlgorithmTerms]:
    """Return the forms that a backend's times may have: the usual algorithm first, each without and with sharing.

    Raises:
        UsageError: there is no such operation.
    """
    if op not in USUAL:
        raise unknown("operation", op, OPS)
    names = [USUAL[op], *(name for of, name in CLOSED_FORMS if of == op and name != USUAL[op])]
    return [AlgorithmTerms(name, shared) for shared in (False, True) for name in names]


def forms_by_name(op: str) -> dict[str, AlgorithmTerms]:
    """Return all forms of an operation by how they are written, such as ``"ring, shared"``.

    Raises:
        UsageError: there is no such operation.
    """
    return {str(form): form for form in (*candidates(op), PLAIN, MESSAGES)}
