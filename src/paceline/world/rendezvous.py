"""The roll call: who is there, who is missing, who is there twice.

torch's own rendezvous waits in C++ and reports a time-out without names, and a store may still hold what
an earlier attempt left there (a file of a killed run, the store of a torchrun agent after a restart). So:

1. Every rank writes a claim to its number: host, process, and a nonce made for this very call.
2. Rank 0 reads all claims and writes them down as a roster. A claim it reads may be an old one; as soon as a
   newer one replaces it, rank 0 writes a new roster.
3. A rank that finds its own nonce in the roster acknowledges that roster. Old claims acknowledge nothing, so a
   roster that every rank has acknowledged consists of living ranks only, and that is the world.

The claims also tell which ranks share a host, so nobody has to guess local ranks, and a few facts in which ranks
should be alike (`likeness`).
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import MissingRanks, WorldError

if TYPE_CHECKING:
    from torch.distributed import Store

from paceline.world.host_identity import boot_id

__all__ = ["RankClaim", "RankRoster", "format_ranks", "join_rendezvous", "leave_rendezvous"]

_PAUSE_SECONDS = 0.1  # how often, at most, a rank that waits asks the store
_LOOK_SECONDS = 0.5  # how often it looks whether the world has become another, or impossible
_LEAVE_SECONDS = 10.0  # how long rank 0 waits, at most, for the others to have read the roster
_DOUBT_SECONDS = 10.0  # how long something that may be left from earlier must last to be believed


@dataclass(frozen=True)
class RankClaim:
    """What a rank tells the others about itself."""

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
        """Return a new claim of this process to `rank`; the boot id tells hosts of the same name apart."""
        return cls(
            rank, size, socket.gethostname(), boot_id(), os.getpid(), uuid.uuid4().hex, dict(facts or {})
        )

    @classmethod
    def of_json(cls, told: Mapping[str, Any]) -> RankClaim:
        """Return the claim that another process wrote; another Paceline may write less, or more."""
        return cls(**{each.name: told[each.name] for each in fields(cls) if each.name in told})

    def may_replace(self, old: RankClaim) -> bool:
        """Return whether `old` surely is of the past: made by this process, or by one of this host that ended."""
        if (self.host, self.boot) != (old.host, old.boot):
            return False
        return self.pid == old.pid or not Path(f"/proc/{old.pid}").exists()


@dataclass(frozen=True)
class RankRoster:
    """A complete world: its name, unlike that of any other, and the claims in order of rank."""

    name: str
    claims: tuple[RankClaim, ...]

    def holds(self, claim: RankClaim) -> bool:
        """Return whether `claim` is part of this world."""
        return len(self.claims) == claim.size and self.claims[claim.rank] == claim


@dataclass(frozen=True)
class Refusal:
    """Why a world can't come about, as told to all ranks; about the claim of `rank` with `nonce`."""

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
    """Take part in the roll call on `store` as `rank`, and return the complete world.

    Args:
        store: a key-value store that all ranks of the world share.
        rank, size: this process's place.
        timeout: seconds until a world counts as one that never completes.
        restarted: ranks may have moved to other hosts since an earlier roll call on this store.
        facts: what this rank's claim tells besides.

    Raises:
        MissingRanks: some ranks did not come in time; they are named.
        WorldError: a rank is claimed twice, or the ranks disagree about the world's size.
    """
    try:
        call = _RollCall(store, RankClaim.of_this_process(rank, size, facts), timeout)
        call.claim(restarted)
        return call.lead() if rank == 0 else call.follow()
    except WorldError:
        raise
    except RuntimeError as error:
        raise WorldError(
            f"the store was lost while the ranks gathered: {error}",
            rank=rank,
            remedy="rank 0 has ended, or its host is out of reach; look at its output",
        ) from error


def leave_rendezvous(store: Store, roster: RankRoster, rank: int) -> None:
    """Let go of a world that is complete and yet not to be; rank 0, which may serve the store, goes last."""
    key, end = f"paceline/left/{roster.name}", time.monotonic() + _LEAVE_SECONDS
    left = store.add(key, 1)
    while rank == 0 and left < len(roster.claims) and time.monotonic() < end:
        time.sleep(_PAUSE_SECONDS)
        left = store.add(key, 0)


