"""What `beside_dcp.py` compares: the same training, saved and loaded by Paceline and by torch.distributed.checkpoint.

Torch's side has DDP where Paceline holds whole parameters, and FSDP2 where it shards. (ZeroRedundancyOptimizer, torch's
ZeRO-1, has to gather the whole optimizer state on one rank before it can be saved.) Beside ``sync="sharded"``, FSDP2
keeps parameters gathered from forward to backward (``reshard_after_forward=False``).

Torch saves and loads in its fastest form: the state dictionaries of model and optimizer as they are, without
``get_state_dict``; tensors are loaded in place, without ``load_state_dict`` of the model.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import paceline
from bench_harness.ranks import tuned_ddp
from paceline.checkpoint.format.tensor_files import block_checksums, bytes_of
from paceline.parallel.sharding.fsdp import default_units
from paceline.parallel.strategy import STRATEGIES
from paceline.tools.models.gpt import GPT, token_loss
from paceline.tools.models.gpt_sizes import GptSize
from paceline.tools.models.token_windows import TokenBatch

__all__ = ["PEERS", "STAGING", "DcpRun", "OurRun", "Staging", "digest"]

ADAMW: dict[str, Any] = {"lr": 3e-4, "fused": True}

PEERS = {"bucketed": "DDP", "sharded": "FSDP2, gathered until backward", "full-shard": "FSDP2"}
"""Torch's side by Paceline's strategy."""


@dataclass(frozen=True)
class Staging:
    """Settings of torch's asynchronous save.

    Attributes:
        kept: one stager, with its memory, makes the copies of all saves; False: each save has its own, as by default.
        shared: its memory is shared with other processes.
        background: it copies in a thread, and the program must wait for it before the optimizer's step. Torch documents
            that this needs CUDA.
        process: another process writes.
        threads: that write, each to a file of its own.
        cached_plan: the plan of a save is kept for the next one.
    """

    kept: bool = True
    shared: bool = False
    background: bool = False
    process: bool = False
    threads: int = 1
    cached_plan: bool = False

    def stager(self) -> DefaultStager | None:
        """Return a stager; None: torch makes one for each save."""
        if not self.kept:
            return None
        return DefaultStager(StagingOptions(False, self.shared, self.background, False))


STAGING = {
    "default": Staging(kept=False),
    "stager kept": Staging(),
    "stager kept, plan cached": Staging(cached_plan=True),
    "stager kept, 2 threads write": Staging(threads=2),
    "stager kept, shared memory": Staging(shared=True),
    "stager kept, a process writes": Staging(shared=True, process=True, cached_plan=True),
    "stager kept, a thread copies": Staging(background=True),
}


class TrainingRun:
    """A model in training, with its checkpoints.

    Args:
        sync: Paceline's strategy, or the one to compare with.
        size: of the model.
        batch: of every step.
        folder: of the checkpoints.

    Attributes:
        optimizer: of the model.
    """

    optimizer: torch.optim.Optimizer

    def __init__(self, sync: str, size: GptSize, batch: TokenBatch, folder: Path) -> None:
        torch.manual_seed(0)
        self.batch, self.folder = batch, folder
        self.net = GPT(size)
        self.build(sync)

    def build(self, sync: str) -> None:
        """Wrap the model, and make its optimizer and what saves them."""
        raise NotImplementedError

    def forward_backward(self) -> None:
        """Compute gradients."""
        raise NotImplementedError

    def step(self, ready: Callable[[], float] = lambda: 0.0) -> float:
        """Run a training step; return the seconds of `ready`, which returns once the state may change."""
        self.forward_backward()
        waited = ready()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return waited

    def time_step(self) -> dict[str, float]:
        """Run a step without a save; return its seconds, as `timed_save` does."""
        dist.barrier()
        started = time.perf_counter()
        self.step()
        return {"step": time.perf_counter() - started}

    def tensors(self, *, optimizer: bool = True) -> list[Tensor]:
        """Return weights, and optimizer state, as this rank holds them."""
        raise NotImplementedError


def timed_save(
    run: TrainingRun, save: Callable[[], Any], ready: Callable[[Any], float], finish: Callable[[Any], None]
) -> dict[str, float]:
    """Save, and run a step meanwhile; return the seconds of this rank.

    Args:
        run: the training.
        save: begins the save.
        ready: waits until the optimizer may step; returns how long it did.
        finish: waits until the checkpoint is complete.

    Returns:
        ``call``: until training may go on; ``wait``: until the optimizer may step, after forward and backward;
        ``step``: from the beginning of the save to the end of the step; ``total``: until the checkpoint is complete.
    """
    dist.barrier()
    started = time.perf_counter()
    pending = save()
    called = time.perf_counter()
    waited = run.step(lambda: ready(pending))
    stepped = time.perf_counter()
    finish(pending)
    done = time.perf_counter()
    return {"call": called - started, "wait": waited, "step": stepped - started, "total": done - started}


class OurRun(TrainingRun):
    """Training with Paceline."""

    def build(self, sync: str) -> None:
        self.model = paceline.DataParallel(self.net, sync=STRATEGIES[sync])
        self.optimizer = self.sharded = paceline.ShardedOptimizer(self.model, torch.optim.AdamW, **ADAMW)
        self.checkpoint = paceline.Checkpoint(self.folder / "times", self.model, self.optimizer)

    def forward_backward(self) -> None:
        self.model.backward(token_loss(self.model(self.batch.inputs), self.batch.targets))

    def save(self) -> dict[str, float]:
        """Save while training goes on; return the seconds of `timed_save`."""
        return timed_save(self, self.checkpoint.save, self._ready, lambda _: self.checkpoint.wait())

    def _ready(self, _: object) -> float:
        """Do what the checkpoint's hook does when the optimizer steps, which then has nothing to wait for."""
        started = time.perf_counter()
        self.checkpoint._writer.before_step()
        return time.perf_counter() - started

    def tidy(self) -> None:
        """Wait until older checkpoints are removed."""
        while dist.get_rank() == 0 and len(list(self.checkpoint.folder.glob("step-*"))) > 2:
            time.sleep(0.01)
        dist.barrier()

    def load(self) -> float:
        """Load, with what only the next step would read; return the seconds."""
        dist.barrier()
        started = time.perf_counter()
        self.checkpoint.load()
        if self.sharded.in_shards:
            self.sharded._build()
        return time.perf_counter() - started

    def first_save(self, *, optimizer: bool, asynchronous: bool) -> Callable[[], Callable[[], None]]:
        """Return what begins a save, and returns what waits until that is complete.

        Args:
            optimizer: whether its state is saved, too.
            asynchronous: whether training goes on meanwhile.
        """
        objects = [self.model, self.optimizer] if optimizer else [self.model]
        checkpoint = paceline.Checkpoint(self.folder / "first", *objects, asynchronous=asynchronous)
        checkpoint.step = 1

        def begin() -> Callable[[], None]:
            checkpoint.save()
            return checkpoint.wait

        return begin

    def tensors(self, *, optimizer: bool = True) -> list[Tensor]:
        self.model.wait_for_parameters()
        shards = self.sharded.shards()
        states = self.sharded.state_dict()["state"] if shards is None else shards
        return local_tensors([self.net.state_dict(), states if optimizer else {}])


