"""Whole training steps that the CPU and a simulated accelerator run alike: results have to be equal to the bit.

A scene is a function of a `Place`; it returns tensors of the CPU. Names of scenes are the keys of `SCENES`.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

import paceline
from paceline import Compression, Sync
from paceline._core.summation_tree import leaves_of
from paceline.parallel.engine.reducer import Reducer
from paceline.parallel.sharding import sharded_layout
from scene_models import WIDTH, Repeated, TwoStreams, Unused, layers

__all__ = ["SCENES", "Place"]

STEPS = 6
"""The round status is read late from the fourth step on."""

KIB = 2.0**-10
"""Of a MiB."""


_meshes: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, int], DeviceMesh]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Place:
    """Where a scene runs.

    Attributes:
        rank: this rank.
        size: number of ranks.
        device: "cpu" or "sim".
        group: the ranks' group for tensors of the device.
    """

    rank: int
    size: int
    device: str
    group: dist.ProcessGroup

    def side_stream(self) -> Any:
        """Return a stream beside the current one; None on the CPU."""
        return None if self.device == "cpu" else torch.get_device_module(self.device).Stream()

    def mesh(self, shape: tuple[int, int]) -> DeviceMesh:
        """Return the ranks as a mesh of two axes, the same one for all scenes of a world."""
        known = _meshes.setdefault(self.group, {})
        if shape not in known:
            ranks, backend = torch.arange(self.size).view(shape), dist.get_backend_config(self.group)
            rows = [dist.new_group(row.tolist(), backend=backend) for row in ranks]
            columns = [dist.new_group(column.tolist(), backend=backend) for column in ranks.T]
            row, column = divmod(self.rank, shape[1])
            groups, names = [columns[column], rows[row]], ("replicate", "shard")
            known[shape] = DeviceMesh.from_group(groups, self.device, ranks, mesh_dim_names=names)
        return known[shape]


def on_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [each.detach().cpu().clone() for each in tensors]


@dataclass(frozen=True, kw_only=True)
class Training:
    """Steps of a `DataParallel` and a `ShardedOptimizer`.

    Attributes:
        sync: strategy.
        call: "samples", whose numbers change from step to step, "share" (``model.backward(loss)``) or "equal".
        model: makes the module.
        backwards: per step; all but the last are accumulated.
        empty: one rank after the other has no samples in a step.
        clip: "model", or "torch" for ``torch.nn.utils.clip_grad_norm_``.
        dtype: of the parameters.
        optimizer: class and options.
        options: of `DataParallel`.
        axes: replicas and shards, if the ranks are a mesh.
        hook: registers a communication hook.
        after: called with model, optimizer and step after each step's backwards; returns whether to update.
        finish: called with model and optimizer at the end; returns more tensors to compare.
        virtual_ranks: over which gradients are summed; each rank then has a backward for each of its own.
    """

    sync: str | Sync
    call: str = "samples"
    model: Callable[[], nn.Module] = layers
    backwards: int = 1
    empty: bool = False
    clip: str = ""
    dtype: torch.dtype = torch.float32
    optimizer: tuple[type[torch.optim.Optimizer], dict[str, Any]] = (torch.optim.AdamW, {"lr": 0.02})
    options: dict[str, Any] = field(default_factory=dict)
    axes: tuple[int, int] | None = None
    hook: Callable[[Any, Any], Any] | None = None
    after: Callable[[Any, Any, int], bool] | None = None
    finish: Callable[[Any, Any], Sequence[Tensor]] | None = None
    virtual_ranks: int | None = None

    def __call__(self, place: Place) -> list[Tensor]:
        torch.manual_seed(3)
        net = self.model().to(self.dtype).to(place.device)
        if isinstance(net, TwoStreams):
            net.side = place.side_stream()
        group = place.group if self.axes is None else place.mesh(self.axes)
        model = paceline.DataParallel(
            net, sync=self.sync, group=group, virtual_ranks=self.virtual_ranks, **self.options
        )
        kind, options = self.optimizer
        optim = paceline.ShardedOptimizer(model, kind, **options)
        if self.hook is not None:
            model.register_comm_hook(None, self.hook)
        for step in range(STEPS):
            self._backwards(model, place, step)
            if self.clip == "model":
                model.clip_grad_norm_(0.2)
            elif self.clip == "torch":
                nn.utils.clip_grad_norm_(net.parameters(), 0.2)
            if self.after is None or self.after(model, optim, step):
                optim.step()
                optim.zero_grad()
        more = [] if self.finish is None else self.finish(model, optim)
        return on_cpu([*model.whole_parameters(), *more])

    def _backwards(self, model: Any, place: Place, step: int) -> None:
        net = model.module
        if isinstance(net, Unused):
            net.used = step != 1 and (place.rank + step) % place.size != 0
        if isinstance(net, Repeated):
            net.times = 1 + step + (place.rank if step == 3 else 0)
        for number, (x, y) in enumerate(self._batches(place, step)):
            accumulates = number < self.backwards - 1 and self.virtual_ranks is None
            with model.accumulate() if accumulates else contextlib.nullcontext():
                loss = (model(x) - y).square().mean() if len(x) else None
                if self.call == "samples":
                    model.backward(loss, samples=len(x))
                elif self.call == "share":
                    model.backward(loss)
                else:
                    assert loss is not None, "no rank is empty"
                    loss.backward()

    def _batches(self, place: Place, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1000 * place.rank + step)
        backwards = self.backwards
        if self.virtual_ranks is not None:
            backwards = len(leaves_of(place.rank, place.size, self.virtual_ranks))
        for number in range(backwards):
            rows = 3 + 2 * place.rank + (step + number) % 3 if self.call == "samples" else 5
            if self.empty and step % (place.size + 1) == place.rank:
                rows = 0
            given = torch.randn(rows, WIDTH + 4, generator=generator).to(self.dtype)
            if place.device != "cpu" and rows:
                given = given.pin_memory().to(place.device, non_blocking=True)
            yield given[:, :WIDTH], given[:, WIDTH:]


def all_reduce_hook(state: None, bucket: Any) -> Any:
    """Average a bucket by a collective, and scale it in a callback of its future."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0] / dist.get_world_size())


