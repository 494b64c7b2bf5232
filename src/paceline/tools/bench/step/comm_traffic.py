"""What a step hands to communication, whoever issues it: calls, bytes, and how long calls are under way.

Both are seen from outside, so Paceline and torch are counted by the same rule:

- *Calls and bytes*: every collective of ``torch.distributed`` over a backend of torch's own passes torch's
  dispatcher, where a dispatch mode sees it with its tensors; a paceline group counts by itself. The payload
  of a call is the larger of what goes in and what comes out, as it is in that rank's memory: the whole tensor
  for an all-reduce, the whole input of a reduce-scatter, the whole output of an all-gather. N-1 sends with as
  many receives are counted as the one collective among N ranks that they make up, its payload N times the
  message.
- *Time*: the profiler, and a paceline group itself, record each call from its launch to its completion. Calls
  overlap, so what is returned is the time in which at least one was under way.

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

__all__ = ["Traffic", "count_traffic", "covered_seconds", "seconds_under_way"]

_NOT_DATA = ("barrier", "monitored_barrier_")
_BACKENDS = ("gloo:", "nccl:")


@dataclass(frozen=True)
class Traffic:
    """Collectives that one rank launched in one step, and the bytes of their payloads."""

    calls: float
    nbytes: float


class _Ear(TorchDispatchMode):
    """Notes the payload of every collective and every received message."""

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


def count_traffic(step: Callable[[], object], ranks: int) -> Traffic:
    """Run `step` once and return what this rank handed to communication; `ranks` is the world size."""
    before = _counted()
    with _Ear() as ear:
        step()
    after = _counted()
    peers = max(1, ranks - 1)
    return Traffic(
        calls=len(ear.payloads) + len(ear.received) / peers + after.calls - before.calls,
        nbytes=sum(ear.payloads) + sum(ear.received) * ranks / peers + after.nbytes - before.nbytes,
    )


def _counted() -> Traffic:
    """Return what the paceline groups of this process have counted so far."""
    groups = _paceline_groups()
    return Traffic(sum(group.calls for group in groups), sum(group.payload_nbytes for group in groups))


def _paceline_groups() -> list[PacelineProcessGroup]:
    return [group for group in dist.distributed_c10d._world.pg_map if isinstance(group, PacelineProcessGroup)]


def seconds_under_way(steps: Callable[[], object]) -> float:
    """Run `steps` under the profiler and return the time in which some call was under way."""
    groups = _paceline_groups()
    for group in groups:
        group.spans = []
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        steps()
    ours = [span for group in groups for span in group.spans or ()]
    for group in groups:
        group.spans = None
    return covered_seconds(ours) + covered_seconds(_profiled(profiler))


def _profiled(profiler: profile) -> list[tuple[float, float]]:
    """Return when the calls that the profiler saw were under way, in seconds of its clock."""
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
    """Return how much time the spans ``(start, end)`` cover together, counting overlaps once."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered
