"""What passes between a worker's two threads: orders to one, what the hub told to the other (plain values)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["SessionRequest", "HubStatus"]


@dataclass(slots=True)
class SessionRequest:
    """What the training thread wants done with a fragment whose snapshot it took.

    Attributes:
        fragment: which. kind: ``"update"``: offer what was learnt and fetch; ``"fetch"``: only fetch;
            ``"parameters"``: hand over the whole; ``"score"``: tell one.
        by: when what comes is needed, in seconds of the driver's clock.
        meta: what the hub is to know of an update.
    """

    fragment: int
    kind: str
    by: float = 0.0
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class HubStatus:
    """What a hub told.

    Attributes:
        run: its name. phase: that it is in. workers: alive.
        rate: bytes per second that this worker may send, None: any.
        slot, slots: which of how many workers this is, to take turns.
        samples: that the centre was learnt from. refusal: why this worker can't take part, empty if it can.
        wanted: the whole parameters are asked for.
    """

    run: str = ""
    phase: str = "empty"
    workers: int = 0
    rate: float | None = None
    slot: int = 0
    slots: int = 1
    samples: float = 0.0
    refusal: str = ""
    wanted: bool = False
