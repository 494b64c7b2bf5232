"""Entries of a profile: costs of collectives and calls, machine rates, and the parts of a model's training step."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from operator import attrgetter
from typing import Annotated, Any, ClassVar

from paceline._core.json_codec import Meta, NonNegative, Positive, Whole
from paceline.cost_model.backward_simulation import ReadyGradient
from paceline.cost_model.collective_prediction import CollectiveFit, TimePrediction
from paceline.cost_model.fit_measurements import MeasuredPoint
from paceline.errors import UsageError, unknown

__all__ = [
    "CALLERS",
    "RATES",
    "CallCost",
    "CollectiveCost",
    "Contention",
    "ExchangeCost",
    "ModelStep",
    "Parameter",
    "ProfileEntry",
    "Rate",
    "Source",
]

Count = Annotated[int, Meta(ge=1)]
Slowdown = Annotated[float, Meta(ge=1.0, le=1e308)]

RATES = {"copy": "B/s", "add": "B/s", "matmul": "FLOP/s"}
"""Kinds of rates and their units: bytes read and written per second, floating-point operations per second."""

CALLERS = ("paceline", "torch")
"""Callers of an exchange: Paceline's engine (`paceline.parallel`), or torch in one call, like its DDP."""


class ProfileEntry:
    """An entry of a profile; a new entry replaces the one with the same key."""

    KEY: ClassVar[tuple[str, ...]] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """Values that identify the entry."""
        return attrgetter(*self.KEY)(self)


@dataclass(frozen=True)
class Source:
    """How an entry was measured.

    Attributes:
        command: reproduces the measurement.
        date: ISO 8601.
        machine: facts that affect times, from `paceline.tools.result_files.machine_record`.
        versions: of the packages that took part, by name.
    """

    command: str
    date: str
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CollectiveCost(ProfileEntry):
    """Fitted cost of one operation on one backend and network.

    Attributes:
        backend: such as ``"gloo"``.
        network: such as ``"loopback"``.
        fit: α and β with their errors.
        source: how it was measured.
    """

    KEY: ClassVar = ("backend", "fit.op", "network")

    backend: str
    network: str
    fit: CollectiveFit
    source: Source

    def predict(self, nbytes: float, ranks: int, *, extrapolate: bool = False) -> TimePrediction:
        """Predict the operation's time; see `paceline.cost_model.collective_prediction.CollectiveFit.predict`."""
        return self.fit.predict(nbytes, ranks, extrapolate=extrapolate)


@dataclass(frozen=True, kw_only=True)
class CallCost(ProfileEntry):
    """Cost of a call that moves next to nothing.

    Attributes:
        backend: such as ``"gloo"``.
        network: such as ``"loopback"``.
        op: such as ``"all-reduce"``.
        ranks: that took part.
        nbytes: size of the message.
        seconds: median.
        source: how it was measured.
    """

    KEY: ClassVar = ("backend", "op", "network", "ranks")

    backend: str
    network: str
    op: str
    ranks: Annotated[int, Meta(ge=2)]
    nbytes: Count
    seconds: Positive
    source: Source


@dataclass(frozen=True, kw_only=True)
class Rate(ProfileEntry):
    """Rate that one machine reaches.

    Attributes:
        kind: ``"copy"`` (bytes read and written per second), ``"add"`` (the same, for a += b), ``"matmul"`` (FLOP/s).
        device: ``"cpu"``, or the name of a GPU.
        dtype: such as ``"float32"``.
        threads: of the CPU; 0 on a GPU.
        value: median of the repetitions, in the unit that `RATES` gives.
        low: the slowest repetition.
        high: the fastest repetition.
        shape: of the operands, such as ``"64 MiB"`` or ``"2048"``.
        source: how it was measured.
    """

    KEY: ClassVar = ("kind", "device", "dtype", "threads")

    kind: str
    device: str
    dtype: str
    threads: Whole
    value: Positive
    low: Positive
    high: Positive
    shape: str
    source: Source

    def __post_init__(self) -> None:
        if self.kind not in RATES:
            raise unknown("rate", self.kind, RATES)


