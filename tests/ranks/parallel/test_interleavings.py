"""Whole training steps in random orders of execution on simulated accelerators: every order gives the same bits.

`PACELINE_INTERLEAVINGS=1000` runs a thousand orders, which take minutes; a scene and a seed reproduce one.
"""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from simulated_worlds import same_bits, world_beside_cpus
from training_scenes import SCENES, Place

COUNT = int(os.environ.get("PACELINE_INTERLEAVINGS", "0"))
"""Orders on two ranks; 0: one per scene, without the slow ones."""

SLOW = ["local SGD, delayed", "DiLoCo, saved", "DiLoCo, warm-up", "guarded"]
"""These run in `test_every_wait_is_needed`, and local training in `test_local_sgd_on_accelerator`."""

ON_THREE_RANKS = [
    "naive",
    "sharded, clipped by torch",
    "full-shard",
    "two streams, int8",
    "late gradients",
    "powersgd",
]


def held_back(seed):
    """Return the number of the stream that runs as late as possible, or None: half of all orders have one."""
    return seed % 8 if seed % 8 < 4 else None


def differing(rank, size, path, scenes, orders, on_cpu):
    """Return the scenes and seeds whose results are not those of the CPU (over gloo), or of the order of the calls."""
    found, expected = [], {}
    with world_beside_cpus(rank, size, path, 0) as simulator:
        host = dist.new_group(backend="gloo")
        place = Place(rank, size, "sim", dist.group.WORLD)
        for number in range(orders):
            turn, scene = number // len(scenes), scenes[number % len(scenes)]
            seed = turn + number % len(scenes)  # scenes begin at different ones
            try:
                if scene not in expected:
                    simulator.restart(0, late=False)
                    expected[scene] = SCENES[scene](Place(rank, size, "cpu", host) if on_cpu else place)
                simulator.restart(seed * size + rank, hold_back=held_back(seed))
                if not all(map(same_bits, SCENES[scene](place), expected[scene])):
                    found.append((scene, seed))
            except Exception as error:
                error.add_note(f"in scene {scene!r} with seed {seed}")
                raise
    return found


@pytest.mark.timeout(300 + 2 * COUNT)
def test_every_order_gives_the_bits_of_the_cpu(simulated_pool, tmp_path):
    scenes = list(SCENES) if COUNT else [scene for scene in SCENES if scene not in SLOW]
    orders = COUNT or len(scenes)
    found = simulated_pool(2).run(
        differing, str(tmp_path / "store"), scenes, orders, True, world=False, timeout=60 + 2 * orders
    )
    assert found == [[], []]


@pytest.mark.timeout(300 + 2 * COUNT)
def test_every_order_gives_the_same_bits_on_three_ranks(simulated_pool, tmp_path):
    """The CPU's sums over three ranks are rounded in another order."""
    orders = COUNT // 4 or len(ON_THREE_RANKS)
    found = simulated_pool(3).run(
        differing,
        str(tmp_path / "store"),
        ON_THREE_RANKS,
        orders,
        False,
        world=False,
        timeout=60 + 2 * orders,
    )
    assert found == [[], [], []]


def differing_on_the_cpu(rank, size, path, scenes):
    """Return the scenes that give other bits on the CPU where the same group serves an accelerator too."""
    with world_beside_cpus(rank, size, path, 0):
        groups = dist.group.WORLD, dist.new_group(backend="gloo")
        results = [[SCENES[scene](Place(rank, size, "cpu", group)) for scene in scenes] for group in groups]
    return [scene for scene, *pair in zip(scenes, *results, strict=True) if not all(map(same_bits, *pair))]


def test_compression_on_the_cpu_over_a_group_of_both_devices(simulated_pool, tmp_path):
    scenes = ["int8", "sharded, int8", "bf16 packets", "int4", "topk", "powersgd"]
    assert simulated_pool(2).run(differing_on_the_cpu, str(tmp_path / "store"), scenes, world=False) == [
        [],
        [],
    ]
