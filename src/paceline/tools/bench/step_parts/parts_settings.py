"""Settings of `paceline bench parts`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UsageError, unknown
from paceline.tools.bench.step.step_benchmark import STEP_BACKENDS
from paceline.tools.models.gpt_sizes import gpt_size

__all__ = ["PartsSettings", "split_workload_name"]


def split_workload_name(text: str) -> tuple[Path, str]:
    """Return file and function of ``FILE.py:FUNCTION``.

    Raises:
        UsageError: the file does not exist, or no function is named.
    """
    path, colon, name = text.rpartition(":")
    if not colon or not name or not Path(path).is_file() or Path(path).suffix != ".py":
        raise UsageError(
            f"{text!r} names no Python file and function", remedy="give FILE.py:FUNCTION, such as net.py:make"
        )
    return Path(path), name


@dataclass(frozen=True, kw_only=True)
class PartsSettings:
    """Settings of a measurement of a step's parts.

    Attributes:
        ranks: processes, 2 or more.
        size: name of a reference model; None if there is a `workload`.
        workload: ``FILE.py:FUNCTION``; see `paceline.tools.bench.step_parts.training_workload.user_workload`.
        batch_size: windows of a rank's batch, of a reference model.
        context: tokens of a window, of a reference model.
        threads: of a rank.
        backend: a name in `paceline.tools.bench.step.step_benchmark.STEP_BACKENDS`; None: chosen by the device.
        network: name of the network between the ranks.
        steps: timed steps of computing.
        rounds: repetitions of computing during exchanges.
        seconds: about the longest time for an exchange of one size.
        torch: measure the calls of torch's DDP too.

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
            raise UsageError(
                f"--nproc-per-node {self.ranks}: one rank exchanges nothing", remedy="give 2 or more"
            )
        for name in ("batch_size", "context", "threads", "steps", "rounds"):
            if getattr(self, name) < 1:
                option = "micro-batch-size" if name == "batch_size" else name
                raise UsageError(f"--{option} {getattr(self, name)}", remedy="give 1 or more")
        if self.backend is not None and self.backend not in STEP_BACKENDS:
            raise unknown("backend", self.backend, STEP_BACKENDS)
        if not self.seconds > 0:
            raise UsageError(f"--seconds {self.seconds}", remedy="give a number above 0")
        if not self.network.strip():
            raise UsageError(
                "--network is empty", remedy="name the network between the ranks, such as loopback"
            )
        if (self.size is None) == (self.workload is None):
            raise UsageError("one model is measured at a time", remedy="give a size or a workload")
        if self.workload is not None:
            split_workload_name(self.workload)
        if self.size is not None and self.context > gpt_size(self.size).context:
            raise UsageError(
                f"--context {self.context}: model size {self.size!r} sees at most {gpt_size(self.size).context} tokens",
                remedy="give a smaller --context, or another --model",
            )
