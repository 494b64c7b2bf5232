"""Pool of warm rank processes: forked from a server that has imported torch (seconds), and reused for many cases.

    def check_sum(rank, size, start):            # at the top level of the test module
        ...                                      # the world of `size` ranks exists already
        return total

    def test_sum(pool):
        assert pool(3).run(check_sum, 5) == [18, 18, 18]                  # over gloo
        assert pool(3, "paceline").run(check_sum, 5) == [18, 18, 18]

A process serves pools of any size: rank k of every pool is process k, and its world is created again when
the number of ranks or the backend changes. Seed, default dtype and environment are reset before every case. A case that
fails or hangs ends the processes that ran it, and the next case starts fresh ones. When pytest ends,
also by a kill, so do they.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from fork_server import ForkServer

__all__ = ["Pool", "RankError", "RankProcesses", "serve", "spawn"]

_fork_server = ForkServer()  # shared by all processes: importing takes seconds
GRACE_SECONDS = 2.0  # after the first failure: how long the other ranks may take to fail too

MOST_THREADS = 64
"""Of a process, which a fresh one replaces beyond that: gloo's threads look for messages every 10 ms, and groups of a
device mesh outlive their world. Hundreds of them would take all of the processors' time."""


class RankError(Exception):
    """A case failed on a rank.

    Attributes:
        rank: the rank that failed first.
        failures: for every rank that failed, its traceback or how it ended.
        cause: the exception that rank raised, None if it died, hung or raised what can't be pickled.
    """

    def __init__(self, failures: Mapping[int, str], cause: BaseException | None) -> None:
        self.failures, self.cause = dict(failures), cause
        self.rank = next(iter(self.failures))
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in self.failures.items()))


@dataclass(frozen=True)
class Case:
    """A call for one process; `init_method` is None for a case without a world."""

    function: bytes
    prepare: bytes
    rank: int
    size: int
    backend: str
    init_method: str | None
    env: Mapping[str, str]
    sys_path: Sequence[str]


