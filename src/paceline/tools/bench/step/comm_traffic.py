"""Communication of a training step: number of collectives, their bytes, and the time in which any is pending.

Both are observed from outside, so Paceline and torch are counted by the same rule:

- *Calls and bytes*: every collective of ``torch.distributed`` on one of torch's backends passes torch's dispatcher,
  where a dispatch mode sees it with its tensors; a paceline group counts its own calls. The payload of a call is the
  larger of its input and output in that rank's memory: the whole tensor of an all-reduce, the whole input of a
  reduce-scatter, the whole output of an all-gather. N-1 sends with as many receives count as the one collective among
  N ranks that they implement, with N times the message as payload. Of a collective in pieces, each piece counts.
- *Time*: the profiler, and a paceline group itself, record each call from launch to completion. Calls overlap, so the
  time in which at least one was pending is returned.

Both slow a step down, so neither runs in a timed step.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.backends.process_group import PacelineProcessGroup

__all__ = ["CommTraffic", "count_traffic", "covered_seconds", "measure_comm_seconds"]

_NOT_DATA = ("barrier", "monitored_barrier_")
_BACKENDS = ("gloo:", "nccl:", "xccl:")


@dataclass(frozen=True)
class CommTraffic:
    """Collectives that one rank launched in one step, and the bytes of their payloads."""

    calls: float
    nbytes: float


class _PayloadRecorder(TorchDispatchMode):
    """Records the payload of every collective and every received message."""

    def __init__(self) -> None:
        super().__init__()
        self.payloads: list[int] = []
        self.received: list[int] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.name().split("::")[1]
            payload = max((_nbytes(arg) for arg in args), default=0)
            if name.startswith("recv"):
                self.received.append(payload)
            elif not name.startswith("send") and name not in _NOT_DATA and payload:
                self.payloads.append(payload)
        return func(*args, **(kwargs or {}))


def _nbytes(arg: object) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(arg) if isinstance(leaf, torch.Tensor))


def count_traffic(step: Callable[[], object], ranks: int) -> CommTraffic:
    """Run `step` once and return this rank's communication.

    Args:
        step: runs a step.
        ranks: the world size.
    """
    groups = _paceline_groups()
    calls, nbytes = (-sum(group.calls for group in groups), -sum(group.payload_nbytes for group in groups))
    with _PayloadRecorder() as recorder:
        step()
    groups, peers = _paceline_groups(), max(1, ranks - 1)
    calls += sum(group.calls for group in groups) + len(recorder.payloads) + len(recorder.received) / peers
    nbytes += sum(group.payload_nbytes for group in groups) + sum(recorder.payloads)
    return CommTraffic(calls, nbytes + sum(recorder.received) * ranks / peers)


def _paceline_groups() -> list[PacelineProcessGroup]:
    return [group for group in dist.distributed_c10d._world.pg_map if isinstance(group, PacelineProcessGroup)]


def measure_comm_seconds(steps: Callable[[], object]) -> float:
    """Run `steps` under the profiler and return the time in which any collective was pending."""
    groups = _paceline_groups()
    for group in groups:
        group.spans = []
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        steps()
    spans = [span for group in groups for span in group.spans or ()]
    for group in groups:
        group.spans = None
    return covered_seconds(spans) + covered_seconds(_profiled_spans(profiler))


def _profiled_spans(profiler: profile) -> list[tuple[float, float]]:
    with tempfile.TemporaryDirectory(prefix="paceline-profile-") as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))  # far cheaper than profiler.events()
        events = json.loads(trace.read_bytes())["traceEvents"]
    return [
        (event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6)
        for event in events
        if event.get("name", "").startswith(_BACKENDS) and "dur" in event
    ]


def covered_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of the spans ``(start, end)``."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered
