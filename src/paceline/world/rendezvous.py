"""Rendezvous of the ranks of a world: finds out which are present, missing, or claimed twice.

torch's own rendezvous waits in C++ and reports a time-out without names, and a store may still hold what an earlier
attempt left there (a file of a killed run, the store of a torchrun agent after a restart). So:

1. Every rank writes a claim to its number: host, process, and a nonce created for this very call.
2. Rank 0 reads all claims and publishes them as a roster. A claim it reads may be a stale one; as soon as a newer one
   replaces it, rank 0 publishes a new roster.
3. A rank that finds its own nonce in the roster acknowledges it. Stale claims acknowledge nothing, so a roster that
   every rank has acknowledged consists of living ranks only, and that is the world.

The claims also show which ranks share a host, so that local ranks are known, and carry a few facts on which ranks must
agree (`consistency_check`).
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import psutil

from paceline.errors import MissingRanks, WorldError
from paceline.world.environment import boot_id

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["RankClaim", "RankRoster", "format_ranks", "join_rendezvous", "leave_rendezvous"]

_MAX_PAUSE_SECONDS = 0.1  # longest pause between two polls of the store
_POLL_SECONDS = 0.5  # polling of keys, before checking whether the world has changed or was refused
_LEAVE_SECONDS = 10.0  # longest wait of rank 0 for the others to have read the roster
_STALE_SECONDS = 10.0  # how long something that may be left from earlier must persist to be believed


@dataclass(frozen=True, kw_only=True)
class RankClaim:
    """A rank's description of itself."""

    rank: int
    size: int
    host: str
    boot: str
    pid: int
    nonce: str
    facts: dict[str, str] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"

    @classmethod
    def of_this_process(cls, rank: int, size: int, facts: Mapping[str, str] | None = None) -> RankClaim:
        """Return a new claim of this process to `rank`."""
        return cls(
            rank=rank,
            size=size,
            host=socket.gethostname(),
            boot=boot_id(),
            pid=os.getpid(),
            nonce=uuid.uuid4().hex,
            facts=dict(facts or {}),
        )

    @classmethod
    def of_json(cls, record: Mapping[str, Any]) -> RankClaim:
        """Return the claim that another process wrote; another Paceline may write fewer fields, or more."""
        return cls(**{each.name: record[each.name] for each in fields(cls) if each.name in record})

    def may_replace(self, old: RankClaim) -> bool:
        """Return whether `old` is certainly stale: of this process, or of one of this host that has ended."""
        if (self.host, self.boot) != (old.host, old.boot):
            return False
        return self.pid == old.pid or not psutil.pid_exists(old.pid)


@dataclass(frozen=True)
class RankRoster:
    """A complete world: its unique name, and the claims by rank."""

    name: str
    claims: tuple[RankClaim, ...]

    def holds(self, claim: RankClaim) -> bool:
        """Return whether `claim` is part of this world."""
        return len(self.claims) == claim.size and self.claims[claim.rank] == claim


@dataclass(frozen=True)
class Refusal:
    """The reason why there will be no world, for all ranks; about the claim of `rank` with `nonce`."""

    rank: int
    nonce: str
    missing: bool
    text: str
    remedy: str

    def error(self, rank: int) -> WorldError:
        """Return the error for `rank` to raise."""
        return (MissingRanks if self.missing else WorldError)(self.text, rank=rank, remedy=self.remedy)


def join_rendezvous(
    store: Store,
    rank: int,
    size: int,
    timeout: float,
    *,
    restarted: bool = False,
    facts: Mapping[str, str] | None = None,
) -> RankRoster:
    """Meet the other ranks on `store`, and return the complete world.

    Args:
        store: key-value store that all ranks of the world share.
        rank: of this process.
        size: the world size.
        timeout: seconds after which the world counts as one that never completes.
        restarted: ranks may have moved to other hosts since an earlier rendezvous on this store.
        facts: for this rank's claim.

    Raises:
        MissingRanks: some ranks did not arrive in time; they are named.
        WorldError: a rank is claimed twice, or the ranks disagree about the world size.
    """
    try:
        rendezvous = _Rendezvous(store, RankClaim.of_this_process(rank, size, facts), timeout)
        rendezvous.claim(restarted)
        return rendezvous.lead() if rank == 0 else rendezvous.follow()
    except WorldError:
        raise
    except RuntimeError as error:
        raise WorldError(
            f"the store was lost while the ranks gathered: {error}",
            rank=rank,
            remedy="rank 0 has ended, or its host is unreachable; look at its output",
        ) from error