def kept_in_even_steps(model: Any, optim: Any, step: int) -> bool:
    """Let the next round carry the gradient of an even step."""
    return step % 2 == 1


def dropped_in_even_steps(model: Any, optim: Any, step: int) -> bool:
    """Drop the gradient of an even step unused."""
    if step % 2 == 0:
        optim.zero_grad()
    return step % 2 == 1


def in_parts(place: Place) -> list[Tensor]:
    """Train with an update for each bucket."""
    with mock.patch.object(
        sharded_layout, "update_parts", lambda sizes, accelerator: [[at] for at in range(len(sizes))]
    ):
        return Training(sync=Sync(bucket_mib=2.5 * KIB, shard="optimizer"), empty=True)(place)


def averaged_beside(model: Any, optim: Any, step: int) -> bool:
    """Update, then average the parameters on another stream, which is ordered behind the step only."""
    optim.step()
    params = [param.detach() for param in model.parameters()]
    if not hasattr(model, "averages"):
        model.averages = [param.clone() for param in params]
    device = params[0].device
    with contextlib.ExitStack() as stack:
        if device.type != "cpu":
            streams = torch.get_device_module(device)
            now, side = streams.current_stream(), streams.Stream()
            side.wait_stream(now)
            stack.callback(now.wait_stream, side)
            stack.enter_context(streams.stream(side))
        torch._foreach_lerp_(model.averages, params, 0.3)
    optim.zero_grad()
    return False


def averages(model: Any, optim: Any) -> list[Tensor]:
    """Return what `averaged_beside` has averaged."""
    return model.averages


def read_unseen(model: Any, optim: Any, step: int) -> bool:
    """Update, and read the parameters where torch's functions are not watched."""
    optim.step()
    optim.zero_grad()
    model.wait_for_parameters()
    with torch._C.DisableTorchFunction():
        model.seen = [param.detach().clone() for param in model.parameters()]
    return False


def seen(model: Any, optim: Any) -> list[Tensor]:
    """Return what `read_unseen` has read."""
    return model.seen


def gathered_state(model: Any, optim: Any) -> list[Tensor]:
    """Return the optimizer's state, whole."""
    optim.consolidate_state_dict()
    states = optim.state_dict()["state"] if dist.get_rank() == 0 else {}
    return [state["exp_avg"] for _, state in sorted(states.items())]


TWO_STREAMS = partial(Training, model=TwoStreams)
SMALL_BUCKETS = Sync(bucket_mib=2.5 * KIB)  # of two or three layers each


def compressed(compression: str | Compression, **options: Any) -> Sync:
    if isinstance(compression, str):
        compression = Compression(compression, exempt_below=64, block=32, **options)
    return Sync(bucket_mib=6 * KIB, compression=compression)


