"""`launch_notebook`: runs a function of a notebook on several ranks.

Every rank is a new process, so it inherits nothing from the notebook's kernel that can't be shared: no locks of torch's
threads, no initialised GPU. cloudpickle sends the function, with the functions, classes and values that it refers to.
Files in a private folder connect the processes:

    call            the function, its arguments, and the source of the notebook's cells
    rank<k>.log     output of each rank; that of rank 0 is copied to the cell while it runs
    result          what rank 0 returned
    failed<k>       time, traceback and exception of a rank that raised
"""

from __future__ import annotations

import codecs
import contextlib
import io
import linecache
import os
import pickle
import shutil
import socket
import sys
import tempfile
import time
from collections import ChainMap
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from typing import Any, ClassVar, NoReturn, TypeVar

from paceline._core.processes.child_process import POLL_SECONDS, sigterm_raises, stop_processes
from paceline._core.processes.process_exit import describe_exit
from paceline.errors import RankFailed, UsageError
from paceline.launch.process.notebook_rank import FailedCall, NotebookCall, read_pickle
from paceline.launch.process.rank_process import (
    RankProcess,
    default_environment,
    exit_remedy,
    start_rank,
    wait_for_exit,
)

__all__ = ["launch_notebook"]

_FOLLOW_SECONDS = 1.0  # for other ranks to fail of the same cause

Result = TypeVar("Result")


def launch_notebook(
    function: Callable[..., Result], args: Sequence[Any] = (), nproc_per_node: int = 2
) -> Result:
    """Run a function on several ranks of this machine, from a notebook, and return rank 0's result.

    The function may be defined in the notebook. It enters the world by ``paceline.init()``; torch's own
    ``init_process_group()`` works too. What rank 0 prints appears while it runs. Interrupting the cell ends all ranks.

    Every rank is a new process that gets copies of the arguments, and of the global variables that the function uses.
    The kernel itself enters no world, and may have used the GPU before.

    Args:
        function: called as ``function(*args)`` on every rank.
        args: positional arguments; they and the result must be picklable.
        nproc_per_node: number of ranks, at least 1.

    Raises:
        RankFailed: a rank raised or ended; has its rank, its traceback, and its exception as ``__cause__``. The other
            ranks have been ended.
        UsageError: the function can't be sent to other processes, or cloudpickle is not installed.

    Example:
        >>> def work(base):
        ...     rank = int(os.environ["RANK"])
        ...     print("rank", rank)
        ...     return base + rank
        >>> launch_notebook(work, (10,), nproc_per_node=2)
        rank 0
        10
    """
    if not callable(function):
        raise UsageError(
            f"launch_notebook() of a {type(function).__name__}",
            remedy="pass the function itself, and its arguments as args=(…)",
        )
    if type(nproc_per_node) is not int or nproc_per_node < 1:
        raise UsageError(f"nproc_per_node={nproc_per_node!r}", remedy="give 1 or more")
    call = _pack(function, args)
    folder = Path(tempfile.mkdtemp(prefix="paceline-notebook-"))
    running: list[RankProcess] = []
    output = _LiveOutput(folder / "rank0.log")
    try:
        with sigterm_raises():
            (folder / "call").write_bytes(call)
            shared = _environment(nproc_per_node, folder)
            for rank in range(nproc_per_node):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                program = ["-m", "paceline.launch.process.notebook_rank", str(folder)]
                running.append(start_rank(program, shared | own, rank, rank, folder / f"rank{rank}.log"))
            _wait(running, output, folder)
        return read_pickle(folder / "result")
    finally:
        stop_processes(running)
        output.copy()
        shutil.rmtree(folder, ignore_errors=True)


def _pack(function: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """Return the call as it is sent to the ranks."""
    if find_spec("cloudpickle") is None:
        raise UsageError(
            "launch_notebook() needs cloudpickle, which is not installed",
            remedy="pip install 'paceline[notebook]'",
        )
    import cloudpickle

    reducers: Any = cloudpickle.CloudPickler.dispatch_table

    def reduce_code(code: CodeType) -> tuple[Any, ...]:
        make, values = reducers[CodeType](code)
        return make, tuple(code.co_filename if value == "<dynamic-code>" else value for value in values)

    class Pickler(cloudpickle.CloudPickler):
        """Keeps the file names of code, which cloudpickle replaces, so that tracebacks show its lines."""

        dispatch_table: ClassVar[Any] = ChainMap({CodeType: reduce_code}, reducers)

    buffer = io.BytesIO()
    # Cells are in no file, so the ranks get their text.
    cells = {name: entry[2] for name, entry in linecache.cache.items() if len(entry) == 4 and not entry[1]}
    try:
        Pickler(buffer).dump((function, tuple(args)))
    except Exception as error:
        raise UsageError(
            f"{getattr(function, '__name__', 'the function')} can't be sent to other processes: {error}",
            remedy="create files, connections, iterators and wrapped models inside the function; pass plain data",
        ) from error
    return pickle.dumps(NotebookCall(buffer.getvalue(), cells))


def _environment(ranks: int, folder: Path) -> dict[str, str]:
    """Return the environment of all ranks: torchrun's variables, and this program's module path."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return (
        default_environment(ranks)
        | os.environ
        | {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "PACELINE_INIT_METHOD": f"{folder.as_uri()}/rendezvous",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "PYTHONUNBUFFERED": "1",
            "MPLBACKEND": "agg",  # the notebook's own backend needs its kernel
        }
    )


class _LiveOutput:
    """Copies what is appended to a file to this program's standard output."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def copy(self) -> None:
        """Copy what is new."""
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
            self._at += len(data)
            if data:
                sys.stdout.write(self._decoder.decode(data))
                sys.stdout.flush()


def _wait(running: Sequence[RankProcess], output: _LiveOutput, folder: Path) -> None:
    """Return when all ranks have ended well; raise when one has not."""
    while True:
        output.copy()
        codes = [one.exit_code() for one in running]
        if any(codes):
            _raise_failure(running, folder)
        if all(code == 0 for code in codes):
            return
        wait_for_exit(running, POLL_SECONDS)


def _raise_failure(running: Sequence[RankProcess], folder: Path) -> NoReturn:
    """Raise the error of the rank that failed first: one that was ended, or the first one that raised."""
    deadline = time.monotonic() + _FOLLOW_SECONDS
    while time.monotonic() < deadline and any(one.exit_code() is None for one in running):
        time.sleep(POLL_SECONDS)
    raised = {one.rank: FailedCall.read(folder, one.rank) for one in running if one.exit_code()}
    ended = [one for one in running if one.exit_code() and raised[one.rank] is None]
    if ended:
        first = ended[0]
        text = describe_exit(first.exit_code() or 0) + _output(first)
        raise RankFailed(text, rank=first.rank, remedy=exit_remedy(first.exit_code()))
    rank, failed = min(
        ((rank, failed) for rank, failed in raised.items() if failed), key=lambda item: item[1].time
    )
    others = ", ".join(str(one.rank) for one in running if one.rank != rank)
    text = f"{failed.summary}\n\n{failed.traceback.rstrip()}{_output(running[rank])}"
    raise RankFailed(
        text, rank=rank, remedy=f"the other ranks ({others}) have been ended" if others else ""
    ) from failed.exception()


def _output(one: RankProcess) -> str:
    """Return the end of a rank's output, which the cell does not show; for a message."""
    lines = one.tail() if one.rank else ()
    return "\n\noutput of the rank:\n" + "\n".join(lines) if lines else ""
