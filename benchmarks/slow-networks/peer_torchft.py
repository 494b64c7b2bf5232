"""torchft's DiLoCo for `peers.py`; runs under the Python that torchft is installed into.

Settings: `fragments` of the model, whose synchronisations are spread over a round, and `delay`, the inner steps
between sending a fragment and waiting for it (0: the classic DiLoCo with one fragment).

Each host is a replica group of one rank with its own store, and host 0 has the lighthouse. The quorum is synchronous,
as DiLoCo requires, and checked every 10 ms rather than 100; nothing is fetched at the start, since all begin alike.
torchft quantises only on a GPU, so it sends float32 here; its buckets are off, as by default: with several of them it
leaves parameters unsynchronised (`benchmarks/peers`).
"""

from __future__ import annotations

import socket
from contextlib import ExitStack
from datetime import timedelta
from itertools import pairwise

import torch
from torch import nn
from torchft import Manager, ProcessGroupGloo  # pyright: ignore[reportMissingImports]
from torchft.coordination import LighthouseServer  # pyright: ignore[reportMissingImports]
from torchft.local_sgd import DiLoCo  # pyright: ignore[reportMissingImports]
from workload import EVERY, OUTER_LR, OUTER_MOMENTUM, SIZE, Peer, Place, stepper

from paceline.tools.models.gpt import GPT
from paceline.tools.train.traffic_counter import float32_gradient_nbytes

_TIMEOUT = timedelta(seconds=300)
_TICK_MS = 10


def fragments_of(model: GPT, count: int) -> list[nn.Module]:
    """Return the model in `count` parts of about equally many blocks, its ends with the first and the last."""
    whole = list(model.blocks)
    cuts = [len(whole) * part // count for part in range(count + 1)]
    parts = [whole[low:high] for low, high in pairwise(cuts)]
    parts[0].insert(0, model.embedding)
    parts[-1] += [model.norm, model.head]
    return [nn.ModuleList(part) for part in parts]


def manager_of(place: Place) -> Manager:
    """Return the manager of this host's replica group; on host 0, also start the lighthouse."""
    here, lighthouse = socket.gethostname(), place.port
    if place.rank == 0:
        place.settings["lighthouse"] = LighthouseServer(  # kept alive there
            bind=f"[::]:{lighthouse}", min_replicas=place.ranks, quorum_tick_ms=_TICK_MS
        )
    store = torch.distributed.TCPStore(here, place.port + 1, is_master=True, wait_for_workers=False)
    place.settings["store"] = store
    return Manager(
        pg=ProcessGroupGloo(timeout=_TIMEOUT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=place.ranks,
        use_async_quorum=False,
        timeout=_TIMEOUT,
        quorum_timeout=_TIMEOUT,
        connect_timeout=_TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=here,
        store_port=store.port,
        lighthouse_addr=f"http://host0:{lighthouse}",
        replica_id=f"host_{place.rank}",
        hostname=here,
        init_sync=False,
    )


def build(place: Place, model: GPT, optimizer: torch.optim.Optimizer) -> Peer:
    """Return torchft's DiLoCo around the inner optimizer."""
    fragments, delay = fragments_of(model, place.settings["fragments"]), place.settings["delay"]
    outer = [
        torch.optim.SGD(part.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
        for part in fragments
    ]
    manager = manager_of(place)
    diloco = DiLoCo(manager, fragments, optimizer, outer, sync_every=EVERY, fragment_sync_delay=delay)

    running = ExitStack()
    running.enter_context(diloco)
    running.callback(manager.shutdown)

    def agreed() -> list[torch.Tensor]:
        """Return what every fragment was set to; all but the latest have been trained further since."""
        return [tensor for part in diloco._fragments for tensor in part.original_parameters.values()]

    sent = float32_gradient_nbytes(SIZE.parameters(), place.ranks)
    # DiLoCo has hooked into the optimizer
    return Peer(stepper(optimizer), running, sent, overlaps=delay > 0, agreed=agreed)
