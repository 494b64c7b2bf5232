"""Network lab: hosts around a slow switch, emulated on one machine.

    with Lab(hosts=4, rate="200Mbit/s") as lab:
        lab.torchrun(["train.py"], ranks_per_host=2)

Hosts are Linux namespaces, links are veth pairs whose rate the kernel limits, so programs run unchanged and take as
long as on a network of that speed. `lab_network` returns the commands that build it (pure), `namespace_main` runs
inside a host, `lab_host` owns one, `lab_job` follows a command on several, and `lab` is the interface.
"""

from __future__ import annotations

from paceline.testing.netlab.lab import Lab
from paceline.testing.netlab.lab_job import LabJob, LabResult
from paceline.testing.netlab.lab_network import InterfaceBytes
from paceline.testing.netlab.lab_requirements import missing

__all__ = ["InterfaceBytes", "Lab", "LabJob", "LabResult", "missing"]