class Worker:
    """One process that serves cases through a pipe."""

    def __init__(self, fork_server: ForkServer, folder: Path) -> None:
        self.pipe, theirs = Pipe()
        self.stacks = folder / f"stacks-{random.getrandbits(48):x}"
        self.fork_server, self.pid = fork_server, fork_server.fork(theirs, self.stacks)
        theirs.close()
        self.has_meshes = False  # it made device meshes, which torch's caches keep beyond their world

    def runs(self) -> bool:
        """Return whether it has not ended."""
        return self.fork_server.code(self.pid) is None

    def can_serve(self, same_world: bool) -> bool:
        """Return whether it runs, and is fresh enough for another case in the same world or another one."""
        if not self.runs() or (self.has_meshes and not same_world):
            return False
        try:
            return len(os.listdir(f"/proc/{self.pid}/task")) <= MOST_THREADS
        except OSError:
            return False

    def ended(self) -> str:
        """Return how the process ended, as text."""
        code = self.fork_server.code(self.pid, wait=True) or 0
        return f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def where(self) -> str:
        """Return the Python stack of each thread of a process that hangs."""
        os.kill(self.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline and not (self.stacks.exists() and self.stacks.stat().st_size):
            time.sleep(0.02)
        time.sleep(0.05)
        return self.stacks.read_text() if self.stacks.exists() else "(no stack: not even signals are served)"

    def close(self) -> None:
        """End the process."""
        if self.runs():
            os.kill(self.pid, signal.SIGKILL)
            self.fork_server.code(self.pid, wait=True)
        self.pipe.close()
        self.stacks.unlink(missing_ok=True)


class RankProcesses:
    """The processes behind all pools of a session: started when first needed.

    Args:
        prepare: a function at the top level of a module that every rank calls before each case.
    """

    def __init__(self, prepare: Callable[[], None] | None = None) -> None:
        self.prepare = pickle.dumps(prepare)
        self.folder = Path(tempfile.mkdtemp(prefix="paceline-pool-"))
        self.workers: dict[int, Worker] = {}
        self.worlds = 0
        self.latest = (
            0,
            "",
        )  # size and backend of the latest world; the next case makes another one if they differ

    def __call__(self, size: int, backend: str = "gloo") -> Pool:
        """Return the pool of `size` ranks, whose world has `backend`."""
        return Pool(self, size, backend)

    def acquire(self, size: int, backend: str) -> list[Worker]:
        """Return the processes of ranks 0 … size − 1 for a world, starting those that are not there."""
        here = [rank for rank in range(size) if rank in self.workers]
        for same_world in (
            self.latest == (size, backend),
            False,
        ):  # if one is replaced, the others change worlds
            old = [rank for rank in here if not self.workers[rank].can_serve(same_world)]
            self.discard(old)
            here = [rank for rank in here if rank not in old] if old else []
        for rank in range(size):
            if rank not in self.workers:
                self.workers[rank] = Worker(_fork_server, self.folder)
        return [self.workers[rank] for rank in range(size)]

    def discard(self, ranks: Sequence[int]) -> None:
        """End the processes of `ranks`; the other ranks of their world get a new one."""
        for rank in ranks:
            self.workers.pop(rank).close()
        if ranks:
            self.latest = (0, "")

    def init_method(self, size: int, backend: str) -> str:
        """Return the rendezvous of the current world; another size or backend is another world."""
        if (size, backend) != self.latest:
            self.worlds, self.latest = self.worlds + 1, (size, backend)
        return f"file://{self.folder}/world-{self.worlds}-{size}-{backend}"

    def close(self) -> None:
        """End all processes and remove their folder."""
        self.discard(list(self.workers))
        shutil.rmtree(self.folder, ignore_errors=True)


class Pool:
    """A number of warm ranks."""

    def __init__(self, processes: RankProcesses, size: int, backend: str) -> None:
        self.processes, self.size, self.backend = processes, size, backend

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        world: bool = True,
        env: Sequence[Mapping[str, str]] | None = None,
    ) -> list[Any]:
        """Run ``function(rank, size, *args)`` on every rank and return the results, rank 0 first.

        Args:
            function: a function at the top level of a module.
            args: anything that can be pickled.
            timeout: seconds until a case counts as hung; starting the processes is not counted.
            world: False runs the case without a world: it makes (or fails to make) its own.
            env: environment variables of each rank during the case.

        Raises:
            RankError: the function raised, died or hung on some rank.
        """
        workers = self.processes.acquire(self.size, self.backend)
        try:
            for rank, worker in enumerate(workers):
                worker.pipe.send_bytes(pickle.dumps(self._case(function, args, rank, world, env)))
            outcome = self._collect(workers, time.monotonic() + 120)
            if not isinstance(outcome, RankError):
                outcome = self._collect(workers, time.monotonic() + timeout)
            if isinstance(outcome, RankError):
                raise outcome from outcome.cause
        except BaseException:  # pytest's own time-out too: answers to this case must not be read later
            self.processes.discard(range(self.size))
            raise
        if not world:
            self.processes.latest = (0, "")
        return outcome

    def _case(
        self,
        function: Callable[..., Any],
        args: Any,
        rank: int,
        world: bool,
        env: Sequence[Mapping[str, str]] | None,
    ) -> Case:
        init_method = self.processes.init_method(self.size, self.backend) if world else None
        call = pickle.dumps((function, args))
        return Case(
            call,
            self.processes.prepare,
            rank,
            self.size,
            self.backend,
            init_method,
            env[rank] if env else {},
            list(sys.path),
        )

    @staticmethod
    def _collect(workers: Sequence[Worker], deadline: float) -> list[Any] | RankError:
        """Take one message from every worker; the first failure shortens the deadline of the others."""
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        cause: BaseException | None = None
        while len(results) + len(failures) < len(workers):
            open_ranks = {w.pipe: r for r, w in enumerate(workers) if r not in results and r not in failures}
            ready = wait(list(open_ranks), timeout=max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                rank = open_ranks[pipe]  # type: ignore[index]
                outcome, value, error, workers[rank].has_meshes = _receive(workers[rank])
                if outcome == "ok":
                    results[rank] = value
                    continue
                if not failures:
                    cause, deadline = error, min(deadline, time.monotonic() + GRACE_SECONDS)
                failures[rank] = value
            if not ready:
                for rank in open_ranks.values():
                    what = "was still running when another rank failed" if failures else "hangs"
                    failures[rank] = f"{what}; it stands at\n{workers[rank].where()}"
        return RankError(failures, cause) if failures else [results[rank] for rank in range(len(workers))]


def spawn(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout: float = 60.0,
    env: Sequence[Mapping[str, str]] | None = None,
) -> list[Any]:
    """Run ``function(rank, ranks, *args)`` without a world, in separate processes."""
    with contextlib.closing(RankProcesses()) as processes:
        return processes(ranks).run(function, *args, timeout=timeout, world=False, env=env)


def _receive(worker: Worker) -> tuple[str, Any, BaseException | None, bool]:
    try:
        outcome, value, error, has_meshes = pickle.loads(worker.pipe.recv_bytes())
    except (EOFError, OSError):
        return "error", worker.ended(), None, False
    return outcome, value, error, has_meshes or worker.has_meshes


# In the process itself.


def _enter(case: Case, present: str | None) -> str | None:
    """Enter the world of `case`, leaving another one first, and return its rendezvous."""
    import torch

    import paceline

    if case.init_method is None or case.init_method != present:
        paceline.shutdown()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        if case.init_method is not None:
            method, place = case.init_method, {"rank": case.rank, "size": case.size}
            paceline.init(case.backend, init_method=method, **place, timeout=60.0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    random.seed(0)
    return case.init_method


def _has_meshes() -> bool:
    """Return whether there are groups of device meshes."""
    import torch.distributed.distributed_c10d as c10d

    return any(group.group_desc.startswith("mesh") for group in c10d._world.pg_map)


def _answer(pipe: Connection, work: Callable[[], Any]) -> bool:
    """Do `work`, send the outcome to the other end, and return whether it succeeded."""
    well = False
    try:
        message = pickle.dumps(("ok", work(), None, _has_meshes()))
        well = True
    except BaseException as error:  # noqa: BLE001 — whatever it is, the test must see it
        text = traceback.format_exc()
        try:
            message = pickle.dumps(("error", text, error, True))
            pickle.loads(message)
        except Exception:  # noqa: BLE001 — an exception that can't be pickled is sent as text
            message = pickle.dumps(("error", text, None, True))
    pipe.send_bytes(message)
    return well


def serve(pipe: Connection) -> None:
    """Carry out cases until the other end of the pipe is closed."""
    environment, present = dict(os.environ), None
    while True:
        try:
            case: Case = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = case.sys_path

        call: list[Any] = []

        def enter(case: Case = case, present: str | None = present, call: list[Any] = call) -> None:
            prepare = pickle.loads(case.prepare)
            if prepare is not None:
                prepare()
            _enter(case, present)
            call.extend(pickle.loads(case.function))  # imports the test module: no part of the case's time

        def run(case: Case = case, call: list[Any] = call) -> Any:
            os.environ.update(case.env)
            function, args = call
            return function(case.rank, case.size, *args)

        present = case.init_method if _answer(pipe, enter) else "broken"
        if present != "broken":
            _answer(pipe, run)
