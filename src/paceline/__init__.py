"""Paceline: exact, explained data-parallel training with PyTorch.

    import paceline as pl

    world = pl.init()
    model = pl.DataParallel(net, sync="sharded")
    optim = pl.ShardedOptimizer(model, torch.optim.AdamW, lr=3e-4)

Names are loaded when they are first used (PEP 562), so that ``import paceline`` and
``paceline --help`` need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.checkpoint.drift import Drift as Drift
    from paceline.checkpoint.plain import export_weights as export_weights
    from paceline.checkpoint.plain import import_weights as import_weights
    from paceline.checkpoint.store import Checkpoint as Checkpoint
    from paceline.checkpoint.watch import Watch as Watch
    from paceline.data.evaluate import evaluate as evaluate
    from paceline.data.loader import Loader as Loader
    from paceline.errors import PacelineError as PacelineError
    from paceline.record.record import Record as Record
    from paceline.star.star import Star as Star
    from paceline.sync.compress import Compression as Compression
    from paceline.sync.engine import DataParallel as DataParallel
    from paceline.sync.finite import Finite as Finite
    from paceline.sync.periodic import DiLoCo as DiLoCo
    from paceline.sync.periodic import LocalSGD as LocalSGD
    from paceline.sync.periodic import SlowMo as SlowMo
    from paceline.sync.plan import Sync as Sync
    from paceline.sync.shard import ShardedOptimizer as ShardedOptimizer
    from paceline.world import World as World
    from paceline.world import init as init
    from paceline.world import shutdown as shutdown

__version__ = "0.1.0"

_HOME = {
    "Checkpoint": "paceline.checkpoint.store",
    "Compression": "paceline.sync.compress",
    "DataParallel": "paceline.sync.engine",
    "DiLoCo": "paceline.sync.periodic",
    "Drift": "paceline.checkpoint.drift",
    "Finite": "paceline.sync.finite",
    "Loader": "paceline.data.loader",
    "LocalSGD": "paceline.sync.periodic",
    "PacelineError": "paceline.errors",
    "Record": "paceline.record.record",
    "ShardedOptimizer": "paceline.sync.shard",
    "SlowMo": "paceline.sync.periodic",
    "Star": "paceline.star.star",
    "Sync": "paceline.sync.plan",
    "Watch": "paceline.checkpoint.watch",
    "World": "paceline.world",
    "export_weights": "paceline.checkpoint.plain",
    "evaluate": "paceline.data.evaluate",
    "import_weights": "paceline.checkpoint.plain",
    "init": "paceline.world",
    "shutdown": "paceline.world",
}

__all__ = [
    "Checkpoint",
    "Compression",
    "DataParallel",
    "DiLoCo",
    "Drift",
    "Finite",
    "Loader",
    "LocalSGD",
    "PacelineError",
    "Record",
    "ShardedOptimizer",
    "SlowMo",
    "Star",
    "Sync",
    "Watch",
    "World",
    "__version__",
    "evaluate",
    "export_weights",
    "import_weights",
    "init",
    "shutdown",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
