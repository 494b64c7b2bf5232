"""Hub over ZeroMQ: a ROUTER socket that workers connect to."""

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

_FAILED_HANDSHAKES: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "invalid handshake",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "aborted handshake",
}
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class HubExchange(ZmqEndpoint):
    """`Exchange` of a hub: binds an address, and exchanges envelopes with the workers that connect.

    Args:
        address: ``tcp://host:port``, ``tcp://*:port`` for every interface, ``tcp://host:*`` for any free port, or
            ``ipc://path``.
        run: name of the run whose envelopes are accepted; empty: any.
        keys: of the hub; None: any worker may connect, and nothing is encrypted.
        insecure: without keys, accept connections from other machines too.
        settings: see `SocketSettings`.
        recent_seconds: `peers` lists the workers heard from within this time.
        max_peers: number of workers remembered for `peers`.

    Attributes:
        address: where it can be reached, with the actual port.

    Raises:
        UsageError: the address is invalid, taken, or needs keys; or the keys are invalid.

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
        wanted = parse_hub_address(address, bind=True)
        if keys is None and not wanted.is_local and not insecure:
            raise UsageError(
                f"a hub at {address} can be reached from other machines, and has no keys",
                remedy="make keys (`paceline hub keygen FOLDER`) and give them (--keys FOLDER), "
                "bind tcp://127.0.0.1:PORT, or let any worker connect (--insecure)",
            )
        super().__init__(HUB, run, settings or SocketSettings())
        self._recent_seconds, self._max_peers = recent_seconds, max_peers
        self._heard_at: OrderedDict[int, float] = OrderedDict()  # the latest last
        self._socket = ZmqSocket(
            self._context, zmq.ROUTER, self.settings, events=_EVENTS, ipv6=wanted.is_ipv6
        )
        self._authenticator: ZapAuthenticator | None = None
        try:
            self._authenticator = ZapAuthenticator(self._context, keys)
            self._authenticator.protect(self._socket.raw)
            self._socket.raw.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._socket.raw.setsockopt(zmq.ROUTER_HANDOVER, 1)
            self._socket.watch(self._wakeup)
            self._socket.watch(self._authenticator.socket)
            self.address = _bind(self._socket.raw, wanted)
        except BaseException:
            self.close()
            raise
        self._port = parse_hub_address(self.address, bind=True).port

    @property
    def rejected(self) -> Counter[str]:
        """Number of rejected connections, by reason."""
        return self._authenticator.rejected if self._authenticator is not None else Counter()

    @property
    def problem(self) -> str:
        """Description of a worker's public key that can't be read; empty: none."""
        return self._authenticator.problem if self._authenticator is not None else ""

    def peers(self) -> list[int]:
        """Return the workers that were heard from recently and are not known to be gone."""
        since = time.monotonic() - self._recent_seconds
        return [number for number, heard_at in self._heard_at.items() if heard_at >= since]

    def close(self) -> None:
        """Disconnect; accepted envelopes that are not sent within 0.3 s are lost. Closing twice is allowed."""
        if self._authenticator is not None:
            self._authenticator.close()
        super().close()

    def _decode(self, parts: Sequence[Bytes]) -> Envelope:
        if len(parts) < 2:
            raise TruncatedEnvelope("envelope has no parts")
        envelope = self._decode_from(parts[1:], worker_number(parts[0]))
        self._heard_at[envelope.header.source] = time.monotonic()
        self._heard_at.move_to_end(envelope.header.source)
        if len(self._heard_at) > self._max_peers:
            self._heard_at.popitem(last=False)
        return envelope

    def _route(self, target: int) -> list[bytes] | None:
        return [worker_identity(target)] if HUB < target <= MAX_WORKER_NUMBER else None

    def _on_unreachable(self, target: int) -> None:
        self._heard_at.pop(target, None)

    def _handle_events(self) -> bool:
        if self._authenticator is not None:
            self._authenticator.answer_requests()
        for event, value in self._socket.events():
            if event in _FAILED_HANDSHAKES:
                self.rejected[_FAILED_HANDSHAKES[event]] += 1
            elif self.settings.rate is not None and self._port:
                set_kernel_pacing(value, self.settings.rate, port=self._port)
        return False


def _bind(router: zmq.Socket[bytes], wanted: HubAddress) -> str:
    """Bind a socket, and return the address with its actual port."""
    try:
        router.bind(str(_resolve_host(wanted)))
    except zmq.ZMQError as error:
        remedy = "give an address of this machine, or tcp://*:PORT for all of them"
        if error.errno == zmq.EADDRINUSE:
            remedy = "stop what listens there (`ss -ltnp` shows it), or give another port; * is any free one"
        elif error.errno == errno.EACCES:
            remedy = "give a port above 1023, or a folder that you may write to"
        raise UsageError(f"hub can't bind {wanted}: {error.strerror}", remedy=remedy) from error
    return router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")


def _resolve_host(wanted: HubAddress) -> HubAddress:
    """Replace a host name by its IP address, since libzmq does not bind names."""
    if wanted.transport != "tcp" or wanted.host == "*" or wanted.is_ipv6:
        return wanted
    try:
        (*_, address), *_ = socket.getaddrinfo(wanted.host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(
            f"hub can't bind {wanted}: the host {wanted.host!r} does not resolve",
            remedy="give an IP address such as 192.168.1.5, or tcp://*:PORT",
        ) from error
    return HubAddress("tcp", str(address[0]), wanted.port)
