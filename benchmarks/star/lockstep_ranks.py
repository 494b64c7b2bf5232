"""What each rank of `loss.py` runs where all go in step: torch DDP, or `paceline.LocalSGD`; timed at given speeds.

torchrun … benchmarks/star/lockstep_ranks.py JOB.json
"""

from __future__ import annotations

import gc
import json
import sys
import time
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training import Training, seconds_of

import paceline


def main(job_file: str) -> None:
    """Time steps, and write what each took on the slowest rank."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    training = Training(rank, 0, job["lr"], seconds_of(rank, job["fastest"]))
    loop = nullcontext()
    if job["kind"] == "ddp":
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", ".*broadcast_buffers", FutureWarning
            )  # its successor is too young
            training.model = DistributedDataParallel(
                training.net,
                bucket_cap_mb=job["bucket_mib"],
                gradient_as_bucket_view=True,
                broadcast_buffers=False,
                static_graph=True,
                init_sync=False,
            )
    else:
        model = paceline.DataParallel(training.net)
        training.model = model
        loop = paceline.LocalSGD(model, training.optimizer, **job["options"])
    seconds = []
    with loop:
        for _ in range(job["steps"] + 4):
            began = time.perf_counter()
            training.step(1.0)
            seconds.append(time.perf_counter() - began)
    table = torch.tensor(seconds[4:], dtype=torch.float64)  # DDP lays out its buckets anew in the second
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    if rank == 0:
        Path(job["out"]).write_text(json.dumps(table.tolist()), encoding="utf-8")
    dist.barrier()
    del training, loop
    gc.collect()  # torch's DDP must be gone before its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
