"""What a training is asked to do; every bad value is refused here, before anything is started."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

from paceline.errors import UsageError, unknown
from paceline.parallel.compression.compression_config import COMPRESSIONS
from paceline.parallel.strategy import Sync
from paceline.tools.models.gpt_sizes import GptSize, gpt_size
from paceline.tools.train.local_sgd_settings import NO_COMPRESSION, Apart, named

__all__ = ["Existing", "Settings"]

Existing = Literal["refuse", "resume", "overwrite"]

AT_LEAST_ONE = ("batch_size", "steps", "accumulate", "log_every")
AT_LEAST_ZERO = ("seed", "eval_every", "eval_windows", "checkpoint_every", "sample_tokens", "max_restarts")
OPTIONAL = ("ranks", "min_ranks", "context", "threads", "vocabulary")
WITH_BUCKETS = ("bucketed", "sharded")
WITH_EVERY = ("outer", "outer_lr", "outer_momentum", "fragments", "delay", "warmup_outer")
AUTO = "auto"
CHOSEN_BY_AUTO = ("compression", "bucket_mib", "every", *WITH_EVERY)


@dataclass(frozen=True)
class Settings:
    """Everything that decides a training.

    Attributes:
        out: the run folder.
        existing: what to do if `out` holds a run already.
        ranks: number of ranks; None for as many as a launcher started, or 2 where there is none.
        min_ranks: ranks that it may go on with after failures; None: all of them.
        max_restarts: failures after which it goes on, where it was not started by a launcher.
        size: name of the model's size.
        data: path of the text, None for the Python standard library's sources.
        vocabulary: number of tokens of the model, None for what the data need.
        context: tokens of a window, None for the size's own.
        batch_size: windows of one rank's micro-batch.
        accumulate: micro-batches per optimizer step.
        steps: optimizer steps in all.
        lr: largest learning rate.
        weight_decay: of AdamW.
        clip: largest norm of the gradient, 0 for any.
        sync: name of the strategy; ``"auto"``: what fits the network, measured at the start; None: ``"sharded"``, or
            ``"bucketed"`` with `every`, since then ranks need whole gradients, and with `compression`, since parameters
            that a sharded optimizer gathers are not compressed.
        bucket_mib: bucket size in MiB, None for the strategy's own.
        compression: of gradients, or with `every` of pseudo-gradients; ``"none"``: as they are; None: none for
            gradients, the usual one for pseudo-gradients.
        every: local steps between two synchronisations of parameters; None: gradients are synchronised every step.
        outer: what becomes of the mean then, ``"average"``, ``"diloco"`` or ``"slowmo"``; None: ``"average"``.
        outer_lr, outer_momentum: of that step; None: the usual ones.
        fragments, delay, warmup_outer: see `Apart`; None: 1, 0, 0.
        seed: decides initial weights and the order of the data.
        log_every: steps between two lines of the log.
        eval_every: steps between two held-out losses; 0 for the first and the last only.
        eval_windows: held-out windows that count, spread evenly; 0 for all.
        checkpoint_every: steps between two checkpoints; 0 for the last step only.
        sample_tokens: length of the text that is generated at the end.
        threads: threads of a rank, None for its share of the cores.
        device: ``"cpu"``, ``"cuda"``, or None for CUDA where there is a GPU.

    Raises:
        UsageError: a value is none of the valid ones.
    """

    out: str
    existing: Existing = "refuse"
    ranks: int | None = None
    min_ranks: int | None = None
    max_restarts: int = 3
    size: str = "tiny"
    data: str | None = None
    vocabulary: int | None = None
    context: int | None = None
    batch_size: int = 16
    accumulate: int = 1
    steps: int = 600
    lr: float = 2e-3
    weight_decay: float = 0.1
    clip: float = 1.0
    sync: str | None = None
    bucket_mib: float | None = None
    compression: str | None = None
    every: int | None = None
    outer: str | None = None
    outer_lr: float | None = None
    outer_momentum: float | None = None
    fragments: int | None = None
    delay: int | None = None
    warmup_outer: int | None = None
    seed: int = 0
    log_every: int = 5
    eval_every: int = 100
    eval_windows: int = 256
    checkpoint_every: int = 200
    sample_tokens: int = 400
    threads: int | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        for name in AT_LEAST_ONE:
            _check_whole(name, getattr(self, name), 1)
        for name in AT_LEAST_ZERO:
            _check_whole(name, getattr(self, name), 0)
        for name in OPTIONAL:
            if getattr(self, name) is not None:
                _check_whole(name, getattr(self, name), 1)
        for name, positive in (("lr", True), ("weight_decay", False), ("clip", False)):
            _check_real(name, getattr(self, name), positive)
        if self.existing not in get_args(Existing):
            raise unknown("existing", self.existing, get_args(Existing))
        if self.device not in (None, "cpu", "cuda"):
            raise unknown("device", self.device, ["cpu", "cuda"])
        if not self.out:
            raise UsageError("out is empty", remedy="name a folder for the run, for example runs/train")
        size = self.model_size(self.vocabulary or 256)  # this and the rest refuse what they can't be made of
        if self.sync is not None and not self.is_auto:
            object.__setattr__(self, "sync", Sync.of(self.sync).name)  # an alias's canonical name
        self._check_auto()
        self._check_compression()
        if (apart := self.apart) is not None:
            apart.check_layers(size.layers)
        _ = self.plan

    def _check_auto(self) -> None:
        """Refuse what contradicts a strategy that is chosen by measuring."""
        for name in CHOSEN_BY_AUTO if self.is_auto else ():
            if getattr(self, name) is not None:
                raise UsageError(
                    f"{name}={getattr(self, name)!r} with sync='auto', which chooses that itself",
                    remedy=f"leave --{name.replace('_', '-')} out, or name a strategy",
                )

    def _check_compression(self) -> None:
        if self.compression not in (None, NO_COMPRESSION, *COMPRESSIONS):
            raise unknown("compression", str(self.compression), [*COMPRESSIONS, NO_COMPRESSION])

    @property
    def is_auto(self) -> bool:
        """Whether the strategy is still to be chosen, by measuring."""
        return self.sync == AUTO

    @property
    def strategy(self) -> str:
        """Name of the strategy: the one that was asked for, or the usual one."""
        if self.sync is None or self.is_auto:
            plain = self.every is None and named(self.compression) is None
            return "sharded" if plain else "bucketed"
        return self.sync

    @property
    def apart(self) -> Apart | None:
        """How parameters are synchronised every so many steps; None: gradients are, every step."""
        if self.every is None:
            for name in WITH_EVERY:
                if getattr(self, name) is not None:
                    raise UsageError(
                        f"{name}={getattr(self, name)!r} without every",
                        remedy=f"add --every H, or leave --{name.replace('_', '-')} out: gradients are synchronised "
                        "every step",
                    )
            return None
        if Sync.of(self.strategy).shard != "none":
            raise UsageError(
                f"every={self.every!r} with sync={self.sync!r}, where no rank has whole gradients for steps of its own",
                remedy="leave --sync out, or use bucketed",
            )
        return Apart(
            self.every,
            "average" if self.outer is None else self.outer,
            self.outer_lr,
            self.outer_momentum,
            1 if self.fragments is None else self.fragments,
            0 if self.delay is None else self.delay,
            0 if self.warmup_outer is None else self.warmup_outer,
            self.compression,
        )

    @property
    def told(self) -> str:
        """How ranks are synchronised, in a few words."""
        if (apart := self.apart) is not None:
            return apart.told
        squeezed = named(self.compression)
        return self.strategy + (f", {squeezed}" if squeezed else "")

    @property
    def plan(self) -> Sync:
        """How gradients are synchronised, where they are."""
        plan = Sync.of(self.strategy)
        if self.every is None and named(self.compression) is not None:
            plan = replace(plan, compression=self.compression)
        if self.bucket_mib is None:
            return plan
        if not isinstance(self.bucket_mib, int | float) or not self.bucket_mib > 0:
            raise UsageError(
                f"bucket_mib={self.bucket_mib!r}, must be above 0",
                remedy="one bucket per parameter is called 'naive' (after backward) or 'overlap' (during it)",
            )
        if self.strategy not in WITH_BUCKETS:
            raise UsageError(
                f"bucket_mib={self.bucket_mib!r} with sync={self.strategy!r}, which has no bucket size",
                remedy=f"leave it out, or use {' or '.join(WITH_BUCKETS)}",
            )
        return replace(plan, bucket_mib=float(self.bucket_mib))

    def model_size(self, vocabulary: int) -> GptSize:
        """Return the shapes of the model for data with `vocabulary` different tokens.

        Raises:
            UsageError: no such size, or the asked-for vocabulary is too small for the data.
        """
        if self.vocabulary is not None and self.vocabulary < vocabulary:
            raise UsageError(
                f"the data hold token {vocabulary - 1}, but vocabulary={self.vocabulary}",
                remedy=f"use a vocabulary of {vocabulary} or more, or leave it out",
            )
        return gpt_size(self.size, vocabulary=self.vocabulary or vocabulary, context=self.context)

    @property
    def warmup(self) -> int:
        """Steps over which the learning rate rises: a twentieth of all."""
        return max(1, self.steps // 20)

    def to_json(self) -> str:
        """Return the settings as JSON, for :meth:`from_json`."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Return the settings that `text` holds.

        Raises:
            UsageError: `text` is no JSON object, or holds names that are no settings.
        """
        try:
            values: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise UsageError(f"settings are no JSON: {error}") from error
        if not isinstance(values, dict):
            raise UsageError(f"settings are {type(values).__name__}, must be a JSON object")
        names = [field.name for field in fields(cls)]
        for name in values:
            if name not in names:
                raise unknown("setting", name, names)
        if "out" not in values:
            raise UsageError("settings name no run folder", remedy='add "out"')
        return cls(**values)


def _check_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name}={value!r}, must be a whole number of {least} or more")


def _check_real(name: str, value: object, positive: bool) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < 0 or (positive and value == 0):  # pyright: ignore[reportOperatorIssue]
        raise UsageError(f"{name}={value!r}, must be a number {'above 0' if positive else 'of 0 or more'}")
