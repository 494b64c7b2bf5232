"""Compression and local SGD: a host's interface sends the predicted bytes.

Overhead per message is visible here, as tensors are small: benchmarks/slow-networks has ratios at 20 M parameters.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.testing.netlab import Lab

KINDS = ["plain", "bf16", "int8", "int4", "topk", "powersgd", "diloco", "streaming"]


@pytest.fixture(scope="module")
def bytes_by_kind(shared: Lab, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of each host, by kind."""
    out, script = tmp_path_factory.mktemp("slow") / "results", Path(__file__).with_name("slow_ranks.py")
    for host in range(shared.hosts):  # the test counts bytes; at any rate they are the same
        shared.rate(host, "1Gbit/s")
    try:
        shared.torchrun([str(script), str(out), *KINDS], ranks_per_host=1, timeout=240)
    finally:
        for host in range(shared.hosts):
            shared.rate(host, "100Mbit/s")
    return [json.loads(Path(f"{out}.{host}").read_text()) for host in range(shared.hosts)]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_the_interface_sends_the_predicted_bytes(bytes_by_kind: list[dict[str, Any]], kind: str) -> None:
    for host in bytes_by_kind:
        found = host[kind]
        assert found["equal"]
        assert found["predicted"] > 0
        # Overhead of TCP and gloo per message, and of a barrier at either end.
        around = 600 * found["messages"] + 20_000
        assert found["predicted"] <= found["moved"] <= 1.03 * found["predicted"] + around
