"""Labs for tests: without root or the kernel features, every test is skipped with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from wire import Wire

from paceline.testing.netlab import Lab, missing


@pytest.fixture(scope="session", autouse=True)
def require_lab() -> None:
    """Skip, with the reason, where no lab can be made."""
    problem = missing()
    if problem is not None:
        pytest.skip(str(problem).replace("\n", " "))


@pytest.fixture(scope="session")
def shared() -> Iterator[Lab]:
    """Return three hosts at 100 Mbit/s, shared by all tests."""
    with Lab(hosts=3, rate="100Mbit/s") as lab:
        yield lab


@pytest.fixture
def lab(shared: Lab) -> Iterator[Lab]:
    """Return the shared lab; afterwards its links are restored and its processes killed."""
    yield shared
    for host in range(shared.hosts):
        shared.kill(host)
        shared.mend(host)
        if shared.rates[host] != 12.5e6:
            shared.rate(host, "100Mbit/s")


@pytest.fixture
def wire(lab: Lab) -> Wire:
    """Return a `Wire` that transfers bytes between the hosts of `lab`."""
    return Wire(lab)
