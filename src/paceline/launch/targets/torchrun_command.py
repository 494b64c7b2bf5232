"""torchrun: the command to start on every host, the same on each (pure)."""

from __future__ import annotations

import shlex

from paceline.launch.targets.cluster_job import ClusterJob

__all__ = ["torchrun_command", "torchrun_line", "torchrun_script"]


def torchrun_command(job: ClusterJob) -> list[str]:
    """Return the torchrun command for every host; the rendezvous is on the first one.

    Raises:
        UsageError: several hosts without names.

    Example:
        >>> " ".join(torchrun_command(ClusterJob(("train.py",), ranks_per_host=2))[3:5])
        '--standalone --nproc-per-node=2'
    """
    options = ["--standalone"]
    if job.hosts > 1:
        host = f"[{job.first_host}]" if ":" in job.first_host else job.first_host
        fewest = f"{job.fewest_hosts}:" if job.fewest_hosts < job.hosts else ""
        options = [f"--nnodes={fewest}{job.hosts}", "--rdzv-backend=c10d", f"--rdzv-id={job.name}"]
        options.append(f"--rdzv-endpoint={host}:{job.port}")
    options += [f"--nproc-per-node={job.ranks_per_host}", f"--max-restarts={job.max_restarts}"]
    return [job.python, "-m", "torch.distributed.run", *options, *job.program]


def torchrun_line(job: ClusterJob) -> str:
    """Return the shell line for every host: folder, variables, command.

    The ranks get their own store: with the rendezvous' store, a host that rejoins would wait for ever (torch 2.13).
    """
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if job.hosts > 1 else {}
    variables |= job.variables()
    settings = [f"{name}={value}" for name, value in variables.items()]
    line = f"exec {shlex.join(['env', *settings, *torchrun_command(job)])}"
    return f"cd {shlex.quote(job.folder)} && {line}" if job.folder else line


def torchrun_script(job: ClusterJob) -> str:
    """Return the text of a shell script to start on every host."""
    where = f"on each of {', '.join(job.host_names)}" if job.host_names else "here"
    comment = f"# Start this {where}. If it is started again, it resumes from the newest checkpoint."
    return f"#!/bin/sh\n{comment}\n{torchrun_line(job)}\n"
