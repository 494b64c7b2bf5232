"""Program of each rank of `paceline bench collectives`: ``python -m
paceline.tools.bench.collectives.collectives_worker job.json``.

The job has settings, cases, the rendezvous, and the journal to which rank 0 adds each case's rows once they are known.
At each case the backends are checked, warmed up, timed interleaved and checked again.

[Note: start] An iteration begins at a barrier of the backend's own group, its smallest collective. Without it, a rank
that is late would count as the operation's time on all others. Two effects remain. Ranks leave a barrier at different
times, by about the latency of a message (20 to 100 µs on a loaded machine), and that difference is part of the
measured time: read it as an upper bound for the smallest sizes. And the barrier leaves the library awake: connections
polled, threads running. A program that computes for a while between collectives may wait longer.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from paceline._core.json_codec import decode
from paceline.errors import PacelineError, PeerLost
from paceline.tools.bench.collectives.backend_calls import OpenBackend, PreparedCall, make_call, open_backend
from paceline.tools.bench.collectives.benchmarked_backends import find_backend
from paceline.tools.bench.collectives.collectives_cases import (
    MOST_TURNS,
    CollectiveCase,
    choose_iterations,
    split_into_turns,
)
from paceline.tools.bench.collectives.collectives_rows import CollectiveRow, summarise_times
from paceline.tools.bench.collectives.collectives_settings import CollectiveSettings
from paceline.tools.bench.collectives.exact_buffers import (
    ExactBuffers,
    allocate_buffers,
    fill_input,
    output_is_right,
)
from paceline.tools.bench.collectives.resume_journal import RowJournal
from paceline.tools.bench.device_clock import gather_ranks, slowest_rank
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.bench.rank_jobs import read_job
from paceline.tools.bench.turn_statistics import turn_order
from paceline.world import World, init, shutdown

__all__ = ["main", "measure_cases", "measure_under_launcher"]

_LOSS = ("by peer", "connection", "broken pipe", "timed out", "timeout")
"""In messages of gloo and NCCL about a rank that is gone or silent."""


def main(path: str) -> int:
    """Run the job in the file `path`; return the exit status."""
    signal.signal(signal.SIGTERM, _exit_gracefully)
    job = read_job(path)
    cases = decode(job["cases"], list[CollectiveCase], "cases")
    settings = decode(job["settings"], CollectiveSettings, "settings")
    try:
        world = init("gloo", device="cpu", init_method=job["init_method"])
        measure_cases(settings, cases, world, RowJournal(Path(job["journal"])))
        shutdown()
    except PacelineError as error:
        print(f"Error: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # at once: ranks leave MPI together, so a graceful exit would wait for the others
    except KeyboardInterrupt:
        return 130
    return 0


def _exit_gracefully(number: int, frame: FrameType | None) -> None:
    """Exit so that finished rows can be written; further signals are ignored."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def measure_under_launcher(
    settings: CollectiveSettings,
    cases: Sequence[CollectiveCase],
    wanted: Sequence[bool],
    journal: RowJournal | None,
) -> None:
    """Measure as a rank that a launcher started.

    Args:
        settings: the same on all ranks.
        cases: all cases, the same on all ranks.
        wanted: for each case, whether this rank has memory for it and, on rank 0, whether it is not finished yet; a
            case is measured if all ranks want it.
        journal: of rank 0.
    """
    signal.signal(signal.SIGTERM, _exit_gracefully)
    world = init("gloo", device="cpu")
    agreed = torch.tensor(wanted, dtype=torch.uint8)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    left = [case for case, chosen in zip(cases, agreed.tolist(), strict=True) if chosen]
    measure_cases(settings, left, world, journal)
    shutdown()


@dataclass(frozen=True)
class _Session:
    """Shared by all cases of a process set; the world's default group, gloo, is for coordination."""

    world: World
    settings: CollectiveSettings
    backends: Mapping[str, OpenBackend]


