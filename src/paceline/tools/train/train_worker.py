"""The program that each rank runs: ``python -m paceline.tools.train.train_worker SETTINGS.json``."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import cast

import torch

from paceline._core.format import format_bytes, format_count, format_seconds
from paceline.errors import CollectiveError, PacelineError, UsageError, WorldError
from paceline.health.watchdog import Watchdog
from paceline.profiling.profiler import machine_facts, versions
from paceline.profiling.rank_timeline import RankTimeline
from paceline.tools.models.gpt import GPT
from paceline.tools.train.run_folder import RunFolder
from paceline.tools.train.train_settings import Settings
from paceline.tools.train.training_job import Job, build
from paceline.tools.train.training_loop import train
from paceline.tools.train.training_progress import Progress
from paceline.world import World, init, shutdown
from paceline.world.object_collectives import sum_over_ranks

__all__ = ["main", "take_part"]

PROMPT = "def "
TEMPERATURE = 0.8


def main(arguments: list[str]) -> int:
    """Take part in the training that a settings file describes; return the exit status."""
    signal.signal(signal.SIGTERM, _leave)
    try:
        settings = _read(arguments)
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0:
            settings = replace(settings, existing="resume")
        take_part(settings)
    except PacelineError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1 if isinstance(error, CollectiveError | WorldError) else 2  # 2: it would fail again
    except KeyboardInterrupt:
        return 130
    return 0


def _read(arguments: list[str]) -> Settings:
    """Return the settings in the one file that `arguments` name."""
    try:
        (path,) = arguments
        return Settings.from_json(Path(path).read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"can't read settings from {' '.join(arguments)!r}: {error}",
            remedy="name one file that `paceline train` wrote, settings.json in its folder",
        ) from error


def _leave(number: int, frame: FrameType | None) -> None:
    """End in order when asked to, so that a live line gives the terminal back."""
    raise SystemExit(128 + number)


def take_part(settings: Settings, *, command: Mapping[str, str] | None = None) -> World:
    """Do one rank's part of the training, from entering the world to leaving it; return the world.

    Args:
        settings: what to do.
        command: where the run folder is not ready yet: what rank 0 shall write into it, once it has made it so.
    """
    world = init(device=settings.device)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    folder = RunFolder(settings.out)
    if command is not None:
        _prepare(folder, settings, command, world)
    _train(settings, world)
    shutdown()
    return world


def _train(settings: Settings, world: World) -> None:
    """Train from the beginning, or the checkpoint, to the end; nothing of the model is left afterwards."""
    job = build(settings, world)
    shown = world.rank == 0
    progress = Progress(settings.steps, first_step=job.step, shown=shown)
    with Watchdog() as watch, RankTimeline(settings.out, job.model), progress:
        _begin(job, progress)
        started = time.perf_counter()
        val_loss = train(job, progress, watch)
        seconds = time.perf_counter() - started
    _end(job, progress, val_loss, seconds)
    job.scalars.close()
    job.keep.close()


def _prepare(folder: RunFolder, settings: Settings, command: Mapping[str, str], world: World) -> None:
    """Make the folder ready on rank 0; where that fails, no rank goes on."""
    error = None
    if world.rank == 0:
        try:
            folder.prepare(settings.existing)
            folder.describe(settings, command)
        except UsageError as refused:
            error = refused
    refusals = sum_over_ranks(torch.tensor([float(error is not None)]))
    if error is not None:
        raise error
    if refusals.item():
        raise UsageError(f"rank 0 can't use {settings.out!r}; its message says why")


def _begin(job: Job, progress: Progress) -> None:
    """Say and write what is about to be done."""
    settings, world, corpus, size = job.settings, job.world, job.corpus, job.size
    ranks, threads = _count(world.size, "rank"), _count(torch.get_num_threads(), "thread")
    progress.say(
        f"GPT {size.name}: {format_count(job.parameters)} parameters, vocabulary {size.vocabulary}, "
        f"context {size.context}"
    )
    progress.say(
        f"text: {corpus.name}, {format_count(len(corpus.train))} tokens and "
        f"{format_count(len(corpus.held_out))} held out"
    )
    progress.say(
        f"{ranks} on {world.device.partition(':')[0]} ({world.backend}), {threads} each; "
        f"{settings.told}; {job.batches.batch} x {size.context} tokens a rank"
        + (f" x {job.batches.rounds}" if job.batches.rounds > 1 else "")
    )
    for sentence in job.choice.sentences if job.choice is not None else ():
        progress.say(sentence)
    if job.model.tuning is not None:
        job.model.tuning.tell = progress.say
    _tell_resumed(job, progress)
    if world.rank == 0:
        job.folder.forget_ranks_from(world.size)
        job.folder.add_facts(
            parameters=job.parameters,
            synchronised=settings.told,
            settings=asdict(settings),
            world=asdict(world),
            model=asdict(size),
            data={
                "name": corpus.name,
                "tokens": len(corpus.train),
                "held out": len(corpus.held_out),
            },
            machine=machine_facts(),
            **({"chosen": dict(job.choice.facts)} if job.choice and job.choice.facts else {}),
            versions=versions(),
        )


def _tell_resumed(job: Job, progress: Progress) -> None:
    """Say what the training goes on from, and what of it stays as it was."""
    found = job.keep.resumed
    if found is None:
        return
    for one in found.passed_over:
        progress.say(f"passed over {one.path}, which is not intact: {one.why}")
    progress.say(f"resumed at step {found.step}")
    settings, windows = job.settings, job.batches.windows_per_step
    if windows != settings.batch_size * settings.accumulate * job.world.size:
        progress.say(f"the global batch stays {windows} windows, as the run began")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _end(job: Job, progress: Progress, val_loss: float, seconds: float) -> None:
    """Say and write what was reached, with a sample of what the model writes."""
    text = _sample(job)  # on all ranks: a model that is sharded needs them all
    if job.world.rank != 0:
        return
    job.folder.sample.write_text(text + "\n", encoding="utf-8")
    result = {"first held-out loss": job.first_val_loss, "last held-out loss": val_loss, "seconds": seconds}
    job.folder.add_facts(result=result, sent=_sent(job))
    if job.model.tuning is not None:
        job.folder.add_facts(tuned=job.model.tuning.sentences)
    checkpoint = sum(path.stat().st_size for path in job.folder.checkpoint.rglob("*") if path.is_file())
    progress.say(
        f"\nheld-out loss {job.first_val_loss:.4f} → {val_loss:.4f} after {job.step} steps "
        f"({format_seconds(seconds)})"
    )
    if told := job.traffic.told():
        progress.say(told)
    if text:
        progress.say(f"\na sample of what the model writes:\n\n{text}\n")
    progress.say(f"checkpoint: {job.folder.checkpoint} ({format_bytes(checkpoint)})")


def _sent(job: Job) -> dict[str, object]:
    """Return what rank 0 has sent, and what compression left out of it."""
    told: dict[str, object] = job.traffic.facts()
    if buckets := job.model.compressed_buckets():
        told["buckets"] = [
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
        told |= {"synchronisations": job.loop.syncs}
    if job.loop is not None and job.loop.rejected:
        told["rejected"] = {f"rank {rank}": count for rank, count in job.loop.rejected.items()}
    return told


def _sample(job: Job) -> str:
    if job.settings.sample_tokens == 0:
        return ""
    prompt = torch.tensor([job.corpus.encode(PROMPT)], device=job.world.device)
    generator = torch.Generator(job.world.device).manual_seed(job.settings.seed)
    net = cast(GPT, job.model.module)
    tokens = net.generate(prompt, job.settings.sample_tokens, TEMPERATURE, generator)
    return job.corpus.decode(tokens[0].tolist())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
