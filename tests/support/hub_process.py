"""A hub on loopback for tests: in a thread of this process, or as a process that can be killed."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline._core.job_key import JobKey
from paceline.async_dp.hub.hub import Hub
from paceline.async_dp.hub.hub_server import HubServer
from paceline.async_dp.hub.hub_settings import HubRules
from paceline.async_dp.wal.memory_journal import MemoryJournal
from paceline.transport.zmq import HubExchange
from paceline.transport.zmq.curve_keys import HubKeys


class HubThread:
    """A hub that serves in a thread."""

    def __init__(
        self, rules: HubRules | None = None, journal: Any = None, run: str = "test", **exchange: Any
    ) -> None:
        self.journal = MemoryJournal() if journal is None else journal
        job = JobKey.from_environment(os.environ)
        if "keys" not in exchange and job is not None:
            exchange["keys"] = HubKeys.of_job(job)
        self.exchange = HubExchange(exchange.pop("address", "tcp://127.0.0.1:*"), "", **exchange)
        self.hub = Hub(run, rules or HubRules(), self.journal, time.time)
        self.address = self.exchange.address
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            HubServer(self.hub, self.exchange).run(self._stop.is_set)
        except BaseException as error:  # noqa: BLE001 - raised by stop()
            self.error = error

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.exchange.close()
        if self.error is not None:
            raise self.error


@contextlib.contextmanager
def hub_thread(*given: Any, **options: Any) -> Iterator[HubThread]:
    hub = HubThread(*given, **options)
    try:
        yield hub
    finally:
        hub.stop()


class HubProcess:
    """``paceline hub`` as a process; it keeps its port when it is started again."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.options = folder, options
        self.address = "tcp://127.0.0.1:*"
        self.start()

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "paceline",
            "hub",
            "serve",
            "--bind",
            self.address,
            "--out",
            str(self.folder),
        ]
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            [*command, *self.options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"at (tcp://\S+),", line)
        assert found, line + self.process.stdout.read()
        self.address = found[1]

    def kill(self) -> None:
        self.process.kill()
        self._ended()

    def end(self) -> str:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self._ended()

    def _ended(self) -> str:
        out, _ = self.process.communicate(timeout=60)
        return out


def wait_until(true: Any, seconds: float = 60.0) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)
