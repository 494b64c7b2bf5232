"""What `paceline bench parts` is asked to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import UsageError, unknown
from paceline.tools.bench.step.step_benchmark import BACKENDS
from paceline.tools.models.gpt_sizes import size_of

__all__ = ["PartsSettings", "workload_place"]


def workload_place(text: str) -> tuple[Path, str]:
    """Return file and function of ``FILE.py:FUNCTION``.

    Raises:
        UsageError: there is no such file, or no function is named.
    """
    path, colon, name = text.rpartition(":")
    if not colon or not name or not Path(path).is_file() or Path(path).suffix != ".py":
        raise UsageError(
            f"{text!r} names no Python file and function", remedy="give FILE.py:FUNCTION, such as net.py:make"
        )
    return Path(path), name


@dataclass(frozen=True)
class PartsSettings:
    """Settings of a measurement of a step's parts.

    Attributes:
        ranks: processes, 2 or more.
        size: name of a reference model; or None where `workload` says what is trained.
        workload: ``FILE.py:FUNCTION``; see `paceline.tools.bench.parts.workload.user_defined`.
        batch_size: windows of a rank's batch, of a reference model.
        context: tokens of a window, of a reference model.
        threads: of a rank.
        backend: a name in `paceline.tools.bench.step.step_benchmark.BACKENDS`; None: what fits the device.
        network: what is between the ranks, in words.
        steps: of computing that are timed.
        rounds: repetitions of computing beside exchanges.
        seconds: an exchange of one size is measured for about so long, at most.
        torch: measure the calls of torch's own DDP too.

    Raises:
        UsageError: a value is out of range or unknown.
    """

    ranks: int = 2
    size: str | None = "mini"
    workload: str | None = None
    batch_size: int = 2
    context: int = 64
    threads: int = 1
    backend: str | None = None
    network: str = "loopback"
    steps: int = 15
    rounds: int = 3
    seconds: float = 1.0
    torch: bool = True

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise UsageError(f"--ranks {self.ranks}: one rank exchanges nothing", remedy="give 2 or more")
        for name in ("batch_size", "context", "threads", "steps", "rounds"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)}", remedy="give 1 or more")
        if self.backend is not None and self.backend not in BACKENDS:
            raise unknown("backend", self.backend, BACKENDS)
        if not self.seconds > 0:
            raise UsageError(f"--seconds {self.seconds}", remedy="give a number above 0")
        if not self.network.strip():
            raise UsageError("--network is empty", remedy="say what is between the ranks, such as loopback")
        if (self.size is None) == (self.workload is None):
            raise UsageError("one model is measured at a time", remedy="give --size or --workload")
        if self.workload is not None:
            workload_place(self.workload)
        if self.size is not None and self.context > size_of(self.size).context:
            raise UsageError(
                f"--context {self.context}: model size {self.size!r} sees at most {size_of(self.size).context} tokens",
                remedy="give a smaller --context, or another --size",
            )

    def to_json(self) -> dict[str, Any]:
        """Return the settings for JSON; ``PartsSettings(**record)`` is the way back."""
        return asdict(self)
