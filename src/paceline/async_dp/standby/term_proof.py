"""Proofs between hubs that have the same secret key: of a term, and of being a hub (pure).

Workers relay the proof of a term from a new hub to an old one; without the key none of them can make one. Without keys
the hubs prove nothing, as nothing else is authenticated then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from hmac import compare_digest
from typing import Any

from paceline.async_dp.protocol.hub_messages import meta_count, meta_text

__all__ = ["TermProof", "hub_proof"]


def hub_proof(secret: str, *parts: object) -> str:
    """Return a proof that the sender of `parts` has the hub's secret key."""
    text = "\n".join(map(str, parts))
    return blake2b(
        text.encode(), key=secret.encode()[:64], digest_size=16, person=b"paceline hub"
    ).hexdigest()


@dataclass(frozen=True)
class TermProof:
    """A term, and the proof that a hub with the secret key has begun it.

    Attributes:
        term: its number.
        since: number of the record with which it began.
        proof: see `hub_proof`.
    """

    term: int = 0
    since: int = 0
    proof: str = ""

    @staticmethod
    def make(secret: str, run: str, term: int, since: int) -> TermProof:
        """Return the proof of a hub's own term."""
        return TermProof(term, since, hub_proof(secret, "term", run, term, since))

    @staticmethod
    def parse(meta: Mapping[str, Any]) -> TermProof:
        """Return the proof in a message, whatever that holds."""
        return TermProof(meta_count(meta, "term"), meta_count(meta, "since"), meta_text(meta, "proof"))

    def meta(self) -> dict[str, Any]:
        """Return it for a message."""
        return {"term": self.term, "since": self.since, "proof": self.proof}

    def is_valid(self, secret: str, run: str) -> bool:
        """Return whether a hub with the secret key has made it, for this run."""
        return compare_digest(
            self.proof.encode(), hub_proof(secret, "term", run, self.term, self.since).encode()
        )
