"""Slurm: batch scripts for jobs that resume from their newest checkpoint, and following a submitted job.

Slurm starts one ``paceline run`` on every host, which starts the ranks: a failed rank costs a second, not the job's
allocation. The job is requeued when a host is lost, when it is preempted, and before its time limit; then the script
runs again, and the program resumes from its newest checkpoint.

[Note: warnings] Before the time limit Slurm signals the batch script (USR1), which passes that on to srun, and that to
the ``paceline run`` of every host. On a preemption with a grace time Slurm signals these itself (TERM). The ranks save,
and leave with exit code 75; only then the script requeues the job. It does not if the job is no longer running: scancel
sends TERM too. A host may be ready before the others, so srun must not end them when the first one exits.

The state of a job is read with scontrol, which needs no accounting, but forgets a job some minutes after its end
(MinJobAge).
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

from paceline._core.format import plural
from paceline.errors import RankFailed, UsageError
from paceline.launch.agent.job_spec import JobTimeouts
from paceline.launch.targets.cluster_job import DRAW_JOB_KEY, ClusterJob, run_command
from paceline.world.live_file import LEFT_EXIT_CODE

__all__ = [
    "JobState",
    "SlurmOptions",
    "batch_script",
    "parse_job_state",
    "require_slurm",
    "submit_script",
    "watch_job",
]

_FIRST_PORT, _PORTS = 20000, 12000  # below those that Linux gives to connections
_POLL_SECONDS = 1.0
_ANSWER_SECONDS = 60.0  # a controller that restarts or is busy may take so long to answer
_TRIES = 30
_RETURN_SECONDS = 30.0  # within which a job whose node was lost is back in the queue, if it comes back
_MAY_RETURN = {"BOOT_FAIL", "NODE_FAIL", "PREEMPTED"}
_OVER = _MAY_RETURN | {"CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "OUT_OF_MEMORY", "TIMEOUT"}


@dataclass(frozen=True)
class SlurmOptions:
    """What a Slurm cluster needs besides the job.

    Attributes:
        partition: empty: Slurm's default.
        account: empty: Slurm's default.
        options: further options of sbatch, such as ``"--constraint=ib"``.
        warn: seconds before the time limit at which the ranks save and the job is requeued, if it has one.

    Raises:
        UsageError: an option is invalid.
    """

    partition: str = ""
    account: str = ""
    options: tuple[str, ...] = ()
    warn: int = 120

    def __post_init__(self) -> None:
        for option in (*self.options, self.partition, self.account):
            if not option.isprintable():
                raise UsageError(
                    f"{option!r} is not possible in a batch script", remedy="use printable characters"
                )
        for option in self.options:
            if not option.startswith("-"):
                raise UsageError(f"{option!r} is not an option of sbatch", remedy="write it as --name=value")
        if self.warn < 1:
            raise UsageError(f"warn={self.warn}", remedy="give at least 1 second")


def batch_script(job: ClusterJob, cluster: SlurmOptions | None = None) -> str:
    """Return the text of a script for sbatch.

    Raises:
        UsageError: the time limit ends before the warning, or a text is not possible in such a script.

    Example:
        >>> "#SBATCH --requeue" in batch_script(ClusterJob(("train.py",))).splitlines()
        True
    """
    options = _options(job, cluster or SlurmOptions())
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options), "", *_setup(job)]
    words = [shlex.quote(word) for word in run_command(job, "-")]
    warn = SlurmOptions().warn if cluster is None else cluster.warn
    if warn > JobTimeouts.leave:
        words[words.index("run") + 1 : words.index("run") + 1] = ["--grace", f"{warn}s"]
    if job.hosts > 1:
        words[words.index("--rendezvous") + 1] = '"$first:$port"'  # our options precede the program's
    srun = f"srun --ntasks-per-node=1 --cpus-per-task={job.cpus_per_host} --kill-on-bad-exit=0"
    lines.append("warned= step=")
    if job.seconds is not None:
        lines += [
            "# Before the time limit: the ranks save and leave.",
            """trap 'warned=1; test -z "$step" || kill -USR1 "$step"' USR1""",
        ]
    return "\n".join([*lines, _RUN.format(step=f"{srun} {' '.join(words)}")])


_RUN = """\
{step} &
step=$!
# A signal ends a wait, but not the process that is waited for.
wait "$step"; while kill -0 "$step" 2>/dev/null; do wait "$step"; done; wait "$step"; code=$?
# If the ranks saved and left, back into the queue, unless the job was cancelled; it resumes from that checkpoint.
if [ "$code" = {left} ] || [ -n "$warned" -a "$code" != 0 ]; then
  case "$(scontrol show job --oneliner "$SLURM_JOB_ID")" in
    *" JobState=RUNNING "*) scontrol requeue "$SLURM_JOB_ID" ;;
  esac
