"""Strategies for Lightning: `PacelineFabricStrategy` for Fabric, `PacelineStrategy` for `lightning.Trainer`.

Both are Lightning's DDP strategies (launching, ranks, devices, checkpoints) with Paceline's engine instead of torch's
DDP, on the paceline backend on CPUs. Importing this module registers both by the name ``"paceline"``.

[Note: samples] Lightning's losses are means over a rank's batch, and ranks count equally. If ranks have unequal
batches, each says how many samples its loss is the mean of: ``fabric.backward(loss, samples=n)``, and in a
LightningModule the ``.samples`` of a `Loader`'s batch, or an entry ``"samples"`` in what ``training_step`` returns (the
number of tokens, for example). Then the gradient is that of the mean over all samples of all ranks and accumulated
batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from paceline import backends
from paceline.data.batch_sample_count import with_samples
from paceline.data.loader import Loader
from paceline.errors import UsageError
from paceline.integrations.wrapped_models import (
    WrappedModels,
    load_whole_state,
    missing_library,
    redirect_scheduler,
    whole_state,
)
from paceline.parallel.data_parallel import DataParallel
from paceline.parallel.strategy import Sync
from paceline.world.device_selection import accelerator_backend

try:
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
    from lightning.fabric.strategies.strategy import _BackwardSyncControl
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
    from lightning.pytorch.strategies.strategy import _ForwardRedirection
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError as error:
    raise missing_library(__name__, "lightning", error) from error

__all__ = ["PacelineFabricStrategy", "PacelineStrategy"]

_NAME = "paceline"


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    known = {
        "accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision", "precision_plugin",
        "process_group_backend", "timeout", "start_method",
    }  # fmt: skip
    for option in options:
        if option not in known:
            raise UsageError(
                f"{name}({option}=...), an option of torch's DDP or unknown",
                remedy="leave it out; gradients are compressed by sync=paceline.Sync(compression=...)",
            )


def _backend_of(device: torch.device, given: str | None) -> str:
    backends.register()
    return given or accelerator_backend(device.type) or "paceline"


def _for_mean(value: Any, reduce_op: Any) -> Any:
    """Return integers as float64 if their mean is computed: it need not be an integer."""
    averages = reduce_op in ("mean", "avg", torch.distributed.ReduceOp.AVG)
    whole = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
    return value.double() if averages and whole else value


def _backward(
    model: DataParallel, loss: Tensor | None, samples: float, precision: Any, **kwargs: Any
) -> None:
    scaler = getattr(precision, "scaler", None)
    model.backward(loss if loss is None or scaler is None else scaler.scale(loss), samples, **kwargs)


class PacelineFabricStrategy(FabricDDPStrategy):
    """Strategy for ``lightning.fabric.Fabric``, also by name: ``Fabric(strategy="paceline")``.

    ``fabric.setup`` wraps the model in `DataParallel`, and if the strategy shards, turns torch's optimizers into
    `ShardedOptimizer`s. ``fabric.backward(loss, samples=n)`` weights ranks by their samples (``fabric.backward(None,
    samples=0)`` without any); ``no_backward_sync``, ``clip_gradients``, ``save`` and ``load`` work as with DDP. A
    checkpoint holds whole states, for any strategy and number of ranks.

    Args:
        sync: the strategy, as in `DataParallel`.
        options: of Lightning's ``DDPStrategy``: ``process_group_backend``, ``timeout``, ``start_method`` …

    Raises:
        UsageError: an unknown strategy, or options of torch's DDP.

    Example:
        >>> from lightning.fabric import Fabric
        >>> strategy = PacelineFabricStrategy(sync="sharded")
        >>> fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)  # then fabric.launch()
        >>> strategy.process_group_backend is None  # "paceline" on CPUs
        True
    """

    def __init__(self, sync: str | Sync = "bucketed", **options: Any) -> None:
        _check_options(type(self).__name__, options)
        super().__init__(**options)
        self._wrapped = WrappedModels(sync)
        self._backward_sync_control = _SyncControl()

    def _get_process_group_backend(self) -> str:
        return _backend_of(self.root_device, self._process_group_backend)

    def setup_module(self, module: nn.Module) -> Any:
        """Wrap the model."""
        return self._wrapped.wrap(module)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer, sharded if the strategy shards."""
        return self._wrapped.adopt(optimizer)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Any], scheduler: Any = None
    ) -> Any:
        """Set up a model, its optimizers and a scheduler of one of them."""
        model = self.setup_module(module)
        ready = [self.setup_optimizer(each) for each in optimizers]
        if scheduler is not None:
            redirect_scheduler(scheduler, dict(zip(map(id, optimizers), ready, strict=True)))
        return model, ready, scheduler

    def backward(
        self,
        tensor: Tensor | None,
        module: nn.Module | None,
        *args: Any,
        samples: float | None = None,
        **kwargs: Any,
    ) -> None:
        """Run backward; with `samples`, the number over which the loss is the mean, ranks are weighted by it."""
        if samples is None:
            assert tensor is not None, "a rank without a loss passes samples=0"
            super().backward(tensor, module, *args, **kwargs)
            return
        model = module if isinstance(module, DataParallel) else self._wrapped.only()
        _backward(model, tensor, samples, self.precision, **kwargs)

    def all_reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        """Reduce a tensor over all ranks; the mean of integers is a float64."""
        return super().all_reduce(_for_mean(tensor, reduce_op), group, reduce_op)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the whole state_dict of the bare module."""
        return whole_state(module.module if isinstance(module, DataParallel) else module)

    def load_module_state_dict(
        self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        """Load a whole state_dict into the bare module."""
        bare = module.module if isinstance(module, DataParallel) else module
        load_whole_state(bare, state_dict, strict=strict)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the name ``"paceline"``."""
        strategy_registry.register(_NAME, cls, description="Paceline's engine", override=True)


