"""torchrun on one host or several: the command that is started on each of them, the same everywhere (pure)."""

from __future__ import annotations

import shlex

from paceline.launch.targets.cluster_job import ClusterJob

__all__ = ["torchrun_command", "torchrun_line", "torchrun_script"]


def torchrun_command(work: ClusterJob) -> list[str]:
    """Return torchrun's command for every host; they meet at the first one's port.

    Raises:
        UsageError: several hosts without names.

    Example:
        >>> " ".join(torchrun_command(ClusterJob(("train.py",), ranks_per_host=2))[3:5])
        '--standalone --nproc-per-node=2'
    """
    options = ["--standalone"]
    if work.hosts > 1:
        fewest = f"{work.fewest_hosts}:" if work.fewest_hosts < work.hosts else ""
        options = [f"--nnodes={fewest}{work.hosts}", "--rdzv-backend=c10d", f"--rdzv-id={work.name}"]
        options.append(f"--rdzv-endpoint={_address(work)}")
    options += [f"--nproc-per-node={work.ranks_per_host}", f"--max-restarts={work.max_restarts}"]
    return [work.python, "-m", "torch.distributed.run", *options, *work.program]


def torchrun_line(work: ClusterJob) -> str:
    """Return the line for a shell on every host: folder, variables, command.

    The ranks' store is not the rendezvous' own, by which a host that comes back would wait in vain (torch 2.13).
    """
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if work.hosts > 1 else {}
    variables |= work.variables()
    settings = [f"{name}={value}" for name, value in variables.items()]
    line = f"exec {shlex.join(['env', *settings, *torchrun_command(work)])}"
    return f"cd {shlex.quote(work.folder)} && {line}" if work.folder else line


def torchrun_script(work: ClusterJob) -> str:
    """Return the text of a shell script that is to be started on every host."""
    where = f"on each of {', '.join(work.host_names)}" if work.host_names else "here"
    told = f"# Start this {where}. Run again after whatever ended it, it goes on from the newest checkpoint."
    return f"#!/bin/sh\n{told}\n{torchrun_line(work)}\n"


def _address(work: ClusterJob) -> str:
    host = work.first_host
    return f"[{host}]:{work.port}" if ":" in host else f"{host}:{work.port}"