fi
exit "$code"
""".replace("{left}", str(LEFT_EXIT_CODE))


def _options(job: ClusterJob, cluster: SlurmOptions) -> list[str]:
    """Return the options of sbatch, each as one line of the script."""
    options = {
        "job-name": job.name,
        "nodes": str(job.hosts),
        "ntasks-per-node": "1",
        "cpus-per-task": str(job.cpus_per_host),
        "gpus-per-node": str(job.gpus_per_host) if job.gpus_per_rank else "",
        "mem": f"{math.ceil(job.memory / (1 << 20))}M" if job.memory else "",
        "time": _time_limit(job, cluster),
        "signal": f"B:USR1@{cluster.warn}" if job.seconds is not None else "",
        "partition": _quote(cluster.partition),
        "account": _quote(cluster.account),
        "output": _log_path(job),
    }
    given = [f"--{name}={value}" for name, value in options.items() if value]
    return [*given, "--open-mode=append", "--requeue", *cluster.options]


def _time_limit(job: ClusterJob, cluster: SlurmOptions) -> str:
    if job.seconds is None:
        return ""
    if job.seconds <= cluster.warn:
        raise UsageError(
            f"a time limit of {job.seconds:g} s, and a warning {cluster.warn} s before it",
            remedy="give the job more time, or warn it later",
        )
    minutes = math.ceil(job.seconds / 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:00"


def _log_path(job: ClusterJob) -> str:
    """Return the path of the job's log, in which Slurm replaces patterns that start with %."""
    if "\\" in job.folder:
        raise UsageError(
            f"folder {job.folder!r}: Slurm replaces no patterns in the path of a log that has a backslash",
            remedy="name a folder without one",
        )
    folder = job.folder.replace("%", "%%") + "/" if job.folder else ""
    return _quote(f"{folder}{job.name}-%j.log")


def _quote(text: str) -> str:
    """Return `text` as sbatch reads it in a line of a script: in quotes, with those in it escaped."""
    return "" if not text else '"{}"'.format(text.replace("\\", "\\\\").replace('"', '\\"'))


def _setup(job: ClusterJob) -> list[str]:
    lines = ["set -u"]
    if job.folder:
        lines.append(f"cd {shlex.quote(job.folder)} || exit 2")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in job.env.items()]
    if job.hosts > 1:
        lines += [
            "# The rendezvous is on the first host, at a port that other jobs are unlikely to use.",
            'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            f"port=$(( {_FIRST_PORT} + SLURM_JOB_ID * 31 % {_PORTS} ))",
            "# A key for this start of the job, which its tasks inherit: others can't join or end it.",
            DRAW_JOB_KEY,
        ]
    return lines


@dataclass(frozen=True, kw_only=True)
class JobState:
    """State of a job as Slurm reports it.

    Attributes:
        job: number of the job.
        state: such as PENDING, RUNNING or COMPLETED.
        reason: why it waits or failed; ``None`` is Slurm's word for none.
        restarts: how often it was requeued.
        nodes: where it runs, as Slurm lists them; empty: nowhere.
        exit_code: for a command that follows the job.
    """

    job: int
    state: str
    reason: str
    restarts: int
    nodes: str
    exit_code: int

    @property
    def over(self) -> bool:
        """Whether it has ended, as far as Slurm knows."""
        return self.state in _OVER

    def __str__(self) -> str:
        where = f" on {self.nodes}" if self.nodes and not self.over else ""
        why = f" ({self.reason})" if self.reason not in ("", "None") and not where else ""
        requeued = f", requeued {plural(self.restarts, 'time')}" if self.restarts else ""
        code = f", exit code {self.exit_code}" if self.over else ""
        return f"job {self.job}: {self.state}{where}{why}{requeued}{code}"