def leave_rendezvous(store: Store, roster: RankRoster, rank: int) -> None:
    """Leave a complete world that is refused; rank 0, which may serve the store, leaves last."""
    key, end = f"paceline/left/{roster.name}", time.monotonic() + _LEAVE_SECONDS
    left = store.add(key, 1)
    while rank == 0 and left < len(roster.claims) and time.monotonic() < end:
        time.sleep(_MAX_PAUSE_SECONDS)
        left = store.add(key, 0)


class _Rendezvous:
    def __init__(self, store: Store, mine: RankClaim, timeout: float) -> None:
        self.store, self.mine, self.timeout = store, mine, timeout
        self.start = time.monotonic()
        self.acknowledged = ""  # name of the roster
        self.stale_refusal = self._read("refusal")

    def claim(self, restarted: bool) -> None:
        """Write the claim to this rank, unless another process holds it."""
        key, text, expected = f"paceline/rank/{self.mine.rank}", json.dumps(asdict(self.mine)), ""
        while (held := self.store.compare_set(key, expected, text).decode()) != text:
            old = RankClaim.of_json(json.loads(held))
            if not (restarted or self.mine.may_replace(old)):
                raise self._refuse(
                    old,
                    f"rank {old.rank} is claimed twice: by process {old} and by process {self.mine}",
                    "give every process a rank of its own; if one is left from an earlier run, meet elsewhere",
                )
            expected = held

    def lead(self) -> RankRoster:
        """Publish rosters until every rank on one has acknowledged it; rank 0 does this."""
        roster: RankRoster | None = None
        while True:
            claims = self._claims(range(self.mine.size))
            present = tuple(claims.values())
            if len(present) == self.mine.size and (roster is None or roster.claims != present):
                roster = RankRoster(self.mine.nonce + uuid.uuid4().hex, present)
                self._write("roster", json.dumps(asdict(roster)))
            self._check_sizes(claims)
            if roster and self._acknowledged(roster):
                return roster
            absent = [f"paceline/rank/{rank}" for rank in range(self.mine.size) if rank not in claims]
            if absent:
                self._wait(absent)
            self._check(roster)

    def follow(self) -> RankRoster:
        """Wait for a roster with this rank's claim that every rank on it has acknowledged."""
        roster: RankRoster | None = None
        while True:
            newest = self._roster() if self._wait(["paceline/roster"]) else None
            if roster and newest != roster and self.store.check([f"paceline/complete/{roster.name}"]):
                return roster  # rank 0 is in its next world already
            roster = newest
            if roster and self._acknowledged(roster):
                return roster
            if roster is None:
                time.sleep(0.05)
            self._check(roster)

    def _roster(self) -> RankRoster | None:
        """Return the newest roster if this claim is on it."""
        record = json.loads(self._read("roster"))
        roster = RankRoster(record["name"], tuple(map(RankClaim.of_json, record["claims"])))
        return roster if roster.holds(self.mine) else None

    def _acknowledged(self, roster: RankRoster) -> bool:
        """Acknowledge `roster`, wait briefly for the others, and return whether all have."""
        if roster.name != self.acknowledged:
            self.acknowledged = roster.name
            self._write(f"ack/{roster.name}/{self.mine.rank}", "1")
            if self.store.add(f"paceline/acks/{roster.name}", 1) == self.mine.size:
                self._write(f"complete/{roster.name}", "1")
        return self._wait([f"paceline/complete/{roster.name}"])

    def _check(self, roster: RankRoster | None) -> None:
        """Raise if the world has been refused, or if the time is up."""
        waited = time.monotonic() - self.start
        text = self._read("refusal")
        if text:
            refusal = Refusal(**json.loads(text))
            about = self._claims([refusal.rank]).get(refusal.rank)
            current = about is not None and about.nonce == refusal.nonce
            if text != self.stale_refusal or (current and waited > self._stale_seconds):
                self._linger()
                raise refusal.error(self.mine.rank)
        if waited > self.timeout:
            raise self._missing(roster)

    @property
    def _stale_seconds(self) -> float:
        return min(_STALE_SECONDS, self.timeout / 2)

    def _check_sizes(self, claims: dict[int, RankClaim]) -> None:
        """Raise if a rank has another world size; a stale claim may, for a while."""
        if time.monotonic() - self.start < self._stale_seconds:
            return
        for other in claims.values():
            if other.size != self.mine.size and not self.mine.may_replace(other):
                raise self._refuse(
                    other,
                    f"rank {self.mine.rank} ({self.mine}) has a world size of {self.mine.size}, "
                    f"rank {other.rank} ({other}) one of {other.size}",
                    "start all processes with the same world size",
                )

    def _missing(self, roster: RankRoster | None) -> WorldError:
        size = self.mine.size
        claims = {
            rank: claim
            for rank, claim in self._claims(range(size)).items()
            if claim == self.mine or not self.mine.may_replace(claim)
        }
        if roster and len(claims) == size:
            claims = {rank: c for rank, c in claims.items() if self._read(f"ack/{roster.name}/{rank}")}
        missing = [rank for rank in range(size) if rank not in claims] or [0]
        noun = "rank" if len(missing) == 1 else "ranks"
        present = [f"{rank} ({claim})" for rank, claim in sorted(claims.items())]
        more = f" and {len(present) - 8} more" if len(present) > 8 else ""
        return self._refuse(
            self.mine,
            f"{len(missing)} of {size} ranks did not arrive within {self.timeout:g} s: missing {noun} "
            f"{format_ranks(missing)}; present: {', '.join(present[:8])}{more}",
            f"look at the output of the missing {noun}: not started, ended early, or waiting elsewhere",
            missing=True,
        )

    def _refuse(self, about: RankClaim, text: str, remedy: str, *, missing: bool = False) -> WorldError:
        """Publish why there will be no world, and return the error; time-outs are published by rank 0 only."""
        refusal = Refusal(about.rank, about.nonce, missing, text, remedy)
        if not missing or self.mine.rank == 0:
            self._write("refusal", json.dumps(asdict(refusal)))
            self._linger()
        return refusal.error(self.mine.rank)

    def _linger(self) -> None:
        """Let the others read the refusal before rank 0 ends, and with it a store that it serves."""
        if self.mine.rank == 0:
            time.sleep(2 * _POLL_SECONDS)

    def _claims(self, ranks: Iterable[int]) -> dict[int, RankClaim]:
        found = ((rank, self._read(f"rank/{rank}")) for rank in ranks)
        return {rank: RankClaim.of_json(json.loads(text)) for rank, text in found if text}

    def _read(self, name: str) -> str:
        return self.store.get(f"paceline/{name}").decode() if self.store.check([f"paceline/{name}"]) else ""

    def _write(self, name: str, text: str) -> None:
        self.store.set(f"paceline/{name}", text)

    def _wait(self, keys: Sequence[str]) -> bool:
        """Poll briefly for `keys`, and return whether all are there; a store's own wait logs its time-outs."""
        wait_for = getattr(self.store, "wait_for", None)
        if wait_for is not None:  # `AuthenticatedStore` waits on its server
            left = self.start + self.timeout - time.monotonic()
            return wait_for(list(keys), max(0.0, min(left, _POLL_SECONDS)))
        pause, end = 0.001, time.monotonic() + _POLL_SECONDS
        while not self.store.check(list(keys)):
            if time.monotonic() > min(end, self.start + self.timeout):
                return False
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)
        return True


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ascending ranks in short form.

    Example:
        >>> format_ranks([1, 3, 4, 5])
        '1, 3–5'
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
