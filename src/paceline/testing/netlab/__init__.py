"""The network lab: hosts around a slow switch, on one machine.

    with Lab(hosts=4, rate="200Mbit/s") as lab:
        lab.torchrun(["train.py"], ranks_per_host=2)

Hosts are Linux namespaces, links are veth pairs that the kernel holds to a rate, so programs run unchanged and the
times are those of a network as slow as asked. `star` and `plan` say what is made and how (pure), `inside`
is what runs within a host, `place` holds one, `job` follows a command on several, `lab` is what a user has.
"""

from __future__ import annotations

from paceline.testing.netlab.lab import Lab
from paceline.testing.netlab.lab_job import LabJob, LabResult
from paceline.testing.netlab.lab_network import InterfaceBytes
from paceline.testing.netlab.lab_requirements import missing

__all__ = ["InterfaceBytes", "Lab", "LabJob", "LabResult", "missing"]
