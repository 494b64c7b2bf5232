"""The world: which rank this process is, of how many, and how they reach each other.

    world = paceline.init()          # torchrun, Slurm, mpirun, a shared file, TCP, or a world of one
    print(world.rank, world.size, world.device)
    paceline.shutdown()

`environment` and `address` read variables and arguments (pure), `store` and `rollcall` bring the ranks
together, `session` holds the world of this process. Nothing is read or started at import, and only
`init` imports torch.
"""

from __future__ import annotations

from paceline.world.environment import ProcessPlace, read_environment
from paceline.world.session import World, init, shutdown

__all__ = ["ProcessPlace", "World", "init", "read_environment", "shutdown"]
