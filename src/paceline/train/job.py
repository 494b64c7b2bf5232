"""What one rank of a training holds: data, model, optimizer, and where it stands."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from paceline.lm import corpus as corpora
from paceline.lm.batches import Batches, HeldOut
from paceline.lm.corpus import Corpus
from paceline.lm.model import GPT
from paceline.lm.sizes import Size
from paceline.sync.engine import DataParallel
from paceline.sync.shard import ShardedOptimizer
from paceline.train import state
from paceline.train.evaluate import held_out_loss
from paceline.train.folder import RunFolder
from paceline.train.settings import Settings
from paceline.train.snapshot import to_resume
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
        batches: what this rank trains on.
        held_out: what this rank measures the held-out loss on.
        step: updates so far.
        first_val_loss: held-out loss before the first update, None if it was not measured yet.
    """

    settings: Settings
    world: World
    folder: RunFolder
    corpus: Corpus
    size: Size
    model: DataParallel
    optimizer: ShardedOptimizer
    batches: Batches
    held_out: HeldOut
    step: int = 0
    first_val_loss: float | None = None

    def evaluate(self) -> float:
        """Return the held-out loss of the model as it is; every rank must call this."""
        return held_out_loss(self.model, self.held_out, self.world)

    def save(self) -> None:
        """Write a checkpoint; every rank must call this."""
        facts = {
            "model": asdict(self.size),
            "data": self.corpus.fingerprint,
            "first_val_loss": self.first_val_loss,
            "settings": asdict(self.settings),
        }
        state.save(self.folder.checkpoint, self.step, self.model, self.optimizer, self.world, facts)

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return self.size.parameters()


def build(settings: Settings, world: World) -> Job:
    """Return this rank's part of the training that `settings` describe, at the checkpoint if it resumes.

    Raises:
        UsageError: the data or the checkpoint do not fit the settings.
        MismatchError: ranks have other settings or other data than rank 0.
    """
    corpus = corpora.load(settings.data)
    size = settings.model_size(settings.vocabulary or corpus.vocabulary)
    corpora.check(corpus, batch=settings.batch_size, context=size.context, ranks=world.size)
    verify_same(_facts(settings, corpus), "the training", remedy="give every rank the same settings and data")
    found = to_resume(settings, size, corpus)

    torch.manual_seed(settings.seed)
    net = GPT(size).to(world.device)
    if found is not None:
        state.load_model(found, net)
    model = DataParallel(net, sync=settings.plan)
    optimizer = ShardedOptimizer(model, torch.optim.AdamW, **_options(settings))
    if found is not None:
        state.load_optimizer(found, model, optimizer, world.rank)

    where: dict[str, Any] = {
        "batch": settings.batch_size,
        "context": size.context,
        "rank": world.rank,
        "size": world.size,
    }
    return Job(
        settings,
        world,
        RunFolder(settings.out),
        corpus,
        size,
        model,
        optimizer,
        Batches(corpus.train, seed=settings.seed, **where),
        HeldOut(corpus.held_out, limit=settings.eval_windows, **where),
        step=0 if found is None else found.step,
        first_val_loss=None if found is None else found.facts["first_val_loss"],
    )


def _options(settings: Settings) -> dict[str, Any]:
    return {"lr": settings.lr, "betas": (0.9, 0.95), "weight_decay": settings.weight_decay, "fused": True}


def _facts(settings: Settings, corpus: Corpus) -> list[str]:
    """Return what must be the same on all ranks; nodes may see the run folder under other paths."""
    told = asdict(replace(settings, out="run"))
    return [*(f"{name}={value!r}" for name, value in told.items()), f"data of number {corpus.fingerprint}"]
