"""The hub's end of a star over ZeroMQ: a ROUTER that workers connect to."""

from __future__ import annotations

import errno
import socket
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence

import zmq

from paceline.errors import TruncatedEnvelope, UsageError
from paceline.transport.envelope import Bytes, Envelope
from paceline.transport.hub_address import HubAddress, parse_hub_address
from paceline.transport.token_bucket import set_kernel_pacing
from paceline.transport.transport_interface import HUB
from paceline.transport.zmq.curve_keys import HubKeys
from paceline.transport.zmq.zap_auth import ZapAuthenticator
from paceline.transport.zmq.zmq_endpoint import ZmqEndpoint
from paceline.transport.zmq.zmq_socket import (
    MAX_WORKER_NUMBER,
    SocketSettings,
    ZmqSocket,
    worker_identity,
    worker_number,
)

__all__ = ["HubExchange"]

_FAILED: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "no handshake of ours",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "a handshake broken off",
}
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class HubExchange(ZmqEndpoint):
    """Binds an address, and carries envelopes from and to the workers that connect to it; an `Exchange`.

    Args:
        address: ``tcp://host:port``, ``tcp://*:port`` for every interface, ``tcp://host:*`` for any free port, or
            ``ipc://path``.
        run: whose envelopes it takes; "": any.
        keys: its own; None: everybody is let in, and nothing is encrypted.
        insecure: without keys, let even those in who come from other machines.
        settings: see `SocketSettings`.
        recent: seconds since it last heard of a worker that `peers` tells.
        most_peers: it remembers the latest so many.

    Attributes:
        address: where it can be reached, with the real port.
        turned_away: how many were not let in, by why.

    Raises:
        UsageError: the address is none, is taken, or needs keys; or the keys can't be used.

    Example:
        >>> hub = HubExchange("tcp://127.0.0.1:*", "run")
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
        asked = parse_hub_address(address, bind=True)
        if keys is None and not asked.is_local and not insecure:
            raise UsageError(
                f"a hub at {address} is within reach of other machines, and has no keys",
                remedy="make keys (`paceline hub keygen FOLDER`) and give them (--keys FOLDER), "
                "bind tcp://127.0.0.1:PORT, or let everybody in (--insecure)",
            )
        super().__init__(HUB, run, settings or SocketSettings())
        self._recent, self._most_peers = recent_seconds, max_peers
        self._heard_at: OrderedDict[int, float] = OrderedDict()  # the latest last
        self._socket = ZmqSocket(self._context, zmq.ROUTER, self.settings, events=_EVENTS, ipv6=asked.is_ipv6)
        self._door: ZapAuthenticator | None = None
        try:
            self._door = ZapAuthenticator(self._context, keys)
            self._prepare()
            self.address = _bind(self._socket.socket, asked)
        except BaseException:
            self.close()
            raise
        self._port = parse_hub_address(self.address, bind=True).port

    @property
    def rejected(self) -> Counter[str]:
        """How many were not let in, by why."""
        return self._door.rejected if self._door is not None else Counter()

    @property
    def problem(self) -> str:
        """What the hub's user should know of: a record of a worker that can't be read; "" if nothing is wrong."""
        return self._door.problem if self._door is not None else ""

    def peers(self) -> list[int]:
        """Return the workers that were heard of recently, and are not known to have gone."""
        since = time.monotonic() - self._recent
        return [number for number, heard_at in self._heard_at.items() if heard_at >= since]

    def close(self) -> None:
        """Leave; what was taken and has not left within 0.3 s is lost. Closing twice is closing once."""
        if self._door is not None:
            self._door.close()
        super().close()

    def _prepare(self) -> None:
        self._socket.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.listen_to(self._bell)
        if self._door is not None:
            self._socket.listen_to(self._door.socket)
            self._door.guard(self._socket.socket)

    def _opened(self, parts: Sequence[Bytes]) -> Envelope:
        if len(parts) < 2:
            raise TruncatedEnvelope("an envelope came without any part")
        source = worker_number(parts[0])
        envelope = self._open(parts[1:], source)
        self._heard_at[envelope.header.source] = time.monotonic()
        self._heard_at.move_to_end(envelope.header.source)
        if len(self._heard_at) > self._most_peers:
            self._heard_at.popitem(last=False)
        return envelope

    def _route(self, target: int) -> list[bytes] | None:
        return [worker_identity(target)] if HUB < target <= MAX_WORKER_NUMBER else None

    def _gone(self, target: int) -> None:
        self._heard_at.pop(target, None)

    def _look(self) -> bool:
        if self._door is not None:
            self._door.look()
        for event, value in self._socket.events():
            if event in _FAILED:
                self.rejected[_FAILED[event]] += 1
            elif self.settings.rate is not None and self._port:
                set_kernel_pacing(value, self.settings.rate, port=self._port)
        return False


def _bind(router: zmq.Socket[bytes], asked: HubAddress) -> str:
    """Bind a socket, and return the address with its real port."""
    try:
        router.bind(str(_numeric(asked)))
    except zmq.ZMQError as error:
        remedy = "give an address of this machine, or tcp://*:PORT for all of them"
        if error.errno == zmq.EADDRINUSE:
            remedy = "stop what listens there (`ss -ltnp` shows it), or give another port; * is any free one"
        elif error.errno == errno.EACCES:
            remedy = "give a port above 1023, or a folder that you may write to"
        raise UsageError(f"a hub can't be at {asked}: {error.strerror}", remedy=remedy) from error
    return router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")


def _numeric(asked: HubAddress) -> HubAddress:
    """Return an address with the number of its host: libzmq binds no names."""
    if asked.transport != "tcp" or asked.host == "*" or asked.is_ipv6:
        return asked
    try:
        (*_, place), *_ = socket.getaddrinfo(asked.host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(
            f"a hub can't be at {asked}: {asked.host!r} is no host that is known here",
            remedy="give a number such as 192.168.1.5, or tcp://*:PORT",
        ) from error
    return HubAddress("tcp", str(place[0]), asked.port)
