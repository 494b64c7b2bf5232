"""The ``"paceline"`` and ``"mpi4py"`` backends of ``torch.distributed``.

``"paceline"`` is shared memory inside a host and the network between hosts; ``"mpi4py"`` is MPI, for ranks that
mpiexec started. torch finds them by their entry point (group ``torch.backends``), so that any program may ask for one
by name::

    torch.distributed.init_process_group("paceline")
"""

from __future__ import annotations

from typing import Any

__all__ = ["NAMES", "register"]

NAMES = ("paceline", "mpi4py")


def register() -> None:
    """Make the backends' names known to torch; what they stand for is loaded when a group is made."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    for name, create in zip(NAMES, (_create, _create_mpi), strict=True):
        if not hasattr(dist.Backend, name.upper()):
            dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: Any = None) -> Any:
    from paceline.backends.group_factory import create

    return create(options, backend_options)


def _create_mpi(options: Any, backend_options: Any = None) -> Any:
    from paceline.backends.mpi_backend import create

    return create(options, backend_options)
