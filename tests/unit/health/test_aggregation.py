"""Groups and summaries: the tree, messages, and that a summary leads to the same attribution as all rows."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench_harness.watchdog_simulation import WatchdogSimulation
from paceline._core.step_state import PHASES
from paceline.health.aggregation.groups import FULL_MESH, PeerGroups, ranges
from paceline.health.aggregation.summary import Departures, Summary, group_summary, merge, parse_row
from paceline.health.attribution import RankObservation, StallLimits, attribute_failure, find_late_rank
from paceline.health.heartbeat import FailureNotice, Heartbeat, MalformedFrame
from paceline.health.straggler import StepTimeSummary, find_slowest

LIMITS = StallLimits(stall=20.0, lost=10.0, interval=3.0)

# ------------------------------------------------------------------ the tree


@st.composite
def worlds(draw):
    hosts = draw(st.lists(st.integers(1, 40), min_size=1, max_size=40))
    keys = [f"h{host}" for host, ranks in enumerate(hosts) for _ in range(ranks)]
    return PeerGroups(draw(st.permutations(keys)) if draw(st.booleans()) else keys)


@given(worlds())
@settings(max_examples=50)
def test_every_rank_is_connected_and_reports_lead_to_lower_ones(groups):
    size = len(groups.group_of)
    assert sorted(rank for group in groups.groups for rank in group) == list(range(size))
    for rank in range(size):
        peers = groups.peers(rank)
        assert rank not in peers
        assert all(rank in groups.peers(peer) for peer in peers)
        assert all((peer in groups.calls(rank)) != (rank in groups.calls(peer)) for peer in peers)
        assert set(groups.mates(rank)) <= set(peers)
        assert len(peers) <= FULL_MESH - 1 + 1 + 2 * 8
    for number, group in enumerate(groups.groups):
        assert len(group) <= FULL_MESH
        assert size <= FULL_MESH or len({groups.host_keys[rank] for rank in group}) == 1
        assert all(parent < number for parent in [*groups.ancestors(number), *groups.fallbacks(number)])
        assert number == 0 or 0 in groups.ancestors(number)
        if number:
            parent = next(groups.ancestors(number))
            assert number in groups.children(parent)
            assert set(groups.calls(group[0])) & set(groups.groups[parent])


def test_ten_thousand_ranks_are_few_reports_away():
    groups = PeerGroups([f"h{rank // 8}" for rank in range(10_000)])
    assert groups.depth == 4
    assert max(len(groups.peers(rank)) for rank in (0, 1, 8, 9, 80, 9999)) <= 16


# ------------------------------------------------------------------ attribution by summaries

HEARTBEATS = st.builds(
    Heartbeat,
    rank=st.just(0),
    sequence=st.just(1),
    step=st.integers(0, 2),
    phase=st.sampled_from(PHASES),
    task=st.sampled_from(["", "", "eval"]),
    bucket=st.integers(-1, 1),
    waiting=st.booleans(),
    age=st.floats(0, 60),
    still=st.floats(0, 60),
)
ROWS = st.builds(
    RankObservation,
    rank=st.just(0),
    host=st.just(""),
    heartbeat=HEARTBEATS,
    silent=st.sampled_from([0.0, 0.2, 0.2, 0.2, 5.0, 15.0]),
    dumped=st.sampled_from([False, False, False, True]),
)


def numbered(rows, per_host):
    return [
        replace(
            row,
            rank=rank,
            host=f"h{rank // per_host}",
            heartbeat=replace(row.heartbeat, rank=rank),
            dumped=row.dumped and row.silent > 1,
        )
        for rank, row in enumerate(rows)
    ]


@given(st.lists(ROWS, min_size=18, max_size=40), st.lists(st.integers(0, 39), max_size=2), st.booleans())
@settings(max_examples=100)
def test_a_summary_leads_to_the_same_attribution_as_all_rows(rows, stopped, urgent):
    rows = numbered(rows, 4)
    rows[0] = replace(rows[0], silent=0.0)
    stopped = tuple(rank for rank in stopped if rank < len(rows))
    reporter = replace(rows[0].heartbeat, stopped=stopped)
    rows[0] = replace(rows[0], heartbeat=reporter)
    groups = PeerGroups([row.host for row in rows])
    parts = [
        group_summary(number, [rows[rank] for rank in group], StepTimeSummary())
        for number, group in enumerate(groups.groups)
    ]
    half = len(parts) // 2
    whole = merge(
        [merge(parts[:half], groups.group_of), merge(parts[half:], groups.group_of)], groups.group_of
    )
    assert whole.group_numbers() == set(range(len(groups.groups)))
    chosen = sorted((*whole.rows, *whole.apart), key=lambda row: row.rank)
    assert len(whole.rows) <= 6
    expected = attribute_failure(0, rows, [], LIMITS, urgent=urgent)
    assert attribute_failure(0, chosen, [], LIMITS, urgent=urgent) == expected
    assert find_late_rank(chosen, [], 5.0, 3.0) == find_late_rank(rows, [], 5.0, 3.0)


def test_a_group_that_is_heard_by_another_way_is_not_lost():
    groups = PeerGroups([f"h{rank // 4}" for rank in range(24)])
    lost = tuple(RankObservation(rank, f"h{rank // 4}", None, 9.0) for rank in (4, 8))
    whole = merge([Summary(lost=lost), Summary(groups=((1, 1),))], groups.group_of)
    assert [row.rank for row in whole.lost] == [8]
    left = merge([whole, Summary(left=Departures(done=((8, 11),)))], groups.group_of)
    assert left.lost == ()


# ------------------------------------------------------------------ messages

HOSTS = [f"h{rank // 4}" for rank in range(24)]
HEARTBEAT = Heartbeat(3, 5, step=2, phase="forward", stopped=(1,))
SUMMARY = Summary(
    groups=((0, 2), (4, 5)),
    rows=(RankObservation(3, "h0", HEARTBEAT, 0.2),),
    apart=(RankObservation(5, "h1", None, 3.5, link="closed", link_seconds=2.0, dumped=True),),
    lost=(RankObservation(12, "h3", None, 7.5, link="open", unanswered=6.0),),
    unheard=((3, 3, 7.5, True, False),),
    left=Departures(((20, 22),), ((23, 23),), (21, 9, "outside", -1)),
    times=StepTimeSummary({-230: 4, -229: 1}, 7, 0.125),
)


def sent(record):
    return json.loads(json.dumps(record))


def test_summaries_round_trip_and_age():
    found = Summary.parse(sent(SUMMARY.record()), HOSTS, 6)
    assert found == SUMMARY
    aged = found.aged(2.0)
    assert [row.silent for row in (*aged.rows, *aged.apart, *aged.lost)] == [2.2, 5.5, 9.5]
    assert (aged.apart[0].link_seconds, aged.lost[0].unanswered) == (4.0, 8.0)
    assert aged.unheard[0][2] == 9.5
    assert Summary.parse(sent(Summary().record()), HOSTS, 6) == Summary()


@pytest.mark.parametrize(
    "change",
    [
        {"groups": [[0, 6]]},
        {"groups": [[-1, 2]]},
        {"groups": [[1]]},
        {"rows": [[1, 2]]},
        {"rows": [[24, 0.1, "open", 0.0, 0.0, False, None]]},
        {"rows": [[3, -0.1, "open", 0.0, 0.0, False, None]]},
        {"rows": [[3, 0.1, "opened", 0.0, 0.0, False, None]]},
        {"rows": [[4, 0.1, "open", 0.0, 0.0, False, HEARTBEAT.message()["row"]]]},
        {"rows": [[3, 0.1, "open", 0.0, 0.0, False, None]] * 33},
        {"lost": [[3, 0.1, "open", 0.0, 0.0, False, None]] * 65},
        {"rows": "x"},
        {"unheard": [[0, 9, 1.0, True, False]]},
        {"unheard": [[0, 1, -1.0, True, False]]},
        {"done": [[0, 24]]},
        {"leaves": [["a", 1]]},
        {"first": [24, 0, "", 0]},
        {"first": [1, 0, "x" * 41, 0]},
        {"times": [0, 1.0]},
        {"times": [24, 1.0, [0, 1]]},
        {"times": [0, -1.0, [0, 1]]},
        {"times": [0, 1.0, [0, 0]]},
        {"times": [0, 1.0, [1 << 20, 1]]},
    ],
)
def test_a_summary_with_an_invalid_field_is_malformed(change):
    with pytest.raises(MalformedFrame):
        Summary.parse(sent(SUMMARY.record()) | sent(change), HOSTS, 6)


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=9)
)
def test_any_other_json_is_malformed(value):
    with pytest.raises(MalformedFrame):
        Summary.parse(value, HOSTS, 6)
    if isinstance(value, list):
        with pytest.raises(MalformedFrame):
            parse_row(value, HOSTS)


def test_departures_name_the_first_rank_that_finished():
    left = Departures(((4, 5),), (), (5, 7, "outside", -1)).merged(
        Departures(((1, 1),), ((9, 9),), (1, 3, "x", 0))
    )
    assert (left.done, left.leaves, left.first) == (((1, 1), (4, 5)), ((9, 9),), (1, 3, "x", 0))
    notices = left.notices()
    assert {(each.kind, each.rank) for each in notices} == {
        ("done", 1),
        ("done", 4),
        ("done", 5),
        ("leaves", 9),
    }
    first = min((each for each in notices if each.kind == "done"), key=lambda each: (each.step, each.rank))
    assert first == FailureNotice("done", 1, 1, step=3, phase="x", bucket=0)


@given(st.sets(st.integers(0, 50)))
def test_ranges_hold_the_numbers(numbers):
    found = ranges(numbers)
    assert [each for first, last in found for each in range(first, last + 1)] == sorted(numbers)


# ------------------------------------------------------------------ step times


@given(
    st.lists(st.dictionaries(st.integers(0, 99), st.floats(0.001, 100), min_size=1), min_size=1, max_size=4)
)
def test_the_slowest_of_many_ranks_is_found_to_one_percent(parts):
    seconds, summary = {}, StepTimeSummary()
    for number, part in enumerate(parts):
        mine = {rank + 100 * number: each for rank, each in part.items()}
        seconds |= mine
        summary = summary.merged(StepTimeSummary.of(mine))
    assert len(summary.counts) <= 64
    assert sum(summary.counts.values()) == len(seconds)
    expected, found = find_slowest(seconds), summary.slowest()
    if expected is None:
        assert found is None
        return
    assert (found[0], summary.seconds) == (expected[0], max(seconds.values()))


def test_the_ratio_of_the_slowest_is_that_to_the_median_of_the_others():
    seconds = dict.fromkeys(range(99), 0.1) | {99: 0.13}
    rank, factor = StepTimeSummary.of(seconds).slowest()
    assert (rank, factor) == (99, pytest.approx(1.3, rel=0.01))


# ------------------------------------------------------------------ what a rank makes of summaries


def exchange_of(ranks, per_host):
    """Return the exchange of rank 0 in a world that has not begun."""
    return WatchdogSimulation(ranks, per_host=per_host).ranks[0].detector.exchange


def test_rows_of_silent_groups_are_bounded():
    """Else every rank of a large world made a row of every other one, many times per second."""
    exchange = exchange_of(1600, 8)
    exchange._adopt(Summary(groups=((0, 199),)), 0.0)
    assert len(exchange.observations(1.0)) == 1, "of a host that is heard"
    rows = exchange.observations(100.0)
    assert len(rows) < 64 + 4 * 8
    assert all(row.silent == 100.0 and row.heard for row in rows)
    failure = attribute_failure(0, [RankObservation(0, "host0"), *rows], [], LIMITS)
    assert (failure.kind, failure.rank) == ("cut off", None)


def test_groups_that_were_never_heard_are_not_silent_at_once():
    exchange = exchange_of(1600, 8)
    assert exchange._with_unheard(Summary(groups=((0, 0),)), 3.0).unheard == ()
    later = exchange._with_unheard(Summary(groups=((0, 0),)), 60.0)
    assert later.unheard == ((1, 199, 60.0, False, False),)


def test_a_host_with_a_group_that_is_heard_is_reachable():
    exchange = exchange_of(96, 32)  # three hosts of two groups
    exchange._adopt(Summary(groups=((0, 2), (4, 5)), unheard=((3, 3, 90.0, True, False),)), 0.0)
    rows = [RankObservation(0, "host0"), *exchange.observations(0.5)]
    assert {row.rank for row in rows if row.silent > 1} == set(range(48, 64))
    assert attribute_failure(0, rows, [], LIMITS) is None
    exchange._adopt(Summary(groups=((0, 1), (4, 5)), unheard=((2, 3, 90.0, True, False),)), 0.0)
    rows = [RankObservation(0, "host0"), *exchange.observations(0.5)]
    failure = attribute_failure(0, rows, [], LIMITS)
    assert (failure.kind, failure.rank, len(failure.others)) == ("unreachable", 32, 31)
