"""A Slurm cluster of its own on the hosts of a lab: munged, slurmctld, and a slurmd on each host.

Hosts of the lab have a network and a process table of their own, so ports are free, and no process outlives them.
Jobs in the partition "urgent" preempt those in "all", which is the default.
All that Slurm writes is in one folder.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from shutil import which

from paceline.testing.netlab import Lab

__all__ = ["SlurmCluster", "lacking"]

_DAEMONS = ("munged", "slurmctld", "slurmd")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"
_CONF = """
ClusterName=lab
SlurmctldHost=host0
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
KillWait=2
MpiDefault=none
NodeName={nodes} CPUs=4 State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 MaxTime=INFINITE State=UP
"""


def lacking() -> str:
    """Return the requirements of a cluster that this machine lacks; empty: none."""
    return ", ".join(name for name in _DAEMONS if which(name, path=_PATH) is None)


class SlurmCluster:
    """Slurm on all hosts of a lab.

    Args:
        lab: the hosts.
        folder: for its files; its path is short, since sockets are in it.
    """

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}
        (folder / "state").mkdir()
        for host in range(lab.hosts):
            (folder / f"spool-host{host}").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        # Hosts have no such file.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupMountpoint=/nowhere\n")
        nodes = ",".join(f"host{host}" for host in range(lab.hosts))
        (folder / "slurm.conf").write_text(_CONF.format(folder=folder, nodes=nodes))

    def start(self) -> None:
        """Start the daemons, and return when all nodes are idle."""
        own = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid"}
        own |= {"log-file": "munged.log", "seed-file": "munged.seed"}
        options = [f"--{name}={self.folder / file}" for name, file in own.items()]
        jobs = [self._daemon(["munged", "--foreground", "--force", *options], 0)]
        self._await(lambda: (self.folder / "munge.socket").exists(), jobs)
        jobs.append(self._daemon(["slurmctld", "-D", "-i"], 0))
        jobs += [self._daemon(["slurmd", "-D"], host) for host in range(self.lab.hosts)]
        states = ["sinfo", "--noheader", "--partition=all", "-o", "%T %D"]
        self._await(lambda: self.run(*states) == f"idle {self.lab.hosts}", jobs)

    def run(self, *command: str) -> str:
        """Run one of Slurm's commands on the first host, and return its output."""
        [result] = self.lab.run(list(command), on=0, env=self.env, timeout=60, check=False)
        return (result.stdout + result.stderr).strip()

    def _daemon(self, command: list[str], host: int):
        path = which(command[0], path=_PATH)
        assert path is not None
        return self.lab.start([path, *command[1:]], on=host, env=self.env)

    def _await(self, reached, jobs) -> None:
        deadline = time.monotonic() + 60
        while not reached():
            output = [line for job in jobs for line in job.lines()]
            assert time.monotonic() < deadline, output
            assert all(job.running() for job in jobs), output
            time.sleep(0.1)
