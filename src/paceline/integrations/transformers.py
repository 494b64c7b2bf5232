"""`PacelineTrainer`: Hugging Face's `Trainer` with Paceline's engine and loader.

[Note: token weights] The loss of a micro-batch is the mean over its items: tokens whose label is not −100, or rows. It
is weighted by their number, so the gradient is that of the mean over all items of all ranks and micro-batches of an
optimizer step, whatever their sizes. Trainer's ``num_items_in_batch`` has the same aim; here it is the micro-batch's
own number, and no gather before each step is needed. It also holds for models and losses that do not accept it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from paceline.data.loader import Loader
from paceline.errors import UsageError
from paceline.integrations.wrapped_models import WrappedModels, check_ranks, missing_library, whole_state
from paceline.parallel.data_parallel import DataParallel
from paceline.parallel.sharding.zero import ShardedOptimizer
from paceline.parallel.strategy import Sync

try:
    from transformers import Trainer, TrainingArguments
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
except ImportError as error:
    raise missing_library(__name__, "transformers and accelerate", error) from error

__all__ = ["PacelineTrainer"]

_T = TypeVar("_T")

IGNORED_LABEL = -100


class PacelineTrainer(Trainer):
    """Hugging Face's `Trainer`, whose model Paceline's engine synchronises.

    Runs in one process or under torchrun, ``paceline run`` and other launchers. Call `paceline.init` before creating
    the `TrainingArguments` for the paceline backend; otherwise they create the process group. Data is served by a
    `Loader`: every sample once per epoch, however many ranks. Checkpoints, resuming, evaluation, clipping, mixed
    precision and PEFT models work as in Trainer; a sharded optimizer's state is gathered into the usual
    ``optimizer.pt``.

    Args:
        model: as in Trainer, like the other arguments besides `sync`.
        args: `TrainingArguments`; ``average_tokens_across_devices`` and ``ddp_*`` have no effect.
        sync: the strategy, as in `DataParallel`.
        options: the other arguments of `Trainer`.

    Raises:
        UsageError: an unknown strategy, or arguments that it can't keep: FSDP, DeepSpeed, other parallelism, several
            GPUs in one process, ``auto_find_batch_size``, other sampling than ``"random"`` and ``"sequential"``,
            optimizers that update during backward, or with ``"full-shard"``, ``load_best_model_at_end`` and
            ``label_smoothing_factor``.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from transformers import logging as transformers_logging
        >>> transformers_logging.set_verbosity_error()
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=11))
        >>> lines = [{"input_ids": torch.arange(n), "labels": torch.arange(n)} for n in (4, 4, 9)]
        >>> args = TrainingArguments(
        ...     "runs/gpt2", per_device_train_batch_size=1, max_steps=2, use_cpu=True, report_to="none"
        ... )
        >>> trainer = PacelineTrainer(model, args, train_dataset=lines, sync="sharded")
        >>> trainer.train().global_step  # doctest: +ELLIPSIS
        {...}
        2
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *,
        sync: str | Sync = "bucketed",
        **options: Any,
    ) -> None:
        self._wrapped = WrappedModels(sync)
        args = TrainingArguments("tmp_trainer") if args is None else args
        for setting, remedy in _unsupported(args, model, self._wrapped):
            raise UsageError(f"PacelineTrainer with {setting}", remedy=remedy)
        args.average_tokens_across_devices = False  # else `compute_loss` multiplies by the number of ranks
        check_ranks("PacelineTrainer", args.world_size)
        super().__init__(model, args, **options)
        bare: Any = self.model
        bare = bare.get_base_model() if hasattr(bare, "get_base_model") else bare  # of PEFT
        is_causal = (
            type(bare).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        )  # before FSDP2 renames it
        self._next_token = getattr(self, "_loss_shifts_labels", False) or is_causal
        self._loss_sum: torch.Tensor = torch.zeros((), device=args.device)  # of the present step, over items

    # ------------------------------------------------------------------ model and optimizer

    def create_accelerator_and_postprocess(self) -> None:
        """Create Accelerate's object, which from now on knows Paceline's wrapper."""
        super().create_accelerator_and_postprocess()
        self.accelerator.unwrap_model = partial(_unwrap, self.accelerator.unwrap_model)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if isinstance(model, DataParallel) or not training:
            return model
        return self._wrapped.wrap(self.accelerator.prepare_model(model, evaluation_mode=True))

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer, sharded if the strategy shards; the model is wrapped before."""
        self.model_wrapped = self._wrap_model(self.model_wrapped)
        optimizer = super().create_optimizer(model)
        if not hasattr(optimizer, "optimizer"):  # not Accelerate's yet
            self.optimizer = self._wrapped.adopt(optimizer)
        return self.optimizer

    def _clip_grad_norm(self, model: nn.Module, max_norm: float | None = None) -> torch.Tensor:
        assert isinstance(model, DataParallel), "it was wrapped for training"
        self.accelerator.unscale_gradients()
        return model.clip_grad_norm_(self.args.max_grad_norm if max_norm is None else max_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        return self._clip_grad_norm(model, float("inf")) if grad_norm is None else grad_norm

    # ------------------------------------------------------------------ data

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the batches of a `Loader` over the training set: every sample once per epoch, on one rank.

        Of an iterable dataset, every rank reads the whole stream and keeps its batches.
        """
        theirs, args = super().get_train_dataloader(), self.args
        stream = isinstance(self.train_dataset, IterableDataset)
        loader = Loader(
            self.train_dataset if stream else theirs.dataset,
            batch_size=self._train_batch_size,
            block=self._train_batch_size if stream else 1,
            stream="whole" if stream else None,
            shuffle=not stream and getattr(args, "train_sampling_strategy", "random") == "random",
            seed=args.seed if args.data_seed is None else args.data_seed,
            uneven="drop" if args.dataloader_drop_last else "join",
            collate_fn=theirs.collate_fn,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and args.device.type != "cpu",
            prefetch_factor=args.dataloader_prefetch_factor,
            persistent_workers=args.dataloader_persistent_workers,
            worker_init_fn=theirs.worker_init_fn,
        )
        batches = _EpochBatches(loader, self) if stream else _SizedEpochBatches(loader, self)
        return DataLoader(batches, batch_size=None, collate_fn=_identity)

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Return the number of samples of a loader's dataset."""
        if isinstance(dataloader.dataset, _SizedEpochBatches):
            return len(dataloader.dataset.loader.dataset)
        return super().num_examples(dataloader)

    def count_items(self, inputs: Any) -> int:
        """Return the number of items over which the loss of a batch is the mean; override it for other losses.

        These are the labels that are not −100, without the first of each row if the model predicts the next token; in a
        batch without labels, the rows.

        Args:
            inputs: a batch, as collated.
        """
        if getattr(inputs, "samples", None) == 0:
            return 0
        labels = inputs.get("shift_labels")
        if labels is None and (labels := inputs.get("labels")) is not None and self._next_token:
            labels = labels[..., 1:]
        if labels is None:
            return next(len(value) for value in inputs.values() if isinstance(value, torch.Tensor))
        return int(labels.ne(IGNORED_LABEL).sum())

    # ------------------------------------------------------------------ step

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Run forward and backward; see [Note: token weights].

        Returns:
            The step's loss, which Trainer logs: 0, or after the last micro-batch the mean over all items of all ranks.
        """
        assert isinstance(model, DataParallel), "it was wrapped for training"
        model.train()
        switch = getattr(self.optimizer, "train", None)  # of optimizers that average weights
        if switch is not None:
            switch()
        last = self.accelerator.sync_gradients
        with nullcontext() if last else model.accumulate():  # Trainer does this only among several processes
            self._forward_and_backward(model, inputs)
        if not last:
            return torch.zeros((), device=self.args.device)
        mean_part = self._loss_sum * model.comm.size / model.samples if model.samples else self._loss_sum
        self._loss_sum = torch.zeros((), device=self.args.device)
        return mean_part  # whose mean over ranks is logged

    def _forward_and_backward(self, model: DataParallel, inputs: Any) -> None:
        items = self.count_items(inputs)
        if not items:
            model.backward(None, samples=0)
            return
        inputs = self._prepare_inputs(inputs)
        count = torch.tensor(items, device=self.args.device)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=count)
        assert isinstance(loss, torch.Tensor), "outputs were not requested"
        self._loss_sum = self._loss_sum + loss.detach() * items
        scaler = self.accelerator.scaler
        model.backward(loss if scaler is None else scaler.scale(loss), samples=items)

    # ------------------------------------------------------------------ checkpoints

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        if isinstance(inner, ShardedOptimizer):
            inner.consolidate_state_dict()
        super()._save_optimizer_and_scheduler(output_dir)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model for ``from_pretrained``, as Trainer does; all ranks call this if parameters are sharded."""
        if not self._wrapped.shards_optimizer or not self._wrapped.models:
            super().save_model(output_dir, _internal_call)
            return
        bare, saves = self.model, self.args.should_save
        assert isinstance(bare, nn.Module), "Trainer has a model"
        state = whole_state(bare) if self._wrapped.shards_parameters or saves else None
        if saves:
            self._save(output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)


