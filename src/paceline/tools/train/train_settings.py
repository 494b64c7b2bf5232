"""Settings of ``paceline train``, which are also its options; invalid values are refused before anything starts."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, get_args

from paceline._core.json_codec import decode, encode
from paceline._core.summation_tree import check_virtual_ranks
from paceline.errors import UsageError, unknown
from paceline.integrations.loggers import LOGGER_NAMES, check_logger_names
from paceline.parallel.compression.compression_config import COMPRESSIONS
from paceline.parallel.strategy import STRATEGIES, Sync
from paceline.tools.command_options import own, shared
from paceline.tools.models.gpt_sizes import SIZES, GptSize, gpt_size
from paceline.tools.train.local_sgd_settings import (
    NO_COMPRESSION,
    OUTER_NAMES,
    LocalSgdSettings,
    compression_or_none,
)
from paceline.world.device_selection import DEVICE_TYPES

__all__ = ["AUTO", "CHOSEN_BY_AUTO", "RUN_PANEL", "ExistingRun", "TrainSettings"]

Recovery = Literal["live", "restart"]
ExistingRun = Literal["refuse", "resume", "overwrite", "auto"]

AUTO = "auto"
_AT_LEAST_ONE = ("micro_batch_size", "steps", "accumulate", "log_every")
_AT_LEAST_ZERO = ("seed", "eval_every", "eval_windows", "checkpoint_every", "sample_tokens", "max_restarts")
_OPTIONAL_COUNTS = (
    "ranks",
    "nproc_per_node",
    "min_ranks",
    "context",
    "threads",
    "vocabulary",
    "virtual_ranks",
)
_STRATEGIES_WITH_BUCKETS = ("bucketed", "sharded", "sharded-gradients")
_NEED_EVERY = ("outer", "outer_lr", "outer_momentum", "fragments", "delay", "outer_warmup_steps")
_TRAINING, _SYNCHRONISATION, _LOCAL_SGD, _PROCESSES = "Training", "Synchronisation", "Local SGD", "Processes"
RUN_PANEL = "Run folder"
CHOSEN_BY_AUTO = ("compression", "bucket_mib", "every", *_NEED_EVERY)
"""Settings that ``--strategy auto`` chooses, besides the strategy."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Everything that determines a training. A field with an `Option` is that option of ``paceline train``.

    Attributes:
        ranks: of the world that the run began with; None until it is known.
        compression: of gradients, or with `every` of pseudo-gradients. None: uncompressed gradients, and the default
            compression of `outer` for pseudo-gradients; ``"none"``: uncompressed.
        existing: treatment of a run that `out` holds already; see `RunFolder.prepare` and `RunFolder.found`.
        weight_decay: of AdamW.
        log_every: steps between two lines of the log.
        eval_windows: number of held-out windows that are evaluated, spread evenly; 0: all.
        sample_tokens: length of the text that the model generates at the end.

    Raises:
        UsageError: a value is not valid.
    """

    model: Annotated[str, shared("model", f": {', '.join(SIZES)}", panel="Model and data")] = "tiny"
    data: Annotated[
        str | None,
        own(
            "PATH",
            "Text to train on: file, folder, or nanoGPT .bin; default the standard library's sources.",
            panel="Model and data",
        ),
    ] = None
    vocabulary: Annotated[
        int | None, own(None, "Vocabulary size; default what the data need.", panel="Model and data")
    ] = None
    context: Annotated[
        int | None, shared("context", "; default that of the model", panel="Model and data")
    ] = None
    micro_batch_size: Annotated[int, shared("micro-batch-size", panel=_TRAINING)] = 16
    accumulate: Annotated[int, shared("accumulate", panel=_TRAINING)] = 1
    virtual_ranks: Annotated[
        int | None,
        shared(
            "virtual-ranks", ": micro-batches per step; equal bits on any number of ranks", panel=_TRAINING
        ),
    ] = None
    steps: Annotated[int, shared("steps", " of the optimizer", panel=_TRAINING)] = 600
    lr: Annotated[float, shared("lr", " at its peak", panel=_TRAINING)] = 2e-3
    clip: Annotated[float, own(None, "Maximum gradient norm; 0: no clipping.", panel=_TRAINING)] = 1.0
    dropout: Annotated[float, own(None, "Share of activations to drop out.", panel=_TRAINING)] = 0.0
    seed: Annotated[int, shared("seed", ": of initial weights and data order", panel=_TRAINING)] = 0
    strategy: Annotated[
        str,
        shared(
            "strategy",
            f": {', '.join(STRATEGIES)}, or auto: chosen for the measured network, tuned while training",
            panel=_SYNCHRONISATION,
        ),
    ] = "bucketed"
    bucket_mib: Annotated[
        float | None, shared("bucket-mib", "; default the strategy's", panel=_SYNCHRONISATION)
    ] = None
    compression: Annotated[
        str | None, shared("compression", f": {', '.join(COMPRESSIONS)}, none", panel=_SYNCHRONISATION)
    ] = None
    every: Annotated[int | None, shared("every", "; default: gradients in every step", panel=_LOCAL_SGD)] = (
        None
    )
    outer: Annotated[
        str | None, shared("outer", f": {', '.join(OUTER_NAMES)}; default average", panel=_LOCAL_SGD)
    ] = None
    outer_lr: Annotated[
        float | None, shared("outer-lr", "; default 0.7 (diloco), 1 (slowmo)", panel=_LOCAL_SGD)
    ] = None
    outer_momentum: Annotated[
        float | None, shared("outer-momentum", "; default 0.9 (diloco), 0.5 (slowmo)", panel=_LOCAL_SGD)
    ] = None
    outer_warmup_steps: Annotated[
        int | None, own("STEPS", "Steps before the outer momentum starts; default 0.", panel=_LOCAL_SGD)
    ] = None
    fragments: Annotated[int | None, shared("fragments", "; default 1", panel=_LOCAL_SGD)] = None
    delay: Annotated[int | None, shared("delay", " a fragment; default 0", panel=_LOCAL_SGD)] = None
    nproc_per_node: Annotated[
        int | None, shared("nproc-per-node", "; default 2, or those of torchrun", panel=_PROCESSES)
    ] = None
    min_ranks: Annotated[int | None, shared("min-ranks", "; default all", panel=_PROCESSES)] = None
    max_restarts: Annotated[int, shared("max-restarts", ", at the last checkpoint", panel=_PROCESSES)] = 3
    recovery: Annotated[
        Recovery,
        shared("recovery", panel=_PROCESSES),
    ] = "live"
    threads: Annotated[
        int | None, shared("threads", "; default its share of the cores", panel=_PROCESSES)
    ] = None
    device: Annotated[
        str | None, shared("device", ", or xpu; default: the GPU if there is one", panel=_PROCESSES)
    ] = None
    out: Annotated[str, shared("out", ": log, checkpoints and report", panel=RUN_PANEL)] = "runs/train"
    eval_every: Annotated[
        int, own("STEPS", "Steps between evaluations; 0: first and last.", panel=RUN_PANEL)
    ] = 100
    checkpoint_every: Annotated[
        int, own("STEPS", "Steps between checkpoints; 0: only at the end.", panel=RUN_PANEL)
    ] = 200
    log: Annotated[
        str | None,
        own(
            "NAMES",
            f"Loggers, by commas: {', '.join(LOGGER_NAMES)}; NAME=PLACE: folder, project, experiment, HOST:PORT.",
            panel=RUN_PANEL,
        ),
    ] = None
    ranks: int | None = None
    existing: ExistingRun = "refuse"
    weight_decay: float = 0.1
    log_every: int = 5
    eval_windows: int = 256
    sample_tokens: int = 400

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            _check_whole(name, getattr(self, name), 1)
        for name in _AT_LEAST_ZERO:
            _check_whole(name, getattr(self, name), 0)
        for name in _OPTIONAL_COUNTS:
            if getattr(self, name) is not None:
                _check_whole(name, getattr(self, name), 1)
        for name in ("lr", "weight_decay", "clip"):
            _check_real(name, getattr(self, name), positive=name == "lr")
        _check_real("dropout", self.dropout, positive=False)
        if self.dropout >= 1:
            raise UsageError(f"dropout={self.dropout!r}, must be below 1")
        self._check_virtual_ranks()
        if self.existing not in get_args(ExistingRun):
            raise unknown("existing", self.existing, get_args(ExistingRun))
        if self.recovery not in get_args(Recovery):
            raise unknown("recovery", self.recovery, get_args(Recovery))
        if self.device not in (None, *DEVICE_TYPES):
            raise unknown("device", self.device, DEVICE_TYPES)
        if self.log is not None:
            check_logger_names(self.log)
        if not self.out:
            raise UsageError("out is empty", remedy="name a folder for the run, for example runs/train")
        if "://" in self.out:
            raise UsageError(
                f"out={self.out!r} is a URL", remedy="name a folder on a disk; paceline.Checkpoint takes URLs"
            )
        size = self.model_size(self.vocabulary or 256)  # this and the following raise on invalid values
        if not self.is_auto:
            object.__setattr__(
                self, "strategy", Sync.of(self.strategy).name
            )  # the canonical name of an alias
        for name in CHOSEN_BY_AUTO if self.is_auto else ():
            if getattr(self, name) is not None:
                raise UsageError(
                    f"{name}={getattr(self, name)!r} with strategy='auto', which chooses that itself",
                    remedy=f"leave --{name.replace('_', '-')} out, or name a strategy",
                )
        if self.compression not in (None, NO_COMPRESSION, *COMPRESSIONS):
            raise unknown("compression", str(self.compression), [*COMPRESSIONS, NO_COMPRESSION])
        if (local_sgd := self.local_sgd) is not None:
            local_sgd.check_layers(size.layers)
        _ = self.plan

    def _check_virtual_ranks(self) -> None:
        if self.virtual_ranks is None:
            return
        others: dict[str, tuple[bool, str]] = {
            "accumulate": (self.accumulate > 1, "virtual ranks accumulate already: raise --virtual-ranks"),
            "every": (self.every is not None, "leave --every out: virtual ranks synchronise every step"),
            "compression": (compression_or_none(self.compression) is not None, "leave --compression out"),
            "strategy": (
                self.is_auto or Sync.of(self.strategy).shard == "parameters",
                "use naive, flat, overlap, bucketed, sharded or sharded-gradients",
            ),
        }
        for name, (excluded, remedy) in others.items():
            if excluded:
                raise UsageError(
                    f"{name}={getattr(self, name)!r} with virtual_ranks={self.virtual_ranks!r}", remedy=remedy
                )
        for name in ("ranks", "nproc_per_node"):
            if getattr(self, name) is not None:
                check_virtual_ranks(self.virtual_ranks, getattr(self, name))

    def recovers_live(self, shard: str) -> bool:
        """Return whether survivors of a failure go on in place, with a strategy that shards this."""
        exchanges_gradients = self.every is None and compression_or_none(self.compression) is None
        return (
            self.recovery == "live"
            and shard in ("none", "optimizer")
            and not self.is_auto
            and exchanges_gradients
        )

    @property
    def is_auto(self) -> bool:
        """True if the strategy is chosen by measuring."""
        return self.strategy == AUTO

    @property
    def local_sgd(self) -> LocalSgdSettings | None:
        """How parameters are synchronised every `every` steps; None: gradients are, every step."""
        if self.every is None:
            for name in _NEED_EVERY:
                if getattr(self, name) is not None:
                    raise UsageError(
                        f"{name}={getattr(self, name)!r} without every",
                        remedy=f"add --every H, or leave --{name.replace('_', '-')} out: gradients are synchronised "
                        "every step",
                    )
            return None
        if not self.is_auto and Sync.of(self.strategy).shard != "none":
            raise UsageError(
                f"every={self.every!r} with strategy={self.strategy!r}, where no rank has whole gradients for local "
                "steps",
                remedy="leave --strategy out, or use bucketed",
            )
        optional: dict[str, Any] = {
            "outer": self.outer,
            "fragments": self.fragments,
            "delay": self.delay,
            "warmup": self.outer_warmup_steps,
        }
        return LocalSgdSettings(
            every=self.every,
            lr=self.outer_lr,
            momentum=self.outer_momentum,
            compression=self.compression,
            **{name: value for name, value in optional.items() if value is not None},
        )

    @property
    def sync_summary(self) -> str:
        """How ranks are synchronised, in a few words."""
        if (local_sgd := self.local_sgd) is not None:
            return local_sgd.summary
        compression = compression_or_none(self.compression)
        return self.strategy + (f", {compression}" if compression else "")

    @property
    def plan(self) -> Sync:
        """How gradients are synchronised, where they are."""
        plan = Sync() if self.is_auto else Sync.of(self.strategy)
        if self.every is None and compression_or_none(self.compression) is not None:
            plan = replace(plan, compression=self.compression)
        if self.bucket_mib is None:
            return plan
        if not isinstance(self.bucket_mib, int | float) or not self.bucket_mib > 0:
            raise UsageError(
                f"bucket_mib={self.bucket_mib!r}, must be above 0",
                remedy="one bucket per parameter is called 'naive' (after backward) or 'overlap' (during it)",
            )
        if self.strategy not in _STRATEGIES_WITH_BUCKETS:
            raise UsageError(
                f"bucket_mib={self.bucket_mib!r} with strategy={self.strategy!r}, which has no bucket size",
                remedy=f"leave it out, or use {', '.join(_STRATEGIES_WITH_BUCKETS)}",
            )
        return replace(plan, bucket_mib=float(self.bucket_mib))

    def model_size(self, vocabulary: int) -> GptSize:
        """Return the shapes of the model for data with `vocabulary` different tokens.

        Raises:
            UsageError: the size is unknown, or the `vocabulary` setting is too small for the data.
        """
        if self.vocabulary is not None and self.vocabulary < vocabulary:
            raise UsageError(
                f"the data hold token {vocabulary - 1}, but vocabulary={self.vocabulary}",
                remedy=f"use a vocabulary of {vocabulary} or more, or leave it out",
            )
        return gpt_size(self.model, vocabulary=self.vocabulary or vocabulary, context=self.context)

    @property
    def warmup(self) -> int:
        """Warm-up steps of the learning rate: a twentieth of all steps."""
        return max(1, self.steps // 20)

    def to_json(self) -> str:
        """Return the settings as JSON, for :meth:`from_json`."""
        return json.dumps(encode(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> TrainSettings:
        """Return the settings stored in `text`.

        Raises:
            UsageError: `text` is not a JSON object with valid settings, or holds unknown names.
        """
        try:
            record = json.loads(text)
        except ValueError as error:
            raise UsageError(f"settings are not JSON: {error}") from error
        names = [field.name for field in fields(cls)]
        for name in record if isinstance(record, dict) else ():
            if name not in names:
                raise unknown("setting", name, names)
        settings = decode(record, cls, "settings")
        if "out" not in record:
            raise UsageError("settings name no run folder", remedy='add "out"')
        return settings


def _check_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name}={value!r}, must be a whole number of {least} or more")


def _check_real(name: str, value: object, *, positive: bool) -> None:
    valid = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not valid or value < 0 or (positive and value == 0):  # pyright: ignore[reportOperatorIssue]
        raise UsageError(f"{name}={value!r}, must be a number {'above 0' if positive else 'of 0 or more'}")
