"""Slurm's queue: submit a batch script, ask for a job's state, follow what it writes until it has ended.

Jobs are asked for by scontrol, which needs no accounting; it forgets a job some minutes after its end (MinJobAge).
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shutil import which

from paceline.errors import RankFailed, UsageError

__all__ = ["JobState", "need_slurm", "read_job", "submit_script", "watch_job"]

_LOOK_SECONDS = 1.0
_ASK_SECONDS = 60.0  # a controller that is restarted or busy may take so long to answer
_TRIES = 30
_RETURN_SECONDS = 30.0  # within which a job whose node was lost is back in the queue, if it comes back
_MAY_RETURN = {"BOOT_FAIL", "NODE_FAIL", "PREEMPTED"}
_OVER = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
}


@dataclass(frozen=True)
class JobState:
    """What Slurm says of a job.

    Attributes:
        job: its number.
        state: Slurm's word, such as PENDING, RUNNING or COMPLETED.
        reason: why it waits or failed; ``None`` is Slurm's word for none.
        restarts: how often it was requeued.
        nodes: where it runs, as Slurm lists them; empty: nowhere.
        exit_code: for a command that followed it to end with.
    """

    job: int
    state: str
    reason: str
    restarts: int
    nodes: str
    exit_code: int

    @property
    def over(self) -> bool:
        """Whether it has ended for good, as far as Slurm knows."""
        return self.state in _OVER

    def __str__(self) -> str:
        where = f" on {self.nodes}" if self.nodes and not self.over else ""
        why = f" ({self.reason})" if self.reason not in ("", "None") and not where else ""
        again = f", requeued {self.restarts} time{'s' * (self.restarts != 1)}" if self.restarts else ""
        code = f", exit code {self.exit_code}" if self.over else ""
        return f"job {self.job}: {self.state}{where}{why}{again}{code}"


def need_slurm() -> None:
    """Refuse a machine without Slurm's commands.

    Raises:
        UsageError: sbatch or scontrol is not on the PATH.
    """
    absent = [name for name in ("sbatch", "scontrol") if which(name) is None]
    if absent:
        raise UsageError(
            f"there is no {' and no '.join(absent)} on this machine",
            remedy="write the script with --out FILE, and run `sbatch FILE` on a login node of the cluster",
        )


def submit_script(path: Path) -> int:
    """Submit the batch script at `path`, and return the job's number.

    Raises:
        UsageError: Slurm is not here, or refused the script.
    """
    need_slurm()
    told = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=False)
    number = told.stdout.strip().partition(";")[0]
    if told.returncode or not number.isdecimal():
        raise UsageError(
            f"sbatch refused {path}: {told.stderr.strip() or told.stdout.strip()}",
            remedy="change what it names, or pass what the cluster wants (--partition, --account, --option)",
        )
    return int(number)


def read_job(text: str) -> JobState:
    """Return what ``scontrol show job --oneliner`` says (pure).

    Example:
        >>> read_job("JobId=7 JobName=a JobState=FAILED Reason=NonZeroExitCode Restarts=1 ExitCode=3:0").exit_code
        3
    """

    def told(name: str) -> str:
        found = re.search(rf"(?:^|\s){name}=(\S*)", text)
        return "" if found is None or found[1] == "(null)" else found[1]

    state = told("JobState")
    code, _, number = told("ExitCode").partition(":")
    exit_code = int(code or 0) or (128 + int(number) if number and int(number) else 0)
    if not exit_code and state in _OVER - {"COMPLETED"}:
        exit_code = 1
    return JobState(
        int(told("JobId") or 0),
        state,
        told("Reason"),
        int(told("Restarts") or 0),
        told("NodeList"),
        exit_code,
    )


def watch_job(job: int, log: Path, say: Callable[[str], None], show: Callable[[bytes], None]) -> JobState:
    """Follow a job until it has ended, and return its last state.

    Args:
        job: its number.
        log: the file that it writes; may come later.
        say: told of every change of its state, in one line.
        show: given what it writes, as it comes.

    Raises:
        RankFailed: Slurm has not answered for minutes, or knows no such job.
    """
    shown, at, left = "", 0, _RETURN_SECONDS
    while True:
        state = _ask(job)
        at = _copy(log, at, show)
        if str(state) != shown:
            shown, left = str(state), _RETURN_SECONDS
            say(shown)
        if state.over and (state.state not in _MAY_RETURN or left <= 0):
            _copy(log, at, show)
            return state
        time.sleep(_LOOK_SECONDS)
        left -= _LOOK_SECONDS


def _ask(job: int) -> JobState:
    command = ["scontrol", "show", "job", "--oneliner", str(job)]
    told = None
    for _ in range(_TRIES):
        try:
            told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_ASK_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        if told.returncode == 0 and "JobState=" in told.stdout:
            return read_job(told.stdout)
        if "Invalid job id" in told.stderr:
            break
        time.sleep(_LOOK_SECONDS)
    why = told.stderr.strip() if told else f"no answer within {_ASK_SECONDS:g} s, {_TRIES} times"
    raise RankFailed(
        f"Slurm tells nothing of job {job}: {why}",
        remedy=f"ask for it with `sacct -j {job}`; scontrol forgets jobs some minutes after their end",
    )


def _copy(log: Path, at: int, show: Callable[[bytes], None]) -> int:
    """Show what was added to the file since byte `at`, and return where it ends now."""
    try:
        with log.open("rb") as file:
            file.seek(at)
            new = file.read()
    except FileNotFoundError:
        return at
    if new:
        show(new)
    return at + len(new)
