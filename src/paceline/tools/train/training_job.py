"""What one rank of a training holds: data, model, optimizer, and where it stands.

Learning rate by step: a linear warm-up, then half a cosine down to a tenth.

The held-out loss: exact, whatever the number of ranks.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from paceline._core.step_state import step_state
from paceline.checkpoint.api import Checkpoint
from paceline.parallel.data_parallel import DataParallel
from paceline.parallel.local_sgd.outer_loop import OuterLoop
from paceline.parallel.sharding.zero import ShardedOptimizer
from paceline.profiling.step_metrics import StepMetrics
from paceline.tools.models import corpus as corpora
from paceline.tools.models.corpus import Corpus
from paceline.tools.models.gpt import GPT
from paceline.tools.models.gpt_sizes import GptSize
from paceline.tools.models.token_windows import HeldOutWindows, TrainingWindows, summed_token_loss
from paceline.tools.train.auto_strategy import Choice, choose
from paceline.tools.train.resume_check import check_facts, facts_of
from paceline.tools.train.run_folder import RunFolder
from paceline.tools.train.sent_bytes import Traffic, interface_nbytes, would_be_nbytes
from paceline.tools.train.train_settings import AUTO, Settings
from paceline.world import World
from paceline.world.object_collectives import sum_over_ranks, verify_same

__all__ = ["Job", "build", "cosine", "held_out_loss"]


@dataclass
class Job:
    """One rank's part of a training.

    Attributes:
        settings: what was asked for.
        world: this rank's place.
        folder: the run folder.
        corpus: the tokens.
        size: shapes of the model.
        model: the wrapped GPT.
        optimizer: AdamW, sharded where the strategy shards it.
        keep: its checkpoints, which count the steps.
        batches: what this rank trains on.
        held_out: what this rank measures the held-out loss on.
        loop: the block to train in, where parameters are synchronised every so many steps.
        traffic: what this rank has sent.
        scalars: writes the numbers of steps.
        choice: what ``--sync auto`` has chosen, and why.
    """

    settings: Settings
    world: World
    folder: RunFolder
    corpus: Corpus
    size: GptSize
    model: DataParallel
    optimizer: ShardedOptimizer
    keep: Checkpoint
    batches: TrainingWindows
    held_out: HeldOutWindows
    scalars: StepMetrics
    loop: OuterLoop | None = None
    traffic: Traffic = field(default_factory=Traffic)
    choice: Choice | None = None
    _counted: float = 0.0

    def evaluate(self) -> float:
        """Return the held-out loss of the parameters that all ranks share; every rank must call this."""
        with self.loop.shared_parameters() if self.loop is not None else nullcontext():
            return held_out_loss(self.model, self.held_out, self.world)

    def save(self, *, wait: bool = False) -> None:
        """Begin a checkpoint, or write one and `wait` for it; every rank must call this."""
        self.keep.facts["traffic"] = self.traffic.state()
        self.keep.save(wait=wait)

    def count_bytes(self, *, step: bool = True) -> None:
        """Add up what this rank has sent since the last time, and what it would have, if a `step` lies between."""
        if self.loop is not None:
            sent, self._counted = self.loop.sent_nbytes - self._counted, self.loop.sent_nbytes
        elif self.model.plan.shard == "parameters" and self.world.size > 1:
            sent = None
        else:
            sent = self.model.timings.sent_nbytes if step else 0.0
        self.traffic.add(sent, would_be_nbytes(self.parameters, self.world.size) if step else 0.0)

    @property
    def step(self) -> int:
        """Updates so far."""
        return self.keep.step

    @property
    def first_val_loss(self) -> float | None:
        """Held-out loss before the first update, None if it was not measured yet."""
        return self.keep.facts["first_val_loss"]

    @first_val_loss.setter
    def first_val_loss(self, loss: float) -> None:
        self.keep.facts["first_val_loss"] = loss

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return self.size.parameters()


def build(settings: Settings, world: World) -> Job:
    """Return this rank's part of the training that `settings` describe, at the checkpoint if it resumes.

    A resumed run keeps the global batch that it began with, dealt to the ranks that there are now.

    Raises:
        UsageError: the data or the checkpoint do not fit the settings.
        MismatchError: ranks have other settings or other data than rank 0.
    """
    corpus = corpora.load_corpus(settings.data)
    size = settings.model_size(settings.vocabulary or corpus.vocabulary)
    corpora.check_corpus(corpus, batch=settings.batch_size, context=size.context, ranks=world.size)
    verify_same(_facts(settings, corpus), "the training", remedy="give every rank the same settings and data")

    windows = settings.batch_size * settings.accumulate * (settings.ranks or world.size)
    where: dict[str, Any] = {"context": size.context, "rank": world.rank, "size": world.size}
    choice = None
    if settings.is_auto:
        batch = min(settings.batch_size, -(-windows // world.size))
        probe = TrainingWindows(corpus.train, batch, seed=settings.seed, windows=windows, **where)
        choice = choose(settings, size, probe, world)
        settings = choice.settings

    torch.manual_seed(settings.seed)
    sync = AUTO if choice is not None and choice.sends_all else settings.plan
    model = DataParallel(GPT(size).to(world.device), sync=sync)
    optimizer = ShardedOptimizer(model, torch.optim.AdamW, **_options(settings))
    folder = RunFolder(settings.out)
    apart = settings.apart
    loop = None if apart is None else apart.loop(model, optimizer)
    facts = facts_of(settings, size, corpus, windows)
    named: dict[str, Any] = {} if loop is None else {"loop": loop}
    keep = Checkpoint(folder.checkpoint, model, optimizer, facts=facts, **named)
    traffic = Traffic(interface_start=interface_nbytes())
    if settings.existing == "resume" and (found := keep.load()):
        check_facts(found.path, found.facts, settings, size, corpus)
        keep.facts |= {name: found.facts[name] for name in ("windows", "first_val_loss")}
        windows = keep.facts["windows"]
        traffic.add(**found.facts.get("traffic", {"sent_nbytes": None, "would_be_nbytes": 0.0}))
    batch = min(settings.batch_size, -(-windows // world.size))
    return Job(
        settings,
        world,
        folder,
        corpus,
        size,
        model,
        optimizer,
        keep,
        TrainingWindows(corpus.train, batch, seed=settings.seed, windows=windows, **where),
        HeldOutWindows(corpus.held_out, settings.batch_size, limit=settings.eval_windows, **where),
        StepMetrics(folder.path),
        loop,
        traffic,
        choice,
    )


def _options(settings: Settings) -> dict[str, Any]:
    return {"lr": settings.lr, "betas": (0.9, 0.95), "weight_decay": settings.weight_decay, "fused": True}


def _facts(settings: Settings, corpus: Corpus) -> list[str]:
    """Return what must be the same on all ranks; nodes may see the run folder under other paths."""
    told = asdict(replace(settings, out="run"))
    return [*(f"{name}={value!r}" for name, value in told.items()), f"data of number {corpus.fingerprint}"]


def cosine(step: int, *, steps: int, warmup: int, peak: float, floor: float = 0.1) -> float:
    """Return the learning rate of `step`.

    Args:
        step: steps done so far, 0 ≤ step < steps.
        steps: steps in all.
        warmup: steps over which the rate rises to `peak`; the first one is not zero.
        peak: the largest rate.
        floor: the share of `peak` that the last step gets.

    Example:
        >>> [round(cosine(step, steps=5, warmup=2, peak=1.0), 2) for step in range(5)]
        [0.5, 1.0, 1.0, 0.55, 0.1]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def held_out_loss(model: nn.Module, held_out: HeldOutWindows, world: World) -> float:
    """Return the mean loss over all held-out windows of all ranks, in nats per token.

    Every rank must call this; each sums over its own windows, and sums and counts are added up.
    """
    with step_state.running_task("eval"):
        mine = torch.tensor(summed_token_loss(model, held_out, world.device), dtype=torch.float64)
        summed, count = sum_over_ranks(mine).tolist()
    return summed / count
