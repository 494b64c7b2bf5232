"""Everything that one rank of a training holds: data, model, optimizer, checkpoints; and its learning rate and loss."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from paceline._core.step_state import step_state
from paceline._core.summation_tree import leaves_of
from paceline.checkpoint.api import Checkpoint, Resumed
from paceline.elastic.live_training import Elastic
from paceline.health.watchdog import Watchdog
from paceline.integrations.loggers import LoggerGroup, make_loggers
from paceline.parallel.data_parallel import DataParallel
from paceline.parallel.local_sgd.outer_loop import OuterLoop
from paceline.parallel.sharding.zero import ShardedOptimizer
from paceline.profiling.metrics_writer import StepMetrics
from paceline.tools.models import corpus as corpora
from paceline.tools.models.corpus import Corpus
from paceline.tools.models.gpt import GPT
from paceline.tools.models.gpt_sizes import GptSize
from paceline.tools.models.token_windows import HeldOutWindows, TrainingWindows, summed_token_loss
from paceline.tools.train.auto_strategy import AutoChoice, choose_strategy
from paceline.tools.train.resume_checks import check_facts, checkpoint_facts
from paceline.tools.train.run_folder import RunFolder
from paceline.tools.train.traffic_counter import SentBytes, float32_gradient_nbytes, interface_nbytes
from paceline.tools.train.train_settings import AUTO, TrainSettings
from paceline.world import World
from paceline.world.control_collectives import gather_rows, verify_same

__all__ = ["TrainingJob", "build_job", "held_out_loss"]


@dataclass(kw_only=True)
class TrainingJob:
    """One rank's part of a training.

    Attributes:
        settings: the settings, with the strategy that ``--strategy auto`` has chosen.
        world: this rank's place.
        folder: the run folder.
        corpus: the tokens.
        size: shapes of the model.
        model: the wrapped GPT.
        optimizer: AdamW, sharded where the strategy shards it.
        checkpoint: saves and restores; counts the steps.
        batches: this rank's training data.
        held_out: this rank's part of the held-out data.
        metrics: writes the measurements of logged steps.
        loggers: receive them, too.
        elastic: recovers from failures of other ranks.
        reported: step up to which the run was evaluated, logged and saved.
        val_loss: the latest held-out loss; None: not measured since the run began or was resumed.
        loop: context manager to train in for local SGD.
        sent_bytes: bytes that this rank has sent.
        choice: the choice of ``--strategy auto``, with reasons.
    """

    settings: TrainSettings
    world: World
    folder: RunFolder
    corpus: Corpus
    size: GptSize
    model: DataParallel
    optimizer: ShardedOptimizer
    checkpoint: Checkpoint
    batches: TrainingWindows
    held_out: HeldOutWindows
    metrics: StepMetrics
    loggers: LoggerGroup
    elastic: Elastic
    reported: int = 0
    val_loss: float | None = None
    loop: OuterLoop | None = None
    sent_bytes: SentBytes = field(default_factory=SentBytes)
    choice: AutoChoice | None = None
    _counted_nbytes: float = 0.0

    def evaluate(self) -> float:
        """Return the held-out loss of the parameters that all ranks share; collective."""
        with self.loop.shared_parameters() if self.loop is not None else nullcontext():
            return held_out_loss(self.model, self.held_out, self.world)

    def save(self, *, wait: bool = False) -> None:
        """Start writing a checkpoint, and `wait` until it is written; collective."""
        self.report(self.step)
        self.checkpoint.save(wait=wait)

    def report(self, step: int) -> None:
        """Note up to which step the run was evaluated, logged and saved; the checkpoint may save itself after that."""
        self.reported = step
        self.checkpoint.facts |= {"traffic": self.sent_bytes.state(), "reported": step}

    def count_bytes(self, *, step: bool = True) -> None:
        """Count the bytes sent since the last call, and those of float32 gradients if a `step` was done since."""
        if self.loop is not None:
            sent = self.loop.sent_nbytes - self._counted_nbytes
            self._counted_nbytes = self.loop.sent_nbytes
        elif self.model.plan.shard == "parameters" and self.world.size > 1:
            sent = None
        else:
            sent = self.model.timings.sent_nbytes if step else 0.0
        self.sent_bytes.add(sent, float32_gradient_nbytes(self.parameters, self.world.size) if step else 0.0)
        self.report(self.reported)

    # ------------------------------------------------------------------ another world

    def state_dict(self) -> dict[str, Any]:
        """Return what ranks have in common beside model and optimizer."""
        return {
            "step": self.checkpoint.step,
            "facts": self.checkpoint.facts,
            "sent": self.sent_bytes.state(),
            "reported": self.reported,
            "val_loss": self.val_loss,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what another rank, or this one, had."""
        self.checkpoint.step, self.reported = state["step"], state["reported"]
        self.val_loss = state["val_loss"]
        self.checkpoint.facts.update(state["facts"])
        self.sent_bytes.restore(state["sent"])

    def move_to(self, world: World) -> None:
        """Continue in another world; all its ranks call this."""
        was_first, self.world = self.world.rank == 0 and self.world.backend != "none", world
        if (found := self.checkpoint.resumed) is not None and found.step == self.step:
            self.go_back(found)
        given = self.settings, self.corpus, self.size, world
        self.batches = _training_windows(*given, self.checkpoint.facts["windows"])
        self.held_out = _held_out_windows(*given)
        self.reported = min(int(rows[0]) for rows in gather_rows(torch.tensor([self.reported])))
        if world.rank == 0 and not was_first and self.settings.log:
            self.loggers = LoggerGroup(make_loggers(self.settings.log))
            self.loggers.start({**self.folder.facts(), "folder": str(self.folder.path)})

    def go_back(self, found: Resumed) -> None:
        """Continue from a checkpoint that was loaded."""
        self.checkpoint.facts |= {name: found.facts[name] for name in ("windows", "first_val_loss")}
        self.sent_bytes.restore(found.facts.get("traffic"))
        reported = min(self.reported, found.step, found.facts.get("reported", found.step))
        self.reported, self.metrics = reported, StepMetrics(self.folder.path)

    @property
    def most_micro_batches(self) -> int:
        """Micro-batches of a step on the rank that has most."""
        virtual = self.batches.virtual_ranks
        return self.batches.rounds if virtual is None else len(leaves_of(0, self.world.size, virtual))

    @property
    def step(self) -> int:
        """Number of updates so far."""
        return self.checkpoint.step

    @property
    def first_val_loss(self) -> float | None:
        """Held-out loss before the first update; None: not measured yet."""
        return self.checkpoint.facts["first_val_loss"]

    @first_val_loss.setter
    def first_val_loss(self, loss: float) -> None:
        self.checkpoint.facts["first_val_loss"] = loss

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return self.size.parameters()


