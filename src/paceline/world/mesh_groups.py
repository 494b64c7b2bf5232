"""Process groups of a device mesh: of one axis, and of all its ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from paceline.errors import UsageError
from paceline.world.group_devices import default_group

__all__ = ["check_mesh", "group_of_mesh", "separate_group"]

_AXES = 'pass mesh["data"] of one axis, or mesh["replicate", "shard"] of two'

_whole_meshes: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], ProcessGroup]] = WeakKeyDictionary()
"""Groups of all ranks of a mesh, by the group of its second axis and the ranks."""

_separate: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()


def check_mesh(mesh: DeviceMesh) -> None:
    """Raise unless `mesh` has one or two axes with process groups, and this process is in it.

    Raises:
        UsageError: names the shape and the ranks.
    """
    shape, ranks = " × ".join(map(str, mesh.shape)), mesh.mesh.tolist()
    if mesh.ndim not in (1, 2):
        names = "" if mesh.mesh_dim_names is None else f" with axes {', '.join(mesh.mesh_dim_names)}"
        raise UsageError(f"a device mesh of {mesh.ndim} axes ({shape}){names}", remedy=_AXES)
    if mesh.get_coordinate() is None:
        rank = dist.get_rank()
        raise UsageError(
            f"this process is not in the device mesh of ranks {ranks}",
            rank=rank,
            remedy="pass a mesh on its members only",
        )
    try:
        groups = mesh.get_all_groups()
    except RuntimeError as error:
        raise UsageError(
            f"the device mesh of ranks {ranks} has no process groups",
            remedy="make it by torch.distributed.device_mesh.init_device_mesh",
        ) from error
    for axis, group in enumerate(groups):
        if group.size() != mesh.shape[axis]:
            raise UsageError(
                f"axis {axis} of the device mesh of ranks {ranks} has {mesh.shape[axis]} ranks, and its group "
                f"{group.size()}",
                remedy="pass groups of the mesh's rows and columns to DeviceMesh.from_group",
            )


def group_of_mesh(mesh: DeviceMesh) -> ProcessGroup:
    """Return the group of all ranks of a mesh of one or two axes; they all call this.

    Raises:
        UsageError: as `check_mesh`.
    """
    check_mesh(mesh)
    if mesh.ndim == 1:
        return mesh.get_group()
    for axis in (0, 1):
        if mesh.shape[axis] == mesh.mesh.numel():
            return mesh.get_group(axis)
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    world = default_group()
    if world is not None and world.size() == len(ranks):
        return world
    known = _whole_meshes.setdefault(mesh.get_group(1), {})
    if ranks not in known:
        known[ranks] = _new_group(ranks, "whole mesh")
    return known[ranks]


def separate_group(group: ProcessGroup) -> ProcessGroup:
    """Return another group of the same ranks, for calls whose order among those on `group` is not fixed.

    The first call for a group is made by all its ranks.
    """
    if group not in _separate:
        _separate[group] = _new_group(dist.get_process_group_ranks(group), "separate")
    return _separate[group]


def _new_group(ranks: Sequence[int], description: str) -> ProcessGroup:
    """Return a group that its members alone create."""
    made = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=description)
    assert isinstance(made, ProcessGroup), "this rank is a member"
    return made
