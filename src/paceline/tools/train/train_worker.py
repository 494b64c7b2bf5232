"""Program of each rank: ``python -m paceline.tools.train.train_worker SETTINGS.json``."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import cast

import torch

from paceline._core.cpu_cores import usable_cores
from paceline._core.format import format_bytes, format_count, format_seconds, plural
from paceline.errors import CollectiveError, PacelineError, UsageError, WorldError
from paceline.health.watchdog import Watchdog
from paceline.profiling.profiler import machine_facts, versions
from paceline.profiling.rank_timeline import RankTimeline
from paceline.tools.models.gpt import GPT
from paceline.tools.train.run_folder import RunFolder
from paceline.tools.train.train_settings import TrainSettings
from paceline.tools.train.training_job import TrainingJob, build_job
from paceline.tools.train.training_loop import run_training
from paceline.tools.train.training_progress import TrainingProgress
from paceline.world import World, init, shutdown
from paceline.world.control_collectives import sum_over_ranks
from paceline.world.live_file import JOINER_VARIABLE, LEFT_EXIT_CODE

__all__ = ["main", "run_rank"]

PROMPT = "def "
TEMPERATURE = 0.8


def main(arguments: list[str]) -> int:
    """Run this rank of the training that a settings file describes; return the exit status."""
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        settings = _read_settings(arguments)
        if os.environ.get(JOINER_VARIABLE):
            settings = replace(settings, existing="refuse")  # its state comes from the others
        elif int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0:
            settings = replace(settings, existing="resume")
        run_rank(settings)
    except PacelineError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1 if isinstance(error, CollectiveError | WorldError) else 2  # 2: it would fail again
    except KeyboardInterrupt:
        return 130
    return 0


def _read_settings(arguments: list[str]) -> TrainSettings:
    try:
        (path,) = arguments
        return TrainSettings.from_json(Path(path).read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"can't read settings from {' '.join(arguments)!r}: {error}",
            remedy="name one file that `paceline train` wrote, settings.json in its folder",
        ) from error


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    """Exit by an exception, so that a live line restores the terminal."""
    raise SystemExit(128 + number)


def run_rank(settings: TrainSettings, *, command: Mapping[str, str] | None = None) -> World:
    """Run one rank of the training, from entering the world to leaving it; return the world.

    Args:
        settings: of the training.
        command: given if the run folder is not prepared yet: facts that rank 0 writes into it once it is.
    """
    world = init(device=settings.device)
    if settings.threads or settings.virtual_ranks:
        # with virtual ranks the same on any number of ranks: it may change the bits
        torch.set_num_threads(settings.threads or max(1, int(usable_cores() / (settings.virtual_ranks or 1))))
    folder = RunFolder(settings.out)
    if command is not None:
        _prepare_folder(folder, settings, command, world)
    _train(settings, world)
    shutdown()
    return world


def _train(settings: TrainSettings, world: World) -> None:
    """Train from the beginning, or the checkpoint, to the end; the model is freed on return."""
    watchdog = Watchdog()
    job = build_job(settings, world, watchdog)
    joins = job.elastic.is_joiner
    shown = world.rank == 0 and not joins
    progress = TrainingProgress(settings.steps, first_step=job.step, shown=shown)
    if signal.getsignal(signal.SIGTERM) == _exit_on_signal:
        signal.signal(
            signal.SIGTERM, signal.SIG_DFL
        )  # from the first step on, the checkpoint or `Elastic` takes it
    with watchdog, RankTimeline(settings.out, job.model) as timeline, progress:
        job.elastic.on_world(lambda _: timeline.rejoin(job.model))
        job.elastic.on_world(lambda now: progress.show(now.rank == 0))
        if not joins:
            _log_start(job, progress)
        started = time.perf_counter()
        with _logging(job), job.elastic:
            val_loss = run_training(job, progress, watchdog)
        seconds = time.perf_counter() - started
    _log_result(job, progress, val_loss, seconds)
    job.checkpoint.close()


@contextmanager
def _logging(job: TrainingJob) -> Iterator[None]:
    """Pass metrics to the loggers in this block, on rank 0."""
    if job.world.rank != 0 or job.elastic.is_joiner:
        yield
        return
    job.loggers.start({**job.folder.facts(), "folder": str(job.folder.path)})
    failed = True
    try:
        yield
        failed = False
    except SystemExit as left:
        failed = left.code != LEFT_EXIT_CODE
        raise
    finally:
        job.loggers.finish(failed)


def _prepare_folder(
    folder: RunFolder, settings: TrainSettings, command: Mapping[str, str], world: World
) -> None:
    """Prepare the folder on rank 0; if that fails, raise on all ranks."""
    error = None
    if world.rank == 0:
        try:
            folder.prepare(settings.existing)
            folder.write_settings(settings, command)
        except UsageError as refused:
            error = refused
    refusals = sum_over_ranks(torch.tensor([float(error is not None)]))
    if error is not None:
        raise error
    if refusals.item():
        raise UsageError(f"rank 0 can't use {settings.out!r}; see its message")


def _log_start(job: TrainingJob, progress: TrainingProgress) -> None:
    """Print the parts of the training, and write them to ``run.json``."""
    settings, world, corpus, size = job.settings, job.world, job.corpus, job.size
    ranks, threads = plural(world.size, "rank"), plural(torch.get_num_threads(), "thread")
    progress.log(
        f"GPT {size.name}: {format_count(job.parameters)} parameters, vocabulary {size.vocabulary}, "
        f"context {size.context}"
    )
    progress.log(
        f"text: {corpus.name}, {format_count(len(corpus.train))} tokens and "
        f"{format_count(len(corpus.held_out))} held out"
    )
    progress.log(
        f"{ranks} on {world.device.partition(':')[0]} ({world.backend}), {threads} each; "
        f"{settings.sync_summary}; {job.batches.batch} x {size.context} tokens per rank"
        + (f" x {job.batches.rounds}" if job.batches.rounds > 1 else "")
    )
    for sentence in job.choice.sentences if job.choice is not None else ():
        progress.log(sentence)
    if job.model.tuning is not None:
        job.model.tuning.tell = progress.log
    _log_resumed(job, progress)
    if world.rank == 0:
        job.folder.remove_ranks_from(world.size)
        job.folder.add_facts(
            parameters=job.parameters,
            synchronised=settings.sync_summary,
            settings=asdict(settings),
            world=asdict(world),
            model=asdict(size),
            data={"name": corpus.name, "tokens": len(corpus.train), "held out": len(corpus.held_out)},
            machine=machine_facts(),
            **({"chosen": dict(job.choice.facts)} if job.choice and job.choice.facts else {}),
            versions=versions(),
        )


def _log_resumed(job: TrainingJob, progress: TrainingProgress) -> None:
    found = job.checkpoint.resumed
    if found is None:
        return
    for skipped in found.passed_over:
        progress.log(f"skipped {skipped.path}, which is damaged: {skipped.why}")
    progress.log(f"resumed at step {found.step}")
    settings, windows = job.settings, job.batches.windows_per_step
    if windows != settings.micro_batch_size * settings.accumulate * job.world.size:
        progress.log(f"the global batch stays {windows} windows, as the run began")


def _log_result(job: TrainingJob, progress: TrainingProgress, val_loss: float, seconds: float) -> None:
    """Print and write the result, with a sample of generated text."""
    text = _sample(job)  # on all ranks: a sharded model needs them all
    if job.world.rank != 0:
        return
    job.folder.sample.write_text(text + "\n", encoding="utf-8")
    result = {"first held-out loss": job.first_val_loss, "last held-out loss": val_loss, "seconds": seconds}
    job.folder.add_facts(result=result, sent=_sent_facts(job))
    if job.model.tuning is not None:
        job.folder.add_facts(tuned=job.model.tuning.sentences)
    nbytes = sum(path.stat().st_size for path in job.folder.checkpoint.rglob("*") if path.is_file())
    progress.log(
        f"\nheld-out loss {job.first_val_loss:.4f} → {val_loss:.4f} after {job.step} steps "
        f"({format_seconds(seconds)})"
    )
    if summary := job.sent_bytes.summary():
        progress.log(summary)
    if text:
        progress.log(f"\na sample of generated text:\n\n{text}\n")
    progress.log(f"checkpoint: {job.folder.checkpoint} ({format_bytes(nbytes)})")


def _sent_facts(job: TrainingJob) -> dict[str, object]:
    """Return the bytes that rank 0 has sent, and the compression of each bucket."""
    facts: dict[str, object] = job.sent_bytes.facts()
    if buckets := job.model.compressed_buckets():
        facts["buckets"] = [
            {
                "first parameter": each.names[0],
                "parameters": len(each.names),
                "nbytes": each.nbytes,
                "sent_nbytes": each.sent_nbytes,
                "uncompressed_nbytes": each.uncompressed_nbytes,
                "error": each.error if math.isfinite(each.error) else None,
                "step": each.step,
            }
            for each in buckets
        ]
    if job.loop is not None:
        facts |= {"synchronisations": job.loop.syncs}
    if job.loop is not None and job.loop.rejected:
        facts["rejected"] = {f"rank {rank}": count for rank, count in job.loop.rejected.items()}
    return facts


def _sample(job: TrainingJob) -> str:
    if job.settings.sample_tokens == 0:
        return ""
    prompt = torch.tensor([job.corpus.encode(PROMPT)], device=job.world.device)
    generator = torch.Generator(job.world.device).manual_seed(job.settings.seed)
    net = cast(GPT, job.model.module).eval()
    tokens = net.generate(prompt, job.settings.sample_tokens, TEMPERATURE, generator)
    return job.corpus.decode(tokens[0].tolist())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