def build_job(settings: TrainSettings, world: World, watchdog: Watchdog | None = None) -> TrainingJob:
    """Return this rank's part of the training, restored from the checkpoint if it resumes.

    A resumed run keeps the global batch that it began with, distributed over the ranks of this run.

    Raises:
        UsageError: the data or the checkpoint do not fit the settings.
        MismatchError: ranks have other settings or other data than rank 0.
    """
    corpus = corpora.load_corpus(settings.data)
    size = settings.model_size(settings.vocabulary or corpus.vocabulary)
    corpora.check_corpus(corpus, batch=settings.micro_batch_size, context=size.context, ranks=world.size)
    verify_same(_facts(settings, corpus), "the training", remedy="give every rank the same settings and data")

    parts = settings.virtual_ranks or settings.ranks or world.size
    windows, choice = settings.micro_batch_size * settings.accumulate * parts, None
    if settings.is_auto:
        choice = choose_strategy(
            settings, size, _training_windows(settings, corpus, size, world, windows), world
        )
        settings = choice.settings

    torch.manual_seed(settings.seed)
    sync = AUTO if choice is not None and choice.sends_full_gradients else settings.plan
    net = GPT(size, dropout=settings.dropout).to(world.device)
    model = DataParallel(net, sync=sync, virtual_ranks=settings.virtual_ranks)
    optimizer = _adamw(model, settings)
    folder = RunFolder(settings.out)
    local_sgd = settings.local_sgd
    loop = None if local_sgd is None else local_sgd.build_loop(model, optimizer)
    stateful: dict[str, Any] = {} if loop is None else {"loop": loop}
    checkpoint = Checkpoint(
        folder.checkpoint,
        model,
        optimizer,
        facts=checkpoint_facts(settings, size, corpus, windows),
        **stateful,
    )
    found = checkpoint.load() if settings.existing == "resume" else None
    if found is not None:
        check_facts(found.path, found.facts, settings, size, corpus)
        windows = found.facts["windows"]
    job = TrainingJob(
        settings=settings,
        world=world,
        folder=folder,
        corpus=corpus,
        size=size,
        model=model,
        optimizer=optimizer,
        checkpoint=checkpoint,
        batches=_training_windows(settings, corpus, size, world, windows),
        held_out=_held_out_windows(settings, corpus, size, world),
        metrics=StepMetrics(folder.path),
        loggers=LoggerGroup(make_loggers(settings.log) if settings.log and world.rank == 0 else ()),
        loop=loop,
        sent_bytes=SentBytes(interface_start=interface_nbytes()),
        choice=choice,
        elastic=_elastic(model, optimizer, checkpoint, settings, watchdog),
        reported=checkpoint.step,
    )
    if found is not None:
        job.go_back(found)
    job.elastic.add("training", job)
    job.elastic.on_world(job.move_to)
    return job


