"""Restores a run from a checkpoint of Paceline's, or of another program, written by torch.distributed.checkpoint (DCP).

The names of the other program are matched with the objects of the run; then `RestorePlan` sees its checkpoint as one of
Paceline's, of one rank.
"""

from __future__ import annotations

from paceline.checkpoint.checkpoint_contents import RestorePlan
from paceline.checkpoint.format.checkpoint_reader import CheckpointReader
from paceline.checkpoint.interop.dcp_match import DcpMatch
from paceline.checkpoint.interop.dcp_reader import DcpReader
from paceline.checkpoint.parts.named_objects import NamedObjects

__all__ = ["plan_restore"]


def plan_restore(
    reader: CheckpointReader | DcpReader, objects: NamedObjects, rank: int, ranks: int
) -> RestorePlan:
    """Return what a rank restores from a checkpoint of Paceline's or of another program.

    Args:
        reader: of the checkpoint.
        objects: to restore.
        rank, ranks: this rank, and the number of ranks.

    Raises:
        UsageError: the checkpoint belongs to other objects; names the first that is missing.
        DamagedCheckpoint: it is not intact, as far as this rank reads it.
    """
    if isinstance(reader, CheckpointReader):
        return RestorePlan(reader, objects, rank, ranks)
    found = DcpMatch(reader, objects)
    plan = RestorePlan(found.reader(), objects, rank, ranks)
    found.check_tied(rank, ranks)
    return plan
