"""The speed of codecs on one thread, beside copying the numbers and beside the plain formulation (`plain.py`).

    python benchmarks/codecs/speed.py run
    python benchmarks/codecs/speed.py table

Compressing (with the error), decompressing, and adding to a sum, each in turns on the same numbers; then int8 in chunks
of other sizes. Times are the thread's processor time, which other programs on the machine affect less than the wall
clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Annotated, Any

import torch
from plain import plain_of
from typer import Option

from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from bench_harness.turns import alternating, ratios_to, seconds_of, take_turns
from paceline.parallel.compression import blockwise
from paceline.parallel.compression.codecs import Codec, HalfCodec, IntCodec, RawCodec
from paceline.parallel.compression.topk import TopKCodec
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.cli.shared_options import JsonOption

OURS, PLAIN, COPY = "ours", "plain", "copy"
CODECS: dict[str, Codec] = {
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
CHUNKS = (12, 14, 16, 17, 18, 19, 20, 22)
"""Binary logarithms of the sizes of chunks that are compared."""

Work = Callable[[], object]

bench = Benchmark(__file__)


@bench.run
def run(
    rounds: Annotated[int, Option(min=1, help="Turns of each.")] = 11,
    numel: Annotated[int, Option(help="Numbers in a packet; a multiple of 1024.")] = 20 << 20,
    json_file: JsonOption = None,
) -> None:
    """Time all codecs."""
    path = bench.output(json_file, "speed")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    values = torch.randn(numel)

    def time_works(works: dict[str, Work]) -> dict[str, Any]:
        turns = {name: lambda work=work: seconds_of(work, time.thread_time) for name, work in works.items()}
        seconds = take_turns(turns, rounds, tick, order=alternating)
        rates = {name: values.nbytes / median(each) / 1e9 for name, each in seconds.items()}
        return {"seconds": seconds, "gb_per_s": rates}

    rows = []
    with ProgressBar("codecs", (len(CODECS) * 3 + 1) * (rounds + 1)) as tick:
        for name, codec in CODECS.items():
            for kind, works in works_of(codec, values).items():
                times = time_works(works)
                head = {"name": name, "ratio": values.nbytes / codec.nbytes(numel), "work": kind}
                rows.append(head | times | {"times_ours": ratios_to(times["seconds"], OURS)})
        chunks = {"name": "int8", "work": "compress"} | time_works(in_chunks(values))
    settings = {"numel": numel, "rounds": rounds, "threads": 1, "chunk": blockwise.CHUNK}
    settings["time"] = "processor time"
    packages = ["paceline", "torch", "numpy"]
    bench.write(path, "codec-speed", settings, packages=packages, rows=rows, chunks=chunks)


def works_of(codec: Codec, values: torch.Tensor) -> dict[str, dict[str, Work]]:
    """Return what is timed, for each kind of work."""
    plain_compress, plain_decompress = plain_of(codec, len(values))
    packet, error = torch.empty(codec.nbytes(len(values)), dtype=torch.uint8), torch.empty_like(values)
    codec.compress(values, packet, error)
    plain_packet, _ = plain_compress(values)
    into, total, copied = torch.empty_like(values), torch.zeros_like(values), torch.empty_like(values)
    works: dict[str, tuple[Work, Work]] = {
        "compress": (lambda: codec.compress(values, packet, error), lambda: plain_compress(values)),
        "decompress": (
            lambda: codec.decompress(packet, into),
            lambda: into.copy_(plain_decompress(plain_packet)),
        ),
        "add": (
            lambda: codec.add(packet, total, 0.25),
            lambda: total.add_(plain_decompress(plain_packet), alpha=0.25),
        ),
    }
    return {
        kind: {OURS: ours, PLAIN: plain, COPY: lambda: copied.copy_(values)}
        for kind, (ours, plain) in works.items()
    }


def in_chunks(values: torch.Tensor) -> dict[str, Work]:
    """Return int8 in chunks of several sizes."""
    codec = IntCodec(8)
    packet, error = torch.empty(codec.nbytes(len(values)), dtype=torch.uint8), torch.empty_like(values)

    def compress(chunk: int) -> None:
        usual, blockwise.CHUNK = blockwise.CHUNK, chunk
        codec.compress(values, packet, error)
        blockwise.CHUNK = usual

    return {str(log2): lambda chunk=1 << log2: compress(chunk) for log2 in CHUNKS}


@bench.tables
def tables() -> dict[str, str]:
    """Return the blocks of README.md."""
    result = bench.read("speed")
    speed: dict[str, list[str]] = {}
    rows = {(row["name"], row["work"]): row for row in result["rows"]}
    for (name, _), row in rows.items():
        both = sum(1 / rows[name, work]["gb_per_s"][OURS] for work in ("compress", "decompress"))
        cells = speed.setdefault(name, [name, f"{row['ratio']:.2f}", f"{1 / both:.1f}"])
        cells += [f"{row['gb_per_s'][OURS]:.1f}", f"{row['times_ours'][PLAIN]['median']:.1f}"]
    columns = ["codec", "times smaller", "both, GB/s"]
    for work in ("compress", "decompress", "add"):
        columns += [f"{work}, GB/s", "plain ÷ ours"]
    copies = [row["gb_per_s"][COPY] for row in result["rows"]]
    rates = {1 << int(log2): f"{rate:.1f}" for log2, rate in result["chunks"]["gb_per_s"].items()}
    sizes = [f"**{size:,}**" if size == result["settings"]["chunk"] else f"{size:,}" for size in rates]
    return {
        "speed": table(columns, list(speed.values())),
        "copying": f"Copying the numbers, in the same turns: {min(copies):.1f} to {max(copies):.1f} GB/s.",
        "chunks": table(["numbers in a chunk", *sizes], [["int8, compress, GB/s", *rates.values()]]),
    }


if __name__ == "__main__":
    bench.main()
