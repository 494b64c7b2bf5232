"""Spoils what an exchange sends: some envelopes are damaged, cut, repeated, lost or held back."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from paceline.transport.zmq.zmq_endpoint import ZmqEndpoint

__all__ = ["spoil"]

_KINDS = ("flip", "cut", "repeat", "lose", "hold")


def spoil(exchange: ZmqEndpoint, share: float, seed: int) -> Counter[str]:
    """Have an exchange spoil a share of what it sends, from now on; return the counts of what was done.

    Args:
        exchange: of a hub or a worker, whose messages end with head, payload and tail.
        share: of all envelopes. seed: of what is drawn.
    """
    drawn, counts, held = random.Random(seed), Counter[str](), list[list[Any]]()
    comm = exchange._socket
    send = comm.send

    def spoilt(parts: Sequence[Any]) -> None:
        if held and drawn.random() < 0.5:
            send(held.pop())  # out of its order
        if drawn.random() >= share:
            send(parts)
            return
        kind = drawn.choice(_KINDS)
        counts[kind] += 1
        changed = [bytes(part) for part in parts]
        if kind == "flip":
            index = len(changed) - 1 - drawn.randrange(3)
            changed[index] = _flipped(changed[index], drawn)
        elif kind == "cut":
            changed[-2] = changed[-2][: len(changed[-2]) // 2]
        elif kind == "hold" and len(held) < 4:
            held.append(changed)
            return
        if kind != "lose":
            send(changed)
        if kind == "repeat":
            send(changed)

    comm.send = spoilt
    return counts


def _flipped(data: bytes, drawn: random.Random) -> bytes:
    if not data:
        return b"\x01"
    changed = bytearray(data)
    changed[drawn.randrange(len(changed))] ^= 1 << drawn.randrange(8)
    return bytes(changed)
