"""Bytes that a training has sent, compared with float32 gradients every step.

`sent_nbytes` counts the bytes that this rank handed to the network, without headers. It is compared with float32
gradients every step: 2(N−1)/N × 4 bytes × parameters × steps. On Linux the kernel's counters of all interfaces but the
loopback are reported too: they include headers, acknowledgements, and other traffic of the host. Ranks on one host that
exchange over shared memory send nothing through an interface.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline._core.format import format_decimal
from paceline._core.network_interfaces import read_interface_bytes

__all__ = ["SentBytes", "float32_gradient_nbytes", "interface_nbytes"]


@dataclass
class SentBytes:
    """Bytes that rank 0 has sent so far, including those before a restart.

    Attributes:
        sent_nbytes: by all exchanges of parameters or gradients; None if unknown (FSDP2's own).
        float32_nbytes: of float32 gradients every step.
        interface_start: bytes sent and received by the host's interfaces when this process began; None: unknown.
    """

    sent_nbytes: float | None = 0.0
    float32_nbytes: float = 0.0
    interface_start: tuple[int, int] | None = None

    def add(self, sent_nbytes: float | None, float32_nbytes: float) -> None:
        """Count the bytes of a step."""
        if self.sent_nbytes is None or sent_nbytes is None:
            self.sent_nbytes = None
        else:
            self.sent_nbytes += sent_nbytes
        self.float32_nbytes += float32_nbytes

    def state(self) -> dict[str, float | None]:
        """Return the counts for logs and checkpoints."""
        return {"sent_nbytes": self.sent_nbytes, "would_be_nbytes": self.float32_nbytes}

    def restore(self, state: dict[str, float | None] | None) -> None:
        """Add the counts of a checkpoint; None: it has none, so the total is unknown."""
        state = state or {}
        self.add(state.get("sent_nbytes"), state.get("would_be_nbytes") or 0.0)

    def facts(self) -> dict[str, Any]:
        """Return the counts for ``run.json``, with those of the interfaces."""
        facts: dict[str, Any] = dict(self.state())
        end = None if self.interface_start is None else interface_nbytes()
        if self.interface_start is not None and end is not None:
            facts["interface bytes"] = {
                "at begin": {"sent": self.interface_start[0], "received": self.interface_start[1]},
                "at end": {"sent": end[0], "received": end[1]},
            }
        return facts

    def summary(self) -> str:
        """Return the counts in a sentence; empty if nothing had to be sent.

        Example:
            >>> SentBytes(12_300_000, 1_200_000_000).summary()
            'sent 12.3 MB per rank; 97.6× less than float32 gradients every step (1.2 GB)'
        """
        if not self.float32_nbytes or self.sent_nbytes is None:
            return ""
        text = f"sent {format_decimal(self.sent_nbytes)} per rank"
        if not self.sent_nbytes or self.float32_nbytes < 1.05 * self.sent_nbytes:
            return text
        ratio = f"{self.float32_nbytes / self.sent_nbytes:.3g}"
        return (
            f"{text}; {ratio}× less than float32 gradients every step ({format_decimal(self.float32_nbytes)})"
        )


def float32_gradient_nbytes(parameters: int, ranks: int, steps: int = 1) -> float:
    """Return the bytes that a rank sends to all-reduce float32 gradients every step.

    Example:
        >>> float32_gradient_nbytes(1_000_000, ranks=2, steps=3)
        12000000.0
    """
    return 2 * (ranks - 1) / ranks * 4 * parameters * steps


def interface_nbytes(table: str | None = None) -> tuple[int, int] | None:
    """Return the bytes that this host's interfaces, without the loopback, have sent and received; None: unknown.

    Args:
        table: the text of ``/proc/net/dev``; None: read it.
    """
    if table is None:
        try:
            table = Path("/proc/net/dev").read_text(encoding="ascii")
        except OSError:
            return None
    found = [counted for name, counted in read_interface_bytes(table).items() if name != "lo"]
    return sum(each.sent for each in found), sum(each.received for each in found)
