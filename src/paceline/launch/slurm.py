"""Slurm: the batch script of a job that goes on from its newest checkpoint whatever ends it (pure).

Slurm starts one ``paceline run`` on every host, and that the ranks: a rank that fails costs a second, not the job's
place in the queue. The job itself is requeued when a host is lost, when it is preempted, and before its time is up;
then the script runs again, and the program goes on from its newest checkpoint.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.launch.run_command import run_command
from paceline.launch.work import Work

__all__ = ["Cluster", "batch_script"]

_FIRST_PORT, _PORTS = 20000, 20000


@dataclass(frozen=True)
class Cluster:
    """What a Slurm cluster wants to be told besides the work.

    Attributes:
        partition, account: empty: Slurm's default.
        options: further options of sbatch, such as ``"--constraint=ib"``.
        warn: seconds before the time limit at which the job is requeued; only jobs with a time limit are.

    Raises:
        UsageError: an option that is none.
    """

    partition: str = ""
    account: str = ""
    options: tuple[str, ...] = ()
    warn: int = 120

    def __post_init__(self) -> None:
        for option in (*self.options, self.partition, self.account):
            if not option.isprintable():
                raise UsageError(f"{option!r} can't stand in a line of a batch script", remedy="leave it out")
        for option in self.options:
            if not option.startswith("-"):
                raise UsageError(f"{option!r} is no option of sbatch", remedy="write it as --name=value")
        if self.warn < 1:
            raise UsageError(f"warn={self.warn}", remedy="give at least 1 second")


def batch_script(work: Work, cluster: Cluster | None = None) -> str:
    """Return the text of a script for sbatch.

    Raises:
        UsageError: a time limit that is over before the warning, or something that can't stand in such a script.

    Example:
        >>> "#SBATCH --requeue" in batch_script(Work(("train.py",))).splitlines()
        True
    """
    cluster = cluster or Cluster()
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(work, cluster)), "", *_set_up(work)]
    if work.seconds is not None:
        lines += [
            "# Time is nearly up: back into the queue; the program goes on from its newest checkpoint.",
            "trap 'scontrol requeue \"$SLURM_JOB_ID\"' USR1",
        ]
    lines += _run(work)
    return "\n".join(lines) + "\n"


def _options(work: Work, cluster: Cluster) -> list[str]:
    """Return the options of sbatch, each as one line of the script."""
    options = {
        "job-name": work.name,
        "nodes": str(work.hosts),
        "ntasks-per-node": "1",
        "cpus-per-task": str(work.cpus_per_host),
        "gpus-per-node": str(work.gpus_per_host) if work.gpus_per_rank else "",
        "mem": f"{math.ceil(work.memory / (1 << 20))}M" if work.memory else "",
        "time": _minutes(work, cluster),
        "signal": f"B:USR1@{cluster.warn}" if work.seconds is not None else "",
        "partition": _quoted(cluster.partition),
        "account": _quoted(cluster.account),
        "output": _log(work),
    }
    told = [f"--{name}={value}" for name, value in options.items() if value]
    return [*told, "--open-mode=append", "--requeue", *cluster.options]


def _log(work: Work) -> str:
    """Return the path of the job's log, in which Slurm replaces what follows a %."""
    if "\\" in work.folder:
        raise UsageError(
            f"folder {work.folder!r}: Slurm replaces nothing in the path of a log that has a backslash",
            remedy="name a folder without one",
        )
    folder = work.folder.replace("%", "%%") + "/" if work.folder else ""
    return _quoted(f"{folder}{work.name}-%j.log")


def _quoted(text: str) -> str:
    """Return `text` as sbatch reads it in a line of a script: in quotes, with those in it escaped."""
    return "" if not text else '"{}"'.format(text.replace("\\", "\\\\").replace('"', '\\"'))


def _minutes(work: Work, cluster: Cluster) -> str:
    if work.seconds is None:
        return ""
    if work.seconds <= cluster.warn:
        raise UsageError(
            f"a time limit of {work.seconds:g} s, and a warning {cluster.warn} s before it",
            remedy="give the job more time, or warn it later",
        )
    minutes = math.ceil(work.seconds / 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:00"


def _set_up(work: Work) -> list[str]:
    lines = ["set -u"]
    if work.folder:
        lines.append(f"cd {shlex.quote(work.folder)} || exit 2")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in work.env.items()]
    if work.hosts > 1:
        port = f"{_FIRST_PORT} + SLURM_JOB_ID * 31 % {_PORTS}"
        lines += [
            "# The hosts meet on the first of them, at a port that other jobs hardly have.",
            'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            f"port=$(( {port} ))",
        ]
    return lines


def _run(work: Work) -> list[str]:
    """Return the lines that run a command on every host, wait for all, and end as they did."""
    words = [shlex.quote(word) for word in run_command(work, "-")]
    if work.hosts > 1:
        words[words.index("--rendezvous") + 1] = '"$first:$port"'  # our options come first
    return [
        f"srun --ntasks-per-node=1 --cpus-per-task={work.cpus_per_host} --kill-on-bad-exit=1 {' '.join(words)} &",
        "# A signal ends a wait, but not what is waited for.",
        'wait "$!"; while kill -0 "$!" 2>/dev/null; do wait "$!"; done; wait "$!"; exit $?',
    ]
