"""Settings of ``paceline train``, which are also its options; invalid values are refused before anything starts."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, get_args

from typer import Option

from paceline._core.json_codec import decode, encode
from paceline.errors import UsageError, unknown
from paceline.parallel.compression.compression_config import COMPRESSIONS
from paceline.parallel.strategy import STRATEGIES, Sync
from paceline.tools.models.gpt_sizes import SIZES, GptSize, gpt_size
from paceline.tools.train.local_sgd_settings import (
    NO_COMPRESSION,
    OUTER_NAMES,
    LocalSgdSettings,
    compression_or_none,
)

__all__ = ["AUTO", "CHOSEN_BY_AUTO", "ExistingRun", "TrainSettings"]

ExistingRun = Literal["refuse", "resume", "overwrite"]

AUTO = "auto"
_AT_LEAST_ONE = ("batch_size", "steps", "accumulate", "log_every")
_AT_LEAST_ZERO = ("seed", "eval_every", "eval_windows", "checkpoint_every", "sample_tokens", "max_restarts")
_OPTIONAL_COUNTS = ("ranks", "min_ranks", "context", "threads", "vocabulary")
_STRATEGIES_WITH_BUCKETS = ("bucketed", "sharded")
_NEED_EVERY = ("outer", "outer_lr", "outer_momentum", "fragments", "delay", "warmup_outer")
CHOSEN_BY_AUTO = ("compression", "bucket_mib", "every", *_NEED_EVERY)
"""Settings that ``--sync auto`` chooses, besides the strategy."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Everything that determines a training. A field with an `Option` is that option of ``paceline train``.

    Attributes:
        sync: None stands for ``"sharded"``; for ``"bucketed"`` with `every`, since local steps need whole gradients,
            and with `compression`, since the parameters that a sharded optimizer gathers are not compressed.
        compression: of gradients, or with `every` of pseudo-gradients. None: uncompressed gradients, and the default
            compression of `outer` for pseudo-gradients; ``"none"``: uncompressed.
        existing: treatment of a run that `out` holds already.
        weight_decay: of AdamW.
        log_every: steps between two lines of the log.
        eval_windows: number of held-out windows that are evaluated, spread evenly; 0: all.
        sample_tokens: length of the text that the model generates at the end.

    Raises:
        UsageError: a value is not valid.
    """

    ranks: Annotated[int | None, Option(help="Processes; default 2, or those of torchrun.")] = None
    min_ranks: Annotated[
        int | None, Option(help="Fewest ranks to continue with after failures; default all.")
    ] = None
    max_restarts: Annotated[int, Option(help="Failures to recover from, at the last checkpoint.")] = 3
    size: Annotated[str, Option(help=f"Model size: {', '.join(SIZES)}.")] = "tiny"
    data: Annotated[
        str | None,
        Option(
            metavar="PATH", help="Text file, folder, or nanoGPT .bin; default the standard library's sources."
        ),
    ] = None
    vocabulary: Annotated[int | None, Option(help="Vocabulary size; default what the data need.")] = None
    context: Annotated[int | None, Option(help="Context in tokens; default that of the size.")] = None
    batch_size: Annotated[int, Option(help="Windows per micro-batch of a rank.")] = 16
    accumulate: Annotated[int, Option(help="Micro-batches per optimizer step.")] = 1
    steps: Annotated[int, Option(help="Number of optimizer steps.")] = 600
    lr: Annotated[float, Option(help="Peak learning rate.")] = 2e-3
    clip: Annotated[float, Option(help="Maximum gradient norm; 0: no clipping.")] = 1.0
    sync: Annotated[
        str | None,
        Option(
            help=f"Strategy: {', '.join(STRATEGIES)}, or auto: chosen for the measured network, tuned while training. "
            "Default sharded; bucketed with --every or --compression."
        ),
    ] = None
    bucket_mib: Annotated[float | None, Option(help="Bucket size in MiB; default the strategy's.")] = None
    compression: Annotated[str | None, Option(help=f"Compression: {', '.join(COMPRESSIONS)}, none.")] = None
    every: Annotated[
        int | None,
        Option(metavar="H", help="Synchronise parameters every H steps, not gradients every step."),
    ] = None
    outer: Annotated[
        str | None, Option(help=f"With --every: outer optimizer: {', '.join(OUTER_NAMES)}; default average.")
    ] = None
    outer_lr: Annotated[
        float | None, Option(help="Outer learning rate; default 0.7 (diloco), 1 (slowmo).")
    ] = None
    outer_momentum: Annotated[
        float | None, Option(help="Outer momentum; default 0.9 (diloco), 0.5 (slowmo).")
    ] = None
    fragments: Annotated[
        int | None, Option(help="With --every: parts of the model, synchronised in turn; default 1.")
    ] = None
    delay: Annotated[
        int | None, Option(help="With --every: steps from sending a fragment to merging it; default 0.")
    ] = None
    warmup_outer: Annotated[
        int | None, Option(help="With --outer: steps before its momentum starts; default 0.")
    ] = None
    seed: Annotated[int, Option(help="Seed of the initial weights and of the data order.")] = 0
    eval_every: Annotated[int, Option(help="Steps between evaluations; 0: first and last.")] = 100
    checkpoint_every: Annotated[int, Option(help="Steps between checkpoints; 0: only at the end.")] = 200
    threads: Annotated[int | None, Option(help="Threads per rank; default its share of the cores.")] = None
    device: Annotated[str | None, Option(help="cpu or cuda; default cuda if there is a GPU.")] = None
    out: Annotated[str, Option(metavar="PATH", help="Folder for log, checkpoints and report.")] = "runs/train"
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
        if self.existing not in get_args(ExistingRun):
            raise unknown("existing", self.existing, get_args(ExistingRun))
        if self.device not in (None, "cpu", "cuda"):
            raise unknown("device", self.device, ["cpu", "cuda"])
        if not self.out:
            raise UsageError("out is empty", remedy="name a folder for the run, for example runs/train")
        size = self.model_size(self.vocabulary or 256)  # this and the following raise on invalid values
        if self.sync is not None and not self.is_auto:
            object.__setattr__(self, "sync", Sync.of(self.sync).name)  # the canonical name of an alias
        for name in CHOSEN_BY_AUTO if self.is_auto else ():
            if getattr(self, name) is not None:
                raise UsageError(
                    f"{name}={getattr(self, name)!r} with sync='auto', which chooses that itself",
                    remedy=f"leave --{name.replace('_', '-')} out, or name a strategy",
                )
        if self.compression not in (None, NO_COMPRESSION, *COMPRESSIONS):
            raise unknown("compression", str(self.compression), [*COMPRESSIONS, NO_COMPRESSION])
        if (local_sgd := self.local_sgd) is not None:
            local_sgd.check_layers(size.layers)
        _ = self.plan

    @property
    def is_auto(self) -> bool:
        """True if the strategy is chosen by measuring."""
        return self.sync == AUTO

    @property
    def strategy(self) -> str:
        """Name of the strategy: that of `sync`, or the default."""
        if self.sync is None or self.is_auto:
            plain = self.every is None and compression_or_none(self.compression) is None
            return "sharded" if plain else "bucketed"
        return self.sync

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
        if Sync.of(self.strategy).shard != "none":
            raise UsageError(
                f"every={self.every!r} with sync={self.sync!r}, where no rank has whole gradients for local steps",
                remedy="leave --sync out, or use bucketed",
            )
        optional: dict[str, Any] = {
            "outer": self.outer,
            "fragments": self.fragments,
            "delay": self.delay,
            "warmup": self.warmup_outer,
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
        plan = Sync.of(self.strategy)
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
                f"bucket_mib={self.bucket_mib!r} with sync={self.strategy!r}, which has no bucket size",
                remedy=f"leave it out, or use {' or '.join(_STRATEGIES_WITH_BUCKETS)}",
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
        return gpt_size(self.size, vocabulary=self.vocabulary or vocabulary, context=self.context)

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
