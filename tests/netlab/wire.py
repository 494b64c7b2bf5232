"""Transfers between hosts of a lab, with their rates."""

from __future__ import annotations

import json
import sys
from itertools import count
from pathlib import Path

from paceline.testing.netlab import Lab, LabJob

__all__ = ["Wire"]

BLAST = [sys.executable, "-I", "-S", str(Path(__file__).with_name("blast.py"))]
FRAME, PAYLOAD = 1514, 1448  # bytes of a full Ethernet frame, and of it those that TCP carries for its user


class Wire:
    """Transfers between the hosts of a lab."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.ports = lab, count(6000)

    def start(self, source: int, target: int, nbytes: int) -> tuple[LabJob, LabJob]:
        """Start to send `nbytes` from one host to another, and return the receiving and the sending job."""
        port = str(next(self.ports))
        receiver = self.lab.start([*BLAST, "receive", port], on=target)
        address = self.lab.addresses[target]
        return receiver, self.lab.start([*BLAST, "send", address, port, str(nbytes)], on=source)

    def finish(self, jobs: tuple[LabJob, LabJob]) -> float:
        """Wait for the end of a transfer and return its rate on the wire in bit/s, headers included."""
        receiver, sender = jobs
        sender.wait(60)
        seen = json.loads(receiver.wait(60)[0].stdout)
        return seen["timed_nbytes"] / seen["seconds"] * 8 * FRAME / PAYLOAD

    def measure(self, source: int, target: int, nbytes: int) -> float:
        """Send `nbytes` and return the rate on the wire in bit/s."""
        return self.finish(self.start(source, target, nbytes))

    def reaches(self, source: int, address: str, port: int, seconds: float = 0.5) -> bool:
        """Return whether a connection from a host succeeds."""
        command = [*BLAST, "reach", address, str(port), str(seconds)]
        return self.lab.run(command, on=source, check=False, timeout=30)[0].code == 0
