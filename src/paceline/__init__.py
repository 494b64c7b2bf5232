"""Paceline: exact, explained data-parallel training with PyTorch.

    import paceline

    world = paceline.init()
    model = paceline.DataParallel(net, sync="sharded")
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=3e-4)

Names are loaded when they are first used (PEP 562), so that ``import paceline`` and
``paceline --help`` need no torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from paceline._core import __version__

if TYPE_CHECKING:
    from paceline.async_dp.api import AsyncDataParallel as AsyncDataParallel
    from paceline.checkpoint.api import Checkpoint as Checkpoint
    from paceline.checkpoint.interop.weights_export import export_weights as export_weights
    from paceline.checkpoint.interop.weights_import import import_weights as import_weights
    from paceline.checkpoint.storage.remote_folder import RemoteFolder as RemoteFolder
    from paceline.data.evaluate import evaluate as evaluate
    from paceline.data.loader import Loader as Loader
    from paceline.elastic.live_training import Elastic as Elastic
    from paceline.errors import PacelineError as PacelineError
    from paceline.health.non_finite_guard import NonFiniteGuard as NonFiniteGuard
    from paceline.health.replica_check import ReplicaCheck as ReplicaCheck
    from paceline.health.watchdog import Watchdog as Watchdog
    from paceline.launch.process.notebook_launcher import launch_notebook as launch_notebook
    from paceline.parallel.compression.compression_config import Compression as Compression
    from paceline.parallel.data_parallel import DataParallel as DataParallel
    from paceline.parallel.ddp import DistributedDataParallel as DistributedDataParallel
    from paceline.parallel.local_sgd.local_sgd import DiLoCo as DiLoCo
    from paceline.parallel.local_sgd.local_sgd import LocalSGD as LocalSGD
    from paceline.parallel.local_sgd.local_sgd import SlowMo as SlowMo
    from paceline.parallel.sharding.matrix_parameters import matrix_parameters as matrix_parameters
    from paceline.parallel.sharding.zero import ShardedOptimizer as ShardedOptimizer
    from paceline.parallel.strategy import Sync as Sync
    from paceline.profiling.profiler import Profiler as Profiler
    from paceline.world import World as World
    from paceline.world import init as init
    from paceline.world import shutdown as shutdown

if sys.platform == "win32":
    raise ImportError(
        "paceline does not run on Windows itself: install it in WSL 2, the Windows Subsystem for Linux"
    )

_HOME = {
    "AsyncDataParallel": "paceline.async_dp.api",
    "Checkpoint": "paceline.checkpoint.api",
    "Compression": "paceline.parallel.compression.compression_config",
    "DataParallel": "paceline.parallel.data_parallel",
    "DiLoCo": "paceline.parallel.local_sgd.local_sgd",
    "DistributedDataParallel": "paceline.parallel.ddp",
    "Elastic": "paceline.elastic.live_training",
    "Loader": "paceline.data.loader",
    "LocalSGD": "paceline.parallel.local_sgd.local_sgd",
    "NonFiniteGuard": "paceline.health.non_finite_guard",
    "PacelineError": "paceline.errors",
    "Profiler": "paceline.profiling.profiler",
    "RemoteFolder": "paceline.checkpoint.storage.remote_folder",
    "ReplicaCheck": "paceline.health.replica_check",
    "ShardedOptimizer": "paceline.parallel.sharding.zero",
    "SlowMo": "paceline.parallel.local_sgd.local_sgd",
    "Sync": "paceline.parallel.strategy",
    "Watchdog": "paceline.health.watchdog",
    "World": "paceline.world",
    "evaluate": "paceline.data.evaluate",
    "export_weights": "paceline.checkpoint.interop.weights_export",
    "import_weights": "paceline.checkpoint.interop.weights_import",
    "init": "paceline.world",
    "launch_notebook": "paceline.launch.process.notebook_launcher",
    "matrix_parameters": "paceline.parallel.sharding.matrix_parameters",
    "shutdown": "paceline.world",
}

__all__ = [
    "AsyncDataParallel",
    "Checkpoint",
    "Compression",
    "DataParallel",
    "DiLoCo",
    "DistributedDataParallel",
    "Elastic",
    "Loader",
    "LocalSGD",
    "NonFiniteGuard",
    "PacelineError",
    "Profiler",
    "RemoteFolder",
    "ReplicaCheck",
    "ShardedOptimizer",
    "SlowMo",
    "Sync",
    "Watchdog",
    "World",
    "__version__",
    "evaluate",
    "export_weights",
    "import_weights",
    "init",
    "launch_notebook",
    "matrix_parameters",
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
