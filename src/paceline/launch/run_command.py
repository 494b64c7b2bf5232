"""The command that a launcher places once on every host: ``paceline run`` with its ranks (pure).

Slurm and Ray place processes; which of them failed first, and that all start again from the newest checkpoint, within
a second and without losing the place on the cluster, is what `paceline run` is there for.
"""

from __future__ import annotations

from paceline.launch.work import Work

__all__ = ["run_command"]


def run_command(work: Work, rendezvous: str = "") -> list[str]:
    """Return the command that runs the ranks of one host, the same on each.

    Args:
        work: what is to be run.
        rendezvous: HOST:PORT where several hosts meet.

    Example:
        >>> " ".join(run_command(Work(("train.py", "--lr", "1"), ranks_per_host=2)))
        'python3 -m paceline run --ranks 2 --max-restarts 3 train.py --lr 1'
    """
    options = ["--ranks", str(work.ranks_per_host), "--max-restarts", str(work.max_restarts)]
    if work.hosts > 1:
        options += ["--hosts", str(work.hosts), "--rendezvous", rendezvous, "--name", work.name]
        options += ["--min-ranks", str(work.fewest_hosts * work.ranks_per_host)]
    program = ["--module", *work.program[1:]] if work.program[0] == "-m" else list(work.program)
    return [work.python, "-m", "paceline", "run", *options, *program]
