"""The hub of `loss.py`: `paceline hub` that keeps a copy of the centre every few seconds.

python benchmarks/star/star_hub.py JOB.json
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from paceline.async_dp.hub.hub import Hub
from paceline.async_dp.hub.hub_server import HubServer
from paceline.async_dp.hub.hub_settings import HubOptimizer, HubRules
from paceline.async_dp.wal.hub_journal import HubJournal
from paceline.transport.zmq import HubExchange


def main(job_file: str) -> None:
    """Serve until the job's time is over; copies are written only then, so that writing takes no time of it."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    folder = Path(job["folder"])
    rules = HubRules(outer=HubOptimizer(**job["outer"]), bandwidth=job.get("bandwidth"))
    exchange = HubExchange(job["bind"], "", insecure=True)
    copies: list[tuple[float, dict[str, Tensor]]] = []
    with HubJournal.open(folder / "hub", resume=False) as journal:
        hub = Hub("benchmark", rules, journal, time.time)

        def look() -> None:
            now = time.time()
            due = job["at"] + (len(copies) + 1) * job["every"]
            if hub.params is not None and hub.phase == "together" and now >= due:
                places = hub.params.layout.fragments[0].tensors
                theta = hub.params.fragments[0].theta.clone()
                copies.append((now - job["at"], {place.name: place.view_in(theta) for place in places}))

        HubServer(hub, exchange).run(lambda: time.time() > job["at"] + job["seconds"] + 15, look)
    exchange.close()
    told = []
    for number, (seconds, tensors) in enumerate(copies):
        path = folder / f"copy-{number:04d}.safetensors"
        save_file({name: each.contiguous() for name, each in tensors.items()}, path)
        told.append({"seconds": seconds, "path": str(path)})
    (folder / "copies.json").write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
