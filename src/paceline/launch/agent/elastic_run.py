"""Running a program as ranks on one host or several, restarted after failures by torch's elastic agent.

    run_elastic(["train.py", "--epochs", "3"], ranks=4, min_ranks=2)      # one host

Torch is imported by the agent, only once everything that can be refused has been.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from paceline._core.child_process import sigterm_raises
from paceline.launch.agent.job_spec import JobSpec, check_log_dir, check_program
from paceline.launch.agent.rendezvous_address import RendezvousAddress, check_port_free, is_local
from paceline.launch.agent.restart_log import log_line
from paceline.launch.process.rank_process import RankLogs
from paceline.testing import fault_injection

__all__ = ["run_elastic", "run_job", "serve_rendezvous"]


def run_elastic(
    argv: Sequence[str],
    ranks: int,
    *,
    env: Mapping[str, str] | None = None,
    log_dir: str | Path | None = None,
    max_restarts: int = 3,
    min_ranks: int | None = None,
    progress: Callable[[], bool] | None = None,
) -> None:
    """Run ``python *argv`` as `ranks` processes of this host, restarted after failures; return when all ended well.

    Takes the place of :func:`paceline.launch.process.local_ranks.run_ranks`. Rank 0 writes to this terminal, the
    others to ``rank<k>.log``, after restart n to ``restart<n>/rank<k>.log``. When a rank ends with an error, the
    others are ended, and all are started again: ``TORCHELASTIC_RESTART_COUNT`` tells a rank how often that has
    happened, and it is up to the program to go on from its last checkpoint. The ranks are told their places in
    torchrun's variables and meet at a store of this process (``env://``), so no port is needed and
    ``PACELINE_INIT_METHOD`` is not set. They end with this process, however it ends. Why each world ended is said in
    one line on the terminal and written to ``restarts.jsonl`` in `log_dir`.

    The world size stays, unless the same rank fails twice in a row without progress in between: then there is one
    rank fewer, down to `min_ranks`; where that is not allowed, the run ends.

    Args:
        argv: arguments to this Python, such as ``["-m", "my.module", "--steps", "3"]``.
        ranks: how many processes, at least 1.
        env: variables to set besides those of this process; ``OMP_NUM_THREADS`` is each rank's share of the cores
            where neither sets it.
        log_dir: folder for logs and ``restarts.jsonl``, made if absent; None: kept only to explain a failure.
        max_restarts: failures to go on after; 0: none.
        min_ranks: the least world size; None: `ranks`.
        progress: called in this process once after each failure, when ranks may still be running; returns whether
            the run got on since it was called last (for the first time: since the start), such as a newer checkpoint.
            Whatever it raises ends the run. None: ranks that ran for a minute got on.

    Raises:
        RankFailed: the run is not to go on; `rank` failed first, and `exit_code` is for this process to end with.
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
    )
    run_job(job)


def run_job(job: JobSpec) -> None:
    """Run the ranks of this host as part of a run, and return when the run has ended well on all hosts.

    Raises:
        RankFailed: the run is not to go on; the same is told on every host.
        UsageError: no such script, a log folder that can't be written, faults that can't be read, an address that
            names no host, or another host was started otherwise.
        MissingRanks: the rendezvous could not be reached, or too few hosts came, within the time of `job.patience`.
        WorldError: the rendezvous was lost, or the run was over before this host came.
        KeyboardInterrupt: Ctrl-C; all ranks of all hosts are ended.
    """
    check_program(job.argv)
    check_log_dir(job.log_dir)
    fault_injection.arm_from_environment()  # to refuse what can't be read before it is refused on every rank
    if job.address is not None:
        is_local(job.address)  # raises where the name means nothing
    with sigterm_raises(), RankLogs(job.log_dir) as logs:
        with _few_words():
            from paceline.launch.agent.host_participation import run_host
        run_host(job, logs)


def serve_rendezvous(address: RendezvousAddress) -> None:
    """Serve the rendezvous of runs whose hosts all may fail, from a host that does not train; until Ctrl-C or SIGTERM.

    Raises:
        UsageError: it can't be served there.
    """
    check_port_free(address)
    with sigterm_raises():
        with _few_words():
            from paceline.launch.agent.elastic_rendezvous import serve_store
        place = serve_store(address)
        log_line(f"serving the rendezvous at {place.address}; end with Ctrl-C")
        while True:
            signal.pause()


@contextlib.contextmanager
def _few_words() -> Iterator[None]:
    """Have torch's C++, where it is loaded now, keep to errors: of a lost store it writes two stacks of frames."""
    if "TORCH_CPP_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    try:
        yield
    finally:
        del os.environ["TORCH_CPP_LOG_LEVEL"]  # ranks decide for themselves
