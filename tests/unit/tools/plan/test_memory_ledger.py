"""Timelines, their ledgers, and whether they fit into memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.tools.plan.memory.caching_allocator import replay_allocations
from paceline.tools.plan.memory.memory_fit import (
    SAFE_SHARE,
    FitLevel,
    MemoryAlternative,
    describe_alternatives,
    judge_fit,
)
from paceline.tools.plan.memory.memory_ledger import make_ledger
from paceline.tools.plan.memory.memory_timeline import (
    CATEGORIES,
    MemoryBlock,
    MemoryTimeline,
    PhaseMark,
    TimelineRecorder,
)
from paceline.tools.plan.memory.non_tensor_memory import NonTensorMemory


def recorded():
    """Return a step by hand: 100 of parameters, 30 held and 5 dropped in forward, 20 of gradients."""
    recording = TimelineRecorder()
    recording.begin(0, "build")
    weight = recording.allocate(100, "temporaries")
    recording.claim(weight, "parameters")
    recording.begin(0, "forward")
    dropped = recording.allocate(5, "temporaries", "layer", "aten.mul")
    held = recording.allocate(30, "temporaries", "layer", "aten.mm")
    recording.free(dropped)
    recording.begin(0, "backward")
    grad = recording.allocate(20, "temporaries", "layer", "aten.mm")
    recording.claim(grad, "gradients")
    recording.free(held)
    return recording


def test_tensors_left_by_forward_are_activations():
    timeline = recorded().timeline()
    assert [block.category for block in timeline.blocks] == [
        "parameters",
        "temporaries",
        "activations",
        "gradients",
    ]


def test_the_peak_is_where_most_is_held():
    timeline = recorded().timeline()
    peak = timeline.peak()
    assert peak.nbytes == 150
    assert timeline.mark_at(peak.tick) == PhaseMark(4, 0, "backward")
    assert sum(block.nbytes for block in timeline.alive_at(peak.tick)) == 150


def test_the_first_claim_counts():
    recording = TimelineRecorder()
    number = recording.allocate(8, "temporaries")
    recording.claim(number, "buckets")
    recording.claim(number, "gradients")
    assert recording.timeline().blocks[0].category == "buckets"


def test_a_sum_in_place_takes_no_memory_of_its_own():
    recording = TimelineRecorder()
    old, new = recording.allocate(8, "temporaries"), recording.allocate(8, "temporaries")
    total = recording.allocate(8, "temporaries")
    recording.free(old)
    recording.reuse(total, old)
    recording.free(new)
    recording.free(total)
    timeline = recording.timeline()
    assert timeline.peak().nbytes == 16
    assert timeline.held()[-1] == 0


def test_after_the_end_nothing_dies():
    recording = recorded()
    before = recording.timeline().held()[-1]
    recording.close()
    recording.free(0)
    assert recording.timeline().held()[-1] == before == 120


def test_building_is_left_out_of_the_steps():
    blocks = [
        MemoryBlock(1000, 0, 1, "temporaries"),
        MemoryBlock(10, 2, None, "parameters"),
        MemoryBlock(5, 3, 4, "activations"),
    ]
    timeline = MemoryTimeline(blocks, [PhaseMark(0, 0, "build"), PhaseMark(3, 0, "forward")], 5)
    assert (timeline.peak().nbytes, timeline.steps().peak().nbytes) == (1000, 15)


def test_lines_add_up_to_reserved_and_outside_memory():
    timeline = recorded().timeline()
    replayed = replay_allocations(timeline.changes())
    ledger = make_ledger(
        timeline, replayed, NonTensorMemory(context_nbytes=7, library_nbytes=3, data_nbytes=2)
    )
    assert ledger.nbytes == replayed.reserved_nbytes + 12
    assert ledger.where == "step 1, backward, mm in layer"
    assert ledger.largest[0] == ("layer", "aten.mm", 30)


def test_without_an_allocator_lines_add_up_to_the_peak():
    timeline = recorded().timeline()
    ledger = make_ledger(timeline)
    assert ledger.nbytes == timeline.peak().nbytes
    assert all(line.rule and line.source for line in ledger.lines)


@st.composite
def timelines(draw):
    """Return random lifetimes of blocks."""
    recording, alive = TimelineRecorder(), []
    for _ in range(draw(st.integers(1, 40))):
        if alive and draw(st.booleans()):
            recording.free(alive.pop(draw(st.integers(0, len(alive) - 1))))
        else:
            alive.append(recording.allocate(draw(st.integers(1, 10**9)), draw(st.sampled_from(CATEGORIES))))
    return recording.timeline()


@given(timelines())
def test_any_ledger_adds_up(timeline):
    peak = timeline.peak()
    assert make_ledger(timeline).nbytes == peak.nbytes == sum(b.nbytes for b in timeline.alive_at(peak.tick))
    replayed = replay_allocations(timeline.changes())
    assert make_ledger(timeline, replayed).nbytes == replayed.reserved_nbytes


@given(timelines())
def test_categories_add_up_at_every_tick(timeline):
    assert (sum(timeline.held(name) for name in CATEGORIES) == timeline.held()).all()


@given(st.integers(0, 10**12), st.integers(1, 10**12))
def test_a_step_fits_only_with_the_margin(nbytes, capacity):
    verdict = judge_fit(nbytes, capacity)
    assert (verdict.answer is FitLevel.FITS) == (nbytes <= SAFE_SHARE * capacity)
    assert (verdict.answer is FitLevel.NOT) == (nbytes > capacity)
    assert verdict.poor == (verdict.answer is not FitLevel.FITS)


def test_advice_names_the_fitting_or_the_tried_settings():
    good, bad = (
        MemoryAlternative("half the batch", judge_fit(1, 100)),
        MemoryAlternative("bf16", judge_fit(99, 100)),
    )
    assert describe_alternatives([good, bad]) == "It fits with half the batch (1 B)."
    assert describe_alternatives([bad]) == "It fits with none of: bf16 (99 B)."
    assert describe_alternatives([]) == ""
