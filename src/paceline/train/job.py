"""What one rank of a training holds: data, model, optimizer, and where it stands."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from paceline.checkpoint.store import Checkpoint
from paceline.lm import corpus as corpora
from paceline.lm.batches import Batches, HeldOut
from paceline.lm.corpus import Corpus
from paceline.lm.model import GPT
from paceline.lm.sizes import Size
from paceline.sync.engine import DataParallel
from paceline.sync.shard import ShardedOptimizer
from paceline.train.evaluate import held_out_loss
from paceline.train.folder import RunFolder
from paceline.train.settings import Settings
from paceline.train.snapshot import check_facts, facts_of
from paceline.world import World
from paceline.world.agree import verify_same

__all__ = ["Job", "build"]


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
    """

    settings: Settings
    world: World
    folder: RunFolder
    corpus: Corpus
    size: Size
    model: DataParallel
    optimizer: ShardedOptimizer
    keep: Checkpoint
    batches: Batches
    held_out: HeldOut

    def evaluate(self) -> float:
        """Return the held-out loss of the model as it is; every rank must call this."""
        return held_out_loss(self.model, self.held_out, self.world)

    def save(self, *, wait: bool = False) -> None:
        """Begin a checkpoint, or write one and `wait` for it; every rank must call this."""
        self.keep.save(wait=wait)

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
    corpus = corpora.load(settings.data)
    size = settings.model_size(settings.vocabulary or corpus.vocabulary)
    corpora.check(corpus, batch=settings.batch_size, context=size.context, ranks=world.size)
    verify_same(_facts(settings, corpus), "the training", remedy="give every rank the same settings and data")

    torch.manual_seed(settings.seed)
    model = DataParallel(GPT(size).to(world.device), sync=settings.plan)
    optimizer = ShardedOptimizer(model, torch.optim.AdamW, **_options(settings))
    folder = RunFolder(settings.out)
    windows = settings.batch_size * settings.accumulate * (settings.ranks or world.size)
    facts = facts_of(settings, size, corpus, windows)
    keep = Checkpoint(folder.checkpoint, model, optimizer, facts=facts)
    if settings.existing == "resume" and (found := keep.load()):
        check_facts(found.path, found.facts, size, corpus)
        keep.facts |= {name: found.facts[name] for name in ("windows", "first_val_loss")}
        windows = keep.facts["windows"]
    where: dict[str, Any] = {"context": size.context, "rank": world.rank, "size": world.size}
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
        Batches(corpus.train, batch, seed=settings.seed, windows=windows, **where),
        HeldOut(corpus.held_out, settings.batch_size, limit=settings.eval_windows, **where),
    )


def _options(settings: Settings) -> dict[str, Any]:
    return {"lr": settings.lr, "betas": (0.9, 0.95), "weight_decay": settings.weight_decay, "fused": True}


def _facts(settings: Settings, corpus: Corpus) -> list[str]:
    """Return what must be the same on all ranks; nodes may see the run folder under other paths."""
    told = asdict(replace(settings, out="run"))
    return [*(f"{name}={value!r}" for name, value in told.items()), f"data of number {corpus.fingerprint}"]
