"""Program that runs starvation cases: ``python -m paceline.tools.bench.starvation.starvation_worker JOB``.

Importing torch takes seconds, so this process imports it once and forks the ranks of each case, fresh processes that
may end in any way. A case is over when all have ended, or when nothing has moved for longer than the group's time-out:
the ranks that are left count as hung and are killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.data.loader import Loader
from paceline.tools.bench.rank_jobs import read_job, write_job_result
from paceline.tools.bench.starvation.starvation_cases import StarvationCase, find_cases
from paceline.tools.bench.starvation.starvation_outcome import (
    CaseOutcome,
    EventLog,
    ProcessEnd,
    case_outcome,
    read_events,
)
from paceline.tools.bench.starvation.starvation_settings import StarvationSettings
from paceline.tools.bench.starvation.starvation_table import summary_line
from paceline.tools.bench.starvation.starvation_training import (
    DdpTrainer,
    RegressionTask,
    SampleBatch,
    SingleProcessReference,
    StarvationTrainer,
    make_trainer,
)

__all__ = ["main", "run_case", "train_as_rank"]

_OVER = "over"  # file in a case's folder: the others have ended, so an idle rank may too
_LARGE = 100_000  # elements: more than the model has
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_POLL_SECONDS = 0.005
_GRACE_SECONDS = 20.0  # beyond the group's time-out


def main(path: str) -> None:
    """Run all cases of the job in the file `path`, and print a line for each."""
    torch.set_num_threads(1)
    job = read_job(path)
    settings, cases = StarvationSettings.from_json(job["settings"]), find_cases(job["cases"])
    outcomes = []
    for number, case in enumerate(cases, start=1):
        outcomes.append(run_case(case, settings).to_json())
        line = f"{number}/{len(cases)} {summary_line(outcomes[-1])}"
        print(line, file=sys.stderr, flush=True)
    write_job_result(job, outcomes)


# ------------------------------------------------------------------ one rank


def train_as_rank(
    case: StarvationCase, settings: StarvationSettings, rank: int, folder: Path, log: EventLog
) -> None:
    """Train an epoch as `rank` of a case, and log the events.

    Args:
        case: to run.
        settings: the batches, and the group's time-out.
        rank: of this process.
        folder: shared by the ranks of this case.
        log: of this rank.

    Raises:
        Exception: any that torch raises because of starvation, once it is logged.
    """
    try:
        dist.init_process_group(
            settings.backend,
            init_method=(folder / "rendezvous").as_uri(),
            rank=rank,
            world_size=settings.ranks,
            timeout=timedelta(seconds=settings.timeout),
        )
        _RankRun(case, settings, rank, folder, log).run()
        dist.destroy_process_group()
    except Exception as error:
        log.write("raised", kind=type(error).__name__, text=str(error))
        raise


class _RankRun:
    def __init__(
        self, case: StarvationCase, settings: StarvationSettings, rank: int, folder: Path, log: EventLog
    ) -> None:
        self.case, self.settings, self.rank, self.folder, self.log = case, settings, rank, folder, log
        self.task = RegressionTask(settings)
        self.reference = SingleProcessReference(self.task, settings)
        self.trainer: StarvationTrainer = make_trainer(case.trainer, self.task.model())

    def run(self) -> None:
        with self._join():
            steps = 0
            for batch in self._batches():
                self._step(steps, batch)
                steps += 1
            if steps < self.settings.steps and self.case.when_dry != "stops early":
                self.log.write("dry")
                self._act_dry(steps)
        parameters = self.trainer.full_parameters()
        if parameters is None:
            self.log.write("finished")
        else:
            error = self.reference.parameter_error(parameters)
            self.log.write("finished", parameters=parameters.tolist(), parameter_error=error)

    def _join(self) -> contextlib.AbstractContextManager[object]:
        """Return torch's context for unequal numbers of batches, for the cases that use it."""
        if self.case.when_dry != "join" or not isinstance(self.trainer, DdpTrainer):
            return contextlib.nullcontext()
        return self.trainer.model.join(divide_by_initial_world_size=self.case.divide_by_initial)

    def _batches(self) -> Iterator[SampleBatch]:
        if self.case.when_dry == "takes part":
            return _loader_batches(self.task, self.settings)
        least = min(self.settings.balance.batches) if self.case.when_dry == "stops early" else None
        return (self.task.batch(numbers) for numbers in self.settings.batches(self.rank)[:least])

    def _step(self, step: int, batch: SampleBatch, *, counts: bool = True) -> None:
        """Train one step and log the error of its gradient; `counts`: with samples of this epoch."""
        before = self.trainer.full_parameters()
        self.log.write("started", step=step)
        self.trainer.step(batch)
        after = self.trainer.full_parameters()
        error = None if before is None or after is None else self.reference.error(before, after, step)
        self.log.write("stepped", step=step, samples=batch.samples if counts else 0, error=error)

    def _act_dry(self, steps: int) -> None:
        """Do what the case prescribes for a rank without batches."""
        match self.case.when_dry:
            case "idles":
                while not (self.folder / _OVER).exists():
                    time.sleep(0.01)
            case "barrier":
                dist.barrier()
            case "reduces one":
                dist.all_reduce(torch.ones(1, dtype=torch.float64))
            case "reduces many":
                dist.all_reduce(torch.ones(_LARGE, dtype=torch.float64))
            case "next epoch":
                left = range(steps, self.settings.steps)
                later = islice(self.settings.later_batches(self.rank), len(left))
                for step, numbers in zip(left, later, strict=True):
                    self._step(step, self.task.batch(numbers), counts=False)


