"""The ``"paceline"`` backend of ``torch.distributed``: shared memory inside a host, the network between hosts.

torch finds it by its entry point (group ``torch.backends``), so that any program may ask for it by name::

    torch.distributed.init_process_group("paceline")
"""

from __future__ import annotations

from typing import Any

__all__ = ["register"]


def register() -> None:
    """Make the name ``"paceline"`` known to torch; what it stands for is loaded when a group is made."""
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, "PACELINE"):
        return
    dist.Backend.register_backend("paceline", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: Any = None) -> Any:
    from paceline.backends.create import create

    return create(options, backend_options)