class _SyncControl(_BackwardSyncControl):
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        assert isinstance(module, DataParallel), "Fabric set it up"
        return module.accumulate() if enabled else nullcontext()


class PacelineStrategy(DDPStrategy):
    """Strategy for ``lightning.Trainer``, also by name: ``Trainer(strategy="paceline")``.

    Automatic and manual optimization, accumulation, clipping, mixed precision, logging with ``sync_dist`` and
    Lightning's checkpoints work as with DDP. A `Loader` may serve the data: every sample once, unequal batches weighted
    by their samples, and its position is in the checkpoint. A checkpoint holds whole states, for any strategy and
    number of ranks.

    Args:
        sync: the strategy, as in `DataParallel`.
        options: of Lightning's ``DDPStrategy``: ``process_group_backend``, ``timeout``, ``start_method`` …

    Raises:
        UsageError: an unknown strategy, or options of torch's DDP.

    Example:
        >>> import lightning
        >>> strategy = PacelineStrategy(sync="sharded")
        >>> trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False)
    """

    def __init__(self, sync: str | Sync = "bucketed", **options: Any) -> None:
        _check_options(type(self).__name__, options)
        super().__init__(**options)
        self._sync = sync
        self._wrapped = WrappedModels(sync)
        self._forward_redirection = _ForwardRedirection()
        self._samples: float | None = None  # of the present batch

    def _get_process_group_backend(self) -> str:
        return _backend_of(self.root_device, self._process_group_backend)

    # ------------------------------------------------------------------ set up and tear down

    def _setup_model(self, model: nn.Module) -> Any:
        self._wrapped = WrappedModels(self._sync)
        return self._wrapped.wrap(model)

    def configure_ddp(self) -> None:
        """Wrap the model for training."""
        assert self.model is not None
        self.model = self._setup_model(self.model)

    def setup_optimizers(self, trainer: Any) -> None:
        """Create the module's optimizers and schedulers; sharded if the strategy shards."""
        super().setup_optimizers(trainer)
        if isinstance(self.model, DataParallel):
            ready = [self._wrapped.adopt(each) for each in self.optimizers]
            replaced = dict(zip(map(id, self.optimizers), ready, strict=True))
            for config in self.lr_scheduler_configs:
                redirect_scheduler(config.scheduler, replaced)
            self.optimizers = ready

    def teardown(self) -> None:
        """Unwrap the model and release what Lightning holds."""
        if isinstance(self.model, DataParallel):
            self.model = self.lightning_module
        super().teardown()

    # ------------------------------------------------------------------ data

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return the loader as Lightning's loops use it."""
        streams = isinstance(dataloader, Loader) and dataloader.steps_left is None
        return _StreamLoader(dataloader) if streams else dataloader

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch, which keeps its ``.samples`` and ``.ends_step``."""
        moved = super().batch_to_device(batch, device, dataloader_idx)
        samples = getattr(batch, "samples", None)
        if samples is None:
            return moved
        return with_samples(moved, samples, getattr(batch, "ends_step", None))

    # ------------------------------------------------------------------ step

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``training_step``; see [Note: samples]."""
        batch = args[0] if args else next(iter(kwargs.values()), None)
        self._samples = getattr(batch, "samples", None)
        output = super().training_step(*args, **kwargs)
        if self._samples != 0 and isinstance(output, Mapping) and output.get("samples") is not None:
            self._samples = float(output["samples"])
        return output

    def backward(
        self, closure_loss: Tensor, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run backward, weighted by the batch's samples if they are known."""
        module, samples = self.lightning_module, self._samples
        if samples is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        assert module is not None
        assert isinstance(self.model, DataParallel), "it was wrapped for training"
        if is_overridden("backward", module):
            raise UsageError(
                f"{type(module).__name__}.backward() with batches that have .samples",
                remedy="leave backward() out, or serve the data by torch's DataLoader",
            )
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        divided = module.trainer.accumulate_grad_batches if module.automatic_optimization else 1
        self.model.backward(closure_loss * divided, samples, **kwargs)
        return self.precision_plugin.post_backward(closure_loss, module)

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Run the closure, then the optimizer's step.

        Inside the step, the gradients of the batches before would be synchronised separately, in a round of their own.
        """
        results = [closure()]

        def first_or_again() -> Any:
            return results.pop() if results else closure()  # LBFGS evaluates several times

        return super().optimizer_step(optimizer, first_or_again, model, **kwargs)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Do nothing: the engine needs no preparation."""

    def post_backward(self, closure_loss: Tensor) -> None:
        """Do nothing: the engine has closed the backward."""

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keep the gradients of backwards in this block on this rank."""
        with self.model.accumulate() if isinstance(self.model, DataParallel) else nullcontext():
            yield

    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        """Reduce a tensor over all ranks; the mean of integers, as of numbers of samples, is a float64."""
        return super().reduce(_for_mean(tensor, reduce_op), group, reduce_op)

    # ------------------------------------------------------------------ checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the whole state_dict of the module."""
        assert self.lightning_module is not None
        return whole_state(self.lightning_module)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the whole state_dict of the module."""
        assert self.lightning_module is not None
        load_whole_state(self.lightning_module, checkpoint["state_dict"], strict=strict)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the name ``"paceline"``."""
        strategy_registry.register(_NAME, cls, description="Paceline's engine", override=True)


class _StreamLoader:
    """A `Loader` of a stream, of which Lightning fetches a batch before it is needed.

    That batch does not belong to the position that a checkpoint saves.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self._position: dict[str, Any] | None = None  # before the batch that was fetched last

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        while True:
            self._position = self.loader.state_dict()
            batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict() if self._position is None else self._position

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._position = None
        self.loader.load_state_dict(state)


PacelineFabricStrategy.register_strategies(STRATEGY_REGISTRY)
PacelineStrategy.register_strategies(StrategyRegistry)
