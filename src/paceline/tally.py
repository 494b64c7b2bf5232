"""What the loader and the engine of one process tell each other, without knowing each other.

The engine counts the seconds in which this rank did nothing but wait for others: in a synchronous step all ranks need
the same time, and the fast ones spend it waiting, so who learns how fast a rank is takes them off. The loader says
how many samples the latest batch has: a batch without any must not be counted as if it were full.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Tally", "tally"]


@dataclass
class Tally:
    """Of one process.

    Attributes:
        waited_seconds: in which this rank waited for others, since the process began.
        waits: how often that was counted.
        samples: of the batch that a loader handed out and that is being trained on; None: no loader is serving.
    """

    waited_seconds: float = 0.0
    waits: int = 0
    samples: float | None = None

    def wait(self, seconds: float) -> None:
        """Count `seconds` in which this rank waited."""
        self.waited_seconds += seconds
        self.waits += 1


tally = Tally()
"""Of this process."""
