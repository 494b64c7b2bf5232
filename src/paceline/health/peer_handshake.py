"""Mutual authentication of two watchdogs by a shared key, and authentication of every frame that follows.

    caller → listener    hello       rank, listener's rank, purpose, nonce, proof that it was made with the key
    listener → caller    challenge   nonce, proof over both nonces
    caller → listener    answer      proof over both nonces
    both                 frames      each with a code (HMAC-SHA256) over a key of the direction and its number

Why not CURVE, which pyzmq has: ZeroMQ connects again by itself and hides what the watchdog needs most, the end of a
connection, the bytes that a host has not acknowledged, and a time-out per connection. So the codes are added to plain
sockets. They give authenticity, not secrecy: heartbeats and tracebacks can be read on the network.

Keys depend on the nonces of both ends, so recorded frames are invalid in any other connection; within one, the number
of a frame is part of its code, so frames can't be repeated, left out or reordered. A recorded hello is accepted, but
leads only to a challenge that it can't answer.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Any

from paceline._core.job_key import JobKey
from paceline.health.heartbeat import TAG_NBYTES, MalformedFrame, frame_tag

__all__ = ["PURPOSES", "CallerHandshake", "FrameSealer", "ListenerHandshake", "world_key"]

PURPOSES = ("beats", "stacks")
"""Heartbeats and notices; stacks that are written without Python's lock, so without codes."""

_NONCE_NBYTES = 16


def world_key(job_key: JobKey | None, token: str) -> bytes:
    """Return the key of one world's watchdogs.

    Args:
        job_key: of the job; None: there is none, so `token` has to be secret.
        token: random text that all ranks share, new for each world.
    """
    secret = b"" if job_key is None else job_key.derive("watchdog")
    return hmac.digest(b"paceline watchdog" + secret, token.encode(), "sha256")


def _proof(key: bytes, role: str, *facts: object) -> str:
    return hmac.digest(key, "\n".join(map(str, (role, *facts))).encode(), "sha256").hex()


def _matches(found: object, expected: str) -> bool:
    return isinstance(found, str) and found.isascii() and hmac.compare_digest(found, expected)


def _fields(message: dict[str, Any], name: str, count: int) -> list[Any]:
    values = message.get(name)
    if not isinstance(values, list) or len(values) != count:
        raise MalformedFrame(f"no {name} with {count} values")
    return values


class FrameSealer:
    """Appends its code to each frame of one direction of a connection.

    Args:
        key: of this direction.
    """

    def __init__(self, key: bytes) -> None:
        self._key, self._sent = key, 0

    def seal(self, frame: bytes) -> bytes:
        """Return the frame with its code; frames must be sent in this order, and all of them."""
        tag = frame_tag(self._key, self._sent, frame)
        self._sent += 1
        assert len(tag) == TAG_NBYTES, "of every frame"
        return frame + tag


class CallerHandshake:
    """The side that connects.

    Args:
        key: of the world.
        own: rank of this side. rank: of the listener.
        purpose: one of `PURPOSES`.

    Attributes:
        keys: of the frames to send and to receive, once `answer` has returned.
    """

    def __init__(self, key: bytes, own: int, rank: int, purpose: str) -> None:
        self._key, self.rank, self.purpose = key, rank, purpose
        self._facts: tuple[object, ...] = own, rank, purpose, secrets.token_hex(_NONCE_NBYTES)
        self.keys = b"", b""

    def hello(self) -> dict[str, Any]:
        """Return the first message."""
        return {"hello": [*self._facts, _proof(self._key, "hello", *self._facts)]}

    def answer(self, challenge: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to the listener's challenge.

        Raises:
            MalformedFrame: the listener does not have the key.
        """
        nonce, proof = _fields(challenge, "challenge", 2)
        if not (isinstance(nonce, str) and nonce.isascii()):
            raise MalformedFrame("no nonce")
        facts = *self._facts, nonce
        if not _matches(proof, _proof(self._key, "listener", *facts)):
            raise MalformedFrame("the listener has another key")
        self.keys = _frame_key(self._key, "caller", facts), _frame_key(self._key, "listener", facts)
        return {"answer": [_proof(self._key, "caller", *facts)]}


class ListenerHandshake:
    """The side that was called.

    Args:
        key: of the world.
        own: rank of this side. ranks: their number.

    Attributes:
        rank, purpose: of the caller; −1 and empty until its hello was valid.
        keys: of the frames to send and to receive, once `accept` has returned.
    """

    def __init__(self, key: bytes, own: int, ranks: int) -> None:
        self._key, self._own, self._ranks = key, own, ranks
        self.rank, self.purpose = -1, ""
        self.keys = b"", b""

    def challenge(self, hello: dict[str, Any]) -> dict[str, Any]:
        """Return the challenge to a caller.

        Raises:
            MalformedFrame: its hello is malformed or was not made with the key for this rank.
        """
        *facts, proof = _fields(hello, "hello", 5)
        rank, to, purpose, nonce = facts
        known = type(rank) is int and 0 <= rank < self._ranks and type(to) is int and to == self._own
        if not known or purpose not in PURPOSES or not (isinstance(nonce, str) and nonce.isascii()):
            raise MalformedFrame("a hello to another rank, of none, or for no known purpose")
        if not _matches(proof, _proof(self._key, "hello", *facts)):
            raise MalformedFrame("the caller has another key")
        self.rank, self.purpose = rank, purpose
        self._facts = *facts, secrets.token_hex(_NONCE_NBYTES)
        return {"challenge": [self._facts[-1], _proof(self._key, "listener", *self._facts)]}

    def accept(self, answer: dict[str, Any]) -> None:
        """Check the caller's answer.

        Raises:
            MalformedFrame: the caller does not have the key; it replays another's hello.
        """
        (proof,) = _fields(answer, "answer", 1)
        if not _matches(proof, _proof(self._key, "caller", *self._facts)):
            raise MalformedFrame("a wrong answer")
        self.keys = (
            _frame_key(self._key, "listener", self._facts),
            _frame_key(self._key, "caller", self._facts),
        )


def _frame_key(key: bytes, sender: str, facts: tuple[object, ...]) -> bytes:
    return bytes.fromhex(_proof(key, f"frames of the {sender}", *facts))
