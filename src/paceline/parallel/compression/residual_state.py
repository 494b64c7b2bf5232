"""What compression has left out and still owes, over a restart: each rank's, also where there are other ranks then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.parallel.compression.compressed_bucket import CompressedBucket
from paceline.parallel.engine.launch_queue import LaunchQueue

__all__ = ["ResidualState"]


class ResidualState:
    """Of one rank; nothing where nothing is compressed.

    Args:
        flight: the buckets.
    """

    def __init__(self, launch_queue: LaunchQueue) -> None:
        self._flight = launch_queue
        self._kept: list[dict[str, Any]] = []  # of ranks before a restart, until there are buckets

    def state(self) -> dict[str, Any]:
        """Return what compression keeps on this rank from step to step, with parameters by name; often empty."""
        freights = self._freights()
        if not freights:
            return _together(self._kept)
        parts = {name: kept for freight in freights for name, kept in freight.left_out().items()}
        return {"parts": parts, "codecs": [freight.codec_state() for freight in freights]}

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from what compression kept on all ranks.

        Where there are other ranks now, what an old one has still to send goes to a new one: nothing of it is lost.

        Args:
            states: of each rank, what `state` returned.
        """
        size, rank = self._flight.comm.size, self._flight.comm.rank
        same = len(states) == size
        mine = [state for number, state in enumerate(states) if number % size == rank and state]
        self._kept = [dict(state) if same else {**state, "codecs": []} for state in mine]
        self.resume()

    def resume(self) -> None:
        """Hand it to the buckets, if they are there."""
        freights = self._freights()
        if not self._kept or not freights:
            return
        kept, self._kept = self._kept, []
        codecs = kept[0]["codecs"] if len(kept) == 1 else []
        for number, freight in enumerate(freights):
            own = codecs[number] if len(codecs) == len(freights) else {}
            freight.take_up([state["parts"] for state in kept], own)

    def _freights(self) -> list[CompressedBucket]:
        return [
            bucket.compressed
            for bucket in self._flight.buckets
            if isinstance(bucket.compressed, CompressedBucket)
        ]


def _together(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one state that owes what several do."""
    if len(states) < 2:
        return dict(states[0]) if states else {}
    parts: dict[str, dict[str, Any]] = {}
    for state in states:
        for name, kept in state["parts"].items():
            held = parts.setdefault(name, {})
            for key, value in kept.items():
                held[key] = held[key] + value if key in held and key != "q" else value
    return {"parts": parts, "codecs": []}
