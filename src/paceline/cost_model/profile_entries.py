"""What a profile holds: costs of collectives, what a call costs, and rates of one machine.

What a profile holds of training steps: a model's computing, its exchanges, and how both disturb each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.cost_model.bucket_layout import ReadyGradient
from paceline.cost_model.collective_fit import CollectiveFit, Prediction
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
    "Rate",
    "Source",
]

RATES = {"copy": "B/s", "add": "B/s", "matmul": "FLOP/s"}
"""Kinds of rates and their units: bytes read and written per second, floating-point operations per second."""


@dataclass(frozen=True)
class Source:
    """How an entry was made.

    Attributes:
        command: what reproduces it.
        date: when, ISO 8601.
        machine: facts that bear on times, as `paceline.tools.result_files.machine_record` returns them.
        versions: of the packages that took part, by name.
    """

    command: str
    date: str
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CollectiveCost:
    """The fitted cost of one operation on one backend and network.

    Attributes:
        backend: such as ``"gloo"``.
        network: what carries it, such as ``"loopback"``.
        fit: α, β, and their errors.
        source: how it was made.
    """

    backend: str
    network: str
    fit: CollectiveFit
    source: Source

    @property
    def key(self) -> tuple[str, str, str]:
        """What makes it one entry of a profile: backend, operation, network."""
        return self.backend, self.fit.op, self.network

    def predict(self, nbytes: float, ranks: int, *, extrapolate: bool = False) -> Prediction:
        """Return what the operation will take; see `paceline.cost_model.collective_fit.CollectiveFit.predict`."""
        return self.fit.predict(nbytes, ranks, extrapolate=extrapolate)


@dataclass(frozen=True)
class CallCost:
    """What a call costs that moves next to nothing.

    Attributes:
        backend, network: where.
        op: such as ``"all-reduce"``.
        ranks: how many took part.
        nbytes: size of the message.
        seconds: median.
        source: how it was made.
    """

    backend: str
    network: str
    op: str
    ranks: int
    nbytes: int
    seconds: float
    source: Source

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What makes it one entry of a profile: backend, operation, network, ranks."""
        return self.backend, self.op, self.network, self.ranks


@dataclass(frozen=True)
class Rate:
    """What one machine reaches by itself.

    Attributes:
        kind: ``"copy"`` (bytes read and written per second), ``"add"`` (the same, for a += b), ``"matmul"`` (FLOP/s).
        device: ``"cpu"``, or the name of a GPU.
        dtype: such as ``"float32"``.
        threads: of the CPU; 0 on a GPU.
        value: median of the repetitions, in the unit that `RATES` says.
        low, high: the slowest and the fastest repetition.
        shape: what was worked on, such as ``"64 MiB"`` or ``"2048"``.
        source: how it was made.
    """

    kind: str
    device: str
    dtype: str
    threads: int
    value: float
    low: float
    high: float
    shape: str
    source: Source

    def __post_init__(self) -> None:
        if self.kind not in RATES:
            raise unknown("rate", self.kind, RATES)

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What makes it one entry of a profile: kind, device, dtype, threads."""
        return self.kind, self.device, self.dtype, self.threads


CALLERS = ("paceline", "torch")
"""Who makes an exchange: Paceline's engine (`paceline.parallel.comm`), or torch by one call, as its DDP does."""


@dataclass(frozen=True)
class Parameter:
    """One trained parameter of a model, and when its gradient is ready.

    Attributes:
        name: as in ``named_parameters()``.
        nbytes: of its gradient.
        seconds: from the beginning of backward until its gradient is ready.
        kind: device and dtype; gradients of one kind can share a bucket.
        unit: number of the module with which FSDP2 gathers it; 0: the root.
    """

    name: str
    nbytes: int
    seconds: float
    kind: str = ""
    unit: int = 0

    @property
    def ready(self) -> ReadyGradient:
        """The gradient, for `paceline.cost_model.bucket_layout`."""
        return ReadyGradient(self.nbytes, self.seconds, self.kind)


