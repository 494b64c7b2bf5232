"""A job whose ranks only play that they can recover in place: a test ends them one by one, and reads who is there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from paceline._core.job_key import JobKey
from paceline.errors import PacelineError
from paceline.launch.agent.elastic_agent import run_host
from paceline.launch.agent.job_spec import JobSpec, JobTimeouts
from paceline.launch.process.rank_output import RankLogs

__all__ = ["LiveJob", "wait_until"]

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from paceline.world.live_file import LEFT_EXIT_CODE, LiveFile, LiveWorld

notes, rank = Path(os.environ["NOTES"]), os.environ["RANK"]
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
            epoch += 1
            file.write(LiveWorld(epoch, tuple(value.split()), 7))
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


class LiveJob:
    """Ranks of one host; each process is named ``rank.incarnation-world``.

    Args:
        folder: for everything; several hosts have one each.
        ranks: number of ranks.
        options: of the job; `key` is the job's key.
    """

    def __init__(self, folder: Path, ranks: int, *, key: JobKey | None = None, **options: Any) -> None:
        self.notes, self.logs = folder / "notes", folder / "logs"
        for path in (self.notes, self.logs):
            path.mkdir(parents=True)
        (folder / "rank.py").write_text(PROGRAM)
        env = {"NOTES": str(self.notes), "OMP_NUM_THREADS": "1"}
        least = options.pop("min_ranks", ranks)
        job = JobSpec([str(folder / "rank.py")], ranks, least, env=env, log_dir=self.logs, **options)
        self.job = replace(job, timeouts=options.get("timeouts", JobTimeouts(end=1.0, follow=0.2)))
        self.error: PacelineError | None = None
        self._key, self._orders = key, 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with RankLogs(self.logs) as logs:
                run_host(self.job, logs, self._key)
        except PacelineError as error:
            self.error = error

    def process(self, name: str) -> int:
        """Return the process id of a rank, once it is there."""
        return int(self.facts(name)["PID"])

    def facts(self, name: str) -> dict[str, str]:
        """Return the variables of a rank, once it is there."""
        wait_until(lambda: self.is_there(name) or not self._thread.is_alive())
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
        while self._thread.is_alive():
            for note in self.notes.glob("here-*"):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process = psutil.Process(int(note.read_text().partition("\n")[0]))
                    if str(self.notes.parent) in " ".join(process.cmdline()):
                        process.kill()
            self._thread.join(0.1)

    def wait(self) -> None:
        """Wait for the end of the job on this host."""
        self._thread.join(60)
        assert not self._thread.is_alive()

    def records(self, event: str) -> list[dict[str, Any]]:
        """Return the records of a kind in restarts.jsonl."""
        path = self.logs / "restarts.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [one for one in map(json.loads, lines) if one["event"] == event]
