"""What strangers cost: training under a Watchdog, a hub, and the server where hosts meet, with callers and without.

    python benchmarks/strangers/strangers.py run
    python benchmarks/strangers/strangers.py table

Each listens on loopback. A process of another user (where this one is root's) holds 500 connections to it that stop in
different places of a handshake, and calls again for each one that is dropped. Blocks of work with and without take
turns in the same processes.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - create_connection imports it, which another user may not be allowed to
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Annotated, Any

import psutil
import torch
from typer import Option

import paceline
from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from bench_harness.turns import Ratio, alternating, ratio_of, take_turns
from paceline._core.job_key import JobKey
from paceline.async_dp.hub.hub import Hub
from paceline.async_dp.hub.hub_server import HubServer
from paceline.async_dp.hub.hub_settings import HubRules
from paceline.async_dp.wal.memory_journal import MemoryJournal
from paceline.errors import UsageError
from paceline.launch.agent.job_server import serve_jobs
from paceline.launch.agent.rendezvous_address import RendezvousAddress, free_port
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.models.gpt import GPT, token_loss
from paceline.tools.models.gpt_sizes import gpt_size
from paceline.transport.zmq import HubExchange
from paceline.transport.zmq.curve_keys import HubKeys
from paceline.world.control_collectives import barrier
from paceline.world.store.authenticated_store import AuthenticatedStore
from paceline.world.value_collectives import gather_values

CALLERS, CALLS_PER_TURN, TURN_SECONDS = 500, 10, 0.02
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(15) + b"\x00" + bytes(31)
WORDS = [
    b"",
    b"\xff",
    GREETING[:11],
    GREETING,
    GREETING + b"\x04\xc8\x05HELLO" + bytes(194),
    b"GET / HTTP/1.1\r\n\r\n",
]
NOBODY = 65534
BATCH, CONTEXT = 4, 128  # windows and tokens of a rank's step
STEPS, EXCHANGES, BURST_EXCHANGES, REQUESTS = 24, 1000, 300, 4000  # of a block
SUBJECTS = {
    "training": "two ranks that train the mini GPT under a Watchdog",
    "hub": "a hub and a worker that exchanges after every step",
    "burst": "the same in short blocks: 500 connections at once, every 300 exchanges",
    "rendezvous": "the server of jobs and a host that sets and gets keys",
}

bench = Benchmark(__file__)


@bench.run
def run(
    rounds: Annotated[int, Option(min=1, help="Blocks of each kind, per subject.")] = 30,
    only: Annotated[str, Option(help="Subject to measure; the others keep their results.")] = "",
    json_file: JsonOption = None,
) -> None:
    """Measure what callers cost."""
    if only not in ("", *SUBJECTS):
        raise UsageError(f"--only {only!r} is no subject", remedy=f"choose {', '.join(SUBJECTS)}")
    path = bench.output(json_file, "strangers")
    chosen = [only] if only else list(SUBJECTS)
    found = bench.read("strangers")["subjects"] if only else {}
    os.environ.update(JobKey.generate().environment())
    with ProgressBar("strangers", len(chosen)) as tick:
        for subject in chosen:
            job = {"subject": subject, "rounds": rounds}
            turns = bench.start_ranks(job, 2 if subject == "training" else 1, timeout=600)
            found[subject] = {
                **turns,
                **{
                    clock: vars(ratio_of(turns["with"][clock], turns["without"][clock]))
                    for clock in ("seconds", "processor_seconds")
                },
            }
            tick()
    settings = {"callers": CALLERS, "rounds": rounds, "other_user": os.geteuid() == 0}
    bench.write(path, "strangers", settings, subjects=found)


@bench.rank
def rank(job: dict[str, Any]) -> dict[str, Any] | None:
    """Measure blocks of one subject."""
    subject = {"training": training, "hub": hub, "burst": burst, "rendezvous": rendezvous}[job["subject"]]
    return subject(job["rounds"])


# ---------------------------------------------------------------------- what is measured


def training(rounds: int) -> dict[str, Any] | None:
    """Train; only rank 0 has callers started, at the ports of both."""
    world = paceline.init(device="cpu")
    torch.manual_seed(0)
    model = paceline.DataParallel(GPT(gpt_size("mini", vocabulary=256, context=CONTEXT)), sync="sharded")
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-4, fused=True)
    tokens = torch.randint(256, (BATCH, CONTEXT + 1))

    def block() -> None:
        barrier()
        for _ in range(STEPS):
            model.backward(token_loss(model(tokens[:, :-1]), tokens[:, 1:]), samples=BATCH)
            optim.step()
            optim.zero_grad()
        barrier()

    with paceline.Watchdog():
        block()
        ports = sorted({port for each in gather_values(listening_ports()) for port in each})
        found = measure(block, ports if world.rank == 0 else [], rounds)
    paceline.shutdown()
    return found if world.rank == 0 else None


def burst(rounds: int) -> dict[str, Any]:
    """As `hub`, with blocks so short that opening all connections is most of what strangers do."""
    return hub(rounds, BURST_EXCHANGES)


def hub(rounds: int, exchanges: int = EXCHANGES) -> dict[str, Any]:
    """Serve a hub, and be its worker."""
    key = JobKey.from_environment(os.environ)
    assert key is not None
    exchange = HubExchange("tcp://127.0.0.1:*", "", keys=HubKeys.of_job(key))
    stop = threading.Event()
    server = HubServer(Hub("strangers", HubRules(), MemoryJournal(), time.time), exchange)
    thread = threading.Thread(target=server.run, args=(stop.is_set,))
    thread.start()
    net = torch.nn.Linear(64, 64)
    optim = torch.optim.SGD(net.parameters(), 1e-3)
    with paceline.AsyncDataParallel(net, optim, exchange.address, 1, 0) as worker:

        def block() -> None:
            until = worker.counts.taken + exchanges
            while worker.counts.taken < until:
                net(torch.ones(4, 64)).square().mean().backward()
                optim.step()
                optim.zero_grad()

        block()
        found = measure(block, listening_ports(), rounds)
    stop.set()
    thread.join()
    exchange.close()
    return found


def rendezvous(rounds: int) -> dict[str, Any]:
    """Serve jobs, and be a host of one."""
    key = JobKey.from_environment(os.environ)
    assert key is not None
    server = serve_jobs(RendezvousAddress("127.0.0.1", free_port()), key)
    store = AuthenticatedStore("127.0.0.1", server.port, key, "run/0")

    def block() -> None:
        for number in range(REQUESTS):
            store.set("key", str(number))
            assert store.get("key") == str(number).encode()

    block()
    found = measure(block, [server.port], rounds)
    server.close()
    return found


def measure(block: Callable[[], None], ports: list[int], rounds: int) -> dict[str, Any]:
    """Return wall-clock and CPU seconds of this process per block, with callers at `ports` and without."""
    with callers(ports) as call:

        def turn(active: bool) -> tuple[float, float]:
            call(active)
            began, used = time.perf_counter(), time.process_time()
            block()
            return time.perf_counter() - began, time.process_time() - used

        turns = take_turns(
            {"without": lambda: turn(False), "with": lambda: turn(True)}, rounds, order=alternating
        )
        calls = call(False)
    return {
        "calls": calls,
        **{
            kind: {"seconds": [pair[0] for pair in pairs], "processor_seconds": [pair[1] for pair in pairs]}
            for kind, pairs in turns.items()
        },
    }


def listening_ports() -> list[int]:
    """Return the TCP ports at which this process listens."""
    every = psutil.Process().net_connections("tcp")
    return sorted({each.laddr.port for each in every if each.status == psutil.CONN_LISTEN})


# ---------------------------------------------------------------------- strangers


@contextlib.contextmanager
def callers(ports: list[int]) -> Iterator[Callable[[bool], int]]:
    """Start the strangers; yield a function that lets them call or be silent, and returns the number of calls."""
    if not ports:
        yield lambda active: 0
        return
    command = [sys.executable, *bench.command(strangers, ports)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        words, answers = process.stdin, process.stdout
        answers.readline()

        def call(active: bool) -> int:
            print("call" if active else "rest", file=words, flush=True)
            return int(answers.readline())

        yield call
        words.close()


@bench.process
def strangers(ports: list[int]) -> None:
    """Do what standard input says, a word a line, until it ends; answer each once connections are open or closed."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    held: dict[int, socket.socket] = {}
    poll, calls, active, answered = select.poll(), 0, False, True
    print("ready", flush=True)
    while True:
        if select.select([sys.stdin], [], [], TURN_SECONDS if active else None)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            active, answered = line == "call\n", False
        if not active:
            for each in held.values():
                each.close()
            held.clear()
            poll = select.poll()
        for number, _ in poll.poll(0) if active else ():
            with contextlib.suppress(OSError):
                if held[number].recv(4096):
                    continue
            poll.unregister(number)
            held.pop(number).close()  # it was dropped
        for _ in range(
            min(CALLERS - len(held), CALLERS if not answered else CALLS_PER_TURN) if active else 0
        ):
            calls += 1
            with contextlib.suppress(OSError):
                made = socket.create_connection(("127.0.0.1", ports[calls % len(ports)]), timeout=5)
                held[made.fileno()] = made
                poll.register(made, select.POLLIN)
                made.setblocking(False)
                made.send(WORDS[calls % len(WORDS)])
        if not answered:
            print(calls, flush=True)
            answered = True


# ---------------------------------------------------------------------- the table


@bench.tables
def tables() -> dict[str, str]:
    """Return the block of README.md: a row per subject."""
    rows = []
    subjects = bench.read("strangers")["subjects"]
    for subject, title in SUBJECTS.items():
        found = subjects[subject]
        ratios = [f"{Ratio(**found[clock]):.3f}" for clock in ("seconds", "processor_seconds")]
        block = median(found["without"]["seconds"])
        rows.append([title, f"{found['calls']:,}", f"{block:.2f}", *ratios])
    titles = [
        "",
        "calls",
        "a block without, s",
        "time with ÷ without (95 % interval)",
        "CPU time with ÷ without",
    ]
    return {"strangers": table(titles, rows, words=1)}


if __name__ == "__main__":
    bench.main()
