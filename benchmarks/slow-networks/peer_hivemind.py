"""hivemind's averager, as one contestant of `peers.py`; runs under the Python that hivemind is installed into.

Settings: `compression`, the name of a class of hivemind.compression.

Each host runs hivemind's DHT and averager in processes of their own; host 0 is the bootstrap peer. What is averaged is
the pseudo-gradient of all parameters as one vector; a Nesterov step with the mean follows, as in OpenDiLoCo (arXiv
2407.07852), which is built on the same averager. A group is full with all hosts, so it begins as soon as all are there.
Looking for it begins some inner steps ahead, as hivemind's own optimizer does it, so it is not in the time of a
synchronisation alone (`matchmaking` tells it). Addresses are known: no relays, no hole punching, no port mapping.
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
from peer_turn import OUTER_LR, OUTER_MOMENTUM, Peer, Place, play, ring_nbytes
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from workload import EVERY

from paceline.testing.netlab.lab_network import host_address
from paceline.tools.models.gpt import GPT

_AHEAD = 5
"""Inner steps before the end of a round at which a group is looked for."""

_MATCHMAKING_SECONDS, _REQUEST_SECONDS, _PATIENCE_SECONDS = 1.0, 0.5, 120.0
_BYTES_OF_COMPRESSION = {
    "NoCompression": 4,
    "Float16Compression": 2,
    "ScaledFloat16Compression": 2,
    "Uniform8BitQuantization": 1,
    "Quantile8BitQuantization": 1,
}


def join(place: Place) -> DHT:
    """Return this host's node of the DHT; host 0 tells the others where it is."""
    card = place.folder / "host0"
    peers = None
    if place.rank:
        while not card.exists():
            time.sleep(0.05)
        peers = card.read_text().split()
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
        new.rename(card)
    return dht


class Averaged:
    """Inner steps, and every so many a Nesterov step with the mean pseudo-gradient."""

    def __init__(self, averager: DecentralizedAverager, model: GPT, optimizer: torch.optim.Optimizer) -> None:
        self._averager, self._model, self._optimizer = averager, model, optimizer
        self._base = torch.nn.Parameter(parameters_to_vector(model.parameters()).detach().clone())
        self._outer = torch.optim.SGD([self._base], lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
        self._steps = 0
        self._control: Any = None
        self.extra: dict[str, list[float]] = {"matchmaking": []}

    def begin(self) -> None:
        """Go back to what all ranks had in common."""
        self._copy_back()

    def look(self) -> None:
        """Begin to look for a group."""
        self._control = self._averager.step(wait=False, require_trigger=True, timeout=_PATIENCE_SECONDS)

    def find(self) -> None:
        """Look for a group and wait until it is there."""
        started = time.perf_counter()
        self.look()
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
            self.look()
        if self._steps % EVERY == 0:
            self._agree()

    def _agree(self) -> None:
        """Average what the parameters have moved by, and take an outer step."""
        with self._averager.get_tensors() as (shared,):
            torch.sub(self._base, parameters_to_vector(self._model.parameters()), out=shared)
        self._control.allow_allreduce()
        self._control.result(_PATIENCE_SECONDS)
        self._control = None
        with self._averager.get_tensors() as (shared,):
            self._base.grad = shared
            self._outer.step()
        self._copy_back()

    @torch.no_grad()
    def _copy_back(self) -> None:
        vector_to_parameters(self._base.detach().clone(), self._model.parameters())


def build(place: Place, model: GPT, optimizer: torch.optim.Optimizer) -> Peer:
    """Return hivemind's averager at work."""
    name = place.settings["compression"]
    dht = join(place)
    averager = DecentralizedAverager(
        [torch.zeros(sum(parameter.numel() for parameter in model.parameters()))],
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
    work = Averaged(averager, model, optimizer)
    sent = ring_nbytes(model, place.ranks) * _BYTES_OF_COMPRESSION[name] / 4
    return Peer(work.finish, running, sent, begin=work.begin, prepare=work.find, extra=work.extra)


if __name__ == "__main__":
    play(build)
