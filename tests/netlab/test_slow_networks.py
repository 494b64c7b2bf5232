"""What compression and rare synchronisation say that they send is what a host's interface sends.

What is around a message shows here, where tensors are small: benchmarks/slow-networks has ratios at 20 M parameters.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.lab import Lab

KINDS = ["plain", "bf16", "int8", "int4", "topk", "powersgd", "diloco", "streaming"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_interface_sends_what_was_foretold(lab: Lab, tmp_path, kind):
    out, script = tmp_path / "told", Path(__file__).with_name("slow_ranks.py")
    lab.torchrun([str(script), kind, str(out)], ranks_per_host=1, timeout=120)
    for host in range(lab.hosts):
        told = json.loads(Path(f"{out}.{host}").read_text())
        assert told["equal"]
        assert told["foretold"] > 0
        # What TCP and gloo put around each message, and what comes with a barrier at either end.
        around = 600 * told["messages"] + 20_000
        assert told["foretold"] <= told["moved"] <= 1.03 * told["foretold"] + around
