"""What this machine has for training: hardware, limits, network, software, and what to mend.

`read_machine_facts()` gathers facts and judges nothing; `findings()` judges facts and gathers nothing. torch
is imported only when its own facts are asked for.
"""

from __future__ import annotations

from paceline.tools.diagnostics.machine_findings import Finding, findings
from paceline.world.machine_facts import LoopbackTiming, MachineFacts, read_machine_facts

__all__ = ["Finding", "LoopbackTiming", "MachineFacts", "findings", "read_machine_facts"]
