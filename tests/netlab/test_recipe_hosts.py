"""The recipe for two PCs runs by `paceline run` on two hosts with links of 1 Gbit/s, as its page says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.testing.netlab import Lab

sys.path.append(str(Path(__file__).parents[1] / "docs"))

from manual import ROOT, blocks


@pytest.mark.thorough
def test_two_hosts_train_over_a_link_of_1_gbit(tmp_path):
    [file] = [block for block in blocks(ROOT / "docs" / "recipes" / "two-pcs.md") if block.title]
    script = tmp_path / file.title
    script.write_text(file.text, encoding="utf-8")
    run = ["paceline", "run", "--nnodes", "2", "--rendezvous", "host0:29400", str(script), "int8"]
    with Lab(hosts=2, rate="1Gbit/s") as lab:
        results = lab.run(run, timeout=200)
        sent = lab.bytes(0).sent
    assert [result.code for result in results] == [0, 0]
    [line] = "".join(result.stdout for result in results).splitlines()
    assert line.startswith("int8: 2 hosts, ")
    assert 8e6 < sent < 15e6  # 30 steps of 0.32 M parameters, in float32 38 MB
