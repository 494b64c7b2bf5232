"""Running a program as the ranks of one world on this machine.

Phases of :func:`run_ranks`: start all ranks; watch until all have ended, or one has failed, or time is up;
then, however that went, end whatever still runs and remove what was made. Each rank leads a process group of
its own, so that its children end with it and Ctrl-C reaches this process alone, which then ends them in order.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline._core.child_process import POLL_SECONDS, end, sigterm_raises
from paceline._core.cpu_cores import usable_cores
from paceline._core.process_exit import describe_exit
from paceline.errors import RankFailed, UsageError
from paceline.launch.agent.job_outcome import exit_remedy
from paceline.launch.agent.job_spec import check_log_dir
from paceline.launch.process.rank_process import RankProcess, start_rank

__all__ = ["run_ranks"]

_FOLLOW_SECONDS = (
    1.0  # how long other ranks may take to fail of the same cause, to be told apart from the first
)


def run_ranks(
    argv: Sequence[str],
    ranks: int,
    *,
    env: Mapping[str, str] | None = None,
    log_dir: str | Path | None = None,
    timeout: float | None = None,
) -> None:
    """Run ``python *argv`` as `ranks` processes that form one world, and return when all have ended well.

    Rank 0 writes to this terminal, the others to ``rank<k>.log``. The ranks are told their places in torchrun's
    variables and meet in a file (``PACELINE_INIT_METHOD``), so no port is needed. They end with this process,
    however it ends.

    Args:
        argv: arguments to this Python, such as ``["-m", "my.module", "--steps", "3"]``.
        ranks: how many processes, at least 1.
        env: variables to set besides those of this process.
        log_dir: folder for the logs of ranks 1 and up, made if absent; None: kept only to explain a failure.
        timeout: seconds until the run counts as hung; None: no limit.

    Raises:
        RankFailed: a rank ended with an error, or time was up; the others have been ended.
        UsageError: no program, fewer than one rank, or a `log_dir` that can't be written.
    """
    if not argv:
        raise UsageError("there is no program to run", remedy='pass its arguments, such as ["train.py"]')
    if ranks < 1:
        raise UsageError(f"ranks={ranks}: a world has at least one rank", remedy="ask for 1 or more")
    running: list[RankProcess] = []
    private = Path(tempfile.mkdtemp(prefix="paceline-run-"))
    try:
        with sigterm_raises():
            logs = private if log_dir is None else Path(log_dir)
            check_log_dir(logs)
            variables = {
                **os.environ,
                **(env or {}),
                "PACELINE_INIT_METHOD": f"{private.as_uri()}/rendezvous",
            }
            for rank in range(ranks):
                running.append(_start(argv, rank, ranks, variables, logs))  # noqa: PERF401 — end those started if one fails
            _watch(running, timeout, logs_stay=log_dir is not None)
    finally:
        end(running)
        shutil.rmtree(private, ignore_errors=True)


def _start(
    argv: Sequence[str], rank: int, ranks: int, variables: Mapping[str, str], logs: Path
) -> RankProcess:
    place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    place |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    threads = str(max(1, int(usable_cores() / ranks)))
    env = {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"} | dict(variables)
    env |= {name: str(value) for name, value in place.items()}
    return start_rank(argv, env, rank, rank, logs / f"rank{rank}.log" if rank else None)


def _watch(running: Sequence[RankProcess], timeout: float | None, *, logs_stay: bool) -> None:
    """Return when all ranks have ended well; raise when one has not, or when time is up."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        codes = {one.rank: one.exit_code() for one in running}
        failed = [one for one in running if codes[one.rank]]
        if failed:
            raise _failure(running, failed, logs_stay=logs_stay)
        if all(code == 0 for code in codes.values()):
            return
        if deadline is not None and time.monotonic() > deadline:
            still = [one for one in running if codes[one.rank] is None]
            raise RankFailed(
                f"not finished within {timeout:g} s: rank {', '.join(str(one.rank) for one in still)} still running"
                + "".join(_tail(one) for one in still),
                rank=still[0].rank,
                remedy="raise the time limit, or find out what the rank waits for",
            )
        time.sleep(POLL_SECONDS)


def _failure(running: Sequence[RankProcess], failed: list[RankProcess], *, logs_stay: bool) -> RankFailed:
    """Return the error for the rank that failed first; whoever follows within a moment is named too."""
    first = min(
        failed, key=lambda one: (one.exit_code() or 0, one.rank)
    )  # those that a signal ended before others
    others = [one for one in running if one is not first]
    deadline = time.monotonic() + _FOLLOW_SECONDS
    while time.monotonic() < deadline and any(one.exit_code() is None for one in others):
        time.sleep(POLL_SECONDS)
    followed = [f"rank {one.rank} ({_how(one)})" for one in others if one.exit_code()]
    after = f"; after it {', '.join(followed)}" if followed else ""
    where = f"; its whole output is in {first.log}" if first.log and logs_stay else ""
    shown = _tail(first) if first.log else "; its output is above"
    return RankFailed(
        f"{_how(first)}{after}{where}{shown}", rank=first.rank, remedy=exit_remedy(first.exit_code())
    )


def _how(one: RankProcess) -> str:
    return describe_exit(one.exit_code() or 0)


def _tail(one: RankProcess) -> str:
    """Return the last lines that a rank wrote, to be appended to a message."""
    if one.log is None:
        return ""
    return "".join(f"\n  rank {one.rank} | {line}" for line in one.tail()) or "\n  (it wrote nothing)"
