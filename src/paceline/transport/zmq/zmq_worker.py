"""Worker over ZeroMQ: a DEALER socket that connects to the hub, and reconnects after a failure.

[Note: reconnecting] libzmq reconnects after a time-out or a broken connection. It gives up for good when the peer
refused the handshake or violated the protocol. A worker must not: its key may be admitted later, and another program at
the port may be replaced by the hub. So it then makes a new socket every two seconds.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence

import zmq

from paceline.transport.envelope import Envelope
from paceline.transport.hub_address import parse_alternatives, parse_hub_address
from paceline.transport.token_bucket import set_kernel_pacing
from paceline.transport.transport_interface import HUB
from paceline.transport.zmq.curve_keys import WorkerKeys
from paceline.transport.zmq.zmq_endpoint import ZmqEndpoint
from paceline.transport.zmq.zmq_hub import DENIED
from paceline.transport.zmq.zmq_socket import SocketSettings, ZmqSocket, check_worker_number

__all__ = ["WorkerExchange"]

_RECONNECT_MS, _MAX_RECONNECT_MS, _CONNECT_MS = 100, 2000, 5000
_NEW_SOCKET_SECONDS = 2.0
_IDENTITY_NBYTES = 16
_SWITCH_SECONDS = 3.0  # without a connection, after which another address is tried
_REFUSALS = (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
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
_ABSENT = "no hub answers at {address}; retrying"
_LOST = "the connection to the hub at {address} broke; retrying"
_PROBLEMS: dict[int, str] = {
    zmq.EVENT_CLOSED: _ABSENT,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the hub at {address} does not admit {worker}: no record of its key",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the server at {address} {mismatch}",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the hub at {address} aborted the handshake: {abort}",
}


class WorkerExchange(ZmqEndpoint):
    """`Exchange` of a worker: connects to a hub, which need not be running yet.

    Args:
        address: of the hub, such as ``tcp://192.168.1.5:7000``; of hub and standby: ``tcp://a:7000|tcp://b:7000``.
        me: own number, drawn at random; a restarted worker may keep it.
        run: name of the run whose envelopes are accepted; empty: any.
        keys: of the worker; None: the hub has none either.
        settings: see `SocketSettings`.

    Raises:
        UsageError: address or number is invalid.

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
        self._alternatives = parse_alternatives(address)
        self._hub_address = self._alternatives[0]
        check_worker_number(me)
        super().__init__(me, run, settings or SocketSettings())
        self._identity = b"w" + secrets.token_bytes(
            _IDENTITY_NBYTES
        )  # nobody else can take over its connection
        self.address, self._keys = str(self._hub_address), keys
        self._connected, self._problem, self._refused = False, "", False
        self._new_socket_at = math.inf
        self._switch_at = time.monotonic() + _SWITCH_SECONDS
        self._socket = self._connect()

    @property
    def problem(self) -> str:
        """Why there is no connection; empty if there is one, or none was tried yet."""
        self._update()
        return self._problem

    def peers(self) -> list[int]:
        """Return the hub's number while connected, else nothing."""
        self._update()
        return [HUB] if self._connected else []

    def add_alternative(self, address: str) -> None:
        """Add the address of a standby, which is tried while the others can't be reached.

        Raises:
            UsageError: it is invalid.
        """
        added = parse_hub_address(address, bind=False)
        secured = self._keys is not None or added.is_local or not self._hub_address.is_local
        if secured and added not in self._alternatives:
            self._alternatives.append(added)

    def try_alternative(self) -> None:
        """Connect to the next address, if there are several."""
        now = time.monotonic()
        self._switch_at = now + _SWITCH_SECONDS
        if len(self._alternatives) > 1:
            self._alternatives.append(self._alternatives.pop(0))
            self._hub_address = self._alternatives[0]
            self.address = str(self._hub_address)
            self._connected, self._new_socket_at = False, now

    def _connect(self) -> ZmqSocket:
        """Return a new socket that connects to the hub."""
        ipv6 = self._hub_address.is_ipv6
        connecting = ZmqSocket(self._context, zmq.DEALER, self.settings, events=_EVENTS, ipv6=ipv6)
        options = {
            zmq.IMMEDIATE: 1,  # queue nothing without a connection
            zmq.RECONNECT_IVL: _RECONNECT_MS,
            zmq.RECONNECT_IVL_MAX: _MAX_RECONNECT_MS,
            zmq.CONNECT_TIMEOUT: _CONNECT_MS,
            zmq.ROUTING_ID: self._identity,
        }
        if self._keys is not None:
            options |= {
                zmq.CURVE_SERVERKEY: self._keys.hub.encode(),
                zmq.CURVE_PUBLICKEY: self._keys.public.encode(),
                zmq.CURVE_SECRETKEY: self._keys.secret.encode(),
            }
        for option, value in options.items():
            connecting.raw.setsockopt(option, value)
        connecting.watch(self._wakeup)
        connecting.watch(connecting.monitor)
        connecting.raw.connect(self.address)
        return connecting

    def _decode(self, parts: Sequence[zmq.Frame]) -> Envelope | None:
        envelope = self._decode_from(parts, HUB)
        if envelope.header.kind != DENIED:
            return envelope
        self._problem = f"the hub at {self.address} refuses this worker: {envelope.header.meta.get('why')}"
        return None

    def _route(self, target: int) -> list[bytes] | None:
        return [] if target == HUB else None

    def _handle_events(self) -> bool:
        before = self._connected
        self._update()
        if self._connected:
            self._switch_at = time.monotonic() + _SWITCH_SECONDS
        elif time.monotonic() >= self._switch_at:
            self.try_alternative()
        if time.monotonic() >= self._new_socket_at:
            self._new_socket_at = math.inf
            self._socket.close(linger=0)
            self._socket = self._connect()
        return self._connected != before

    def _on_unreachable(self, target: int) -> None:
        """Do nothing: the monitor reports when the hub is gone."""

    def _max_wait_seconds(self) -> float:
        due = (
            self._new_socket_at if len(self._alternatives) < 2 else min(self._new_socket_at, self._switch_at)
        )
        return max(0.0, due - time.monotonic())

    def _update(self) -> None:
        """Update the connection's state from monitor events; see [Note: reconnecting]."""
        for event, value in self._socket.events():
            if event == zmq.EVENT_CONNECTED:
                if self.settings.rate is not None and self._hub_address.port:
                    set_kernel_pacing(value, self.settings.rate, port=self._hub_address.port)
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected, self._problem, self._refused = True, "", False
                self._new_socket_at = math.inf
            elif event == zmq.EVENT_CONNECT_RETRIED:
                self._new_socket_at = math.inf
                # A name that does not resolve, for example.
                self._problem = self._problem or self._describe(_ABSENT)
            else:
                self._update_problem(event)
                self._connected = False
                self._new_socket_at = time.monotonic() + _NEW_SOCKET_SECONDS

    def _update_problem(self, event: int) -> None:
        aborted = event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        if event in _PROBLEMS and not (aborted and self._refused):  # either end may be the first to refuse
            self._problem = self._describe(_PROBLEMS[event])
            self._refused = event in _REFUSALS
        elif self._connected:
            self._problem = self._describe(_LOST)

    def _describe(self, template: str) -> str:
        if self._keys is None:
            details = {
                "worker": "this worker",
                "mismatch": "is not a hub without keys: it requires a key, or is another program",
                "abort": "it may require a key, or it is shutting down or busy",
            }
        else:
            details = {
                "worker": f"worker {self._keys.name!r}",
                "mismatch": "is not a hub with keys: it has none, or is another program",
                "abort": "its key differs from the one that this worker was given, or it is shutting down or busy",
            }
        return template.format(address=self.address, **details)
