"""Starts the ranks of a training, or becomes one of them where torchrun, srun or mpirun started this process.

All checks come first: no process is started for a training that can't begin.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from datetime import datetime

from paceline._core.cpu_cores import usable_cores
from paceline._core.format import plural
from paceline.errors import UsageError
from paceline.integrations.loggers import make_loggers
from paceline.launch.agent.elastic_run import run_elastic
from paceline.testing import fault_injection
from paceline.tools.models import corpus as corpora
from paceline.tools.result_files import paceline_command
from paceline.tools.train.resume_checks import check_resumable
from paceline.tools.train.run_folder import RunFolder
from paceline.tools.train.train_settings import TrainSettings
from paceline.world import ProcessPlace, read_environment
from paceline.world.device_selection import choose_device
from paceline.world.live_file import LEFT_EXIT_CODE

__all__ = ["start_training"]

DEFAULT_RANKS = 2


def start_training(settings: TrainSettings) -> None:
    """Run a training and write its report.

    Started by hand, this process starts the ranks and waits for them. Started by torchrun, srun or mpirun it is one of
    them.

    Raises:
        UsageError: the data, the folder or the world do not fit the settings; nothing was started.
        RankFailed: a rank failed, and no restart was left or could help.
    """
    fault_injection.arm_from_environment()
    place = read_environment(os.environ)
    if place.source == "arguments":
        _launch_ranks(settings)
    else:
        _join_world(settings, place)


def _launch_ranks(settings: TrainSettings) -> None:
    ranks, folder = settings.nproc_per_node or DEFAULT_RANKS, RunFolder(settings.out)
    again = settings.existing == "auto"
    settings = replace(settings, existing=folder.found(settings.existing))
    if settings.min_ranks is not None and settings.min_ranks > ranks:
        raise UsageError(
            f"min_ranks={settings.min_ranks}, of {plural(ranks, 'rank')}", remedy=f"valid: 1 to {ranks}"
        )
    threads = settings.threads or max(1, int(usable_cores() / (settings.virtual_ranks or ranks)))
    if settings.device not in (None, "cpu"):
        for rank in range(ranks):
            choose_device(settings.device, None, rank, ranks)
    settings = _fit_to_data(replace(settings, ranks=ranks, threads=threads), ranks, again=again)
    folder.prepare(settings.existing)
    folder.write_settings(settings, _command())
    try:
        _run(settings, folder, ranks, threads)
    except KeyboardInterrupt:
        print(f"Interrupted{_resume_hint(folder)}", file=sys.stderr)
        raise
    except SystemExit as left:
        if left.code == LEFT_EXIT_CODE:
            print(f"Left after a warning{_resume_hint(folder)}", file=sys.stderr)
        raise
    _write_report(folder)


def _run(settings: TrainSettings, folder: RunFolder, ranks: int, threads: int) -> None:
    """Run the ranks until all have ended; a single one in this process."""
    if ranks == 1:
        from paceline.tools.train.train_worker import run_rank

        run_rank(settings)
        return
    seen = folder.complete_checkpoints()[-1:]

    def made_progress() -> bool:
        """Return whether a checkpoint has been completed since the last call."""
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
        recovery=settings.recovery,
        progress=made_progress,
    )


def _resume_hint(folder: RunFolder) -> str:
    if folder.complete_checkpoints():
        return f"\n  → resume from the checkpoint in {folder.path} with --resume"
    return f" before the first checkpoint in {folder.path}\n  → start anew with --overwrite"


def _join_world(settings: TrainSettings, place: ProcessPlace) -> None:
    """Run the rank that a launcher started this process as."""
    here = place.local_size or place.size
    if settings.nproc_per_node not in (None, here):
        raise UsageError(
            f"nproc_per_node={settings.nproc_per_node}, but {place.source} started {here}",
            remedy="leave --nproc-per-node out under a launcher",
        )
    again = settings.existing == "auto"
    settings = replace(settings, existing=RunFolder(settings.out).found(settings.existing), ranks=place.size)
    settings = _fit_to_data(settings, place.size, again=again)
    from paceline.tools.train.train_worker import run_rank

    world = run_rank(settings, command=_command())
    if world.rank == 0:
        _write_report(RunFolder(settings.out))


def _fit_to_data(settings: TrainSettings, ranks: int, *, again: bool) -> TrainSettings:
    """Return `settings` with the vocabulary that the data need, after checking data and checkpoint.

    Args:
        settings: of the training.
        ranks: of its world.
        again: a training that has ended may end again.
    """
    if settings.log:
        make_loggers(settings.log)  # raises if a library is missing
    corpus = corpora.load_corpus(settings.data)
    size = settings.model_size(corpus.vocabulary)
    corpora.check_corpus(corpus, batch=settings.micro_batch_size, context=size.context, ranks=ranks)
    check_resumable(settings, size, corpus, again=again)
    return replace(settings, vocabulary=size.vocabulary)


def _command() -> dict[str, str]:
    return {
        "command": paceline_command(),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def _write_report(folder: RunFolder) -> None:
    """Write ``report.html``, or print what is missing for it; the training itself is complete."""
    from paceline.tools.report.run.run_page import write_run_report

    try:
        print(f"report: {write_run_report(folder.path)}")
    except UsageError as error:
        print(f"no report: {error}", file=sys.stderr)
