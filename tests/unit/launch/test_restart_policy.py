"""Decision after a failure: first failure, restart, size and outcome, without processes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline._core.json_codec import decode, encode
from paceline.launch.agent.first_failure import RankFailure, first_failure, is_secondary
from paceline.launch.agent.restart_policy import (
    HostMember,
    JobOutcome,
    PreviousWorld,
    WorldAgreement,
    WorldRun,
    agree_on_world,
    decide_restart,
    failed_outcome,
)
from paceline.launch.process.rank_process import exit_status

A, B, C = (HostMember(f"pc{number}", f"agent{number}", 2) for number in range(3))


def world_run(place="pc0/1", ranks=4, progress=False, of_rank=True):
    return WorldRun(place, ranks, progress, of_rank)


def action(past, ranks=4, min_ranks=2, max_restarts=5):
    return decide_restart(past, ranks, min_ranks=min_ranks, max_restarts=max_restarts).action


@pytest.mark.parametrize(
    ("past", "expected"),
    [
        ([], "same"),
        ([world_run()], "same"),
        ([world_run(), world_run()], "fewer"),
        ([world_run(), world_run(progress=True)], "same"),
        ([world_run(progress=True), world_run()], "fewer"),
        ([world_run("pc0/0"), world_run("pc0/1")], "same"),
        ([world_run("pc0/1"), world_run("pc1/1")], "same"),
        ([world_run(), world_run("pc0/0"), world_run()], "same"),
        ([world_run(ranks=5), world_run(ranks=4)], "same"),
        ([world_run(), world_run(), world_run(ranks=3)], "same"),
        ([world_run("pc0", of_rank=False), world_run("pc0", of_rank=False)], "same"),
    ],
)
def test_the_same_rank_without_progress_is_given_up(past, expected):
    assert action(past) == expected


def test_ranks_that_leave_again_without_progress_end_the_run_and_cost_no_rank():
    left = WorldRun("pc0/1", 4, progress=False, left=True)
    assert action([left]) == "same"
    assert action([left, left]) == action([WorldRun("pc1/0", 4, progress=False, left=True), left]) == "end"
    assert action([left, WorldRun("pc0/1", 4, progress=True, left=True)]) == "same"
    assert [action([world_run(), left]), action([left, world_run()])] == ["same", "same"]


def test_the_minimum_world_size_is_kept():
    stuck = [world_run(), world_run()]
    assert action(stuck, ranks=3, min_ranks=2) == "fewer"
    assert action(stuck, ranks=2, min_ranks=2) == "end"
    assert action(stuck, ranks=1, min_ranks=1) == "end"
    assert (
        "2 times in a row without progress, and at least 4 ranks"
        in decide_restart(stuck, 4, min_ranks=4, max_restarts=9).why
    )


@pytest.mark.parametrize(
    ("restarts", "why"),
    [(0, "restarts are disabled"), (1, "restarted 1 time already"), (3, "restarted 3 times already")],
)
def test_restarts_are_counted(restarts, why):
    past = [world_run(f"pc0/{number}") for number in range(restarts + 1)]
    assert action(past[:-1], max_restarts=restarts) == "same"
    assert decide_restart(past, 4, min_ranks=1, max_restarts=restarts).why == why


def test_too_few_ranks_left_end_the_run():
    assert action([world_run()], ranks=1) == "end"
    assert (
        decide_restart([world_run()], 1, min_ranks=2, max_restarts=3).why
        == "1 rank left, at least 2 required"
    )


@given(
    places=st.lists(st.tuples(st.sampled_from(["a/0", "a/1", "b/0"]), st.booleans()), max_size=12),
    ranks=st.integers(1, 6),
    min_ranks=st.integers(1, 6),
    max_restarts=st.integers(0, 12),
)
def test_the_run_ends_within_its_bounds_for_any_failures(places, ranks, min_ranks, max_restarts):
    past = []
    for place, progress in places:
        past.append(WorldRun(place, ranks, progress))
        reported = decide_restart(past, ranks, min_ranks=min_ranks, max_restarts=max_restarts).action
        if reported == "end":
            break
        ranks -= reported == "fewer"
        assert ranks >= min_ranks
        assert len(past) <= max_restarts
    assert len(past) <= max_restarts + 1


def rank_failed(number, *lines, host=A, code=1):
    return RankFailure(
        host.host, host.member, rank=number, local_rank=number % 2, exit_code=code, seconds=12.0, lines=lines
    )


@pytest.mark.parametrize(
    "line",
    [
        "[rank0]: paceline.errors.PeerLost: [rank 1] ended with exit code 3 on pc1",
        "RuntimeError: [.../pair.cc:553] Connection closed by peer [10.0.0.2]:4711. This is typically caused by",
        "RuntimeError: [..] Read error [127.0.0.1]:9: Connection reset by peer",
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
        "paceline.errors.MissingRanks: 1 of 2 ranks did not come within 60 s",
    ],
)
def test_a_lost_peer_is_a_secondary_failure(line):
    assert is_secondary(rank_failed(0, "Traceback", line))
    assert not is_secondary(rank_failed(0, line, *["later"] * 5))


def test_quoting_another_rank_is_a_secondary_failure():
    named = "[rank0]: paceline.errors.PeerFailed: [rank 1, step 24] rank 1 on host pc1 raised KeyError: 7"
    cited = [f"[rank0]:   |   File 'train.py', line {number}" for number in range(9)]
    assert is_secondary(rank_failed(0, named, *cited, "[rank0]:   | KeyError: 7", "[rank0]:   → correct it"))


@pytest.mark.parametrize(
    "line", ["ValueError: a bad batch", "", "torch.OutOfMemoryError: CUDA out of memory"]
)
def test_other_errors_are_primary_failures(line):
    assert not is_secondary(rank_failed(0, line))


def test_the_first_failure_is_the_first_primary_one():
    secondary, cause, later = (
        rank_failed(0, "PeerLost"),
        rank_failed(3, "ValueError: x"),
        rank_failed(2, "KeyError"),
    )
    assert first_failure([secondary, cause, later]) is cause
    assert first_failure([later, secondary, cause]) is later
    assert first_failure([secondary]) is secondary
    assert first_failure([]) is None


def test_a_failure_is_described_by_rank_exit_and_reason():
    assert (
        str(rank_failed(1, "[rank1]: ValueError: x"))
        == "rank 1 on pc0 ended with exit code 1 after 12 s (ValueError: x)"
    )
    assert str(rank_failed(1, "step 3", code=-9)) == "rank 1 on pc0 was ended by SIGKILL after 12 s"
    assert str(RankFailure("pc2", "x", seconds=3.2)) == "pc2 was lost after 3 s"
    assert (rank_failed(3, host=B).place, RankFailure("pc2", "x").place) == ("pc1/1", "pc2")


def judged(before, now, past=(), number=1, **limits):
    verdict, runs = agree_on_world(number, before, now, past, **{"min_ranks": 2, "max_restarts": 3} | limits)
    assert decode(json.loads(json.dumps(encode(verdict))), WorldAgreement, "verdict") == verdict
    return verdict, runs


def test_a_run_begins_without_a_failure():
    verdict, runs = judged(None, [A, B], number=0)
    assert (verdict.decision.action, verdict.first, verdict.joined, runs) == ("same", None, (), ())
    assert (verdict.ranks_before, verdict.ranks_after, verdict.hosts_after) == (0, 4, 2)


def test_a_rank_failed_and_all_hosts_are_there():
    reported = (rank_failed(0, "PeerLost"), rank_failed(3, "ValueError: x", host=B))
    verdict, runs = judged(PreviousWorld((A, B), reported, False), [A, B])
    assert verdict.first == reported[1]
    assert verdict.after == reported[:1]
    assert runs == (WorldRun("pc1/1", 4, False, refused=False),)
    assert str(verdict) == (
        "restart 1: rank 3 on pc1 ended with exit code 1 after 12 s (ValueError: x); 4 → 4 ranks on 2 hosts"
    )


def test_a_lost_host_caused_the_secondary_failures():
    reported = (rank_failed(0, "Connection reset by peer"), rank_failed(1, "Connection reset by peer"))
    verdict, runs = judged(PreviousWorld((A, B, C), reported, True, 30.0), [A, C])
    assert (verdict.first.host, verdict.first.rank, verdict.lost) == ("pc1", None, ("pc1",))
    assert runs == (WorldRun("pc1", 6, True, of_rank=False),)
    assert str(verdict) == "restart 1: pc1 was lost after 30 s; 6 → 4 ranks on 2 hosts"


def test_a_host_whose_rank_failed_before_it_was_lost_is_named_by_the_rank():
    reported = (rank_failed(2, "MemoryError", host=B),)
    verdict, _ = judged(PreviousWorld((A, B), reported, False), [A], min_ranks=1)
    assert (verdict.first.rank, verdict.lost, verdict.after) == (2, ("pc1",), ())


def test_a_host_that_rejoins_at_once_was_lost_and_joined():
    again = HostMember("pc1", "another agent", 2)
    verdict, _ = judged(PreviousWorld((A, B), (), False), [A, again])
    assert (verdict.first.host, verdict.lost, verdict.joined) == ("pc1", ("pc1",), ("pc1",))


def test_a_host_that_joins_counts_as_no_failure():
    past = [world_run(), world_run(), world_run()]
    verdict, runs = judged(PreviousWorld((A, B), (), False), [A, B, C], past)
    assert (verdict.decision.action, verdict.joined, runs) == ("same", ("pc2",), tuple(past))
    assert str(verdict) == "restart 1: pc2 joined; 4 → 6 ranks on 3 hosts"


def test_a_stuck_rank_is_taken_from_its_host():
    reported = (rank_failed(3, "ValueError: x", host=B),)
    past = [WorldRun("pc1/1", 4, True)]
    verdict, _ = judged(PreviousWorld((A, B), reported, False), [A, B], past)
    assert (verdict.shrinks, verdict.leaves, verdict.ranks_after, verdict.hosts_after) == (
        B.member,
        False,
        3,
        2,
    )
    assert "in a row without progress; 4 → 3 ranks on 2 hosts" in str(verdict)

    one = HostMember("pc1", "agent1", 1)
    verdict, _ = judged(PreviousWorld((A, one), reported, False), [A, one], [WorldRun("pc1/1", 3, False)])
    assert (verdict.shrinks, verdict.leaves, verdict.ranks_after, verdict.hosts_after) == (
        "agent1",
        True,
        2,
        1,
    )

    verdict, _ = judged(PreviousWorld((A, B), reported, False), [A], past)
    assert (verdict.decision.action, verdict.shrinks) == ("same", "")  # its host is gone with it


def test_the_outcome_names_the_first_failure_and_later_ones():
    reported = (rank_failed(0, "PeerLost"), rank_failed(3, "one", "ValueError: x", host=B, code=3))
    verdict, _ = judged(PreviousWorld((A, B), reported, False), [A, B], max_restarts=0)
    over = failed_outcome(verdict)
    assert (over.code, over.rank, verdict.ranks_after) == (3, 3, 0)
    assert over.text == (
        "ended with exit code 3 on pc1 after 12 s; after it rank 0 (ended with exit code 1); "
        "restarts are disabled\n  rank 3 | one\n  rank 3 | ValueError: x"
    )
    assert str(over.error()).startswith("[rank 3] ended with exit code 3 on pc1")
    assert over.error().exit_code == 3


def test_the_end_by_a_lost_host_and_by_a_signal():
    verdict, _ = judged(PreviousWorld((A, B), (), False, 7.0), [A], min_ranks=4)
    over = failed_outcome(verdict)
    assert (over.code, over.rank, over.text) == (
        1,
        None,
        "pc1 was lost after 7 s; 2 ranks left, at least 4 required",
    )
    reported = (rank_failed(1, code=-9),)
    over = failed_outcome(judged(PreviousWorld((A,), reported, False), [A], max_restarts=0)[0])
    assert (over.code, over.text) == (137, "was ended by SIGKILL after 12 s; restarts are disabled")
    assert "out of memory" in over.remedy


def test_exit_statuses_are_those_of_a_shell():
    assert [exit_status(code) for code in (0, 3, -15, None)] == [0, 3, 143, 1]
    assert JobOutcome(130, "interrupted on pc1").error().exit_code == 130


def test_a_program_that_was_called_wrongly_is_not_started_again():
    decision = decide_restart([WorldRun("pc1/0", 4, False, refused=True)], 4, min_ranks=1, max_restarts=9)
    assert decision.action == "end"
    assert "called wrongly" in decision.why


@pytest.mark.parametrize(
    ("code", "lines", "refused"),
    [
        (2, ["usage: train.py"], True),
        (1, ["paceline.errors.UsageError: every=0", "  → pass a number of optimizer steps"], True),
        (1, ["[rank1]: paceline.errors.UsageError: every=0", "[rank1]:   → pass a number"], True),
        (1, ["[rank1]: [rank2]: paceline.errors.UsageError: every=0", "[rank1]: [rank2]:   → pass it"], True),
        (1, ["ValueError: a bad batch"], False),
        (1, ["PeerFailed: [rank 1] UsageError: every=0"], False),
        (-9, [], False),
    ],
)
def test_usage_errors_are_recognised(code, lines, refused):
    failure = rank_failed(0, *lines, code=code)
    assert failure.refused is refused
    verdict, _ = judged(PreviousWorld((A,), (failure,), False), [A], min_ranks=1)
    assert verdict.decision.action == ("end" if refused else "same")


def test_the_reason_is_separate_from_the_remedy():
    assert rank_failed(0, "step 1", "[rank0]: UsageError: no", "[rank0]:   → yes").why == "UsageError: no"
    assert rank_failed(0, "  → yes").why == rank_failed(0).why == ""


def test_ranks_that_left_in_order_are_named_so_and_the_outcome_has_their_code():
    failures = rank_failed(1, "a last line", code=75), rank_failed(0, code=75)
    before = PreviousWorld((A,), failures, progress=False, seconds=12.0)
    past = (WorldRun("pc0/0", 2, progress=True, left=True),)
    agreement, runs = agree_on_world(2, before, [A], past, min_ranks=1, max_restarts=5)
    assert runs[-1].left
    outcome = failed_outcome(agreement)
    assert outcome.code == 75
    assert "left in order (exit code 75) after 12 s" in outcome.text