class DcpRun(TrainingRun):
    """Training with torch."""

    def build(self, sync: str) -> None:
        self.model: Any = self.net
        if sync == "bucketed":
            self.model = tuned_ddp(self.net, 25)
        else:
            for unit in [*default_units(self.net), self.net]:
                fully_shard(unit, reshard_after_forward=sync == "full-shard")
        self.optimizer = torch.optim.AdamW(self.net.parameters(), **ADAMW)
        self._group = dist.new_group(backend="gloo")  # a save in a thread has collectives of its own
        self._stagers = {name: each.stager() for name, each in STAGING.items()}
        self._saves = 0

    def forward_backward(self) -> None:
        token_loss(self.model(self.batch.inputs), self.batch.targets).backward()

    def save(self, staging: str) -> dict[str, float]:
        """Save while training goes on; return the seconds of `timed_save`.

        Args:
            staging: one of `STAGING`.
        """
        self._saves += 1
        return timed_save(
            self, lambda: self._begin(staging), _staged, lambda pending: _written(pending).result()
        )

    def _begin(self, staging: str) -> Any:
        settings = STAGING[staging]
        return dcp.async_save(
            self.state(),
            storage_writer=dcp.FileSystemWriter(self._place(), thread_count=settings.threads),
            planner=DefaultSavePlanner(enable_plan_caching=settings.cached_plan),
            async_stager=self._stagers[staging],
            async_checkpointer_type=AsyncCheckpointerType.PROCESS
            if settings.process
            else AsyncCheckpointerType.THREAD,
            process_group=self._group,
        )

    def _place(self) -> Path:
        return self.folder / f"save-{self._saves}"

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        return {"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tidy(self) -> None:
        """Remove the latest save."""
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self._place())
        dist.barrier()

    def save_for_loads(self, threads: int) -> Path:
        """Save; return the folder.

        Args:
            threads: that write, each to a file of its own.
        """
        place = self.folder / f"loads-{threads}"
        dcp.save(self.state(), storage_writer=dcp.FileSystemWriter(place, thread_count=threads))
        return place

    def load(self, place: Path, *, alone: bool) -> float:
        """Load into weights in place, and into new memory for the optimizer, as in a new process; return the seconds.

        Args:
            place: the folder.
            alone: no rank coordinates.
        """
        dist.barrier()
        started = time.perf_counter()
        state = self.state()
        state["optimizer"]["state"] = pytree.tree_map_only(
            Tensor, torch.empty_like, state["optimizer"]["state"]
        )
        dcp.load(state, storage_reader=dcp.FileSystemReader(place), no_dist=alone)
        self.optimizer.load_state_dict(state["optimizer"])
        return time.perf_counter() - started

    def first_save(self, *, optimizer: bool, asynchronous: bool) -> Callable[[], Callable[[], None]]:
        """Return what begins a save; see `OurRun.first_save`."""
        state = self.state() if optimizer else {"model": self.net.state_dict()}
        writer = dcp.FileSystemWriter(self.folder / "first")
        stager = STAGING["stager kept"].stager()

        def begin() -> Callable[[], None]:
            if not asynchronous:
                dcp.save(state, storage_writer=writer)
                return lambda: None
            pending = dcp.async_save(
                state, storage_writer=writer, async_stager=stager, process_group=self._group
            )
            return lambda: _written(pending).result()

        return begin

    def tensors(self, *, optimizer: bool = True) -> list[Tensor]:
        return local_tensors(
            [self.net.state_dict(), self.optimizer.state_dict()["state"] if optimizer else {}]
        )


def _staged(pending: Any) -> float:
    """Wait until a save has its copies; return the seconds."""
    started = time.perf_counter()
    if hasattr(pending, "staging_completion"):
        pending.staging_completion.result()
    return time.perf_counter() - started


def _written(pending: Any) -> Any:
    return getattr(pending, "upload_completion", pending)


def local_tensors(state: Any) -> list[Tensor]:
    """Return the tensors in a state; of sharded ones this rank's shards."""
    leaves = [leaf.detach() for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)]
    return [leaf.to_local() if isinstance(leaf, DTensor) else leaf for leaf in leaves]


def digest(tensors: list[Tensor]) -> list[str]:
    """Return the checksum of each tensor."""
    return [block_checksums(bytes_of(tensor.contiguous())) for tensor in tensors]
