"""Functional forms of a collective's time: T = α·a + β·b·n, with a and b known for every number of ranks.

n is the size in bytes as nccl-tests defines it. a and b belong to the algorithm: the number of messages and the
multiple of the vector that are sent one after another (`paceline.collectives.closed_form_cost`), so a fit holds for
numbers of ranks that were never measured. The cost of adding is part of β: where `added` is proportional to `sent`,
no data can separate γ from β.

Ranks with separate links send at the same time. Ranks of one machine share its cores and memory: they wait for each
other, and both terms count p times. Such a form is written ``ring, shared``.

Two plain forms show how far one gets without knowing the algorithm: ``plain`` is α + β·n, and ``messages`` is
α·P + β·n with P the number of messages of the operation's default algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.collectives.closed_form_cost import CLOSED_FORMS, Terms, closed_form
from paceline.errors import unknown

__all__ = [
    "DEFAULT_ALGORITHMS",
    "MESSAGES_FORM",
    "OPS",
    "PLAIN_FORM",
    "CostForm",
    "candidate_forms",
    "forms_by_name",
    "terms_of",
]

DEFAULT_ALGORITHMS = {
    "all-reduce": "ring",
    "reduce-scatter": "ring",
    "all-gather": "ring",
    "all-to-all": "pairwise",
    "broadcast": "tree",
    "reduce": "tree",
    "send-recv": "direct",
}
"""Algorithm by operation that is assumed where the data can't identify one."""

OPS = tuple(DEFAULT_ALGORITHMS)
_SHARED = ", shared"


@dataclass(frozen=True)
class CostForm:
    """An algorithm, and whether its ranks share the link.

    Example:
        >>> str(CostForm("ring", shared=True))
        'ring, shared'
    """

    algorithm: str
    shared: bool = False

    @classmethod
    def parse(cls, text: str) -> CostForm:
        """Return the form that `str` writes as `text`."""
        return cls(text.removesuffix(_SHARED), text.endswith(_SHARED))

    def __str__(self) -> str:
        return self.algorithm + _SHARED * self.shared


PLAIN_FORM, MESSAGES_FORM = CostForm("plain"), CostForm("messages")


def terms_of(op: str, form: CostForm, ranks: int) -> Terms:
    """Return a (`messages`) and b (`sent`) of T = α·a + β·b·n.

    Args:
        op: the operation, such as ``"all-reduce"``.
        form: such as ``CostForm("ring")``.
        ranks: p, at least 1.

    Raises:
        UsageError: the operation or algorithm is unknown.

    Example:
        >>> terms_of("all-reduce", CostForm("ring"), 4)
        Terms(messages=6, sent=1.5, added=0.0)
        >>> terms_of("all-reduce", CostForm("ring", shared=True), 4)
        Terms(messages=24, sent=6.0, added=0.0)
    """
    _check_op(op)
    if form == PLAIN_FORM:
        return Terms(1, 1.0)
    if form == MESSAGES_FORM:
        return Terms(closed_form(op, DEFAULT_ALGORITHMS[op], ranks).messages, 1.0)
    terms, factor = closed_form(op, form.algorithm, ranks), ranks if form.shared else 1
    return Terms(terms.messages * factor, terms.sent * factor)


def candidate_forms(op: str) -> list[CostForm]:
    """Return the forms that measured times may have: the default algorithm first, each unshared and shared.

    Raises:
        UsageError: the operation is unknown.
    """
    _check_op(op)
    default = DEFAULT_ALGORITHMS[op]
    names = [default, *(name for known, name in CLOSED_FORMS if known == op and name != default)]
    return [CostForm(name, shared) for shared in (False, True) for name in names]


def forms_by_name(op: str) -> dict[str, CostForm]:
    """Return all forms of an operation by their names, such as ``"ring, shared"``.

    Raises:
        UsageError: the operation is unknown.
    """
    return {str(form): form for form in (*candidate_forms(op), PLAIN_FORM, MESSAGES_FORM)}


def _check_op(op: str) -> None:
    if op not in DEFAULT_ALGORITHMS:
        raise unknown("operation", op, OPS)
