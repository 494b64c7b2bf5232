"""Runs a program as ranks on one host or several, restarted after failures.

    run_elastic(["train.py", "--epochs", "3"], ranks=4, min_ranks=2)      # one host

Hosts and ranks authenticate each other by the job's key (`paceline._core.job_key`): a single host draws one for each
job, several hosts are given the same.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from paceline._core.job_key import KEY_FILE_VARIABLE, JobKey
from paceline._core.processes.child_process import sigterm_raises
from paceline._core.processes.warning_signals import warnings_raise
from paceline.errors import UsageError
from paceline.launch.agent.elastic_agent import run_host
from paceline.launch.agent.job_server import serve_jobs
from paceline.launch.agent.job_spec import JobSpec, check_script
from paceline.launch.agent.rendezvous_address import RendezvousAddress, check_port_free, is_local
from paceline.launch.agent.restart_log import log_line
from paceline.launch.process.rank_output import RankLogs, check_log_dir
from paceline.testing import fault_injection

__all__ = ["job_key", "run_elastic", "run_job", "serve_rendezvous"]


def run_elastic(
    argv: Sequence[str],
    ranks: int,
    *,
    env: Mapping[str, str] | None = None,
    log_dir: str | Path | None = None,
    max_restarts: int = 3,
    min_ranks: int | None = None,
    progress: Callable[[], bool] | None = None,
    recovery: Literal["live", "restart"] = "live",
) -> None:
    """Run ``python *argv`` as `ranks` processes of this host, restarted after failures, until all have ended well.

    Replaces :func:`paceline.launch.process.local_ranks.run_ranks`. Rank 0 writes to this terminal, the others to
    ``rank<k>.log``, after restart n to ``restart<n>/rank<k>.log``. When a rank ends with an error, the others are
    ended, and all are started again with ``TORCHELASTIC_RESTART_COUNT`` incremented; the program has to resume from its
    last checkpoint. Ranks get torchrun's variables and meet in a file of this process (``env://``), so nothing listens
    and ``PACELINE_INIT_METHOD`` is not set. They end with this process, however it ends. Why each world ended is logged
    in one line on the terminal and in ``restarts.jsonl`` in `log_dir`.

    The world keeps its size, unless the same rank fails twice in a row without progress: then it has one rank fewer,
    down to `min_ranks`; below that, the run ends.

    Ranks that can recover in place (`paceline.world.live_file`) are neither ended nor restarted: those that ended are
    replaced, each at the expense of one restart.

    Args:
        argv: arguments to this Python, such as ``["-m", "my.module", "--steps", "3"]``.
        ranks: number of processes, at least 1.
        env: variables to set in addition to those of this process; ``OMP_NUM_THREADS`` defaults to each rank's share
            of the cores.
        log_dir: folder for logs and ``restarts.jsonl``, created if missing; None: logs are kept only to explain a
            failure.
        max_restarts: number of failures after which it is restarted.
        min_ranks: minimum world size; None: `ranks`.
        progress: called in this process once after each failure, while ranks may still be running; returns whether
            the run made progress since the last call (or the start), such as a newer checkpoint. An exception ends
            the run. None: ranks that ran for a minute made progress.
        recovery: ``"live"``: ranks that can recover in place go on when others end; ``"restart"``: all are restarted.

    Raises:
        RankFailed: the run does not continue; `rank` failed first, and `exit_code` is the exit code for this process.
        UsageError: no program, no ranks, more `min_ranks` than `ranks`, or a `log_dir` that can't be written.
        KeyboardInterrupt: Ctrl-C; the ranks have been ended.

    Example:
        >>> run_elastic(["-c", "import os; assert os.environ['TORCHELASTIC_RESTART_COUNT'] == '1'"], 2)
    """
    job = JobSpec(
        argv,
        ranks,
        ranks if min_ranks is None else min_ranks,
        max_restarts=max_restarts,
        env=env or {},
        log_dir=None if log_dir is None else Path(log_dir),
        progress=progress,
        recovery=recovery,
    )
    run_job(job)


def run_job(job: JobSpec) -> None:
    """Run this host's ranks of a job, and return when the job has ended well on all hosts.

    Raises:
        RankFailed: the job does not continue; the error is the same on every host.
        UsageError: no such script, an unwritable log folder, invalid faults, an address that does not resolve, several
            hosts without a job key, or another host was started with other settings.
        MissingRanks: the rendezvous was unreachable or too few hosts joined, within ``job.timeouts``.
        WorldError: the rendezvous was lost, or the job ended before this host joined.
        KeyboardInterrupt: Ctrl-C; all ranks of all hosts are ended.
        SystemExit: SIGTERM or SIGUSR1, which the ranks got too: code 75 if they left in order, else 128 + the number of
            the signal, or the exit code of a rank.
    """
    check_script(job.argv)
    check_log_dir(job.log_dir)
    fault_injection.arm_from_environment()  # refuse invalid faults here rather than on every rank
    if job.address is not None:
        is_local(job.address)  # raises if the name does not resolve
    key = job_key(several=job.hosts > 1, insecure=job.insecure)
    with warnings_raise() as warnings, RankLogs(job.log_dir) as logs:
        run_host(job, logs, key, warnings)


def serve_rendezvous(address: RendezvousAddress, *, insecure: bool = False) -> None:
    """Serve a rendezvous until Ctrl-C or SIGTERM, from a host that does not train, so that every host may fail.

    Args:
        address: where to serve.
        insecure: serve without a job key, everybody who reaches the address.

    Raises:
        UsageError: it can't be served there, or there is no job key.
    """
    check_port_free(address)
    key = job_key(several=True, insecure=insecure)
    with sigterm_raises():
        serve_jobs(address, key)
        log_line(f"serving the rendezvous at {address}; end with Ctrl-C")
        while True:
            signal.pause()


def job_key(*, several: bool, insecure: bool) -> JobKey | None:
    """Return the job's key from the environment; a single host draws one, several may go without.

    Args:
        several: whether several hosts need the same key.
        insecure: whether they may go without.

    Raises:
        UsageError: several hosts have none, or it is malformed.
    """
    key = JobKey.from_environment(os.environ)
    if key is None and not several:
        return JobKey.generate()
    if key is None and not insecure:
        raise UsageError(
            "several hosts, but no job key: everybody who reaches the rendezvous could run code on all of them",
            remedy=f"make a key once, `(umask 077; openssl rand -hex 32 > job.key)`, copy it to every host, and set "
            f"{KEY_FILE_VARIABLE}=job.key; on a network that only you can reach, --insecure goes without",
        )
    return key