@dataclass(frozen=True)
class Outer:
    """Steps of a bare model in a block of local training.

    Attributes:
        kind: name of its class.
        options: of it.
        saved_at: after this step its state is saved, loaded, and compared.
    """

    kind: str
    options: dict[str, Any]
    saved_at: int = 0

    def __call__(self, place: Place) -> list[Tensor]:
        torch.manual_seed(3)
        net = layers().to(place.device)
        optim = torch.optim.AdamW(net.parameters(), lr=0.01 * (1 + place.rank))
        generator = torch.Generator().manual_seed(place.rank)
        more = []
        with getattr(paceline, self.kind)(net, optim, group=place.group, **self.options) as loop:
            for step in range(1, STEPS + 1):
                x = torch.randn(5, WIDTH, generator=generator).to(place.device)
                net(x).square().mean().backward()
                optim.step()
                optim.zero_grad()
                if step == self.saved_at:
                    state = loop.state_dict()
                    more = on_cpu([each for each in pytree.tree_leaves(state) if isinstance(each, Tensor)])
                    loop.load_state_dict(state, loop.rank_state_dict())
        return on_cpu([*net.parameters(), *more])


def scaled(place: Place) -> list[Tensor]:
    """Train with a GradScaler, whose scale is too large for the first step."""
    torch.manual_seed(3)
    model = paceline.DataParallel(layers().to(place.device), sync="sharded", group=place.group)
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=0.02)
    scaler = torch.amp.GradScaler(place.device, init_scale=2.0**127, growth_interval=2)
    generator = torch.Generator().manual_seed(place.rank)
    for _ in range(STEPS):
        x = torch.randn(5, WIDTH, generator=generator).to(place.device)
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optim)
        scaler.update()
        optim.zero_grad()
    return on_cpu(model.whole_parameters())


def delayed(place: Place) -> list[Tensor]:
    """Train with torch's interface, where some gradients are reduced together at the end of backward."""
    torch.manual_seed(3)
    net = layers().to(place.device)
    model = paceline.DistributedDataParallel(
        net,
        device_ids=None if place.device == "cpu" else [0],
        process_group=place.group,
        delay_all_reduce_named_params=[
            (name, param) for name, param in net.named_parameters() if name[0] == "2"
        ],
        param_to_hook_all_reduce=net[0].weight,
    )
    optim = torch.optim.AdamW(net.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(place.rank)
    for _ in range(STEPS):
        x = torch.randn(5, WIDTH, generator=generator).to(place.device)
        model(x).square().mean().backward()
        optim.step()
        optim.zero_grad()
    return on_cpu(list(net.parameters()))


def guarded(place: Place, sync: str | Sync, model: Callable[[], nn.Module] = layers) -> list[Tensor]:
    """Train under a guard that skips steps whose gradient is not finite, as it is in two steps on one rank."""
    torch.manual_seed(3)
    net = model().to(place.device)
    side = place.side_stream()
    if isinstance(net, TwoStreams):
        net.side = side
    wrapped = paceline.DataParallel(net, sync=sync, group=place.group)
    optim = paceline.ShardedOptimizer(wrapped, torch.optim.AdamW, lr=0.02)
    guard = paceline.NonFiniteGuard(wrapped, optim, action="skip")
    generator = torch.Generator().manual_seed(place.rank)
    for step in range(STEPS + 1):
        x = torch.randn(5, WIDTH, generator=generator).to(place.device)
        loss = wrapped(x).square().mean()
        (loss * torch.inf if step in (1, 5) and place.rank == 0 else loss).backward()
        if side is not None:
            with torch.get_device_module(place.device).stream(side):
                torch.zeros(8, device=place.device)  # may get memory that was used in backward
        optim.step()
        optim.zero_grad()
    assert guard.latest is not None, "two gradients are not finite"
    reported = torch.tensor([guard.skipped, guard.latest.step, len(guard.latest.names), *guard.latest.ranks])
    return on_cpu([*wrapped.whole_parameters(), reported])


def given_up(place: Place, compression: str) -> list[Tensor]:
    """Give up a round whose first bucket is sent; rank 0 deletes its model, the others wait for the bucket."""
    torch.manual_seed(3)
    net = layers().to(place.device)
    model = paceline.DataParallel(net, sync=compressed(compression), group=place.group)
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(place.rank)).to(place.device)
    for _ in range(2):
        model.backward(model(x).square().mean())
        model.zero_grad()
    with (
        contextlib.suppress(KeyboardInterrupt),
        mock.patch.object(Reducer, "finish", side_effect=KeyboardInterrupt),
    ):
        model.backward(model(x).square().mean())
    first = model.engine.buckets[0]
    assert first.launched
    assert first.compressed is not None, "it is compressed"
    if place.rank:
        first.compressed.wait()
        return on_cpu([first.flat])
    del model, net, first
    gc.collect()
    torch.ones(8, device=place.device)
    return []


