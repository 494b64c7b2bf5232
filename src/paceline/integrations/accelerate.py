"""`PacelineAccelerator`: Hugging Face's `Accelerator` with Paceline's engine instead of torch's DDP.

[Note: accumulation] ``accelerator.accumulate(model)`` enters the model's ``no_sync``, which `DataParallel` has, so
gradients are sent once per optimizer step. ``backward(loss, samples=n)`` weights every micro-batch of every rank by its
samples; Accelerate's division by the number of micro-batches is left out there.

[Note: state of engines] The total by which losses are weighted (`paceline.parallel.engine.loss_weights`) decides the
last bits of the next step. Accelerate's folder gets it in a file of its own, so that a resumed run has the same bits.
Without that file, as in states of Accelerate or of an older Paceline, runs agree to rounding.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.checkpoint.checkpoint_contents import engine_state
from paceline.data.batch_sample_count import with_samples
from paceline.data.loader import Loader
from paceline.errors import UsageError
from paceline.integrations.wrapped_models import (
    WrappedModels,
    check_ranks,
    missing_library,
    redirect_scheduler,
    whole_state,
)
from paceline.parallel.data_parallel import DataParallel
from paceline.parallel.sharding.zero import ShardedOptimizer
from paceline.parallel.strategy import Sync

try:
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderStateMixin
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.state import GradientState
    from accelerate.utils import DistributedType
    from accelerate.utils.operations import send_to_device
except ImportError as error:
    raise missing_library(__name__, "accelerate", error) from error

__all__ = ["PacelineAccelerator"]

_SUPPORTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
_ENGINES_FILE = "paceline_engines.json"
_PLUGINS = (
    "deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "parallelism_config"
)  # fmt: skip


class PacelineAccelerator(Accelerator):
    """Hugging Face's `Accelerator`, whose models Paceline's engine synchronises.

    A program changes its import and constructor. ``prepare`` wraps models in `DataParallel`, and if the strategy
    shards, turns torch's optimizers into `ShardedOptimizer`s; ``accumulate``, ``clip_grad_norm_``,
    ``gather_for_metrics``, ``autocast``, ``save_state`` and ``load_state`` work as before. A `Loader` may be prepared
    too: its batches are moved to the device, the end of its epoch ends an accumulation, and its position is part of
    ``save_state``.

    Call `paceline.init` before, for the paceline backend and Paceline's rendezvous; otherwise Accelerate creates the
    process group.

    Args:
        sync: the strategy, as in `DataParallel`.
        options: passed to `Accelerator`.

    Raises:
        UsageError: options for FSDP, DeepSpeed, Megatron or other parallelism, a DDP communication hook, or an unknown
            strategy.

    Example:
        >>> accelerator = PacelineAccelerator(cpu=True, gradient_accumulation_steps=2)
        >>> net = nn.Linear(4, 1)
        >>> net, optim = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
        >>> for inputs in torch.ones(4, 8, 4):
        ...     with accelerator.accumulate(net):
        ...         accelerator.backward(net(inputs).square().mean(), samples=len(inputs))
        ...         optim.step()
        ...         optim.zero_grad()
        >>> net.engine.step  # gradients were synchronised twice
        2
    """

    def __init__(self, *, sync: str | Sync = "bucketed", **options: Any) -> None:
        self._wrapped = WrappedModels(sync)
        for name in _PLUGINS:
            if options.get(name) is not None:
                raise UsageError(
                    f"PacelineAccelerator({name}=...)",
                    remedy='leave it out, and shard with sync="sharded" or sync="full-shard"',
                )
        super().__init__(**options)
        if self.distributed_type not in _SUPPORTED:
            raise UsageError(
                f"PacelineAccelerator in an environment for {self.distributed_type.value}",
                remedy="start with `paceline run`, torchrun or `accelerate launch` without FSDP, DeepSpeed or others",
            )
        check_ranks("PacelineAccelerator", self.num_processes)
        hook = getattr(self.ddp_handler, "comm_hook", "no")
        hook = str(getattr(hook, "value", hook))
        if hook != "no":
            raise UsageError(
                f"PacelineAccelerator with the communication hook {hook!r}",
                remedy="compress by the strategy: sync=paceline.Sync(compression=...)",
            )
        self.register_save_state_pre_hook(self._save_engines)
        self.register_load_state_pre_hook(self._load_engines)

    # ------------------------------------------------------------------ prepare

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers, and return them in the same order.

        Models are prepared first, wherever they stand, and then the optimizers, which are sharded if `sync` shards.
        """
        ready = [self.prepare_model(each) if isinstance(each, nn.Module) else each for each in args]
        replaced: dict[int, torch.optim.Optimizer] = {}
        for at, each in enumerate(ready):
            if isinstance(each, torch.optim.Optimizer) and not isinstance(each, AcceleratedOptimizer):
                ready[at] = replaced[id(each)] = self._wrapped.adopt(each)
            elif isinstance(each, Loader):
                ready[at] = _PreparedLoader(each, self)
        for each in ready:
            if isinstance(each, torch.optim.lr_scheduler.LRScheduler):
                redirect_scheduler(each, replaced)
        return super().prepare(*ready, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Move a model to the device, set up mixed precision and compilation, and wrap it in `DataParallel`.

        Args:
            model: the bare module.
            device_placement: as in Accelerate.
            evaluation_mode: leave it unwrapped.
        """
        if isinstance(model, DataParallel):
            return model
        model = super().prepare_model(model, device_placement, evaluation_mode=True)
        trains = any(param.requires_grad for param in model.parameters())
        return self._wrapped.wrap(model) if trains and not evaluation_mode else model

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the bare module; the arguments are Accelerate's."""
        bare = model.module if isinstance(model, DataParallel) else model
        return super().unwrap_model(bare, keep_fp32_wrapper, keep_torch_compile)

    # ------------------------------------------------------------------ backward

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Keep the gradients of backwards in this block on this rank; in one process too, for the same rounding."""
        with model.accumulate() if isinstance(model, DataParallel) else super().no_sync(model):
            yield

    def backward(self, loss: torch.Tensor | None, samples: float | None = None, **kwargs: Any) -> None:
        """Run backward; the gradient is sent unless ``accumulate`` or ``no_sync`` hold it back.

        Args:
            loss: scalar; None on a rank without samples.
            samples: number of samples (or tokens) over which `loss` is the mean: the gradient is then that of the mean
                over all samples of all ranks and micro-batches. None: every rank and micro-batch counts the same, as
                in Accelerate.
            kwargs: passed to ``backward``.

        Raises:
            UsageError: `samples` with several models, or as in `DataParallel.backward`.
        """
        if samples is None:
            super().backward(loss, **kwargs)
            return
        if loss is not None and self.scaler is not None:
            loss = self.scaler.scale(loss)
        self._wrapped.only().backward(loss, samples, **kwargs)

    # ------------------------------------------------------------------ state

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the state_dict of the bare module with whole tensors, on all ranks; all ranks call this."""
        return whole_state(self.unwrap_model(model))

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> Any:
        """Save models, optimizers, schedulers, loaders and generators, as Accelerate does; all ranks call this.

        The state of sharded optimizers is gathered on rank 0, so any number of ranks and any strategy can load it.

        Raises:
            UsageError: the strategy shards parameters.
        """
        self._refuse_sharded_parameters("save_state")
        for optimizer in self._optimizers:
            inner = optimizer.optimizer
            if isinstance(inner, ShardedOptimizer):
                inner.consolidate_state_dict()
        return super().save_state(output_dir, safe_serialization, **kwargs)

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Load what `save_state` saved; all ranks call this.

        Raises:
            UsageError: the strategy shards parameters.
        """
        self._refuse_sharded_parameters("load_state")
        super().load_state(input_dir, load_kwargs, **kwargs)

    def _save_engines(self, models: list[nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
        """Write what the next step needs for the same bits; see [Note: state of engines]."""
        states = [engine_state(model.engine) for model in self._wrapped.models]
        every_node = self.project_configuration.save_on_each_node
        if self.is_local_main_process if every_node else self.is_main_process:
            Path(output_dir, _ENGINES_FILE).write_text(json.dumps(states))

    def _load_engines(self, models: list[nn.Module], input_dir: str) -> None:
        path = Path(input_dir, _ENGINES_FILE)
        states = json.loads(path.read_text()) if path.exists() else []
        for model, state in zip(self._wrapped.models, states, strict=False):
            model.engine.step, model.engine.weights.reference = state["step"], state["reference"]

    def _refuse_sharded_parameters(self, name: str) -> None:
        if self._wrapped.shards_parameters and self.num_processes > 1:
            raise UsageError(
                f"{name} with sync={self._wrapped.sync!r}, whose parameters are in parts on all ranks",
                remedy="use paceline.Checkpoint(folder, model, optimizer.optimizer, ...)",
            )

    def free_memory(self, *objects: Any) -> Any:
        """Forget the prepared objects, as Accelerate does."""
        self._wrapped = WrappedModels(self._wrapped.sync)
        return super().free_memory(*objects)


class _PreparedLoader(DataLoaderStateMixin):
    """A `Loader` as `Accelerator.prepare` returns it: on the device, and known to the accumulation."""

    def __init__(self, loader: Loader, accelerator: PacelineAccelerator) -> None:
        self.loader, self._device = loader, accelerator.device
        self.gradient_state = GradientState()
        accelerator.register_for_checkpointing(self)

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        try:
            for batch in self.loader:
                self.end_of_dataloader = self.loader.steps_left == 0
                moved = send_to_device(batch, self._device)
                yield with_samples(moved, batch.samples, getattr(batch, "ends_step", None))
        finally:
            self.end()

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loader.load_state_dict(state)