@dataclass(frozen=True)
class ModelStep:
    """What the computing of one model's training step takes where nothing is exchanged.

    Medians over steps of the rank that was the slowest in each.

    Attributes:
        model: its name.
        fingerprint: of names, shapes and types of its parameters.
        batch: samples of a rank.
        shape: what a sample is, such as ``"context 128"``.
        device: ``"cpu"``, or the name of a GPU.
        backend: of the engine: its group may have memory of its own for buckets.
        ranks: that computed at the same time, in the whole world of the measurement.
        threads: of each rank; 0 on a GPU.
        forward: seconds. backward: seconds, each gradient kept where autograd made it.
        buffered: seconds of a backward that adds gradients to buffers, as whoever sends them in buckets needs it.
        optimizer: seconds of an update of all parameters.
        update_call, update_byte: an update of parameters of n bytes takes update_call + update_byte · n seconds.
        spread: how far single steps were from the median: half of the range that holds eight in ten, relative to it.
        parameters: in the order in which their gradients are ready, in a backward that adds them to buffers.
        source: how it was made.

    Raises:
        UsageError: there is no parameter.
    """

    model: str
    fingerprint: str
    batch: int
    shape: str
    device: str
    backend: str
    ranks: int
    threads: int
    forward: float
    backward: float
    buffered: float
    optimizer: float
    update_call: float
    update_byte: float
    spread: float
    parameters: tuple[Parameter, ...]
    source: Source

    def __post_init__(self) -> None:
        if not self.parameters:
            raise UsageError(
                f"the model {self.model!r} has no parameters", remedy="measure one that is trained"
            )

    @property
    def key(self) -> tuple[str, int, str, str, str, int, int]:
        """What makes it one entry of a profile: model, batch, shape, device, backend, ranks, threads."""
        return self.model, self.batch, self.shape, self.device, self.backend, self.ranks, self.threads

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(each.nbytes for each in self.parameters)

    def update_seconds(self, nbytes: float) -> float:
        """Return what an update of parameters of so many bytes takes, made by itself."""
        return self.update_call + self.update_byte * nbytes


@dataclass(frozen=True)
class ExchangeCost:
    """The fitted cost of an exchange as a training makes it.

    Attributes:
        caller: who makes it, one of `CALLERS`.
        backend, network: such as ``"gloo"`` and ``"loopback"``.
        queued: false: seconds of one that is alone; true: seconds from one to the next where several are launched at
            once, which hides what can be hidden.
        fit: α, β, and their errors.
        points: what was fitted; other numbers of ranks join them.
        source: how it was made.
    """

    caller: str
    backend: str
    network: str
    queued: bool
    fit: CollectiveFit
    points: tuple[MeasuredPoint, ...]
    source: Source

    def __post_init__(self) -> None:
        if self.caller not in CALLERS:
            raise unknown("caller", self.caller, CALLERS)

    @property
    def key(self) -> tuple[str, str, str, str, bool]:
        """What makes it one entry of a profile: caller, backend, operation, network, queued."""
        return self.caller, self.backend, self.fit.op, self.network, self.queued


@dataclass(frozen=True)
class Contention:
    """What a rank's computing and its exchanges do to each other.

    Attributes:
        caller, backend, network, op: whose exchanges.
        device, ranks, threads: where, as for `ModelStep`.
        nbytes: of each exchange.
        launch_seconds: for which the rank itself is busy with launching one.
        computing_slows: how many times longer computing takes while exchanges are under way.
        calls_slow: how many times longer exchanges take while the rank computes.
        source: how it was made.
    """

    caller: str
    backend: str
    network: str
    op: str
    device: str
    ranks: int
    threads: int
    nbytes: int
    launch_seconds: float
    computing_slows: float
    calls_slow: float
    source: Source

    @property
    def key(self) -> tuple[str, str, str, str, str, int, int]:
        """What makes it one entry of a profile: all but what was measured."""
        return self.caller, self.backend, self.network, self.op, self.device, self.ranks, self.threads
