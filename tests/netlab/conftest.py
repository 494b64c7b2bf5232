"""Labs for tests: hosts that need root and a kernel with the right parts; else every test says why it is skipped."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from paceline.lab import Job, Lab, missing

BLAST = [sys.executable, "-I", "-S", str(Path(__file__).with_name("blast.py"))]
FRAME, PAYLOAD = 1514, 1448  # bytes of a full Ethernet frame, and of it those that TCP carries for its user


class Wire:
    """Transfers between the hosts of a lab."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.ports = lab, count(6000)

    def start(self, source: int, target: int, nbytes: int) -> tuple[Job, Job]:
        """Start to send `nbytes` from one host to another, and return the receiving and the sending job."""
        port = str(next(self.ports))
        receiver = self.lab.start([*BLAST, "receive", port], on=target)
        address = self.lab.addresses[target]
        return receiver, self.lab.start([*BLAST, "send", address, port, str(nbytes)], on=source)

    def finish(self, jobs: tuple[Job, Job]) -> float:
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


@pytest.fixture(scope="session", autouse=True)
def possible() -> None:
    """Skip, with the reason, where no lab can be made."""
    problem = missing()
    if problem is not None:
        pytest.skip(str(problem).replace("\n", " "))


@pytest.fixture(scope="session")
def shared() -> Iterator[Lab]:
    """Three hosts at 100 Mbit/s that tests leave as they found them."""
    with Lab(hosts=3, rate="100Mbit/s") as lab:
        yield lab


@pytest.fixture
def lab(shared: Lab) -> Iterator[Lab]:
    """The shared lab, made as new afterwards: links whole and at 100 Mbit/s, nothing running."""
    yield shared
    for host in range(shared.hosts):
        shared.kill(host)
        shared.mend(host)
        if shared.rates[host] != 12.5e6:
            shared.rate(host, "100Mbit/s")


@pytest.fixture
def wire(lab: Lab) -> Wire:
    """Transfers between the hosts of `lab`."""
    return Wire(lab)
