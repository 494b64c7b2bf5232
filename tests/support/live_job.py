"""A job whose ranks only play that they can recover in place: a test ends them one by one, and reads who is there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from paceline._core.job_key import JobKey
from paceline.errors import PacelineError
from paceline.launch.agent.elastic_run import run_job
from paceline.launch.agent.job_spec import JobSpec, JobTimeouts

__all__ = ["LiveAgent", "LiveHost", "LiveJob", "wait_until"]

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from paceline.world.live_file import LEFT_EXIT_CODE, LiveFile, LiveWorld

notes, rank = Path(os.environ["NOTES"]), os.environ["LOCAL_RANK"]
file = LiveFile.from_environment(os.environ)
incarnation = os.environ.get("PACELINE_MEMBER", "none").rpartition("/")[2]
name = f"{rank}.{incarnation}-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
signal.signal(signal.SIGTERM, lambda *_: sys.exit(LEFT_EXIT_CODE))
print("rank", name, "is there", flush=True)
variables = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "PACELINE_MEMBER", "PACELINE_JOINER", "PACELINE_STORE"]
note = [str(os.getpid()), *(os.environ.get(each, "") for each in variables)]
(notes / f"{name}.part").write_text("\\n".join(note))
(notes / f"{name}.part").rename(notes / f"here-{name}")
epoch, done = 0, set()
while True:
    for order in notes.glob(f"do-*-{name}"):
        if order in done:
            continue
        what, _, value = order.read_text().partition(" ")
        if what == "live":
            file.write(LiveWorld(epoch, tuple(value.split()), 7, repeats=epoch > 0, seconds=0.25 * epoch))
            epoch += 1
        elif what == "dull":
            file.remove()
        elif what == "exit":
            print(value.partition(" ")[2], file=sys.stderr, flush=True)
            os._exit(int(value.partition(" ")[0]))
        done.add(order)
        (notes / f"done-{order.name}").touch()
    time.sleep(0.01)
"""


def wait_until(reached: Any, seconds: float = 60.0) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class LiveHost:
    """Ranks of one host; each process is named ``rank.incarnation-world``, by its rank on this host.

    Args:
        folder: for the files of this host.
    """

    def __init__(self, folder: Path) -> None:
        self.notes, self.logs = folder / "notes", folder / "logs"
        for path in (self.notes, self.logs):
            path.mkdir(parents=True)
        self._program, self._orders = folder / "rank.py", 0
        self._program.write_text(PROGRAM)

    def runs(self) -> bool:
        """Return whether the launcher runs."""
        raise NotImplementedError

    def ended(self) -> object:
        """Return how the launcher has ended."""
        raise NotImplementedError

    def process(self, name: str) -> int:
        """Return the process id of a rank, once it is there."""
        return int(self.facts(name)["PID"])

    def facts(self, name: str) -> dict[str, str]:
        """Return the variables of a rank, once it is there."""
        wait_until(lambda: self.is_there(name) or not self.runs())
        assert self.is_there(name), self.ended()
        names = ["PID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MEMBER", "JOINER", "STORE"]
        return dict(zip(names, (self.notes / f"here-{name}").read_text().split("\n"), strict=True))

    def is_there(self, name: str) -> bool:
        """Return whether a rank has been started."""
        return (self.notes / f"here-{name}").exists()

    def order(self, text: str, *names: str) -> None:
        """Let ranks do something: ``live MEMBERS``, ``dull``, or ``exit CODE LAST-LINE``."""
        for name in names:
            self.process(name)
            self._orders += 1
            order = self.notes / f"do-{self._orders:03}-{name}"
            order.with_suffix(".part").write_text(text)
            order.with_suffix(".part").rename(order)
            if not text.startswith("exit"):
                wait_until((self.notes / f"done-{order.name}").exists)

    def kill(self, name: str) -> None:
        """Kill a rank."""
        os.kill(self.process(name), signal.SIGKILL)

    def end(self, *names: str) -> None:
        """Let ranks end well, and wait for the end of the job on this host."""
        self.order("exit 0", *names)
        self.wait()

    def abandon(self) -> None:
        """Kill ranks until no restart is left."""
        while self.runs():
            for note in self.notes.glob("here-*"):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process = psutil.Process(int(note.read_text().partition("\n")[0]))
                    if str(self.notes.parent) in " ".join(process.cmdline()):
                        process.kill()
            time.sleep(0.05)

    def wait(self) -> None:
        """Wait for the end of the job on this host."""
        wait_until(lambda: not self.runs())

    def records(self, event: str) -> list[dict[str, Any]]:
        """Return the records of a kind in restarts.jsonl."""
        path = self.logs / "restarts.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [one for one in map(json.loads, lines) if one["event"] == event]


class LiveJob(LiveHost):
    """A job of one host, run by a thread of this process; `error` is how it ended.

    Args:
        folder: for the files of the job.
        ranks: number of ranks.
        options: of the job.
    """

    def __init__(self, folder: Path, ranks: int, **options: Any) -> None:
        super().__init__(folder)
        self._job = JobSpec(
            [str(self._program)],
            ranks,
            ranks,
            env={"NOTES": str(self.notes), "OMP_NUM_THREADS": "1"},
            log_dir=self.logs,
            timeouts=JobTimeouts(end=1.0, follow=0.2),
            **options,
        )
        self.error: PacelineError | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def runs(self) -> bool:
        return self._thread.is_alive()

    def ended(self) -> object:
        return self.error

    def _run(self) -> None:
        try:
            run_job(self._job)
        except PacelineError as error:
            self.error = error


class LiveAgent(LiveHost):
    """One host of a job of several: a process with the command ``paceline run``.

    Args:
        folder: for the files of this host.
        words: options of the command.
        key: of the job.
    """

    def __init__(self, folder: Path, words: Sequence[str], key: JobKey) -> None:
        super().__init__(folder)
        env = {**os.environ, **key.environment(), "NOTES": str(self.notes), "TMPDIR": str(folder)}
        command = [sys.executable, "-m", "paceline", "run", "--log-dir", str(self.logs), *words]
        with (folder / "output").open("wb") as output:
            self.agent = subprocess.Popen(
                [*command, str(self._program)], env=env, stdout=output, stderr=subprocess.STDOUT
            )

    @property
    def output(self) -> str:
        """What the command and its rank 0 have written."""
        return (self.notes.parent / "output").read_text()

    def runs(self) -> bool:
        return self.agent.poll() is None

    def ended(self) -> object:
        return self.agent.returncode, self.output

    def abandon(self) -> None:
        self.agent.kill()
        self.agent.wait()
