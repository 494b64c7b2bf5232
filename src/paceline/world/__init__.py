"""The world: the rank of this process, the number of ranks, and how they reach each other.

    world = paceline.init()          # torchrun, Slurm, mpirun, a shared file, TCP, or a world of one
    print(world.rank, world.size, world.device)
    paceline.shutdown()

`environment` reads variables and arguments, `key_value_store` and `rendezvous` bring the ranks together, `session`
holds the world of this process. Nothing is read or started at import, and torch is imported by `init` only.
"""

from __future__ import annotations

from paceline.world.environment import ProcessPlace, read_environment
from paceline.world.session import World, init, shutdown

__all__ = ["ProcessPlace", "World", "init", "read_environment", "shutdown"]
