"""What this machine has for training: hardware, limits, network, software, and what to mend.

`machine()` gathers facts and judges nothing; `findings()` judges facts and gathers nothing. torch is imported
only when its own facts are asked for.
"""

from __future__ import annotations

from paceline.tools.diagnostics.machine_findings import Finding, findings
from paceline.world.machine_facts import Loopback, Machine, machine

__all__ = ["Finding", "Loopback", "Machine", "findings", "machine"]
