"""A turn of one contestant of `peers.py`: what every host's process does, whatever the library.

Each library runs in processes of its own, under the Python that it was installed into, so this file needs nothing
but torch and Paceline's reference model. Phases: set the library up; meet the other hosts in a gloo group that is
used between measurements only; take some steps without it; a first round, which opens connections; rounds whose inner
steps change the parameters but compute nothing, which leaves the synchronisation alone; rounds of real inner steps;
measure how far apart the ranks are; rank 0 writes what was found.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from workload import EVERY, batch_of, digest_of, model_and_optimizer

from paceline.testing.netlab.lab_network import parse_traffic
from paceline.tools.models.gpt import GPT, token_loss
from paceline.tools.models.token_windows import TokenBatch

__all__ = ["OUTER_LR", "OUTER_MOMENTUM", "Peer", "Place", "play", "ring_nbytes"]

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
"""Of the outer Nesterov step (DiLoCo, arXiv 2311.08105, section 3)."""

_ALONE_STEPS = 3
_FARTHEST = 1e-2


@dataclass(frozen=True)
class Place:
    """Where a rank is and what it is asked for.

    Attributes:
        rank, ranks: which rank, of how many; rank k runs on host k.
        port: this one and the next ninety-nine are free on every host.
        folder: empty, and the same on all hosts.
        settings: of the contestant.
    """

    rank: int
    ranks: int
    port: int
    folder: Path
    settings: dict[str, Any]


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Peer:
    """A library at work.

    Attributes:
        finish: completes an inner step after backward: the inner optimizer, and after `EVERY` steps the outer one.
        running: entered when synchronising shall begin; left at the end.
        sent: bytes that a host is expected to send in a round, without headers and matchmaking.
        overlaps: whether it sends while inner steps compute, so that there is no synchronisation alone.
        begin: called once, when synchronising begins.
        prepare: called before a synchronisation alone is timed, for what can be done beside inner steps.
        agreed: returns what is the same on all hosts after a round; None: the model's parameters.
        extra: seconds that are told apart, filled by the library.
    """

    finish: Callable[[], object]
    running: AbstractContextManager[object]
    sent: float
    overlaps: bool = False
    begin: Callable[[], object] = _nothing
    prepare: Callable[[], object] = _nothing
    agreed: Callable[[], Iterable[Tensor]] | None = None
    extra: dict[str, list[float]] = field(default_factory=dict)


Build = Callable[[Place, GPT, torch.optim.Optimizer], Peer]


def ring_nbytes(model: torch.nn.Module, ranks: int) -> float:
    """Return what each rank of a ring sends to all-reduce all parameters in their own type."""
    return 2 * (ranks - 1) / ranks * sum(parameter.nbytes for parameter in model.parameters())


@torch.no_grad()
def _nudge(model: torch.nn.Module, rank: int) -> None:
    """Change the parameters as an inner step might, without computing one."""
    drawn = torch.Generator().manual_seed(rank)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape[-1], generator=drawn), alpha=1e-3)


class _Turn:
    """What one rank measures."""

    def __init__(self, place: Place, model: GPT, peer: Peer, batch: TokenBatch) -> None:
        self._place, self._model, self._peer, self._batch = place, model, peer, batch
        self.passed: list[tuple[int, int]] = []

    def round(self, compute: bool) -> float:
        """Return the seconds of a round on this rank; what its host sent and received is noted."""
        before = _counts()
        if not compute:
            self._peer.prepare()
            _nudge(self._model, self._place.rank)
        dist.barrier()
        started = time.perf_counter()
        for _ in range(EVERY):
            if compute:
                token_loss(self._model(self._batch.inputs), self._batch.targets).backward()
            self._peer.finish()
        seconds = time.perf_counter() - started
        dist.barrier()
        sent, received = _counts()
        self.passed.append((sent - before[0], received - before[1]))
        return seconds


def _counts() -> tuple[int, int]:
    traffic = parse_traffic(Path("/proc/net/dev").read_text())
    return traffic.sent, traffic.received


def _alone(model: GPT, optimizer: torch.optim.Optimizer, batch: TokenBatch) -> float:
    """Return the seconds of a step that nobody synchronises, beside the other ranks' steps."""
    seconds = []
    for _ in range(1 + _ALONE_STEPS):
        dist.barrier()
        started = time.perf_counter()
        token_loss(model(batch.inputs), batch.targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:])


@torch.no_grad()
def _apart(agreed: list[Tensor]) -> float:
    """Return how far this rank is from rank 0: ‖a − b‖ / ‖b‖ over all that should be equal; 0: bit for bit.

    Raises:
        RuntimeError: it is further than rounding on the wire explains.
    """
    if len(set(_gathered(digest_of(agreed)))) == 1:
        return 0.0
    mine = torch.cat([tensor.detach().reshape(-1) for tensor in agreed])
    first = mine.clone()
    dist.broadcast(first, src=0)
    apart = float((mine - first).norm() / first.norm())
    if not apart < _FARTHEST:
        raise RuntimeError(f"after a round this rank's parameters are {apart:.2g} away from rank 0's")
    return apart


def _gathered(value: object) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def play(build: Build) -> None:
    """Take one turn as the job file says that is the program's only argument.

    Raises:
        RuntimeError: the ranks are further apart after a round than rounding explains.
    """
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    rank = int(socket.gethostname().removeprefix("host"))
    place = Place(rank, job["ranks"], job["port"] + 1, Path(job["folder"]), job["settings"])
    torch.set_num_threads(1)
    model, optimizer = model_and_optimizer()
    dist.init_process_group(
        "gloo", init_method=f"tcp://host0:{job['port']}", rank=rank, world_size=place.ranks
    )
    peer = build(place, model, optimizer)
    turn = _Turn(place, model, peer, batch_of(rank))
    mine: dict[str, Any] = {"alone": _alone(model, optimizer, batch_of(rank))}
    with peer.running:
        peer.begin()
        turn.round(compute=False)
        turn.passed.clear()
        for kept in peer.extra.values():
            kept.clear()
        mine["syncs"] = [turn.round(compute=False) for _ in range(0 if peer.overlaps else job["syncs"])]
        mine["rounds"] = [turn.round(compute=True) for _ in range(job["rounds"])]
        agreed = list(model.parameters() if peer.agreed is None else peer.agreed())
        mine |= {"passed": turn.passed, "apart": _apart(agreed), "extra": dict(peer.extra)}
        every = _gathered(mine)
    if rank == 0:
        found = _slowest(every) | {"expected_sent": peer.sent}
        Path(job["out"]).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _slowest(every: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the slowest rank's seconds, and the bytes of every round and host."""
    return {
        "alone": max(one["alone"] for one in every),
        "apart": max(one["apart"] for one in every),
        "syncs": [max(turns) for turns in zip(*(one["syncs"] for one in every), strict=True)],
        "rounds": [max(turns) for turns in zip(*(one["rounds"] for one in every), strict=True)],
        "passed": [list(turns) for turns in zip(*(one["passed"] for one in every), strict=True)],
        "extra": {
            name: [max(turns) for turns in zip(*(one["extra"][name] for one in every), strict=True)]
            for name in every[0]["extra"]
        },
    }