def _loader_batches(task: RegressionTask, settings: StarvationSettings) -> Iterator[SampleBatch]:
    """Yield this rank's batch of each step from `paceline.Loader`."""
    dealing = settings.balance.dispatch
    loader = Loader(
        task.dataset,
        settings.balance.batch_size,
        dispatch=dealing.scheme,
        block=dealing.block,
        shares=list(dealing.shares),
        seed=dealing.seed,
    )
    for batch in loader:
        x, y = batch
        yield SampleBatch(x, y, batch.samples)


# ------------------------------------------------------------------ the processes of a case


def run_case(case: StarvationCase, settings: StarvationSettings) -> CaseOutcome:
    """Run one case in fresh processes, none of which is left, and return its outcome."""
    with tempfile.TemporaryDirectory(prefix="paceline-starvation-") as name:
        folder = Path(name)
        pids: dict[int, int] = {}
        try:
            for rank in range(settings.ranks):
                pids[rank] = _fork(case, settings, rank, folder)
            ends = _wait_for_ends(settings, pids, folder)
        finally:
            for pid in pids.values():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        events = {rank: read_events(_events_file(folder, rank)) for rank in ends}
        return case_outcome(case, settings, events, ends)


def _events_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.jsonl"


def _stderr_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.stderr"


def _wait_for_ends(settings: StarvationSettings, pids: dict[int, int], folder: Path) -> dict[int, ProcessEnd]:
    """Return the end of every rank; remove those that have ended from `pids`."""
    ends: dict[int, ProcessEnd] = {}
    files = [_events_file(folder, rank) for rank in pids]
    moved, size = time.monotonic(), 0
    while pids:
        for rank, pid in list(pids.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del pids[rank]
                ends[rank] = _process_end(os.waitstatus_to_exitcode(status), rank, folder)
        if set(pids) <= set(settings.dry_ranks):
            (folder / _OVER).touch()
        written = sum(file.stat().st_size for file in files if file.exists())
        if written + len(ends) != size:
            moved, size = time.monotonic(), written + len(ends)
        if time.monotonic() - moved > settings.timeout + _GRACE_SECONDS:
            ends |= {rank: _process_end(None, rank, folder) for rank in pids}
            break
        time.sleep(_POLL_SECONDS)
    return ends


def _process_end(code: int | None, rank: int, folder: Path) -> ProcessEnd:
    stderr = _stderr_file(folder, rank).read_text(encoding="utf-8", errors="replace")
    return ProcessEnd(code, time.monotonic(), stderr)


def _fork(case: StarvationCase, settings: StarvationSettings, rank: int, folder: Path) -> int:
    """Return the id of a new process that trains as `rank` and ends with this one."""
    parent = os.getpid()
    _stderr_file(folder, rank).touch()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _isolate(parent, _stderr_file(folder, rank))
        train_as_rank(case, settings, rank, folder, EventLog(_events_file(folder, rank)))
        code = 0
    except BaseException:  # noqa: BLE001 - a forked process must not return into the code of its parent
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _isolate(parent: int, stderr: Path) -> None:
    """End when `parent` ends, redirect the output to `stderr`, and write no core file."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    handle = os.open(stderr, os.O_WRONLY | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)


if __name__ == "__main__":
    main(sys.argv[1])