def require_slurm() -> None:
    """Raise UsageError unless sbatch and scontrol are on the PATH."""
    absent = [name for name in ("sbatch", "scontrol") if which(name) is None]
    if absent:
        raise UsageError(
            f"no {' and no '.join(absent)} on this machine",
            remedy="write the script with --file FILE, and run `sbatch FILE` on a login node of the cluster",
        )


def submit_script(path: Path) -> int:
    """Submit the batch script at `path`, and return the job's number.

    Raises:
        UsageError: Slurm is not installed, or refused the script.
    """
    require_slurm()
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=False)
    number = done.stdout.strip().partition(";")[0]
    if done.returncode or not number.isdecimal():
        raise UsageError(
            f"sbatch refused {path}: {done.stderr.strip() or done.stdout.strip()}",
            remedy="change what it names, or pass what the cluster requires (--partition, --account, --option)",
        )
    return int(number)


def parse_job_state(text: str) -> JobState:
    """Parse the output of ``scontrol show job --oneliner`` (pure).

    Example:
        >>> state = "JobId=7 JobName=a JobState=FAILED Reason=NonZeroExitCode Restarts=1 ExitCode=3:0"
        >>> parse_job_state(state).exit_code
        3
    """

    def value(name: str) -> str:
        found = re.search(rf"(?:^|\s){name}=(\S*)", text)
        return "" if found is None or found[1] == "(null)" else found[1]

    state = value("JobState")
    code, _, number = value("ExitCode").partition(":")
    exit_code = int(code or 0) or (128 + int(number) if number and int(number) else 0)
    if not exit_code and state in _OVER - {"COMPLETED"}:
        exit_code = 1
    return JobState(
        job=int(value("JobId") or 0),
        state=state,
        reason=value("Reason"),
        restarts=int(value("Restarts") or 0),
        nodes=value("NodeList"),
        exit_code=exit_code,
    )


def watch_job(job: int, log: Path, say: Callable[[str], None], show: Callable[[bytes], None]) -> JobState:
    """Follow a job until it has ended, and return its last state.

    Args:
        job: number of the job.
        log: file that it writes; may appear later.
        say: called with one line for every change of its state.
        show: called with its output as it appears.

    Raises:
        RankFailed: Slurm has not answered for minutes, or does not know the job.
    """
    shown, at, left = "", 0, _RETURN_SECONDS
    while True:
        state = _query(job)
        at = _copy_new(log, at, show)
        if str(state) != shown:
            shown, left = str(state), _RETURN_SECONDS
            say(shown)
        if state.over and (state.state not in _MAY_RETURN or left <= 0):
            _copy_new(log, at, show)
            return state
        time.sleep(_POLL_SECONDS)
        left -= _POLL_SECONDS


def _query(job: int) -> JobState:
    command = ["scontrol", "show", "job", "--oneliner", str(job)]
    why = f"no answer within {_ANSWER_SECONDS:g} s, {_TRIES} times"
    for _ in range(_TRIES):
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=_ANSWER_SECONDS
            )
        except subprocess.TimeoutExpired:
            continue
        if done.returncode == 0 and "JobState=" in done.stdout:
            return parse_job_state(done.stdout)
        why = done.stderr.strip()
        if "Invalid job id" in why:
            break
        time.sleep(_POLL_SECONDS)
    raise RankFailed(
        f"Slurm reports nothing about job {job}: {why}",
        remedy=f"query it with `sacct -j {job}`; scontrol forgets jobs some minutes after their end",
    )


def _copy_new(log: Path, at: int, show: Callable[[bytes], None]) -> int:
    """Show the content of a file from byte `at` on, and return its end."""
    try:
        with log.open("rb") as file:
            file.seek(at)
            new = file.read()
    except FileNotFoundError:
        return at
    if new:
        show(new)
    return at + len(new)
