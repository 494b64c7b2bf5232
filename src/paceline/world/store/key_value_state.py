"""Key-value stores on a server: spaces of keys, and the requests that wait for some (pure).

Requests and their semantics are those of torch's TCPStore. A client that waits sends one request, which is answered
when its keys exist or its time is up.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from paceline.world.store.request_messages import MAX_REQUEST_NBYTES, SentReply, encode_reply, refuse

__all__ = ["KEY_VALUE_SERVICE", "KeyRequest", "KeyValueState"]

KEY_VALUE_SERVICE = b"kv"
"""Name of the service whose requests `KeyValueState` handles."""

_STORE_NBYTES = 256 << 20  # of all spaces together
_KEY_OVERHEAD_NBYTES = 200  # per key, so that empty values count too
_MAX_WAITING = 100_000

_Key = Annotated[str, Meta(max_length=4096)]
_Keys = Annotated[list[_Key], Meta(max_length=100_000)]
_Value = Annotated[bytes, Meta(max_length=MAX_REQUEST_NBYTES)]
_Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]


class KeyRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request of the key-value service, in one space of keys."""

    id: Annotated[int, Meta(ge=0)]
    space: Annotated[str, Meta(max_length=200)]


class SetKeys(KeyRequest, tag="set"):
    """Set keys to values."""

    values: dict[_Key, _Value]


class GetKeys(KeyRequest, tag="get"):
    """Return the values of all keys, once they exist; an error after `seconds`."""

    keys: _Keys
    seconds: _Seconds


class WaitKeys(KeyRequest, tag="wait"):
    """Return when all keys exist; an error after `seconds`."""

    keys: _Keys
    seconds: _Seconds


class CheckKeys(KeyRequest, tag="check"):
    """Return whether all keys exist."""

    keys: _Keys


class AddToKey(KeyRequest, tag="add"):
    """Add to a decimal number, which is 0 if missing, and return the sum."""

    key: _Key
    amount: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class AppendToKey(KeyRequest, tag="append"):
    """Append to a value, which is empty if missing."""

    key: _Key
    value: _Value


class CompareSet(KeyRequest, tag="compare"):
    """Set a key if it has the expected value, or is missing and that is empty; return what it then is."""

    key: _Key
    expected: _Value
    desired: _Value


class DeleteKey(KeyRequest, tag="delete"):
    """Delete a key, and return whether it existed."""

    key: _Key


class CountKeys(KeyRequest, tag="count"):
    """Return the number of keys."""


_decoder = msgspec.json.Decoder(
    SetKeys | GetKeys | WaitKeys | CheckKeys | AddToKey | AppendToKey | CompareSet | DeleteKey | CountKeys
)


@dataclass(eq=False)
class _Waiting:
    """A request that waits for keys."""

    client: bytes
    request: GetKeys | WaitKeys
    missing: set[str]
    done: bool = False


class _Refused(Exception):
    """A request that can't be carried out."""