def measure_cases(
    settings: CollectiveSettings, cases: Sequence[CollectiveCase], world: World, journal: RowJournal | None
) -> None:
    """Measure the cases one after another; rank 0 adds the rows of each to the journal."""
    gc.collect()
    gc.freeze()  # objects that exist now are not scanned again, so that collecting before turns is quick
    try:
        with _name_lost_ranks():
            names = dict.fromkeys(name for case in cases for name in case.backends)
            session = _Session(world, settings, {name: open_backend(name, world) for name in names})
            total = MOST_TURNS * len(cases)
            with ProgressBar(f"{world.size} ranks", total, shown=world.rank == 0) as advance:
                for case in cases:
                    rows = _measure_case(session, case, advance)
                    if journal is not None and world.rank == 0:
                        journal.append(rows)
            dist.barrier()
    finally:
        gc.unfreeze()


@contextmanager
def _name_lost_ranks() -> Iterator[None]:
    """Replace the error of a backend that lost a rank by one that says so."""
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


def _measure_case(
    session: _Session, case: CollectiveCase, advance: Callable[[], None]
) -> list[CollectiveRow]:
    """Measure a case; return its rows on rank 0, none elsewhere. `advance` is called `MOST_TURNS` times."""
    calls = _prepare_calls(session, case)
    before = [_check(call) for call in calls]
    once = [_warm_up(call, session.settings.warmup) for call in calls]
    iterations = choose_iterations(session.settings, slowest_rank(once, "cpu"))
    seconds = _time_interleaved(calls, split_into_turns(iterations), advance)
    after = [_check(call) for call in calls]  # even after a wrong result: the other ranks take part in it too
    right = torch.tensor([before, after], dtype=torch.float64).amin(dim=0).view(-1, 1)
    every = gather_ranks(torch.cat([seconds, right], dim=1), "cpu")  # one tensor: nothing is pickled
    if session.world.rank:
        return []
    return [
        CollectiveRow(
            backend=call.backend.name,
            op=case.op,
            ranks=case.ranks,
            nbytes=case.nbytes,
            dtype=session.settings.dtype,
            times=summarise_times(every[:, at, :-1].T.tolist()),
            correct=bool(every[:, at, -1].all()),
        )
        for at, call in enumerate(calls)
    ]


def _prepare_calls(session: _Session, case: CollectiveCase) -> list[PreparedCall]:
    """Return the backends' calls; those with the same kind of buffers share them."""
    settings, world = session.settings, session.world
    shared: dict[tuple[str, bool, bool], ExactBuffers] = {}
    calls = []
    for name in case.backends:
        backend, kind = session.backends[name], find_backend(name).buffer_kind(case.op)
        if kind not in shared:
            numel, new = case.nbytes // settings.itemsize, backend.allocator(getattr(torch, settings.dtype))
            shared[kind] = allocate_buffers(case.op, world.rank, world.size, numel, new, in_place=kind[2])
        calls.append(PreparedCall(backend, shared[kind], make_call(backend, shared[kind])))
    return calls


def _check(call: PreparedCall) -> bool:
    """Run it once on numbers that show where each element came from; return whether this rank's result is right."""
    fill_input(call.buffers)
    call.backend.barrier()
    call.run()
    call.backend.synchronise()
    return output_is_right(call.buffers)


def _warm_up(call: PreparedCall, times: int) -> float:
    """Return the seconds of the last of some calls on this rank; afterwards the buffers hold zeros.

    Zeros stay zeros under every operation, however often it is repeated in place.
    """
    call.buffers.input.zero_()
    call.buffers.output.zero_()
    return [_timed(call) for _ in range(times)][-1]


def _time_interleaved(
    calls: Sequence[PreparedCall], turns: Sequence[int], advance: Callable[[], None]
) -> torch.Tensor:
    """Return this rank's seconds ``[call, iteration]`` in float64."""
    seconds: list[list[float]] = [[] for _ in calls]
    gc.collect()
    gc.disable()
    try:
        for number, iterations in enumerate(turns):
            for index in turn_order(len(calls), number):
                calls[index].buffers.input.zero_()  # back into this rank's caches after another one's turn
                seconds[index] += [_timed(calls[index]) for _ in range(iterations)]
            for _ in range(number * MOST_TURNS // len(turns), (number + 1) * MOST_TURNS // len(turns)):
                advance()
    finally:
        gc.enable()
    return torch.tensor(seconds, dtype=torch.float64)


def _timed(call: PreparedCall) -> float:
    """Return the seconds of one call on this rank; see [Note: start]."""
    call.backend.barrier()
    started = time.perf_counter()
    call.run()
    call.backend.synchronise()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
