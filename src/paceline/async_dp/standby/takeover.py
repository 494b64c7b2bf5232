"""Waits until a standby must take over, and notifies the former hub afterwards."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from paceline._core.file_lock import FolderLock
from paceline.async_dp.protocol.frame_sender import FrameSender
from paceline.async_dp.protocol.hub_messages import HubMessage
from paceline.async_dp.standby.standby_hub import StandbyHub, WorkerRefusal
from paceline.async_dp.standby.term_proof import TermProof
from paceline.async_dp.wal.hub_folder import HubFolder
from paceline.errors import CheckpointError, UsageError
from paceline.transport.hub_address import parse_hub_address
from paceline.transport.transport_interface import HUB
from paceline.transport.zmq import HubExchange, WorkerExchange
from paceline.transport.zmq.curve_keys import HubKeys

__all__ = ["SHARED", "FormerHub", "check_shared_folder", "follow_active_hub", "wait_for_folder"]

SHARED = "shared"
"""Instead of an active hub's address: both hubs have the same folder, on a disk that they share."""

_POLL_SECONDS, _NOTICE_SECONDS = 0.2, 2.0


def check_shared_folder(folder: Path) -> None:
    """Raise a UsageError unless a folder holds a run that a standby can take over."""
    if not folder.is_dir() or not HubFolder(folder).holds_run():
        raise UsageError(
            f"{str(folder)!r} holds no run that a standby could take over",
            remedy="start the active hub first",
        )


def wait_for_folder(folder: Path, workers: HubExchange, stop: Callable[[], bool]) -> FolderLock | None:
    """Wait until no hub has a folder open, and return its lock; None once `stop` returns True.

    Raises:
        UsageError: it can't be locked.
    """
    refusal = WorkerRefusal(workers, lambda: "")
    while not stop():
        with suppress(CheckpointError):
            return FolderLock(folder / "hub.lock", "hub", timeout=0.0, busy=CheckpointError)
        refusal.answer(workers.poll(_POLL_SECONDS), "another hub has the folder open", time.monotonic())
    return None


def follow_active_hub(
    address: str,
    folder: Path,
    workers: HubExchange,
    keys: HubKeys | None,
    *,
    silent_after: float,
    stop: Callable[[], bool],
    on_state: Callable[[str], object],
) -> bool:
    """Copy an active hub's folder until this hub must take over; return False once `stop` returns True.

    Args:
        address: of the active hub.
        folder: for the copy.
        workers: exchange with workers, bound where they will find this hub.
        keys: of both hubs; None: they have none.
        silent_after: seconds of silence of the active hub after which this one may take over.
        stop: ends the wait.
        on_state: called with a description whenever it changes.

    Raises:
        UsageError: the address is invalid, or the folder holds another run.
        DamagedCheckpoint: the folder's mark is damaged.
    """
    with closing(_client(address, keys)) as active:
        standby = StandbyHub(
            folder,
            active,
            workers,
            number=active.me,
            secret="" if keys is None else keys.secret,
            address=_reachable_address(workers.address, active.address),
            silent_after=silent_after,
        )
        shown = ""

        def show() -> None:
            nonlocal shown
            if standby.state != shown:
                shown = standby.state
                on_state(shown)

        return standby.follow(stop, show)


class FormerHub:
    """Notifies the hub at the address of the former one that it was superseded, whenever it can be reached.

    Args:
        address: of the former hub.
        run: name of the run.
        proof: of this hub's term.
        keys: of both hubs; None: they have none.
    """

    def __init__(self, address: str, run: str, proof: TermProof, keys: HubKeys | None) -> None:
        self._exchange, self._proof = _client(address, keys), proof
        self._sender = FrameSender(self._exchange, lambda: run)
        self._due = 0.0

    def __enter__(self) -> FormerHub:
        return self

    def __exit__(self, *_: object) -> None:
        self._exchange.close()

    def refresh(self) -> None:
        """Send the notice if it is due; never blocks."""
        self._exchange.poll()
        now = time.monotonic()
        if now >= self._due and self._exchange.peers():
            self._due = now + _NOTICE_SECONDS
            self._sender.enqueue(HubMessage("superseded", self._exchange.me, HUB, meta=self._proof.meta()))
        self._sender.pump(now)


def _client(address: str, keys: HubKeys | None) -> WorkerExchange:
    client = None if keys is None else keys.as_client()
    return WorkerExchange(address, 1 + secrets.randbelow(2**53 - 1), keys=client)


def _reachable_address(bound: str, active: str) -> str:
    """Return the address at which other machines reach a bound one: every interface becomes that toward `active`."""
    own, other = parse_hub_address(bound, bind=True), parse_hub_address(active, bind=False)
    if own.host not in ("*", "0.0.0.0", "::") or other.transport != "tcp":
        return bound
    with socket.socket(socket.AF_INET6 if other.is_ipv6 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other.host, other.port or 9))  # chooses a route; nothing is sent
        except OSError:
            return str(replace(own, host=socket.gethostname()))
        return str(replace(own, host=str(probe.getsockname()[0])))