class KeyValueState:
    """Handler of the key-value service, see `RequestHandler`.

    Example:
        >>> state = KeyValueState()
        >>> state.receive(b"a", b'{"type": "wait", "id": 1, "space": "", "keys": ["k"], "seconds": 9}', 0.0)
        []
        >>> request = b'{"type": "set", "id": 1, "space": "", "values": {"k": "dmFsdWU="}}'
        >>> [client for client, _ in state.receive(b"b", request, 1.0)]
        [b'a', b'b']
    """

    def __init__(self) -> None:
        self._spaces: defaultdict[str, dict[str, bytes]] = defaultdict(dict)
        self._nbytes = 0
        self._waiting_for: defaultdict[tuple[str, str], list[_Waiting]] = defaultdict(list)
        self._of_client: defaultdict[bytes, set[_Waiting]] = defaultdict(set)
        self._due: list[tuple[float, int, _Waiting]] = []
        self._count = self._waiting = 0

    def receive(self, client: bytes, body: bytes, now: float) -> list[SentReply]:
        """Handle a request of a client."""
        try:
            request = _decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return [(client, refuse(_id_of(body), f"invalid request: {error}"))]
        try:
            if isinstance(request, GetKeys | WaitKeys):
                return self._get_or_wait(client, request, now)
            replies: list[SentReply] = []
            result = self._carry_out(request, replies)
        except _Refused as error:
            return [(client, refuse(request.id, str(error)))]
        return [*replies, (client, encode_reply(request.id, result))]

    def disconnected(self, client: bytes, now: float) -> Iterable[SentReply]:
        """Forget the requests of a client that wait."""
        for waiting in list(self._of_client.get(client, ())):
            self._forget(waiting)
        return ()

    def advance(self, now: float) -> list[SentReply]:
        """Answer the requests whose time is up."""
        replies = []
        while self._due and self._due[0][0] <= now:
            waiting = heapq.heappop(self._due)[2]
            if not waiting.done:
                self._forget(waiting)
                names = ", ".join(sorted(waiting.missing)[:8])
                text = f"wait timeout after {waiting.request.seconds:g} s, keys: {names}"
                replies.append((waiting.client, refuse(waiting.request.id, text, timeout=True)))
        return replies

    def next_due(self) -> float:
        """Return when the time of the next request is up."""
        while self._due and self._due[0][2].done:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else math.inf

    def drop_space(self, space: str) -> None:
        """Delete all keys of a space."""
        for key, value in self._spaces.pop(space, {}).items():
            self._nbytes -= _KEY_OVERHEAD_NBYTES + len(key) + len(value)

    def _get_or_wait(self, client: bytes, request: GetKeys | WaitKeys, now: float) -> list[SentReply]:
        keys = self._spaces[request.space]
        missing = {key for key in request.keys if key not in keys}
        if not missing:
            return [(client, self._found(request))]
        if self._waiting >= _MAX_WAITING:
            raise _Refused("too many requests wait")
        waiting = _Waiting(client, request, missing)
        for key in missing:
            self._waiting_for[request.space, key].append(waiting)
        self._of_client[client].add(waiting)
        self._waiting += 1
        self._count += 1
        heapq.heappush(self._due, (now + request.seconds, self._count, waiting))
        return []

    def _found(self, request: GetKeys | WaitKeys) -> bytes:
        keys = self._spaces[request.space]
        found = [keys[key] for key in request.keys] if isinstance(request, GetKeys) else None
        return encode_reply(request.id, found)

    def _carry_out(self, request: KeyRequest, replies: list[SentReply]) -> object:
        keys = self._spaces[request.space]
        match request:
            case SetKeys(values=values):
                for key, value in values.items():
                    self._set(request.space, key, value, replies)
                return None
            case CheckKeys(keys=names):
                return all(key in keys for key in names)
            case AddToKey(key=key, amount=amount):
                total = _number(key, keys.get(key, b"0")) + amount
                self._set(request.space, key, b"%d" % total, replies)
                return total
            case AppendToKey(key=key, value=value):
                self._set(request.space, key, keys.get(key, b"") + value, replies)
                return None
            case CompareSet(key=key, expected=expected, desired=desired):
                current = keys.get(key)
                if current is None and expected:
                    return expected
                if current is not None and current != expected:
                    return current
                self._set(request.space, key, desired, replies)
                return desired
            case DeleteKey(key=key):
                value = keys.pop(key, None)
                if value is not None:
                    self._nbytes -= _KEY_OVERHEAD_NBYTES + len(key) + len(value)
                return value is not None
            case _:
                return len(keys)

    def _set(self, space: str, key: str, value: bytes, replies: list[SentReply]) -> None:
        keys = self._spaces[space]
        old = keys.get(key)
        growth = len(value) - len(old) if old is not None else _KEY_OVERHEAD_NBYTES + len(key) + len(value)
        if self._nbytes + growth > _STORE_NBYTES:
            raise _Refused(f"the store is full: it holds up to {_STORE_NBYTES >> 20} MiB")
        self._nbytes += growth
        keys[key] = value
        for waiting in self._waiting_for.pop((space, key), ()):
            waiting.missing.discard(key)
            if waiting.missing or waiting.done:
                continue
            waiting.missing = {each for each in waiting.request.keys if each not in keys}  # deleted meanwhile
            for each in waiting.missing:
                self._waiting_for[space, each].append(waiting)
            if not waiting.missing:
                self._forget(waiting)
                replies.append((waiting.client, self._found(waiting.request)))

    def _forget(self, waiting: _Waiting) -> None:
        waiting.done = True
        self._waiting -= 1
        of_client = self._of_client[waiting.client]
        of_client.discard(waiting)
        if not of_client:
            del self._of_client[waiting.client]
        for key in waiting.missing:
            others = self._waiting_for[waiting.request.space, key]
            others.remove(waiting)
            if not others:
                del self._waiting_for[waiting.request.space, key]


def _number(key: str, value: bytes) -> int:
    try:
        return int(value)
    except ValueError:
        raise _Refused(f"add: the value of {key!r} is not a number") from None


class _Identified(msgspec.Struct):
    id: int = 0


def _id_of(body: bytes) -> int:
    """Return the id of a malformed request, as far as it has one."""
    try:
        return msgspec.json.decode(body, type=_Identified).id
    except (msgspec.DecodeError, UnicodeDecodeError):
        return 0
