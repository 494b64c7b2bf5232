"""A worker's end of a star over ZeroMQ: a DEALER that connects to the hub, again and again if need be.

[Note: dialling again] libzmq connects again by itself when there was no answer or the connection broke off. It gives
up for good when the other side refused the handshake or broke the protocol. A worker does not: its key may be admitted
later, and what listens at the port may be the hub next time. So it then makes a new socket every two seconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import zmq

from paceline.transport.envelope import Bytes, Envelope
from paceline.transport.hub_address import parse_hub_address
from paceline.transport.token_bucket import set_kernel_pacing
from paceline.transport.transport_interface import HUB
from paceline.transport.zmq.curve_keys import WorkerKeys
from paceline.transport.zmq.zmq_endpoint import ZmqEndpoint
from paceline.transport.zmq.zmq_socket import SocketSettings, ZmqSocket, worker_identity

__all__ = ["WorkerExchange"]

_RECONNECT_MS, _RECONNECT_MOST_MS, _CONNECT_MS = 100, 2000, 5000
_DIAL_AGAIN_SECONDS = 2.0
_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
)
_REFUSED = (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_ABSENT = "no hub answers at {address}; it is tried again and again"
_LOST = "the connection to the hub at {address} broke; it is tried again and again"
_TROUBLE: dict[int, str] = {
    zmq.EVENT_CLOSED: _ABSENT,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the hub at {address} does not admit {who}: its key is not among those that"
    " are recorded there",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "what answers at {address} {speaks}",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the hub at {address} broke off the handshake: {breaks}",
}


class WorkerExchange(ZmqEndpoint):
    """Connects to a hub, and carries envelopes from and to it; an `Exchange`. The hub need not be there yet.

    Args:
        address: the hub's, such as ``tcp://192.168.1.5:7000``.
        me: its own number, drawn at random; a worker that starts again may keep it.
        run: whose envelopes it takes; "": any.
        keys: what it was given; None: the hub has none either.
        settings: see `SocketSettings`.

    Raises:
        UsageError: the address or the number is none.

    Example:
        >>> worker = WorkerExchange("tcp://127.0.0.1:7000", me=4711)
        >>> worker.peers()
        []
        >>> worker.close()
    """

    def __init__(
        self,
        address: str,
        me: int,
        run: str = "",
        *,
        keys: WorkerKeys | None = None,
        settings: SocketSettings | None = None,
    ) -> None:
        self._place = parse_hub_address(address, bind=False)
        worker_identity(me)
        super().__init__(me, run, settings or SocketSettings())
        self.address, self._keys = str(self._place), keys
        self._connected, self._trouble, self._refused = False, "", False
        self._dial_at = math.inf
        self._socket = self._dialled()

    @property
    def problem(self) -> str:
        """Why there is no connection, one sentence; "" if there is one, or none was tried yet."""
        self._note()
        return self._trouble

    def peers(self) -> list[int]:
        """Return the hub's number while there is a connection, else nothing."""
        self._note()
        return [HUB] if self._connected else []

    def _dialled(self) -> ZmqSocket:
        """Return a socket that connects to the hub."""
        wire = ZmqSocket(self._context, zmq.DEALER, self.settings, events=_EVENTS, ipv6=self._place.is_ipv6)
        options = {
            zmq.IMMEDIATE: 1,  # nothing is taken before there is a connection
            zmq.RECONNECT_IVL: _RECONNECT_MS,
            zmq.RECONNECT_IVL_MAX: _RECONNECT_MOST_MS,
            zmq.CONNECT_TIMEOUT: _CONNECT_MS,
            zmq.ROUTING_ID: worker_identity(self.me),
        }
        if self._keys is not None:
            options |= {
                zmq.CURVE_SERVERKEY: self._keys.hub.encode(),
                zmq.CURVE_PUBLICKEY: self._keys.public.encode(),
                zmq.CURVE_SECRETKEY: self._keys.secret.encode(),
            }
        for option, value in options.items():
            wire.socket.setsockopt(option, value)
        wire.listen_to(self._bell)
        wire.socket.connect(self.address)
        return wire

    def _opened(self, parts: Sequence[Bytes]) -> Envelope:
        return self._open(parts, HUB)

    def _route(self, target: int) -> list[bytes] | None:
        return [] if target == HUB else None

    def _look(self) -> bool:
        before = self._connected
        self._note()
        if time.monotonic() >= self._dial_at:
            self._dial_at = math.inf
            self._socket.close(linger=0)
            self._socket = self._dialled()
        return self._connected != before

    def _gone(self, target: int) -> None:
        """Do nothing: the monitor says when the hub is gone."""

    def _patience(self) -> float:
        return max(0.0, self._dial_at - time.monotonic())

    def _note(self) -> None:
        """Note what the monitor saw; see [Note: dialling again]."""
        for event, value in self._socket.events():
            if event == zmq.EVENT_CONNECTED:
                if self.settings.rate is not None and self._place.port:
                    set_kernel_pacing(value, self.settings.rate, port=self._place.port)
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected, self._trouble, self._refused, self._dial_at = True, "", False, math.inf
            elif event == zmq.EVENT_CONNECT_RETRIED:
                self._dial_at = math.inf
                self._trouble = self._trouble or self._told(_ABSENT)  # its name is not known, for example
            else:
                self._note_trouble(event)
                self._connected = False
                self._dial_at = time.monotonic() + _DIAL_AGAIN_SECONDS

    def _note_trouble(self, event: int) -> None:
        broken_off = event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        if event in _TROUBLE and not (broken_off and self._refused):  # either end may be the first to refuse
            self._trouble = self._told(_TROUBLE[event])
            self._refused = event in _REFUSED
        elif self._connected:
            self._trouble = self._told(_LOST)

    def _told(self, text: str) -> str:
        if self._keys is None:
            speaks = "is no hub without keys: it wants a key, or it is something else"
            return text.format(
                address=self.address,
                who="this worker",
                speaks=speaks,
                breaks="it may want a key, or it is ending or busy",
            )
        return text.format(
            address=self.address,
            who=f"worker {self._keys.name!r}",
            speaks="is no hub with keys: it has none, or is something else",
            breaks="its key is not the one that this worker was given, or it is ending or busy",
        )
