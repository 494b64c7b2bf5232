"""Runs a program as the ranks of one world on this machine.

:func:`run_ranks` starts all ranks, waits until all have ended, one has failed or time is up, and then in any case ends
what still runs and removes its files. Each rank leads its own process group, so its children end with it, and Ctrl-C
reaches this process alone, which ends the ranks in order.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline._core.processes.child_process import POLL_SECONDS, sigterm_raises, stop_processes
from paceline._core.processes.process_exit import describe_exit
from paceline.errors import RankFailed, UsageError
from paceline.launch.process.rank_output import check_log_dir
from paceline.launch.process.rank_process import (
    RankProcess,
    default_environment,
    exit_remedy,
    start_rank,
)
from paceline.world import live_file

__all__ = ["run_ranks"]

_FOLLOW_SECONDS = 1.0  # for other ranks to fail of the same cause


def run_ranks(
    argv: Sequence[str],
    ranks: int,
    *,
    env: Mapping[str, str] | None = None,
    log_dir: str | Path | None = None,
    timeout: float | None = None,
) -> None:
    """Run ``python *argv`` as `ranks` processes that form one world, until all have ended well.

    Rank 0 writes to this terminal, the others to ``rank<k>.log``. Ranks get torchrun's variables and use a file for
    their rendezvous (``PACELINE_INIT_METHOD``), so no port is needed. They end with this process, however it ends.

    Args:
        argv: arguments to this Python, such as ``["-m", "my.module", "--steps", "3"]``.
        ranks: number of processes, at least 1.
        env: variables to set in addition to those of this process.
        log_dir: folder for the logs of ranks 1 and up, created if missing; None: kept only to explain a failure.
        timeout: seconds until the run counts as hung; None: no limit.

    Raises:
        RankFailed: a rank ended with an error, or time was up; the others have been ended.
        UsageError: no program, fewer than one rank, or a `log_dir` that can't be written.
    """
    if not argv:
        raise UsageError("no program to run", remedy='pass its arguments, such as ["train.py"]')
    if ranks < 1:
        raise UsageError(f"ranks={ranks}: a world has at least one rank", remedy="give 1 or more")
    running: list[RankProcess] = []
    private = Path(tempfile.mkdtemp(prefix="paceline-run-"))
    try:
        with sigterm_raises():
            logs = private if log_dir is None else Path(log_dir)
            check_log_dir(logs)
            base = default_environment(ranks) | os.environ | dict(env or {})
            for name in live_file.VARIABLES:  # of an outer launcher
                base.pop(name, None)
            base["PACELINE_INIT_METHOD"] = f"{private.as_uri()}/rendezvous"
            for rank in range(ranks):
                log = logs / f"rank{rank}.log" if rank else None
                running.append(start_rank(argv, base | _place(rank, ranks), rank, rank, log))
            _wait(running, timeout, logs_kept=log_dir is not None)
    finally:
        stop_processes(running)
        shutil.rmtree(private, ignore_errors=True)


def _place(rank: int, ranks: int) -> dict[str, str]:
    place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    return {name: str(value) for name, value in {**place, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}.items()}


def _wait(running: Sequence[RankProcess], timeout: float | None, *, logs_kept: bool) -> None:
    """Return when all ranks have ended well; raise when one has not, or when time is up."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        codes = {one.rank: one.exit_code() for one in running}
        failed = [one for one in running if codes[one.rank]]
        if failed:
            raise _failure(running, failed, logs_kept=logs_kept)
        if all(code == 0 for code in codes.values()):
            return
        if deadline is not None and time.monotonic() > deadline:
            alive = [one for one in running if codes[one.rank] is None]
            raise RankFailed(
                f"not finished within {timeout:g} s: rank {', '.join(str(one.rank) for one in alive)} still running"
                + "".join(_tail(one) for one in alive),
                rank=alive[0].rank,
                remedy="raise the time limit, or find out what the rank waits for",
            )
        time.sleep(POLL_SECONDS)


def _failure(running: Sequence[RankProcess], failed: list[RankProcess], *, logs_kept: bool) -> RankFailed:
    """Return the error for the rank that failed first, with those that follow within a moment."""
    first = min(failed, key=lambda one: (one.exit_code() or 0, one.rank))  # those ended by signals first
    others = [one for one in running if one is not first]
    deadline = time.monotonic() + _FOLLOW_SECONDS
    while time.monotonic() < deadline and any(one.exit_code() is None for one in others):
        time.sleep(POLL_SECONDS)
    followed = [f"rank {one.rank} ({_how(one)})" for one in others if one.exit_code()]
    after = f"; after it {', '.join(followed)}" if followed else ""
    where = f"; its complete output is in {first.log}" if first.log and logs_kept else ""
    shown = _tail(first) if first.log else "; its output is above"
    return RankFailed(
        f"{_how(first)}{after}{where}{shown}", rank=first.rank, remedy=exit_remedy(first.exit_code())
    )


def _how(one: RankProcess) -> str:
    return describe_exit(one.exit_code() or 0)


def _tail(one: RankProcess) -> str:
    """Return the last lines of a rank's output, to be appended to a message."""
    if one.log is None:
        return ""
    return "".join(f"\n  rank {one.rank} | {line}" for line in one.tail()) or "\n  (no output)"
