"""What a training has sent, beside what it would have: bytes of this rank, and of its host's interfaces.

`sent_nbytes` is what this rank handed to the network by what is known of each exchange, headers aside. Beside it stands
what float32 gradients every step would have been: 2(N−1)/N × 4 bytes × parameters × steps. On Linux the bytes that the
kernel counted at all interfaces but the loopback stand beside both: headers, acknowledgements, and whatever else the
host did meanwhile. Ranks on one host that exchange over shared memory send nothing through an interface.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline._core.format import format_decimal
from paceline._core.network_interfaces import read_interface_bytes

__all__ = ["Traffic", "interface_nbytes", "would_be_nbytes"]

_TABLE = Path("/proc/net/dev")
_LOOPBACK = "lo"


@dataclass
class Traffic:
    """What rank 0 has sent so far, also before a restart.

    Attributes:
        sent_nbytes: by all exchanges of parameters or gradients; None where that is not known (FSDP2's own).
        would_be_nbytes: of float32 gradients every step.
        interface_start: bytes sent and received by the host's interfaces when this process began; None: not known.
    """

    sent_nbytes: float | None = 0.0
    would_be_nbytes: float = 0.0
    interface_start: tuple[int, int] | None = None

    def add(self, sent_nbytes: float | None, would_be_nbytes: float) -> None:
        """Count what was sent in a step."""
        if self.sent_nbytes is None or sent_nbytes is None:
            self.sent_nbytes = None
        else:
            self.sent_nbytes += sent_nbytes
        self.would_be_nbytes += would_be_nbytes

    def state(self) -> dict[str, float | None]:
        """Return what a checkpoint remembers."""
        return {"sent_nbytes": self.sent_nbytes, "would_be_nbytes": self.would_be_nbytes}

    def facts(self) -> dict[str, Any]:
        """Return what ``run.json`` tells at the end."""
        told: dict[str, Any] = dict(self.state())
        end = None if self.interface_start is None else interface_nbytes()
        if self.interface_start is not None and end is not None:
            told["interface bytes"] = {
                "at begin": {"sent": self.interface_start[0], "received": self.interface_start[1]},
                "at end": {"sent": end[0], "received": end[1]},
            }
        return told

    def told(self) -> str:
        """Return the same in a sentence; empty where nothing was to be sent.

        Example:
            >>> Traffic(12_300_000, 1_200_000_000).told()
            'sent 12.3 MB a rank; float32 gradients every step would have been 1.2 GB (97.6 times as much)'
        """
        if not self.would_be_nbytes or self.sent_nbytes is None:
            return ""
        text = f"sent {format_decimal(self.sent_nbytes)} a rank"
        would_be = f"float32 gradients every step would have been {format_decimal(self.would_be_nbytes)}"
        if not self.sent_nbytes or self.would_be_nbytes < 1.05 * self.sent_nbytes:
            return text
        return f"{text}; {would_be} ({self.would_be_nbytes / self.sent_nbytes:.3g} times as much)"


def would_be_nbytes(parameters: int, ranks: int, steps: int = 1) -> float:
    """Return what a rank sends for float32 gradients, all-reduced every step.

    Example:
        >>> would_be_nbytes(1_000_000, ranks=2, steps=3)
        12000000.0
    """
    return 2 * (ranks - 1) / ranks * 4 * parameters * steps


def interface_nbytes(table: str | None = None) -> tuple[int, int] | None:
    """Return bytes that this host's interfaces, without the loopback, have sent and received; None: not known.

    Args:
        table: the text of ``/proc/net/dev``; None: read it.
    """
    if table is None:
        try:
            table = _TABLE.read_text(encoding="ascii")
        except OSError:
            return None
    found = [traffic for name, traffic in read_interface_bytes(table).items() if name != _LOOPBACK]
    return sum(each.sent for each in found), sum(each.received for each in found)
