"""What each rank of `paceline bench collectives` runs: ``python -m
paceline.tools.bench.collectives.collectives_worker job.json``.

The job holds settings, the cases, where the ranks meet (else they are told by variables), and the journal that rank 0
adds each case's rows to as soon as they are there.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from paceline.errors import PacelineError, PeerLost
from paceline.tools.bench.collectives.backend_calls import open_carrier
from paceline.tools.bench.collectives.benchmark_cases import TURNS, Case
from paceline.tools.bench.collectives.case_timing import Field, measure_case
from paceline.tools.bench.collectives.collectives_settings import CollectiveSettings
from paceline.tools.bench.collectives.measurement_journal import Journal
from paceline.tools.bench.progress_bar import TurnBar
from paceline.world import World, init, shutdown

__all__ = ["main", "measure_cases", "take_part"]

_LOSS = ("by peer", "connection", "broken pipe", "timed out", "timeout")
"""What gloo and NCCL write when another rank is gone or silent."""


def main(argv: Sequence[str]) -> int:
    """Do the job that the file ``argv[0]`` describes; return the exit status."""
    signal.signal(signal.SIGTERM, _leave)
    job = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    cases = [Case(**{**case, "backends": tuple(case["backends"])}) for case in job["cases"]]
    settings = CollectiveSettings.from_json(job["settings"])
    try:
        world = init("gloo", device="cpu", init_method=job["init_method"])
        measure_cases(settings, cases, world, Journal(Path(job["journal"])))
        shutdown()
    except PacelineError as error:
        print(f"Error: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # at once: MPI is left by all ranks together, so an orderly end would wait for the others
    except KeyboardInterrupt:
        return 130
    return 0


def _leave(number: int, frame: FrameType | None) -> None:
    """End in order when asked to, so that what is finished can be written; a second time asks in vain."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def take_part(
    settings: CollectiveSettings, cases: Sequence[Case], wanted: Sequence[bool], journal: Journal | None
) -> None:
    """Measure as a rank that a launcher started.

    Args:
        settings: the same on all ranks.
        cases: all cases, the same on all ranks.
        wanted: which of them this rank has memory for, and, on rank 0, are not finished yet: a case is measured if
            all ranks want it.
        journal: for rank 0.
    """
    signal.signal(signal.SIGTERM, _leave)
    world = init("gloo", device="cpu")
    agreed = torch.tensor(wanted, dtype=torch.uint8)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    left = [case for case, chosen in zip(cases, agreed.tolist(), strict=True) if chosen]
    measure_cases(settings, left, world, journal)
    shutdown()


def measure_cases(
    settings: CollectiveSettings, cases: Sequence[Case], world: World, journal: Journal | None
) -> None:
    """Measure the cases one after another; rank 0 adds the rows of each to the journal."""
    gc.collect()
    gc.freeze()  # what is there stays there, so that collecting before turns is quick
    try:
        with _losses_named():
            _measure(settings, cases, world, journal)
    finally:
        gc.unfreeze()


def _measure(
    settings: CollectiveSettings, cases: Sequence[Case], world: World, journal: Journal | None
) -> None:
    backends = dict.fromkeys(name for case in cases for name in case.backends)
    field = Field(world, settings, {name: open_carrier(name, world) for name in backends})
    with TurnBar(f"{world.size} ranks", TURNS * len(cases), shown=world.rank == 0) as tick:
        for case in cases:
            rows = measure_case(field, case, tick)
            if journal is not None and world.rank == 0:
                journal.append(rows)
    dist.barrier()


@contextmanager
def _losses_named() -> Iterator[None]:
    """Turn the anonymous error of a backend that lost a rank into one that says what it means."""
    try:
        yield
    except PacelineError:
        raise  # it names the rank already
    except RuntimeError as error:
        reason = str(error).partition("\n")[0].rsplit("] ", 1)[-1].partition(". ")[0]
        if not any(sign in reason.lower() for sign in _LOSS):
            raise
        raise PeerLost(
            f"another rank ended or stopped answering ({reason})",
            remedy="look at the output of the other ranks",
        ) from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