class _RollCall:
    def __init__(self, store: Store, mine: RankClaim, timeout: float) -> None:
        self.store, self.mine, self.timeout = store, mine, timeout
        self.start = time.monotonic()
        self.acknowledged = ""  # name of the roster
        self.refused_before = self._read("refusal")

    def claim(self, restarted: bool) -> None:
        """Write the claim to this rank, unless somebody else holds it."""
        key, text, expected = self._claim_key(self.mine.rank), json.dumps(asdict(self.mine)), ""
        while (there := self.store.compare_set(key, expected, text).decode()) != text:
            old = RankClaim.of_json(json.loads(there))
            if not (restarted or self.mine.may_replace(old)):
                raise self._refuse(
                    old,
                    f"rank {old.rank} is claimed twice: by process {old} and by process {self.mine}",
                    "give every process a rank of its own; if one is left from an earlier run, meet elsewhere",
                )
            expected = there

    def lead(self) -> RankRoster:
        """Write down who is there until everybody on the list says so; rank 0 does this."""
        roster: RankRoster | None = None
        while True:
            claims = self._claims(range(self.mine.size))
            if len(claims) == self.mine.size and (
                roster is None or list(roster.claims) != list(claims.values())
            ):
                roster = RankRoster(self.mine.nonce + uuid.uuid4().hex, tuple(claims.values()))
                self._write("roster", json.dumps(asdict(roster)))
            self._check_sizes(claims)
            if roster and self._acknowledged(roster):
                return roster
            absent = [self._claim_key(rank) for rank in range(self.mine.size) if rank not in claims]
            if absent:
                self._wait(absent)
            self._check(roster)

    def follow(self) -> RankRoster:
        """Wait for a roster that holds this rank's claim, and for everybody on it to say so."""
        roster: RankRoster | None = None
        while True:
            newest = self._roster() if self._wait(["paceline/roster"]) else None
            if roster and newest != roster and self._complete(roster):
                return roster  # rank 0 is in its next world already
            roster = newest
            if roster and self._acknowledged(roster):
                return roster
            if roster is None:
                time.sleep(0.05)
            self._check(roster)

    def _roster(self) -> RankRoster | None:
        """Return the newest roster if this claim is on it."""
        data = json.loads(self._read("roster"))
        roster = RankRoster(data["name"], tuple(map(RankClaim.of_json, data["claims"])))
        return roster if roster.holds(self.mine) else None

    def _complete(self, roster: RankRoster) -> bool:
        return self.store.check([f"paceline/complete/{roster.name}"])

    def _acknowledged(self, roster: RankRoster) -> bool:
        """Acknowledge `roster`, wait a moment for the others, and return whether all have."""
        if roster.name != self.acknowledged:
            self.acknowledged = roster.name
            self._write(f"ack/{roster.name}/{self.mine.rank}", "1")
            if self.store.add(f"paceline/acks/{roster.name}", 1) == self.mine.size:
                self._write(f"complete/{roster.name}", "1")
        return self._wait([f"paceline/complete/{roster.name}"])

    def _check(self, roster: RankRoster | None) -> None:
        """Raise if the world has been refused, or if its time is up."""
        waited = time.monotonic() - self.start
        refusal = self._read("refusal")
        if refusal:
            reason = Refusal(**json.loads(refusal))
            doubtful = refusal == self.refused_before
            about = self._claims([reason.rank]).get(reason.rank)
            present = about is not None and about.nonce == reason.nonce
            if not doubtful or (present and waited > min(_DOUBT_SECONDS, self.timeout / 2)):
                self._linger()
                raise reason.error(self.mine.rank)
        if waited > self.timeout:
            raise self._missing(roster)

    def _check_sizes(self, claims: dict[int, RankClaim]) -> None:
        """Raise if a rank was told another world size; an old claim may, for a while."""
        if time.monotonic() - self.start < min(_DOUBT_SECONDS, self.timeout / 2):
            return
        for other in claims.values():
            if other.size != self.mine.size and not self.mine.may_replace(other):
                raise self._refuse(
                    other,
                    f"rank {self.mine.rank} ({self.mine}) was told a world size of {self.mine.size}, "
                    f"rank {other.rank} ({other}) one of {other.size}",
                    "start all processes with the same world size",
                )

    def _missing(self, roster: RankRoster | None) -> WorldError:
        size = self.mine.size
        claims = {
            rank: c
            for rank, c in self._claims(range(size)).items()
            if c == self.mine or not self.mine.may_replace(c)
        }
        if roster and len(claims) == size:
            claims = {
                rank: claim for rank, claim in claims.items() if self._read(f"ack/{roster.name}/{rank}")
            }
        missing = [rank for rank in range(size) if rank not in claims] or [0]
        noun = "rank" if len(missing) == 1 else "ranks"
        absent = f"{len(missing)} of {size} ranks did not come within {self.timeout:g} s"
        return self._refuse(
            self.mine,
            f"{absent}: missing {noun} {format_ranks(missing)}; present: {_listed(claims)}",
            f"look at the output of the missing {noun}: not started, ended early, or waiting elsewhere",
            missing=True,
        )

    def _refuse(self, about: RankClaim, text: str, remedy: str, *, missing: bool = False) -> WorldError:
        """Tell all ranks why there will be no world, and return the error; of time-outs only rank 0 tells."""
        refusal = Refusal(about.rank, about.nonce, missing, text, remedy)
        if not missing or self.mine.rank == 0:
            self._write("refusal", json.dumps(asdict(refusal)))
            self._linger()
        return refusal.error(self.mine.rank)

    def _linger(self) -> None:
        """Let the others read the refusal before rank 0 ends, and with it a store that it serves."""
        if self.mine.rank == 0:
            time.sleep(2 * _LOOK_SECONDS)

    def _claims(self, ranks: Iterable[int]) -> dict[int, RankClaim]:
        found = ((rank, self._read(f"rank/{rank}")) for rank in ranks)
        return {rank: RankClaim.of_json(json.loads(text)) for rank, text in found if text}

    def _claim_key(self, rank: int) -> str:
        return f"paceline/rank/{rank}"

    def _read(self, name: str) -> str:
        return self.store.get(f"paceline/{name}").decode() if self.store.check([f"paceline/{name}"]) else ""

    def _write(self, name: str, text: str) -> None:
        self.store.set(f"paceline/{name}", text)

    def _wait(self, keys: Sequence[str]) -> bool:
        """Wait a moment for `keys`, and return whether all are there.

        Asking again and again, since a wait of the store that times out writes warnings on the terminal.
        """
        pause, end = 0.001, time.monotonic() + _LOOK_SECONDS
        while not self.store.check(list(keys)):
            if time.monotonic() > min(end, self.start + self.timeout):
                return False
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_SECONDS)
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


def _listed(claims: dict[int, RankClaim], most: int = 8) -> str:
    """Return the first ranks and their processes."""
    shown = [f"{rank} ({claim})" for rank, claim in sorted(claims.items())[:most]]
    return ", ".join(shown) + (f" and {len(claims) - most} more" if len(claims) > most else "")
