"""hivemind's optimizer with local updates, as a contestant of `peers.py`; runs where hivemind is installed.

Its mode that is nearest to a star: every machine updates its own parameters at its own pace; when all together have
learnt from so many samples, parameters are averaged in the background and come in by the delta rule. Settings: ``lr``;
``samples`` between two averagings, of all machines.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import hivemind  # pyright: ignore[reportMissingImports]
from peer_hivemind import join  # pyright: ignore[reportMissingImports]
from training import BATCH, Training

from single_process import Part, play

_REFRESH: dict[str, Any] = {
    "min_refresh_period": 0.1,
    "default_refresh_period": 0.5,
    "max_refresh_period": 1.0,
}
_AVERAGER: dict[str, Any] = {"request_timeout": 0.5, "min_group_size": 2}


def attach(part: Part, training: Training) -> None:
    """Put hivemind's optimizer around AdamW."""
    dht = join(SimpleNamespace(rank=part.rank, folder=part.folder, port=part.port))
    adamw: Any = training.optimizer
    training.optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="paceline",
        target_batch_size=part.settings["samples"],
        batch_size_per_step=BATCH,
        optimizer=adamw,
        use_local_updates=True,
        delay_state_averaging=True,
        matchmaking_time=1.0,
        averaging_timeout=30.0,
        state_averaging_compression=hivemind.compression.Uniform8BitQuantization(),
        averager_opts={**_AVERAGER, "target_group_size": part.ranks},
        tracker_opts=_REFRESH,
    )


if __name__ == "__main__":
    play(attach)
