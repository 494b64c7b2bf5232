"""How fast codecs are on one thread: beside copying the numbers, and beside the plain formulation, in turns.

    python benchmarks/codecs/speed.py

For each codec, three kinds of work on the same numbers: `compress` (with the error, beside the values), `decompress`,
and `add` onto a sum. A contestant's time is the processor time of its thread, which neighbours on a machine that is not
quiet lengthen less than the time of day (they still share its cache and memory). Then int8 in chunks of other sizes,
in turns too. Writes ``speed.json`` beside this file.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from plain import plain_of

from bench_harness.program import run_program
from bench_harness.turns import ratio_of
from paceline._core.files import write_json
from paceline.parallel.compression import blockwise
from paceline.parallel.compression.codecs import Codec, HalfCodec, IntCodec, RawCodec
from paceline.parallel.compression.topk import TopKCodec
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.result_files import check_writable, result_head

HERE = Path(__file__).parent
OURS, PLAIN, COPY = "ours", "plain", "copy"
CHUNKS = (12, 14, 16, 17, 18, 19, 20, 22)
"""Binary logarithms of the sizes of chunks that are compared."""

Work = Callable[[], object]


def codecs() -> dict[str, Codec]:
    """Return what is measured."""
    return {
        "fp32": RawCodec(),
        "bf16": HalfCodec("bf16"),
        "fp16": HalfCodec("fp16"),
        "int8": IntCodec(8),
        "int4": IntCodec(4),
        "bf16, stochastic": HalfCodec("bf16", "stochastic"),
        "int8, stochastic": IntCodec(8, rounding="stochastic"),
        "int4, stochastic": IntCodec(4, rounding="stochastic"),
        "top-1%": TopKCodec(0.01),
        "top-0.1%": TopKCodec(0.001),
    }


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 11,
    numel: Annotated[int, typer.Option(help="Numbers in a packet; a multiple of 1024.")] = 20 << 20,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Write the result there.")] = HERE / "speed.json",
) -> None:
    """Time all codecs."""
    check_writable(out, make_folder=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    values = torch.randn(numel)
    rows = []
    with ProgressBar("codecs", (len(codecs()) * 3 + 1) * (rounds + 1)) as tick:
        for name, codec in codecs().items():
            weight = {"name": name, "ratio": values.nbytes / codec.nbytes(numel)}
            rows += [
                weight | {"work": kind} | take_turns(contestants, rounds, tick)
                for kind, contestants in work_of(codec, values).items()
            ]
        chunks = turns_of(in_chunks(values), rounds, tick)
    result = result_head("codec-speed", ["paceline", "torch", "numpy"]) | {
        "settings": {
            "numel": numel,
            "rounds": rounds,
            "threads": 1,
            "chunk": blockwise.CHUNK,
            "time": "processor time",
        },
        "rows": [row | {"gb_per_s": rates(row["seconds"], values.nbytes)} for row in rows],
        "chunks": {"name": "int8", "work": "compress", "seconds": chunks}
        | {"gb_per_s": rates(chunks, values.nbytes)},
    }
    write_json(out, result)


def work_of(codec: Codec, values: torch.Tensor) -> dict[str, dict[str, Work]]:
    """Return the contestants of each kind of work."""
    plain = plain_of(codec, len(values))
    packet, error = torch.empty(codec.nbytes(len(values)), dtype=torch.uint8), torch.empty_like(values)
    codec.compress(values, packet, error)
    theirs, _ = plain.compress(values)
    into, total, copied = torch.empty_like(values), torch.zeros_like(values), torch.empty_like(values)

    def copy() -> None:
        copied.copy_(values)

    return {
        "compress": {
            OURS: lambda: codec.compress(values, packet, error),
            PLAIN: lambda: plain.compress(values),
            COPY: copy,
        },
        "decompress": {
            OURS: lambda: codec.decompress(packet, into),
            PLAIN: lambda: into.copy_(plain.decompress(theirs)),
            COPY: copy,
        },
        "add": {
            OURS: lambda: codec.add(packet, total, 0.25),
            PLAIN: lambda: total.add_(plain.decompress(theirs), alpha=0.25),
            COPY: copy,
        },
    }


def in_chunks(values: torch.Tensor) -> dict[str, Work]:
    """Return int8 in chunks of several sizes."""
    codec = IntCodec(8)
    packet, error = torch.empty(codec.nbytes(len(values)), dtype=torch.uint8), torch.empty_like(values)

    def work(chunk: int) -> Work:
        def compress() -> None:
            usual, blockwise.CHUNK = blockwise.CHUNK, chunk
            codec.compress(values, packet, error)
            blockwise.CHUNK = usual

        return compress

    return {str(log2): work(1 << log2) for log2 in CHUNKS}


def take_turns(contestants: dict[str, Work], rounds: int, tick: Callable[[], object]) -> dict[str, Any]:
    """Return the seconds of every turn, and how many times as long the others take as ours."""
    seconds = turns_of(contestants, rounds, tick)
    ratios = {name: ratio_of(seconds[name], seconds[OURS]) for name in (PLAIN, COPY)}
    return {
        "seconds": seconds,
        "times_ours": {
            name: {"median": r.median, "low": r.low, "high": r.high} for name, r in ratios.items()
        },
    }


def turns_of(contestants: dict[str, Work], rounds: int, tick: Callable[[], object]) -> dict[str, list[float]]:
    """Return the seconds of every turn."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    gc.disable()
    for number in range(rounds + 1):
        for name in list(contestants)[:: -1 if number % 2 else 1]:
            started = time.thread_time()
            contestants[name]()
            if number:  # the first round is warming up
                seconds[name].append(time.thread_time() - started)
        tick()
    gc.enable()
    return seconds


def rates(seconds: dict[str, list[float]], nbytes: int) -> dict[str, float]:
    """Return the GB of float32 numbers that each contestant gets through in a second."""
    return {name: nbytes / median(each) / 1e9 for name, each in seconds.items()}


if __name__ == "__main__":
    run_program(main)