class _EpochBatches(IterableDataset[Any]):
    """The batches of the trainer's present epoch, for torch's DataLoader, of which Trainer can skip the first ones."""

    def __init__(self, loader: Loader, trainer: Trainer) -> None:
        self.loader, self._trainer = loader, trainer

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


class _SizedEpochBatches(_EpochBatches):
    """Those of a map-style dataset, whose number is known."""

    def __iter__(self) -> Iterator[Any]:
        self.loader.set_epoch(int(self._trainer.state.epoch or 0))
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)


def _identity(batch: _T) -> _T:
    return batch


def _unwrap(theirs: Callable[..., nn.Module], model: nn.Module, *args: Any, **options: Any) -> nn.Module:
    """Return the bare module; `theirs` is Accelerate's function for other wrappers."""
    return theirs(model.module if isinstance(model, DataParallel) else model, *args, **options)


def _unsupported(
    args: TrainingArguments, model: nn.Module | None, wrapped: WrappedModels
) -> Iterator[tuple[str, str]]:
    """Yield the settings that can't be kept, with what to do instead."""
    shard = 'leave it out, and shard with sync="sharded" or sync="full-shard"'
    leave = "leave it out"
    for name in ("fsdp", "deepspeed", "parallelism_config"):
        if getattr(args, name, None):
            yield f"{name}={getattr(args, name)!r}", shard
    if getattr(model, "is_distributed_loading_by_transformers", False):
        yield "a model that transformers has sharded (distributed_config)", shard
    if args.n_gpu > 1:
        yield f"{args.n_gpu} GPUs in one process", "start one process per GPU: `paceline run` or torchrun"
    if args.auto_find_batch_size:
        yield "auto_find_batch_size=True", f"{leave}, and see `paceline plan batch`"
    sampling = getattr(args, "train_sampling_strategy", "random")
    if sampling not in ("random", "sequential"):
        yield f"train_sampling_strategy={sampling!r}", 'use "random" or "sequential"'
    for name in ("split_batches", "dispatch_batches"):
        if getattr(args.accelerator_config, name, None):
            yield f"accelerator_config.{name}=True", f"{leave}: the batch size is per rank"
    optim = str(getattr(args.optim, "value", args.optim))
    if "lomo" in optim or "layerwise" in optim:
        yield f"optim={optim!r}, which updates during backward", "use another optimizer"
    if (
        wrapped.shards_parameters and args.label_smoothing_factor
    ):  # Trainer finds the shift by the class's name
        yield f"label_smoothing_factor and sync={wrapped.sync!r}", 'use sync="sharded"'
    if wrapped.shards_parameters and args.load_best_model_at_end:
        yield f"load_best_model_at_end=True and sync={wrapped.sync!r}", f'{leave}, or use sync="sharded"'
