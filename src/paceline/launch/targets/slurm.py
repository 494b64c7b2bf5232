"""Slurm: the batch script of a job that goes on from its newest checkpoint whatever ends it (pure).

Slurm starts one ``paceline run`` on every host, and that the ranks: a rank that fails costs a second, not the job's
place in the queue. The job itself is requeued when a host is lost, when it is preempted, and before its time is up;
then the script runs again, and the program goes on from its newest checkpoint.

Slurm's queue: submit a batch script, ask for a job's state, follow what it writes until it has ended.

Jobs are asked for by scontrol, which needs no accounting; it forgets a job some minutes after its end (MinJobAge).
"""

from __future__ import annotations

import math
import re
import shlex
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shutil import which

from paceline.errors import RankFailed, UsageError
from paceline.launch.targets.cluster_job import ClusterJob, run_command

__all__ = ["JobState", "SlurmOptions", "batch_script", "parse_job_state", "require_slurm", "submit_script", "watch_job"]

_FIRST_PORT, _PORTS = 20000, 20000


@dataclass(frozen=True)
class SlurmOptions:
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


def batch_script(work: ClusterJob, cluster: SlurmOptions | None = None) -> str:
    """Return the text of a script for sbatch.

    Raises:
        UsageError: a time limit that is over before the warning, or something that can't stand in such a script.

    Example:
        >>> "#SBATCH --requeue" in batch_script(ClusterJob(("train.py",))).splitlines()
        True
    """
    cluster = cluster or SlurmOptions()
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(work, cluster)), "", *_set_up(work)]
    if work.seconds is not None:
        lines += [
            "# Time is nearly up: back into the queue; the program goes on from its newest checkpoint.",
            "trap 'scontrol requeue \"$SLURM_JOB_ID\"' USR1",
        ]
    lines += _run(work)
    return "\n".join(lines) + "\n"


def _options(work: ClusterJob, cluster: SlurmOptions) -> list[str]:
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


def _log(work: ClusterJob) -> str:
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


def _minutes(work: ClusterJob, cluster: SlurmOptions) -> str:
    if work.seconds is None:
        return ""
    if work.seconds <= cluster.warn:
        raise UsageError(
            f"a time limit of {work.seconds:g} s, and a warning {cluster.warn} s before it",
            remedy="give the job more time, or warn it later",
        )
    minutes = math.ceil(work.seconds / 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:00"


def _set_up(work: ClusterJob) -> list[str]:
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


def _run(work: ClusterJob) -> list[str]:
    """Return the lines that run a command on every host, wait for all, and end as they did."""
    words = [shlex.quote(word) for word in run_command(work, "-")]
    if work.hosts > 1:
        words[words.index("--rendezvous") + 1] = '"$first:$port"'  # our options come first
    return [
        f"srun --ntasks-per-node=1 --cpus-per-task={work.cpus_per_host} --kill-on-bad-exit=1 {' '.join(words)} &",
        "# A signal ends a wait, but not what is waited for.",
        'wait "$!"; while kill -0 "$!" 2>/dev/null; do wait "$!"; done; wait "$!"; exit $?',
    ]


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


def require_slurm() -> None:
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
    require_slurm()
    told = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=False)
    number = told.stdout.strip().partition(";")[0]
    if told.returncode or not number.isdecimal():
        raise UsageError(
            f"sbatch refused {path}: {told.stderr.strip() or told.stdout.strip()}",
            remedy="change what it names, or pass what the cluster wants (--partition, --account, --option)",
        )
    return int(number)


def parse_job_state(text: str) -> JobState:
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
            return parse_job_state(told.stdout)
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
