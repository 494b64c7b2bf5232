"""50 runs with random failures: whether all end with the bits of the undisturbed run, every sample used once.

    python benchmarks/live-recovery/random_failures.py run
    python benchmarks/live-recovery/random_failures.py table

Each run is `paceline run` of `bench_harness.fault_injection.live_training` by the commands of two hosts, which are two
commands on this machine, with two ranks each. At random moments ranks are killed, stopped for a while or requested to
leave, hosts are lost or leave, and join again.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import psutil
from typer import Option

from bench_harness.benchmark import Benchmark
from bench_harness.fault_injection.live_training import PROGRAM, SAVE_EVERY, digests, used_once_by_leaves
from bench_harness.fault_injection.saved_training import logged
from bench_harness.markdown import table
from bench_harness.progress import progress
from paceline._core.job_key import JobKey
from paceline.launch.agent.job_server import serve_jobs
from paceline.launch.agent.rendezvous_address import RendezvousAddress, free_port
from paceline.tools.cli.shared_options import JsonOption

STRATEGIES = ("bucketed", "sharded")
HOSTS, RANKS_PER_HOST = 2, 2
LIMIT_SECONDS = 300.0
STOPPED_SECONDS = (0.3, 1.0, 3.0, 8.0)  # the last one is longer than a rank may be silent
KINDS = {
    "rank killed": "one rank is killed",
    "two killed": "two ranks are killed, up to 0.6 s apart",
    "rank stopped": "one rank is stopped for 0.3 to 8 s",
    "rank leaves": "one rank is requested to leave",
    "host lost": "all processes of a host are killed",
    "host leaves": "a host is requested to leave",
    "host joins": "a host joins",
}

bench = Benchmark(__file__)


class Run:
    """One training with the commands of its hosts.

    Args:
        folder: for its files.
        strategy: of the gradient exchange.
        generator: of kinds and moments.
    """

    def __init__(self, folder: Path, strategy: str, generator: random.Random) -> None:
        self.folder, self._strategy, self._random = folder, strategy, generator
        self._key = JobKey.generate()
        self._server = serve_jobs(RendezvousAddress("127.0.0.1", free_port()), self._key)
        self._commands: list[subprocess.Popen[bytes]] = []
        self._hosts: dict[int, subprocess.Popen[bytes]] = {}
        self.events: list[dict[str, Any]] = []
        self._disturbed: set[int] = set()  # process ids
        self._gone: set[int] = set()  # that were killed or requested to leave
        for host in range(HOSTS):
            self._start(host)

    def _start(self, host: int) -> None:
        name = f"host{host}-{len(self._commands)}"
        options = ["--nnodes", HOSTS, "--nproc-per-node", RANKS_PER_HOST, "--min-ranks", 1]
        options += ["--max-restarts", 1000, "--rendezvous", f"127.0.0.1:{self._server.port}"]
        options += ["--log-dir", self.folder / name, PROGRAM, self.folder, self._strategy]
        command = [sys.executable, "-m", "paceline", "run", *map(str, options)]
        env = {**os.environ, **self._key.environment(), "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.output").open("wb") as output:
            started = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
        self._commands.append(started)
        self._hosts[host] = started

    # ------------------------------------------------------------------ what is there

    def lines(self) -> list[dict[str, Any]]:
        """Return what the processes have logged."""
        found = logged(self.folder, "steps-*.jsonl")
        return [line for line in found if "samples" in line]

    def ranks(self) -> dict[int, list[int]]:
        """Return the process ids of each host that train in the newest world, and are to go on."""
        newest: dict[int, int] = {}
        for path in self.folder.glob("steps-*.jsonl"):
            lines = [line for line in logged(self.folder, path.name) if "samples" in line]
            if lines:
                newest[int(path.stem.partition("-")[2])] = lines[-1]["world"]
        world, found = max(newest.values(), default=0), {}
        newest = {pid: number for pid, number in newest.items() if pid not in self._gone}
        for host, command in self._hosts.items():
            found[host] = []
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(command.pid).children():
                    if newest.get(process.pid) == world and process.status() != psutil.STATUS_ZOMBIE:
                        found[host].append(process.pid)
        return found

    def _ended(self) -> bool:
        return all(command.poll() is not None for command in self._hosts.values())

    # ------------------------------------------------------------------ events

    def disturb(self, number: int) -> None:
        """Let `number` events happen, each up to 3 s after the one before, in part during the recovery from it."""
        while not any((self.folder / "checkpoint").glob("step-????????")) and not self._ended():
            time.sleep(0.05)
        while len(self.events) < number and not self._ended():
            time.sleep(self._random.choice([self._random.uniform(0.0, 0.6), self._random.uniform(0.6, 3.0)]))
            self._one_event()

    def _one_event(self) -> None:
        ranks = self.ranks()
        training = [pid for pids in ranks.values() for pid in pids]
        full = [host for host, pids in ranks.items() if pids and len(pids) < len(training)]
        possible = ["rank stopped"] if training else []
        possible += 2 * ["rank killed"] + ["rank leaves"] if len(training) > 1 else []
        possible += ["two killed"] if len(training) > 2 else []
        possible += ["host lost", "host leaves"] if full else []
        possible = 3 * ["host joins"] + possible[:3] if len(self._hosts) < HOSTS else possible
        if not possible:
            return
        kind, before = self._random.choice(possible), self.lines()
        pids = self._happen(kind, ranks, full)
        with contextlib.suppress(FileNotFoundError):
            phase = (self.folder / f"phase-{pids[0]}").read_text().strip() if pids else ""
            if self.events and before[-1]["at"] < self.events[-1]["at"]:
                phase = "recovery"
            self.events.append(
                {"kind": kind, "at": time.monotonic(), "during": phase, "step": before[-1]["step"]}
            )

    def _happen(self, kind: str, ranks: dict[int, list[int]], full: list[int]) -> list[int]:
        """Do it; return the ids of the processes that it concerns."""
        if kind == "host joins":
            self._start(next(host for host in range(HOSTS) if host not in self._hosts))
            return []
        if kind.startswith("host"):
            host = self._random.choice(full)
            command, pids = self._hosts.pop(host), ranks[host]
            self._gone.update(each.pid for each in psutil.Process(command.pid).children())
            command.send_signal(signal.SIGKILL if kind == "host lost" else signal.SIGTERM)
            return pids
        training = [pid for each in ranks.values() for pid in each]
        pids = self._random.sample(training, 2 if kind == "two killed" else 1)
        possible = STOPPED_SECONDS if len(training) > 2 else STOPPED_SECONDS[:-1]  # a majority must be left
        seconds = self._random.choice(possible)
        if kind == "rank stopped" and seconds == STOPPED_SECONDS[-1]:
            self._disturbed.update(pids)
        if kind != "rank stopped":
            self._gone.update(pids)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(
                    pid,
                    {"rank stopped": signal.SIGSTOP, "rank leaves": signal.SIGTERM}.get(kind, signal.SIGKILL),
                )
                if kind == "rank stopped":
                    time.sleep(seconds)
                    os.kill(pid, signal.SIGCONT)
            if pid != pids[-1]:
                time.sleep(self._random.uniform(0.0, 0.6))
        return pids

    # ------------------------------------------------------------------ the end

    def end(self) -> dict[str, Any]:
        """Wait for the end, and return how it ended."""
        deadline, timely = time.monotonic() + LIMIT_SECONDS, True
        while not self._ended() and timely:
            timely = time.monotonic() < deadline
            time.sleep(0.1)
        codes = [command.poll() for command in self._hosts.values()]
        for command in self._commands:
            if not timely:
                command.kill()
            command.wait()
        self._server.close()
        found = self._records("recovery")  # by every host; on a newcomer, it took no time
        recoveries = {each["epoch"]: each for each in sorted(found, key=lambda each: each["seconds"])}
        undisturbed = {pid for pid in self._began() if pid not in self._disturbed | self._gone}
        lasted = {pid for pid in undisturbed if "digest" in logged(self.folder, f"steps-{pid}.jsonl")[-1]}
        return {
            "events": [{name: value for name, value in each.items() if name != "at"} for each in self.events],
            "ranks": [recoveries[epoch]["ranks"] for epoch in sorted(recoveries)],
            "seconds": [recoveries[epoch]["seconds"] for epoch in sorted(recoveries)],
            "repeated": sum(record["repeated"] for record in recoveries.values()),
            "ended": timely and set(codes) == {0},
            "restarts": len(self._records("restart")),
            "same processes": lasted == undisturbed,
            "every sample once": used_once_by_leaves(self.folder),
            "digests": sorted(digests(self.folder)),
        }

    def _began(self) -> set[int]:
        """Return the ids of all processes that have trained."""
        return {int(path.stem.partition("-")[2]) for path in self.folder.glob("steps-*.jsonl")}

    def _records(self, event: str) -> list[dict[str, Any]]:
        lines = [
            line for path in self.folder.glob("*/restarts.jsonl") for line in path.read_text().splitlines()
        ]
        return [record for record in map(json.loads, lines) if record["event"] == event]


@bench.run
def run(
    runs: Annotated[int, Option(min=1, help="Runs in all.")] = 50,
    events: Annotated[int, Option(min=1, help="Events in each.")] = 5,
    seed: Annotated[int, Option(help="Seed of kinds and moments.")] = 0,
    keep: Annotated[Path | None, Option(help="Folder for the files of the runs.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Disturb runs, and compare how they end with the undisturbed run."""
    path = bench.output(json_file, "random-failures")
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as place:
        place = str(keep or place)
        alone = Path(place, "undisturbed")
        alone.mkdir(parents=True)
        subprocess.run(
            [sys.executable, PROGRAM, alone, STRATEGIES[0]],
            check=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert used_once_by_leaves(alone)
        for number in progress("runs", range(runs)):
            folder = Path(place, f"run-{number}")
            folder.mkdir()
            strategy = STRATEGIES[number % len(STRATEGIES)]
            one = Run(folder, strategy, random.Random(1000 * seed + number))
            one.disturb(events)
            result = one.end()
            same = set(result.pop("digests")) == digests(alone)
            found.append({"strategy": strategy, **result, "same bits": same})
    settings = {"hosts": HOSTS, "ranks per host": RANKS_PER_HOST, "seed": seed, "save every": SAVE_EVERY}
    bench.write(path, "random-failures", settings, runs=found)


@bench.tables
def tables() -> dict[str, str]:
    """Return the blocks of README.md: kinds of failures, when they happened, and how the runs ended."""
    runs = bench.read("random-failures")["runs"]
    events = [event for run in runs for event in run["events"]]
    kinds, phases = (Counter(event[name] for event in events) for name in ("kind", "during"))
    rows = [[KINDS[kind], str(kinds[kind])] for kind in KINDS if kinds[kind]]
    rows += [[f"… during: {phase}", str(number)] for phase, number in phases.most_common() if phase]
    checks = ("ended", "same bits", "every sample once", "same processes")
    counts = {name: sum(run[name] for run in runs) for name in checks}
    seconds = [each for run in runs for each in run["seconds"]]
    texts = [
        f"Of {len(runs)} runs {counts['ended']} ended without a restart of all ranks"
        if not any(run["restarts"] for run in runs)
        else f"Of {len(runs)} runs {counts['ended']} ended, with {sum(run['restarts'] for run in runs)} restarts",
        f"{counts['same bits']} with the same bits",
        f"{counts['every sample once']} with every sample used once",
        f"in {counts['same processes']} the other processes went on to the end",
    ]
    recoveries = f"{len(seconds)} new worlds, formed in {median(seconds):.2f} s (median; {max(seconds):.1f} s at most)."
    return {"failures": f"{table(['event', 'times'], rows)}\n\n{'; '.join(texts)}. {recoveries}"}


if __name__ == "__main__":
    bench.main()
