"""The ``"paceline"`` and ``"mpi4py"`` backends of ``torch.distributed``.

``"paceline"`` uses shared memory inside a host and the network between hosts; ``"mpi4py"`` is MPI, for ranks started
by mpiexec. torch finds them by their entry point (group ``torch.backends``), so any program can use one by name::

    torch.distributed.init_process_group("paceline")
"""

from __future__ import annotations

from typing import Any

from paceline.world.device_selection import accelerator_backend
from paceline.world.store.launched_store import replace_env_rendezvous

__all__ = ["NAMES", "register"]

NAMES = ("paceline", "mpi4py")


def register() -> None:
    """Register the backends with torch, and the store of `paceline run` in its ranks.

    The code of a backend is loaded when a group is created.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return
    accelerators = filter(accelerator_backend, dist.Backend.default_device_backend_map)
    devices = ["cpu", *accelerators]  # these by their own backends
    for name, create in zip(NAMES, (_create_paceline, _create_mpi), strict=True):
        if not hasattr(dist.Backend, name.upper()):
            dist.Backend.register_backend(name, create, extended_api=True, devices=devices)
    replace_env_rendezvous()


def _create_paceline(options: Any, backend_options: Any = None) -> Any:
    from paceline.backends.group_factory import create_paceline_group

    return create_paceline_group(options)


def _create_mpi(options: Any, backend_options: Any = None) -> Any:
    from paceline.backends.mpi_backend import create_mpi_group

    return create_mpi_group(options)
