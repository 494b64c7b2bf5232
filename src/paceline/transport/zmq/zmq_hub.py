"""Hub over ZeroMQ: a ROUTER socket that workers connect to.

[Note: who sends] A worker's connection has a random identity, so that no other worker can take it over, and the public
key that authenticated it. The worker's number is in its envelopes. The first key that uses a number owns it; each
connection is of one number, and answers go to the connection that a number's last envelope arrived through.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import zmq

from paceline._core.file_limit import raise_file_limit
from paceline.errors import ForeignEnvelope, TruncatedEnvelope, UsageError
from paceline.transport.envelope import Envelope, encode
from paceline.transport.header_layout import Header
from paceline.transport.hub_address import parse_hub_address
from paceline.transport.transport_interface import HUB
from paceline.transport.zmq.connection_guard import GUARD_EVENTS, ConnectionGuard
from paceline.transport.zmq.curve_keys import HubKeys
from paceline.transport.zmq.hub_binding import bind_hub, remove_socket_file
from paceline.transport.zmq.number_owners import NumberOwners
from paceline.transport.zmq.zap_auth import ZapAuthenticator
from paceline.transport.zmq.zmq_endpoint import ZmqEndpoint
from paceline.transport.zmq.zmq_socket import MAX_WORKER_NUMBER, SocketSettings, ZmqSocket

__all__ = ["DENIED", "HubExchange"]

log = logging.getLogger("paceline.transport")

DENIED = "denied"
"""Kind of the envelope by which a hub answers a worker whose number belongs to another key."""

_BACKLOG = 1024  # workers that connect at the same time
_OWN_FILES = 256  # descriptors of the hub's process besides connections
_MAX_LOGGED_CONFLICTS = 1000


@dataclass(slots=True)
class _Peer:
    """A worker that sent something."""

    identity: bytes  # of its connection
    heard_at: float


class HubExchange(ZmqEndpoint):
    """`Exchange` of a hub: binds an address, and exchanges envelopes with the workers that connect.

    Args:
        address: ``tcp://host:port``, ``tcp://*:port`` for every interface, ``tcp://host:*`` for any free port, or
            ``ipc://path``.
        run: name of the run whose envelopes are accepted; empty: any.
        keys: of the hub; None: nothing is encrypted, and the address is an ``ipc://path``, where only processes of the
            same user may connect.
        insecure: without keys, accept every connection to any address.
        settings: see `SocketSettings`.
        recent_seconds: `peers` lists the workers heard from within this time.
        max_peers: number of workers that it has connections for, and remembers.

    Attributes:
        address: where it can be reached, with the actual port.
        problem: the last one with the workers' keys, such as an unreadable file; empty: none.

    Raises:
        UsageError: the address is invalid, taken, or needs keys; or the keys are invalid.

    Example:
        >>> hub = HubExchange("tcp://127.0.0.1:*", "run", insecure=True)
        >>> hub.poll(), hub.peers()
        ([], [])
        >>> hub.close()
    """

    def __init__(
        self,
        address: str,
        run: str,
        *,
        keys: HubKeys | None = None,
        insecure: bool = False,
        settings: SocketSettings | None = None,
        recent_seconds: float = 60.0,
        max_peers: int = 4096,
    ) -> None:
        wanted = parse_hub_address(address, bind=True)
        if keys is None and wanted.transport == "tcp" and not insecure:
            reach = "other users of this machine" if wanted.is_local else "other machines"
            raise UsageError(
                f"a hub at {address} can be reached by {reach}, and has no keys",
                remedy="make keys (`paceline hub keygen FOLDER`) and give them (--keys FOLDER), "
                "bind ipc://PATH, or let any worker connect (--insecure)",
            )
        super().__init__(HUB, run, settings or SocketSettings())
        self._recent_seconds, self._max_peers = recent_seconds, max_peers
        self._peers: OrderedDict[int, _Peer] = OrderedDict()  # the latest last
        self._number_of: dict[bytes, int] = {}  # by identity
        self._owners = NumberOwners(max_peers)
        self._conflict, self._conflicts = "", set[tuple[int, str]]()
        self._socket = ZmqSocket(
            self._context, zmq.ROUTER, self.settings, events=GUARD_EVENTS, ipv6=wanted.is_ipv6
        )
        self._bound = False
        self._authenticator: ZapAuthenticator | None = None
        self._guard: ConnectionGuard | None = None
        try:
            self._authenticator = ZapAuthenticator(self._context, keys)
            self._authenticator.protect(self._socket.raw)
            for option in (zmq.ROUTER_MANDATORY, zmq.ROUTER_HANDOVER):
                self._socket.raw.setsockopt(option, 1)
            self._socket.raw.setsockopt(zmq.BACKLOG, _BACKLOG)
            self._socket.watch(self._wakeup)
            self.address = bind_hub(self._socket.raw, wanted, private=not insecure)
            self._bound = True
            self._socket.port = parse_hub_address(self.address, bind=True).port
            max_connections = raise_file_limit(max_peers + _OWN_FILES) - _OWN_FILES
            if max_connections < max_peers:
                log.warning(
                    "at most %d workers can connect, since this process may open %d files; for more, raise the "
                    "limit: ulimit -n %d",
                    max(1, max_connections),
                    max_connections + _OWN_FILES,
                    max_peers + _OWN_FILES,
                )
            self._guard = ConnectionGuard(
                self._socket, self._authenticator, self.settings, max_connections=max(1, max_connections)
            )
        except BaseException:
            self.close()
            raise

    @property
    def rejected(self) -> Counter[str]:
        """Number of connections that were rejected or ended, by reason."""
        return self._guard.rejected() if self._guard is not None else Counter()

    @property
    def problem(self) -> str:
        """The last problem with the workers' keys; empty: none."""
        return self._conflict or (self._authenticator.problem if self._authenticator is not None else "")

    def bind_keys(self, owners: Mapping[int, str]) -> None:
        """Make keys the owners of worker numbers, as an earlier hub of the run knew them.

        Args:
            owners: public keys by number; an empty one is ignored.
        """
        for number, key in owners.items():
            if key:
                self._owners.claim(number, key)

    def peers(self) -> list[int]:
        """Return the workers that were heard from recently and are not known to be gone."""
        since = time.monotonic() - self._recent_seconds
        return [number for number, peer in self._peers.items() if peer.heard_at >= since]

    def close(self) -> None:
        """Disconnect; accepted envelopes that are not sent within 0.3 s are lost. Closing twice is allowed."""
        if self._guard is not None:
            self._guard.close()
        if self._authenticator is not None:
            self._authenticator.close()
        super().close()
        if self._bound:
            self._bound = False
            remove_socket_file(parse_hub_address(self.address, bind=True))

    def _decode(self, parts: Sequence[zmq.Frame]) -> Envelope | None:
        """Return a worker's envelope; see [Note: who sends]."""
        if len(parts) < 2:
            raise TruncatedEnvelope("envelope has no parts")
        key, fd = str(parts[1].get("User-Id") or ""), int(parts[1].get(zmq.SRCFD))
        assert self._guard is not None
        if not self._guard.arrived(fd, key, sum(map(len, parts))):
            self.refused["withdrawn key"] += 1
            return None
        envelope, identity = self._decode_from(parts[1:]), parts[0].bytes
        envelope.key = key
        number = envelope.header.source
        known = self._number_of.get(identity, number)
        if not HUB < number <= MAX_WORKER_NUMBER or known != number:
            raise ForeignEnvelope(f"{envelope.header} is not of a worker, or was sent by {known}")
        owner = self._owners.claim(number, key) if key else ""
        if owner != key:
            self._deny(identity, envelope.header, owner, key)
            return None
        self._remember(number, identity)
        return envelope

    def _deny(self, identity: bytes, header: Header, owner: str, key: str) -> None:
        """Refuse an envelope whose number belongs to another key; answer with the reason."""
        assert self._authenticator is not None
        name_of, number = self._authenticator.name_of, header.source
        self.refused["number of another key"] += 1
        why = (
            f"worker number {number} belongs to the key {name_of(owner)!r}, this worker has {name_of(key)!r}"
        )
        self._conflict = f"key {name_of(key)!r} sent messages of {number}, a worker of key {name_of(owner)!r}"
        if (number, key) not in self._conflicts and len(self._conflicts) < _MAX_LOGGED_CONFLICTS:
            self._conflicts.add((number, key))
            log.warning("%s; they are refused", self._conflict)
        answer = encode(Header(header.run, DENIED, HUB, number, 0, meta={"why": why}))
        with contextlib.suppress(zmq.ZMQError):  # it is gone, or does not read its answers
            self._socket.send([identity, *answer])

    def _remember(self, number: int, identity: bytes) -> None:
        """Send answers to a number through this connection from now on."""
        now, peer = time.monotonic(), self._peers.get(number)
        if peer is not None and peer.identity == identity:
            peer.heard_at = now
        else:
            if peer is not None:
                del self._number_of[peer.identity]
            self._peers[number] = _Peer(identity, now)
            self._number_of[identity] = number
        self._peers.move_to_end(number)
        if len(self._peers) > self._max_peers:
            self._forget(next(iter(self._peers)))

    def _forget(self, number: int) -> None:
        peer = self._peers.pop(number, None)
        if peer is not None:
            del self._number_of[peer.identity]

    def _route(self, target: int) -> list[bytes] | None:
        peer = self._peers.get(target)
        return None if peer is None else [peer.identity]

    def _on_unreachable(self, target: int) -> None:
        self._forget(target)

    def _handle_events(self) -> bool:
        if self._guard is not None:
            self._guard.check()
        return False
