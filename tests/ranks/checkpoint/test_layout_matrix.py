"""Checkpoints of every strategy on every number of ranks, resumed in every other one: equal to the bit."""

from __future__ import annotations

import pytest

from checkpoint_layouts import FORMATS, LAYOUTS, Layout, compare_all, save_everywhere


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """`saved(kind, layouts)` returns the folder with the checkpoints of the layouts, each of which is saved once."""
    folders = {}

    def save(kind, layouts):
        folder, done = folders.setdefault(kind, (tmp_path_factory.mktemp(kind), set()))
        for layout in layouts:
            if layout not in done:
                pool(layout.ranks).run(save_everywhere, kind, layout, folder)
                done.add(layout)
        return folder

    return save


def problems(pool, saved, kind, target, sources, again=None, timeout=250):
    folder = saved(kind, sources)
    pairs = [(source, format) for source in sources for format in FORMATS]
    found = pool(target.ranks).run(compare_all, kind, target, folder, pairs, again, timeout=timeout)
    return [f"rank {rank} {text}" for rank, texts in enumerate(found) for text in texts]


CASES = [(kind, target) for kind, layouts in LAYOUTS.items() for target in layouts]


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "target"), CASES, ids=[f"{kind}-{target}" for kind, target in CASES])
def test_what_any_layout_saves_every_layout_loads(pool, saved, kind, target):
    assert problems(pool, saved, kind, target, LAYOUTS[kind]) == []


SAMPLE = [
    ("adamw", Layout("full-shard", 3), [Layout("sharded", 2), Layout("naive", 1)]),
    ("adamw", Layout("sharded", 4, 2), [Layout("full-shard", 3)]),
    ("master", Layout("sharded", 3), [Layout("full-shard", 4, 2)]),
    ("muon", Layout("full-shard", 2), [Layout("sharded", 3)]),
    ("soap", Layout("sharded", 3), [Layout("bucketed", 2)]),
]


@pytest.mark.parametrize(
    ("kind", "target", "sources"), SAMPLE, ids=[f"{kind}-{to}" for kind, to, _ in SAMPLE]
)
def test_some_layouts_load_what_others_save(pool, saved, kind, target, sources):
    assert problems(pool, saved, kind, target, sources) == []


AGAIN = [
    (kind, Layout(sync, *world))
    for kind in LAYOUTS
    for sync, world in [
        ("sharded", (3, 1)),
        ("full-shard", (2, 1)),
        ("bucketed", (2, 1)),
        ("sharded", (4, 2)),
        ("sharded", (1, 1)),
    ]
]


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "target"), AGAIN, ids=[f"{kind}-{target}" for kind, target in AGAIN])
def test_what_was_loaded_is_saved_again_before_a_step(pool, saved, tmp_path, kind, target):
    """Where the first backward decides which part of the state a rank has, it has none of it until then."""
    sources = [Layout("sharded", 2), Layout("full-shard", 3), Layout("bucketed", 1)]
    assert problems(pool, saved, kind, target, sources, again=tmp_path) == []