@dataclass(frozen=True)
class Parameter:
    """Trained parameter of a model, and when its gradient is ready.

    Attributes:
        name: as in ``named_parameters()``.
        nbytes: of its gradient.
        seconds: from the beginning of backward until the gradient is ready.
        kind: device and dtype; gradients of one kind can share a bucket.
        unit: number of the module with which FSDP2 gathers it; 0: the root.
    """

    name: str
    nbytes: Whole
    seconds: NonNegative
    kind: str = ""
    unit: Whole = 0

    @property
    def ready(self) -> ReadyGradient:
        """The gradient, for `paceline.cost_model.backward_simulation`."""
        return ReadyGradient(self.nbytes, self.seconds, self.kind)


@dataclass(frozen=True, kw_only=True)
class ModelStep(ProfileEntry):
    """Compute times of a model's training step without any exchange.

    Medians over steps, each of the rank that was slowest in that step.

    Attributes:
        model: its name.
        fingerprint: hash of the names, shapes and types of its parameters.
        batch: samples per rank.
        shape: of a sample, such as ``"context 128"``.
        device: ``"cpu"``, or the name of a GPU.
        backend: of the engine, whose process group may allocate the buckets.
        ranks: that computed at the same time, in the whole world of the measurement.
        threads: of each rank; 0 on a GPU.
        forward: seconds.
        backward: seconds, with each gradient left where autograd made it.
        buffered: seconds of a backward that adds gradients to bucket buffers.
        optimizer: seconds of an update of all parameters.
        update_call: fixed seconds of an update; n bytes of parameters take update_call + update_byte · n.
        update_byte: seconds per byte of an update.
        spread: half of the range that holds 80 % of the steps, relative to the median.
        parameters: in the order in which their gradients are ready, in a backward that fills buckets.
        source: how it was measured.

    Raises:
        UsageError: there is no parameter.
    """

    KEY: ClassVar = ("model", "batch", "shape", "device", "backend", "ranks", "threads")

    model: str
    fingerprint: str
    batch: Count
    shape: str
    device: str
    backend: str
    ranks: Count
    threads: Whole
    forward: Positive
    backward: Positive
    buffered: Positive
    optimizer: Positive
    update_call: NonNegative
    update_byte: NonNegative
    spread: NonNegative
    parameters: tuple[Parameter, ...]
    source: Source

    def __post_init__(self) -> None:
        if not self.parameters:
            raise UsageError(
                f"the model {self.model!r} has no parameters",
                remedy="measure a model with trained parameters",
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(each.nbytes for each in self.parameters)

    def update_seconds(self, nbytes: float) -> float:
        """Return the seconds of a separate update of `nbytes` of parameters."""
        return self.update_call + self.update_byte * nbytes


@dataclass(frozen=True)
class ExchangeCost(ProfileEntry):
    """Fitted cost of an exchange as training makes it.

    Attributes:
        caller: one of `CALLERS`.
        backend: such as ``"gloo"``.
        network: such as ``"loopback"``.
        queued: false: seconds of an isolated exchange; true: seconds from one to the next where several are launched
            together, which hides latency.
        fit: α and β with their errors.
        points: that were fitted; points of other numbers of ranks can join them.
        source: how it was measured.
    """

    KEY: ClassVar = ("caller", "backend", "fit.op", "network", "queued")

    caller: str
    backend: str
    network: str
    queued: bool
    _: KW_ONLY
    fit: CollectiveFit
    points: tuple[MeasuredPoint, ...]
    source: Source

    def __post_init__(self) -> None:
        if self.caller not in CALLERS:
            raise unknown("caller", self.caller, CALLERS)


@dataclass(frozen=True, kw_only=True)
class Contention(ProfileEntry):
    """How a rank's computing and its exchanges slow each other down.

    Attributes:
        caller: of the exchanges, one of `CALLERS`.
        backend: of the exchanges.
        network: of the exchanges.
        op: of the exchanges.
        device: that computes, as for `ModelStep`.
        ranks: as for `ModelStep`.
        threads: as for `ModelStep`.
        nbytes: of each exchange.
        launch_seconds: for which launching an exchange occupies the rank.
        computing_slows: factor by which computing is slower while exchanges run.
        calls_slow: factor by which exchanges are slower while the rank computes.
        source: how it was measured.
    """

    KEY: ClassVar = ("caller", "backend", "network", "op", "device", "ranks", "threads")

    caller: str
    backend: str
    network: str
    op: str
    device: str
    ranks: Count
    threads: Whole
    nbytes: Count
    launch_seconds: NonNegative
    computing_slows: Slowdown
    calls_slow: Slowdown
    source: Source