def _training_windows(
    settings: TrainSettings, corpus: Corpus, size: GptSize, world: World, windows: int
) -> TrainingWindows:
    """Return this rank's training data, of a global batch of `windows`."""
    return TrainingWindows(
        corpus.train,
        min(settings.micro_batch_size, -(-windows // (settings.virtual_ranks or world.size))),
        size.context,
        rank=world.rank,
        size=world.size,
        seed=settings.seed,
        windows=windows,
        virtual_ranks=settings.virtual_ranks,
    )


def _held_out_windows(settings: TrainSettings, corpus: Corpus, size: GptSize, world: World) -> HeldOutWindows:
    """Return this rank's part of the held-out data."""
    return HeldOutWindows(
        corpus.held_out,
        settings.micro_batch_size,
        size.context,
        rank=world.rank,
        size=world.size,
        limit=settings.eval_windows,
        virtual_ranks=settings.virtual_ranks,
    )


def _elastic(
    model: DataParallel,
    optimizer: ShardedOptimizer,
    checkpoint: Checkpoint,
    settings: TrainSettings,
    watchdog: Watchdog | None,
) -> Elastic:
    """Return what recovers from failures of other ranks, where the settings allow that."""
    return Elastic(
        model,
        optimizer,
        active=settings.recovers_live(model.plan.shard),
        watchdog=watchdog,
        min_ranks=settings.min_ranks or 1,
        checkpoint=checkpoint,
    )


def _adamw(model: DataParallel, settings: TrainSettings) -> ShardedOptimizer:
    """Return the optimizer of the model, which is sharded if the strategy shards."""
    options: dict[str, Any] = {"weight_decay": settings.weight_decay, "betas": (0.9, 0.95), "fused": True}
    return ShardedOptimizer(model, torch.optim.AdamW, lr=settings.lr, **options)


def _facts(settings: TrainSettings, corpus: Corpus) -> list[str]:
    """Return what must be the same on all ranks; nodes may see the run folder under other paths."""
    values = asdict(replace(settings, out="run"))
    return [
        *(f"{name}={value!r}" for name, value in values.items()),
        f"data of number {corpus.fingerprint}",
    ]


def held_out_loss(model: nn.Module, held_out: HeldOutWindows, world: World) -> float:
    """Return the mean loss over the held-out windows of all ranks, in nats per token; collective.

    Exact for any number of ranks: each rank sums over its own windows, or those of each of its virtual ranks; then all
    sums are gathered and added exactly.
    """
    with step_state.running_task("eval"):
        training = model.training
        model.eval()
        parts = [summed_token_loss(model, part, world.device) for part in held_out.by_virtual_rank()]
        model.train(training)
        own = torch.zeros(held_out.most_parts, 2, dtype=torch.float64)
        own[: len(parts)] = torch.tensor(parts, dtype=torch.float64)
        rows = torch.cat(gather_rows(own))
    return math.fsum(rows[:, 0].tolist()) / rows[:, 1].sum().item()
