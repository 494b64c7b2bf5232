"""Closed-form cost of an algorithm: α·messages + β·n·sent + γ·n·added.

p ranks, n bytes, α seconds per message, β seconds per byte sent, γ seconds per byte added. n is the whole vector as
nccl-tests counts it: what a rank holds before all-reduce, reduce-scatter and all-to-all, and after all-gather; so a
ring all-gather sends (p − 1)/p of n.

Sources: Thakur, Rabenseifner & Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 2005;
ring: Patarasuk & Yuan, JPDC 2009; Bruck et al., IEEE TPDS 1997. Where p is not a power of two, MPICH's comments give
(p − 1)/p for algorithms that first fold p ranks into q = 2^⌊lg p⌋; the part sent is (q − 1)/q, which is used here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import UsageError

__all__ = ["CLOSED_FORMS", "Terms", "closed_form"]


@dataclass(frozen=True)
class Terms:
    """Factors of the cost parameters.

    Attributes:
        messages: messages one after another: factor of α.
        sent: parts of the vector sent one after another: factor of β·n.
        added: parts of the vector added one after another: factor of γ·n.
    """

    messages: float
    sent: float
    added: float = 0.0

    def __add__(self, other: Terms) -> Terms:
        return Terms(self.messages + other.messages, self.sent + other.sent, self.added + other.added)

    def seconds(self, nbytes: float, alpha: float, beta: float, gamma: float = 0.0) -> float:
        """Return the time in seconds for a vector of `nbytes` bytes."""
        return alpha * self.messages + nbytes * (beta * self.sent + gamma * self.added)


def closed_form(op: str, algorithm: str, ranks: int) -> Terms:
    """Return the terms of an algorithm on ranks whose links are alike and full duplex.

    Args:
        op: such as ``"all-reduce"``.
        algorithm: such as ``"ring"``.
        ranks: p, at least 1; a single rank sends nothing.

    Raises:
        UsageError: no closed form is known for it.

    Example:
        >>> closed_form("all-reduce", "ring", 4)
        Terms(messages=6, sent=1.5, added=0.75)
    """
    if (op, algorithm) not in CLOSED_FORMS:
        names = ", ".join(f"{of} {name}" for of, name in CLOSED_FORMS)
        raise UsageError(f"{op} {algorithm} has no closed form", remedy=f"those that have: {names}")
    return CLOSED_FORMS[op, algorithm](ranks) if ranks > 1 else Terms(0, 0.0)


def _lg_up(p: int) -> int:
    return (p - 1).bit_length()


def _fold(p: int) -> tuple[int, int]:
    """Return lg q and q, the largest power of two that is at most p."""
    lg = p.bit_length() - 1
    return lg, 1 << lg


def _one_by_one(p: int) -> Terms:
    return Terms(p - 1, p - 1)


def _tree(p: int) -> Terms:
    return Terms(_lg_up(p), _lg_up(p))


def _scatter_tree(p: int) -> Terms:
    """Each round halves the part that remains to be passed on: the root sends the (p − 1)/p that it does not keep."""
    return Terms(_lg_up(p), (p - 1) / p)


def _ring_half(p: int) -> Terms:
    return Terms(p - 1, (p - 1) / p)


def _added(terms: Terms) -> Terms:
    return Terms(terms.messages, terms.sent, terms.sent)


def _doubling(p: int) -> Terms:
    lg, q = _fold(p)
    return Terms(lg + 2, lg + 2, lg + 1) if q < p else Terms(lg, lg, lg)


def _two_halvings(p: int, folding: Terms) -> Terms:
    lg, q = _fold(p)
    core = Terms(2 * lg, 2 * (q - 1) / q, (q - 1) / q)
    return core + folding if q < p else core


def _halving(p: int) -> Terms:
    """Each of q actors has one chunk, or two if it acts for a pair; the largest half is sent where pairs are."""
    lg, q = _fold(p)
    pairs = p - q
    sent = sum((1 << k) + min(1 << k, pairs) for k in range(lg)) / p
    return Terms(lg + 2, 1 + sent + 1 / p) if pairs else Terms(lg, sent)


def _halving_added(p: int) -> Terms:
    """Everything sent is added, except the chunk that the odd rank of a pair receives at the end."""
    terms = _halving(p)
    return terms + Terms(0, 0, terms.sent - (1 / p if p & (p - 1) else 0))


CLOSED_FORMS: dict[tuple[str, str], Callable[[int], Terms]] = {
    ("send-recv", "direct"): lambda p: Terms(1, 1),
    ("broadcast", "one-by-one"): _one_by_one,
    ("broadcast", "tree"): _tree,
    ("broadcast", "chain"): _one_by_one,
    ("broadcast", "scatter-all-gather"): lambda p: _scatter_tree(p) + _ring_half(p),
    ("reduce", "one-by-one"): lambda p: _added(_one_by_one(p)),
    ("reduce", "tree"): lambda p: _added(_tree(p)),
    ("reduce", "chain"): lambda p: _added(_one_by_one(p)),
    ("reduce", "rabenseifner"): lambda p: _two_halvings(p, Terms(1, 1, 1)),
    ("all-reduce", "tree"): lambda p: _added(_tree(p)) + _tree(p),
    ("all-reduce", "ring"): lambda p: _added(_ring_half(p)) + _ring_half(p),
    ("all-reduce", "doubling"): _doubling,
    ("all-reduce", "halving-doubling"): lambda p: _two_halvings(p, Terms(2, 2, 1)),
    ("reduce-scatter", "ring"): lambda p: _added(_ring_half(p)),
    ("reduce-scatter", "pairwise"): lambda p: _added(_ring_half(p)),
    ("reduce-scatter", "halving"): _halving_added,
    ("all-gather", "ring"): _ring_half,
    ("all-gather", "doubling"): _halving,
    ("all-gather", "bruck"): lambda p: Terms(_lg_up(p), (p - 1) / p),
    ("all-to-all", "pairwise"): _ring_half,
    ("scatter", "one-by-one"): _ring_half,
    ("scatter", "tree"): _scatter_tree,
    ("gather", "one-by-one"): _ring_half,
    ("gather", "tree"): _scatter_tree,
}
