"""hivemind's averager for `peers.py`; runs under the Python that hivemind is installed into.

Settings: `compression`, the name of a class of hivemind.compression.

Each host runs hivemind's DHT and averager in their own processes; host 0 is the bootstrap peer. The pseudo-gradient of
all parameters is averaged as one vector; a Nesterov step with the mean follows, as in OpenDiLoCo (arXiv 2407.07852),
which is built on the same averager. A group is full with all hosts, so it begins as soon as all are there. Matchmaking
begins some inner steps ahead, as in hivemind's own optimizer, so it is not in the time of a synchronisation alone
(`matchmaking` has its seconds). Addresses are known: no relays, no hole punching, no port mapping.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import hivemind.compression  # pyright: ignore[reportMissingImports]
import torch
from hivemind import DHT  # pyright: ignore[reportMissingImports]
from hivemind.averaging import DecentralizedAverager  # pyright: ignore[reportMissingImports]
from hivemind.averaging.control import AveragingStage  # pyright: ignore[reportMissingImports]
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from workload import EVERY, OUTER_LR, OUTER_MOMENTUM, SIZE, Peer, Place

from paceline.testing.netlab.lab_network import host_address
from paceline.tools.models.gpt import GPT
from paceline.tools.train.traffic_counter import float32_gradient_nbytes

_AHEAD = 5
"""Inner steps before the end of a round at which matchmaking begins."""

_MATCHMAKING_SECONDS, _REQUEST_SECONDS, _TIMEOUT_SECONDS = 1.0, 0.5, 120.0
_BYTES_OF_COMPRESSION = {
    "NoCompression": 4,
    "Float16Compression": 2,
    "ScaledFloat16Compression": 2,
    "Uniform8BitQuantization": 1,
    "Quantile8BitQuantization": 1,
}


def join(place: Place) -> DHT:
    """Return this host's node of the DHT; host 0 writes its address to a file for the others."""
    address = place.folder / "host0"
    peers = None
    if place.rank:
        while not address.exists():
            time.sleep(0.05)
        peers = address.read_text().split()
    dht = DHT(
        initial_peers=peers,
        start=True,
        host_maddrs=[f"/ip4/{host_address(place.rank)}/tcp/{place.port}"],
        use_relay=False,
        use_auto_relay=False,
        auto_nat=False,
        nat_port_map=False,
    )
    if not place.rank:
        new = place.folder / "host0.new"
        new.write_text("\n".join(map(str, dht.get_visible_maddrs())))
        new.rename(address)
    return dht


class Averaging:
    """Inner steps, and every so many a Nesterov step with the mean pseudo-gradient."""

    def __init__(self, averager: DecentralizedAverager, model: GPT, optimizer: torch.optim.Optimizer) -> None:
        self._averager, self._model, self._optimizer = averager, model, optimizer
        self._base = torch.nn.Parameter(parameters_to_vector(model.parameters()).detach().clone())
        self._outer = torch.optim.SGD([self._base], lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
        self._steps = 0
        self._control: Any = None
        self.extra: dict[str, list[float]] = {"matchmaking": []}

    def begin_matchmaking(self) -> None:
        """Begin matchmaking."""
        self._control = self._averager.step(wait=False, require_trigger=True, timeout=_TIMEOUT_SECONDS)

    def find_group(self) -> None:
        """Begin matchmaking and wait until the group is complete."""
        started = time.perf_counter()
        self.begin_matchmaking()
        while self._control.stage != AveragingStage.AWAITING_TRIGGER:
            time.sleep(0.005)
        self.extra["matchmaking"].append(time.perf_counter() - started)

    @torch.no_grad()
    def finish(self) -> None:
        """Complete an inner step."""
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._steps += 1
        if self._steps % EVERY == EVERY - _AHEAD and self._control is None:
            self.begin_matchmaking()
        if self._steps % EVERY == 0:
            self._average()

    def _average(self) -> None:
        """Average what the parameters have moved by, and take an outer step."""
        with self._averager.get_tensors() as (shared,):
            torch.sub(self._base, parameters_to_vector(self._model.parameters()), out=shared)
        self._control.allow_allreduce()
        self._control.result(_TIMEOUT_SECONDS)
        self._control = None
        with self._averager.get_tensors() as (shared,):
            self._base.grad = shared
            self._outer.step()
        self.go_back()

    @torch.no_grad()
    def go_back(self) -> None:
        """Go back to what all ranks have in common."""
        vector_to_parameters(self._base.detach().clone(), self._model.parameters())


def build(place: Place, model: GPT, optimizer: torch.optim.Optimizer) -> Peer:
    """Return hivemind's averager at work."""
    name = place.settings["compression"]
    dht = join(place)
    averager = DecentralizedAverager(
        [torch.zeros(SIZE.parameters())],
        dht,
        start=True,
        prefix="paceline",
        target_group_size=place.ranks,
        min_group_size=place.ranks,
        min_matchmaking_time=_MATCHMAKING_SECONDS,
        request_timeout=_REQUEST_SECONDS,
        compression=getattr(hivemind.compression, name)(),
        allow_state_sharing=False,
    )
    running = ExitStack()
    running.callback(dht.shutdown)
    running.callback(averager.shutdown)
    work = Averaging(averager, model, optimizer)
    sent = float32_gradient_nbytes(SIZE.parameters(), place.ranks) * _BYTES_OF_COMPRESSION[name] / 4
    return Peer(work.finish, running, sent, begin=work.go_back, prepare=work.find_group, extra=work.extra)
