"""Starts the ranks of a training, or takes part in one where a launcher started this process.

Everything that can be refused is refused first: no process is started for a training that can't begin.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from datetime import datetime

from paceline._core.cpu_cores import usable_cores
from paceline.errors import UsageError
from paceline.launch.agent.elastic_run import run_elastic
from paceline.testing import fault_injection
from paceline.tools.models import corpus as corpora
from paceline.tools.train.resume_check import to_resume
from paceline.tools.train.run_folder import RunFolder
from paceline.tools.train.train_settings import Settings
from paceline.world import ProcessPlace, read_environment
from paceline.world.device import choose_device

__all__ = ["start"]

RANKS = 2


def start(settings: Settings) -> None:
    """Do the training that `settings` describe, and write its report.

    Started by hand, this process starts the ranks and waits for them. Started by torchrun, srun or mpirun it
    is one of them.

    Raises:
        UsageError: the data, the folder or the world do not fit the settings; nothing was started.
        RankFailed: a rank ended with an error, and more restarts were not asked for or of no use.
    """
    fault_injection.read_environment()
    place = read_environment(os.environ)
    if place.source == "arguments":
        _launch(settings)
    else:
        _join(settings, place)


def _launch(settings: Settings) -> None:
    """Start the ranks on this machine."""
    ranks = settings.ranks or RANKS
    if settings.min_ranks is not None and settings.min_ranks > ranks:
        raise UsageError(
            f"min_ranks={settings.min_ranks}, of {ranks} rank{'s' * (ranks != 1)}",
            remedy=f"valid: 1 to {ranks}",
        )
    threads = settings.threads or max(1, int(usable_cores() / ranks))
    if settings.device == "cuda":
        for rank in range(ranks):
            choose_device(settings.device, None, rank, ranks)
    settings = _fit_to_data(replace(settings, ranks=ranks, threads=threads), ranks)
    folder = RunFolder(settings.out)
    folder.prepare(settings.existing)
    folder.describe(settings, _command())
    try:
        _run(settings, folder, ranks, threads)
    except KeyboardInterrupt:
        print(f"Interrupted{_how_to_go_on(folder)}", file=sys.stderr)
        raise
    _report(folder)


def _run(settings: Settings, folder: RunFolder, ranks: int, threads: int) -> None:
    """Run the ranks until all have ended: a single one in this process."""
    if ranks == 1:
        from paceline.tools.train.train_worker import take_part

        take_part(settings)
        return
    seen = folder.complete_checkpoints()[-1:]

    def got_on() -> bool:
        """Tell whether there is a newer checkpoint than when this was asked last."""
        nonlocal seen
        before, seen = seen, folder.complete_checkpoints()[-1:]
        return seen != before

    run_elastic(
        ["-m", "paceline.tools.train.train_worker", str(folder.settings)],
        ranks,
        env={"OMP_NUM_THREADS": str(threads)},
        log_dir=folder.logs,
        max_restarts=settings.max_restarts,
        min_ranks=settings.min_ranks,
        progress=got_on,
    )


def _how_to_go_on(folder: RunFolder) -> str:
    if folder.complete_checkpoints():
        return f"\n  → go on from the checkpoint in {folder.path} by --resume"
    return f" before the first checkpoint in {folder.path}\n  → start anew with --overwrite"


def _join(settings: Settings, place: ProcessPlace) -> None:
    """Be the rank that a launcher started this process as."""
    if settings.ranks not in (None, place.size):
        raise UsageError(
            f"ranks={settings.ranks}, but {place.source} started {place.size}",
            remedy="leave --ranks out under a launcher",
        )
    settings = _fit_to_data(replace(settings, ranks=place.size), place.size)
    from paceline.tools.train.train_worker import take_part

    world = take_part(settings, command=_command())
    if world.rank == 0:
        _report(RunFolder(settings.out))


def _fit_to_data(settings: Settings, ranks: int) -> Settings:
    """Return `settings` with the vocabulary that the data need, once data and checkpoint are known to fit."""
    corpus = corpora.load(settings.data)
    size = settings.model_size(corpus.vocabulary)
    corpora.check(corpus, batch=settings.batch_size, context=size.context, ranks=ranks)
    to_resume(settings, size, corpus)
    return replace(settings, vocabulary=size.vocabulary)


def _command() -> dict[str, str]:
    words = ["paceline", *sys.argv[1:]]
    return {
        "command": shlex.join(words),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def _report(folder: RunFolder) -> None:
    """Write ``report.html``, or say what is missing for it; the training itself is done."""
    from paceline.tools.report.run.run_page import write_run_report

    try:
        print(f"report: {write_run_report(folder.path)}")
    except UsageError as error:
        print(f"no report: {error}", file=sys.stderr)