SCENES: dict[str, Callable[[Place], list[Tensor]]] = {
    "naive": Training(sync="naive", call="equal"),
    "flat": Training(sync="flat", clip="model"),
    "overlap": Training(sync="overlap", call="share", backwards=2),
    "bucketed": Training(sync=SMALL_BUCKETS, empty=True),
    "bucketed, equal, clipped": Training(sync=SMALL_BUCKETS, call="equal", clip="torch"),
    "sharded": Training(sync=Sync(bucket_mib=2.5 * KIB, shard="optimizer"), empty=True),
    "sharded, accumulated, clipped": Training(sync="sharded", backwards=2, clip="model"),
    "virtual ranks": Training(sync=SMALL_BUCKETS, virtual_ranks=5, clip="model", empty=True),
    "virtual ranks, sharded": Training(sync="sharded", virtual_ranks=5, clip="model"),
    "sharded, clipped by torch": Training(sync="sharded", call="equal", clip="torch", finish=gathered_state),
    "sharded, kept": Training(sync="sharded", after=kept_in_even_steps),
    "sharded, dropped": Training(sync="sharded", after=dropped_in_even_steps),
    "sharded, in parts": in_parts,
    "sharded, averaged beside": Training(sync="sharded", after=averaged_beside, finish=averages),
    "sharded, read unseen": Training(sync="sharded", after=read_unseen, finish=seen),
    "two axes": Training(
        sync=Sync(bucket_mib=2.5 * KIB, shard="optimizer"), axes=(2, 1), empty=True, clip="model"
    ),
    "two axes, full-shard": Training(sync="full-shard", axes=(2, 1), backwards=2),
    "full-shard": Training(sync="full-shard"),
    "full-shard, accumulated, clipped": Training(sync="full-shard", call="equal", backwards=2, clip="model"),
    "two streams": TWO_STREAMS(sync=SMALL_BUCKETS),
    "two streams, overlap": TWO_STREAMS(sync="overlap", call="equal", backwards=2),
    "two streams, sharded": TWO_STREAMS(sync=Sync(bucket_mib=2.5 * KIB, shard="optimizer"), call="share"),
    "two streams, int8": TWO_STREAMS(sync=compressed("int8")),
    "unused": Training(sync=SMALL_BUCKETS, model=Unused),
    "unused, sharded": Training(sync="sharded", call="equal", model=Unused),
    "late gradients": Training(sync="overlap", model=Repeated, optimizer=(torch.optim.SGD, {"lr": 0.1})),
    "bf16 reduced in float32": Training(
        sync=SMALL_BUCKETS, dtype=torch.bfloat16, options={"reduce_dtype": torch.float32}
    ),
    "bf16": Training(sync="flat", call="share", dtype=torch.bfloat16, clip="model"),
    "int8": Training(sync=compressed("int8"), call="equal"),
    "sharded, int8": Training(
        sync=Sync(
            bucket_mib=6 * KIB, shard="optimizer", compression=Compression("int8", exempt_below=64, block=32)
        ),
        call="share",
    ),
    "bf16 packets": Training(sync=compressed("bf16"), backwards=2),
    "int4": Training(sync=compressed("int4"), call="share"),
    "topk": Training(
        sync=compressed("topk", keep=0.1, momentum=0.5),
        empty=True,
        optimizer=(torch.optim.SGD, {"lr": 0.1}),
    ),
    "powersgd": Training(sync=compressed("powersgd", rank=2), clip="torch"),
    "flat, powersgd": Training(
        sync=Sync(math.inf, overlap=False, compression=Compression("powersgd", rank=2, exempt_below=64)),
        call="share",
    ),
    "hook": Training(sync=SMALL_BUCKETS, hook=all_reduce_hook),
    "local SGD, int8": Outer("LocalSGD", {"every": 2, "fragments": 2, "delay": 0, "compression": "int8"}),
    "local SGD, delayed": Outer("LocalSGD", {"every": 2, "delay": 1, "mix": 0.3, "compression": None}),
    "DiLoCo, saved": Outer("DiLoCo", {"every": 3, "delay": 2, "compression": "topk-int2"}, saved_at=4),
    "DiLoCo, warm-up": Outer("DiLoCo", {"every": 2, "warmup": 3}),
    "given up, int8": partial(given_up, compression="int8"),
    "given up, powersgd": partial(given_up, compression="powersgd"),
    "GradScaler": scaled,
    "delayed parameters": delayed,
    "guarded": partial(guarded, sync="sharded"),
    "two streams, guarded": partial(guarded, sync=SMALL_BUCKETS, model=TwoStreams),
}
