"""Subject and setting of a training whose memory is predicted or measured.

The subject is a reference model by its size, or built by a user's code. ``package.module:name`` names

- a class derived from ``torch.nn.Module`` that needs no arguments, or
- a function that returns a module, ``(module, inputs)`` or ``(module, inputs, loss)``. It gets ``batch`` and
  ``context`` if it has parameters of these names.

`inputs` is a tensor, a tuple of the model's arguments, or a dict of its keyword arguments; if absent, the command line
gives shapes and types. `loss` takes the model's output (and `inputs`, if it has two parameters) and returns a scalar;
if absent, the loss is the mean over everything that the model returns.

A prediction runs all of it on tensors without memory: it must not read values.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from paceline.errors import UsageError, unknown
from paceline.tools.models import gpt
from paceline.tools.models.gpt_sizes import SIZES, gpt_size

__all__ = [
    "ALONE",
    "BACKENDS",
    "STRATEGY_NAMES",
    "BuiltSubject",
    "TrainingSetting",
    "TrainingSubject",
    "import_named",
    "resolve_subject",
]

ALONE = "alone"
"""One device, without other ranks: plain torch, with a `ShardedOptimizer` where torch has no such optimizer."""


STRATEGY_NAMES = (ALONE, "naive", "flat", "overlap", "bucketed", "sharded", "full-shard")
BACKENDS = ("gloo", "nccl", "paceline")
_AUTOCASTS = ("off", "bf16", "fp16")
_DTYPES = ("fp32", "bf16")


@dataclass(frozen=True, kw_only=True)
class TrainingSetting:
    """Setting of a training, as far as memory depends on it.

    Attributes:
        strategy: one of `STRATEGY_NAMES`.
        ranks: devices, each with its own batch.
        batch: samples of a device's micro-batch.
        context: tokens of a sample, for models that read tokens.
        optimizer: ``adamw``, ``sgd``, ``sgd-momentum``, ``muon`` (AdamW for what is no hidden matrix), or the import
            path of an optimizer's class.
        dtype: of the model and its inputs: ``fp32``, as it was built, or ``bf16``.
        master_weights: ``off`` or ``fp32``: the type of copies of 16-bit parameters that are updated in their place.
        autocast: ``off``, ``bf16`` or ``fp16``.
        gather: ``off`` or ``bf16``: the type in which full-shard gathers parameters and computes.
        checkpointing: recompute the members of every ``ModuleList`` or ``Sequential`` in backward.
        accumulate: micro-batches per step.
        backend: of the collectives: ``gloo``, ``nccl`` or ``paceline``.
        device: ``cpu`` or ``cuda``, which sets the optimizer's defaults.
        bucket_mib: of strategies with buckets; None: the strategy's own.

    Raises:
        UsageError: a value is unknown or out of range.
    """

    strategy: str = "bucketed"
    ranks: int = 1
    batch: int = 1
    context: int = 128
    optimizer: str = "adamw"
    dtype: str = "fp32"
    master_weights: str = "off"
    autocast: str = "off"
    gather: str = "off"
    checkpointing: bool = False
    accumulate: int = 1
    backend: str = "gloo"
    device: str = "cpu"
    bucket_mib: float | None = None

    def __post_init__(self) -> None:
        for kind, given, valid in (
            ("strategy", self.strategy, STRATEGY_NAMES),
            ("backend", self.backend, BACKENDS),
            ("dtype", self.dtype, _DTYPES),
            ("master_weights", self.master_weights, ("off", "fp32")),
            ("autocast", self.autocast, _AUTOCASTS),
            ("gather", self.gather, ("off", "bf16")),
            ("device", self.device, ("cpu", "cuda")),
        ):
            if given not in valid:
                raise unknown(kind, given, valid)
        for name in ("ranks", "batch", "context", "accumulate"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}", remedy="give 1 or more")
        if self.strategy == ALONE and self.ranks > 1:
            raise UsageError(f"strategy 'alone' on {self.ranks} devices", remedy="give 1 device")
        if self.gather != "off" and self.strategy not in ("full-shard", ALONE):
            raise UsageError(
                f"strategy {self.strategy!r} gathers no parameters", remedy="use full-shard, or autocast"
            )
        if self.bucket_mib is not None and not self.bucket_mib > 0:
            raise UsageError(f"bucket_mib={self.bucket_mib}", remedy="give more than 0")

    @property
    def name(self) -> str:
        """The setting as text."""
        parts = [self.strategy, f"{self.ranks} device{'s' if self.ranks > 1 else ''}", self.optimizer]
        parts += [] if self.dtype == "fp32" else [self.dtype]
        parts += [] if self.master_weights == "off" else [f"{self.master_weights} master weights"]
        parts += [] if self.autocast == "off" else [f"{self.autocast} autocast"]
        parts += [] if self.gather == "off" else [f"gathered in {self.gather}"]
        parts += ["checkpointing"] if self.checkpointing else []
        parts += [f"{self.accumulate} micro-batches"] if self.accumulate > 1 else []
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return the setting for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> TrainingSetting:
        """Return the setting that `to_json` wrote."""
        return cls(**{field.name: record[field.name] for field in fields(cls) if field.name in record})


XXL = "xxl"
"""126 blocks of two linear layers, 16384 → 53248 → 16384: 220 G parameters."""


@dataclass(frozen=True)
class BuiltSubject:
    """A model with its micro-batches and loss.

    Attributes:
        module: the model.
        draw: returns one micro-batch in new memory.
        loss: maps the model (or its wrapper) and a micro-batch to a scalar.
    """

    module: torch.nn.Module
    draw: Callable[[], Any]
    loss: Callable[[torch.nn.Module, Any], Tensor]


@dataclass(frozen=True)
class TrainingSubject:
    """A named subject; `build` makes it anew, on the tensors of the context in which it is called.

    Attributes:
        name: as the user wrote it.
        build: returns model and micro-batches for a setting.
    """

    name: str
    build: Callable[[TrainingSetting], BuiltSubject]


def resolve_subject(name: str, inputs: Sequence[str] = ()) -> TrainingSubject:
    """Return the subject of a name.

    Args:
        name: a size of the reference model, ``xxl``, or ``package.module:name``; see the module's docstring.
        inputs: shapes and types of the model's arguments, as in ``8x3x224x224`` or ``8x128:int64``, if the subject
            has none.

    Raises:
        UsageError: unknown name.
    """
    if ":" in name:
        return TrainingSubject(name, partial(_user_subject, name, import_named(name), tuple(inputs)))
    if name == XXL:
        return TrainingSubject(name, _linear_subject)
    if name not in SIZES:
        raise unknown("model", name, [*SIZES, XXL, "package.module:name"])
    return TrainingSubject(name, partial(_reference_subject, name))


def import_named(path: str) -> Any:
    """Import ``package.module:name``; the current folder is searched too.

    Raises:
        UsageError: the module can't be imported, or has no such name.
    """
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(
            f"can't import {module_name!r}: {error}", remedy="write package.module:name, importable from here"
        ) from error
    if not hasattr(module, name):
        public = [each for each in vars(module) if not each.startswith("_")]
        raise unknown(f"name in {module_name}", name, public)
    return getattr(module, name)


def _reference_subject(name: str, setting: TrainingSetting) -> BuiltSubject:
    size = gpt_size(name)
    if setting.context > size.context:
        size = gpt_size(name, context=setting.context)
    module = gpt.GPT(size, recompute=setting.checkpointing)
    shape = (setting.batch, setting.context)

    def draw() -> tuple[Tensor, Tensor]:
        return torch.randint(size.vocabulary, shape), torch.randint(size.vocabulary, shape)

    return BuiltSubject(module, draw, lambda model, batch: gpt.token_loss(model(batch[0]), batch[1]))


class _Linears(torch.nn.Module):
    """Blocks of two linear layers without bias or activation function."""

    def __init__(self, d_model: int, d_ff: int, blocks: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Linear(d_model, d_ff, bias=False), torch.nn.Linear(d_ff, d_model, bias=False)
            )
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _linear_subject(setting: TrainingSetting) -> BuiltSubject:
    module = _Linears(16384, 53248, 126)
    if setting.checkpointing:
        _recompute_members(module)
    low = "bf16" if "bf16" in (setting.gather, setting.dtype) else setting.autocast
    dtype = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[low]
    shape = (setting.batch, setting.context, 16384)
    return BuiltSubject(
        module, lambda: torch.empty(shape, dtype=dtype), lambda model, x: model(x).float().mean()
    )


def _user_subject(name: str, named: Any, shapes: Sequence[str], setting: TrainingSetting) -> BuiltSubject:
    found = _call(name, named, setting)
    parts: list[Any] = list(found) if isinstance(found, tuple) else [found]
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], torch.nn.Module):
        raise UsageError(
            f"{name} returned {type(found).__name__}",
            remedy="return a module, (module, inputs) or (module, inputs, loss)",
        )
    module = parts[0]
    if setting.checkpointing:
        _recompute_members(module)
    first = parts[1] if len(parts) > 1 else tuple(_make_input(shape) for shape in shapes)
    if not pytree.tree_leaves(first):
        raise UsageError(
            f"{name} has no inputs", remedy="return (module, inputs), or give --inputs 8x128:int64"
        )
    loss_of: Callable[..., Tensor] = parts[2] if len(parts) == 3 else _mean

    def loss(model: torch.nn.Module, batch: Any) -> Tensor:
        output = model(**batch) if isinstance(batch, dict) else model(*_arguments(batch))
        return loss_of(output, batch) if _takes_two(loss_of) else loss_of(output)

    def draw() -> Any:
        return pytree.tree_map_only(Tensor, Tensor.clone, first)

    return BuiltSubject(module, draw, loss)


def _call(name: str, named: Any, setting: TrainingSetting) -> Any:
    if not callable(named):
        raise UsageError(f"{name} is a {type(named).__name__}", remedy="name a Module class or a function")
    given = {"batch": setting.batch, "context": setting.context}
    takes = inspect.signature(named).parameters
    passed = {key: value for key, value in given.items() if key in takes}
    needed = [
        key
        for key, parameter in takes.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and key not in passed
    ]
    if needed:
        raise UsageError(
            f"{name} needs {', '.join(needed)}", remedy="name a function that takes at most batch and context"
        )
    return named(**passed)


def _arguments(batch: Any) -> tuple[Any, ...]:
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


def _takes_two(loss: Callable[..., Tensor]) -> bool:
    try:
        return len(inspect.signature(loss).parameters) >= 2
    except ValueError:
        return False


def _mean(output: Any) -> Tensor:
    """Return the mean over all floating-point tensors of an output."""
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    if not floating:
        raise UsageError(
            "the model returns no floating-point tensor",
            remedy="return (module, inputs, loss) from a function",
        )
    return torch.stack([tensor.float().mean() for tensor in floating]).mean()


def _make_input(text: str) -> Tensor:
    """Return a tensor of a shape and type written as ``8x128:int64``."""
    shape, _, kind = text.partition(":")
    try:
        sizes = [int(part) for part in shape.split("x")]
        dtype = getattr(torch, kind or "float32")
        return torch.zeros(sizes, dtype=dtype)
    except (ValueError, AttributeError, TypeError, RuntimeError) as error:
        raise UsageError(
            f"--inputs {text!r} is not a shape", remedy="write 8x3x224x224 or 8x128:int64"
        ) from error


def _recompute_members(module: torch.nn.Module) -> None:
    """Checkpoint the outermost members of module lists and sequences."""
    for child in module.children():
        if isinstance(child, torch.nn.ModuleList | torch.nn.Sequential):
            for member in child:
                member.forward = partial(checkpoint, member.forward, use_reentrant=False)
        else:
            _recompute_members(child)
