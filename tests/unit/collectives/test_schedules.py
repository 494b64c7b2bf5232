"""Every algorithm is proven for 1 to 33 ranks, and flaws are found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.collectives.algorithms import ALGORITHMS, algorithms_of, find_algorithm, make_schedule
from paceline.collectives.prove import OPS, ROOTED, counts, find_flaws, input_of, prove
from paceline.collectives.schedule import Schedule, Send, pipelined
from paceline.collectives.schedule_text import describe_schedule
from paceline.errors import UsageError

# They send ranks chunks that these already hold, so that all ranks do the same.
WASTEFUL = {("broadcast", "scatter-all-gather"), ("all-gather", "doubling")}
EVERY = [(op, name) for op in ALGORITHMS for name in ALGORITHMS[op]]


@pytest.mark.sweep
@pytest.mark.parametrize(("op", "name"), EVERY)
def test_is_proven_for_1_to_33_ranks(op, name):
    for ranks in range(1, 34):
        assert find_flaws(make_schedule(op, name, ranks)) == []


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, name in EVERY if op in ROOTED])
def test_any_rank_can_be_root(op, name):
    for ranks in (1, 2, 5, 8):
        for root in range(ranks):
            assert find_flaws(make_schedule(op, name, ranks, root=root)) == []


@pytest.mark.parametrize("name", ["tree", "switch"])
def test_the_centre_of_an_all_reduce_may_be_any_rank(name):
    schedule = make_schedule("all-reduce", name, 5, root=3)
    assert find_flaws(schedule) == []
    assert {send.dst for send in schedule.rounds[-2 if name == "switch" else 2] if send.add} == {3}


@pytest.mark.parametrize(("op", "name"), EVERY)
def test_pipelined_schedules_are_proven(op, name):
    for ranks in (1, 2, 3, 6):
        for segments in (1, 2, 5):
            assert find_flaws(pipelined(make_schedule(op, name, ranks), segments)) == []


@given(ranks=st.integers(1, 33), per_node=st.integers(1, 40))
def test_two_levels_with_any_nodes(ranks, per_node):
    assert find_flaws(make_schedule("all-reduce", "two-level", ranks, per_node=per_node)) == []


@given(
    algorithm=st.sampled_from([one for one in EVERY if one not in WASTEFUL]),
    ranks=st.integers(2, 9),
    data=st.data(),
)
def test_a_missing_send_is_a_flaw(algorithm, ranks, data):
    schedule = make_schedule(*algorithm, ranks)
    number = data.draw(st.integers(0, len(schedule.rounds) - 1))
    removed = data.draw(st.integers(0, len(schedule.rounds[number]) - 1))
    sends = schedule.rounds[number]
    rounds = [
        *schedule.rounds[:number],
        (*sends[:removed], *sends[removed + 1 :]),
        *schedule.rounds[number + 1 :],
    ]
    assert find_flaws(replace(schedule, rounds=tuple(rounds)))


@given(algorithm=st.sampled_from(EVERY), ranks=st.integers(2, 9), data=st.data())
def test_a_send_added_twice_is_a_flaw(algorithm, ranks, data):
    schedule = make_schedule(*algorithm, ranks)
    adding = [(number, send) for number, sends in enumerate(schedule.rounds) for send in sends if send.add]
    if not adding:
        return
    number, send = data.draw(st.sampled_from(adding))
    rounds = list(schedule.rounds)
    rounds[number] = (*rounds[number], send)
    assert find_flaws(replace(schedule, rounds=tuple(rounds)))


def of(*rounds, op="all-reduce", ranks=2, chunks=1):
    return Schedule(op, "mine", ranks, chunks, tuple(map(tuple, rounds)))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (of([Send(0, 2, 0)]), "round 1: 0→2: valid are ranks 0 to 1"),
        (of([Send(1, 1, 0)]), "round 1: rank 1 sends to itself"),
        (of([Send(0, 1, 1)]), "round 1: 0→1: valid are chunks 0 to 0, not 1+1"),
        (of([Send(0, 1, 0, width=2)]), "valid are chunks 0 to 0, not 0+2"),
        (of([Send(1, 0, 0)], op="broadcast"), "round 1: rank 1 sends chunk 0 to 0 but holds nothing in it"),
        (of([Send(0, 1, 0, add=True)], op="broadcast"), "chunk 0 from 0 is added to nothing on rank 1"),
        (
            of([Send(0, 2, 0), Send(1, 2, 0, add=True)], ranks=3),
            "round 1: 2 sends write chunk 0 of rank 2",
        ),
        (
            of([Send(0, 1, 0, add=True)]),
            "at the end chunk 0 of rank 0 holds the input of 1 0 times instead of 1",
        ),
        (
            of([Send(0, 1, 0, add=True)], [Send(0, 1, 0, add=True)], [Send(1, 0, 0)]),
            "at the end chunk 0 of rank 0 holds the input of 0 2 times instead of 1",
        ),
    ],
)
def test_flaws_are_named(schedule, message):
    assert message in find_flaws(schedule)[0]
    with pytest.raises(UsageError, match=f"{schedule} is wrong"):
        prove(schedule)


def test_a_round_reads_the_state_at_its_beginning():
    exchange = of([Send(0, 1, 0, add=True), Send(1, 0, 0, add=True)])
    assert find_flaws(exchange) == []
    swap = of([Send(0, 1, 0), Send(1, 0, 1)], op="send-recv", chunks=2)
    assert find_flaws(swap) == []


def test_a_long_list_of_flaws_is_cut():
    with pytest.raises(UsageError, match="… and 11 more"):
        prove(of(ranks=4, chunks=4))


def test_an_unknown_operation_is_refused():
    with pytest.raises(UsageError, match="did you mean 'all-reduce'"):
        find_flaws(of(op="all-reduc"))


def test_the_tree_reduce_of_the_textbook_on_8_ranks():
    rounds = make_schedule("reduce", "tree", 8).rounds
    assert [[(send.src, send.dst) for send in sends] for sends in rounds] == [
        [(1, 0), (3, 2), (5, 4), (7, 6)],
        [(2, 0), (6, 4)],
        [(4, 0)],
    ]


def test_a_broadcast_tree_reaches_1_3_7_ranks():
    have, counted = {0}, []
    for sends in make_schedule("broadcast", "tree", 8).rounds:
        have |= {send.dst for send in sends}
        counted.append(len(have) - 1)
    assert counted == [1, 3, 7]


@pytest.mark.parametrize(
    ("op", "name", "rounds"),
    [
        ("all-reduce", "ring", 14),
        ("all-reduce", "doubling", 3),
        ("all-reduce", "halving-doubling", 6),
        ("all-gather", "bruck", 3),
        ("all-to-all", "direct", 1),
        ("all-to-all", "pairwise", 7),
        ("broadcast", "one-by-one", 7),
    ],
)
def test_number_of_rounds_on_8_ranks(op, name, rounds):
    assert len(make_schedule(op, name, 8).rounds) == rounds


def test_a_pipelined_chain_keeps_every_link_busy():
    schedule = pipelined(make_schedule("broadcast", "chain", 5), 10)
    assert len(schedule.rounds) == 4 + 9
    assert [len(sends) for sends in schedule.rounds] == [1, 2, 3, *[4] * 7, 3, 2, 1]


def test_sends_between_two_ranks_in_a_round_are_one_message():
    (first, *_) = make_schedule("all-gather", "bruck", 7).messages(2)
    assert (first.src, first.dst, first.chunks, len(first.sends)) == (0, 3, 3, 1)
    (message,) = [m for m in make_schedule("all-gather", "bruck", 7).messages(2) if m.src == 6]
    assert message.chunks == 3
    assert [(send.chunk, send.width) for send in message.sends] == [(6, 1), (0, 2)]


def test_find_algorithm():
    assert find_algorithm("ring") == ("all-reduce", "ring")
    assert find_algorithm("ring", "all-gather") == ("all-gather", "ring")
    assert find_algorithm("all-gather/ring") == ("all-gather", "ring")
    assert find_algorithm("chain") == ("broadcast", "chain")
    assert set(algorithms_of("reduce")) == {"one-by-one", "tree", "chain", "rabenseifner"}
    assert set(ALGORITHMS) == set(OPS)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: find_algorithm("rign"), "did you mean 'ring'"),
        (lambda: find_algorithm("ringg", "all-reduce"), "unknown algorithm of all-reduce 'ringg'"),
        (lambda: find_algorithm("all-gathr/ring"), "did you mean 'all-gather'"),
        (lambda: make_schedule("all-reduce", "ring", 0), "ranks=0"),
        (lambda: make_schedule("broadcast", "tree", 4, root=4), "ranks 0 to 3"),
        (lambda: make_schedule("all-reduce", "ring", 4, root=1), "has no root"),
        (lambda: make_schedule("all-reduce", "ring", 4, per_node=2), "two-level only"),
        (lambda: make_schedule("all-reduce", "two-level", 4, per_node=0), "at least one rank"),
        (lambda: pipelined(make_schedule("broadcast", "chain", 4), 0), "segments=0"),
    ],
)
def test_wrong_input_is_named(call, message):
    with pytest.raises(UsageError, match=message):
        call()


def test_contents_are_counted():
    assert counts(input_of(1) + input_of(1) + input_of(3), 4) == [0, 2, 0, 1]


@pytest.mark.parametrize(("op", "name"), EVERY)
def test_the_description_ends_with_all_ranks_done(op, name):
    for ranks in (2, 5, 8):
        last = describe_schedule(make_schedule(op, name, ranks))[-1]
        done, _, of_all = last.rpartition("done: ")[2].split()[:3]
        assert done == of_all


def test_a_long_description_is_cut():
    lines = describe_schedule(make_schedule("all-reduce", "ring", 33))
    assert len(lines) < 30
    assert any("more rounds" in line for line in lines)
    assert "… and 25 more" in lines[1]
    assert describe_schedule(make_schedule("broadcast", "tree", 1)) == ["One rank has nothing to send."]
