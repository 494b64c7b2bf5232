"""What is made of a rank's notes and its end, who runs dry in which set-up, and the words for it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.sampling.block_dispatch import dispatch_blocks
from paceline.errors import UsageError
from paceline.tools.bench.starvation.scene_outcome import (
    End,
    Notes,
    RankOutcome,
    message_of,
    outcome_of,
    read_notes,
)
from paceline.tools.bench.starvation.scene_setup import EXAMPLE, MOST_RANKS, Setup
from paceline.tools.bench.starvation.starvation_scenes import SCENES, scenes_named
from paceline.tools.bench.starvation.starvation_table import COLUMNS, cells, is_exact, sentence, title
from paceline.tools.plan.balance_report import BatchBalance

SETUP = Setup(EXAMPLE, timeout=10.0)
PLACE = "[/build/third_party/gloo/gloo/transport/tcp/pair.cc:537] "
ABORT = (
    "[W101 Warning: something else\n"
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
    "  what():  [enforce fail at /build/gloo/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 328 vs 8. Received\n"
)


def began(at, step=0):
    return {"what": "began", "at": at, "step": step}


def made(at, step=0, samples=64, error=1e-16):
    return {"what": "made", "at": at, "step": step, "samples": samples, "error": error}


def dry(at):
    return {"what": "dry", "at": at}


def raised(at, text, kind="RuntimeError"):
    return {"what": "raised", "at": at, "kind": kind, "text": text}


def finished(at, *parameters):
    return {"what": "finished", "at": at, "parameters": list(parameters), "parameter_error": 0.5}


def of(notes, code, at=100.0, stderr=""):
    return RankOutcome.of(3, notes, End(code, at, stderr), timeout=10.0)


# ---------------------------------------------------------------------- one rank


def test_a_rank_that_came_to_its_end_has_finished():
    one = of([began(1), made(2), finished(3, 0.5)], 0)
    assert (one.rank, one.kind, one.seconds) == (3, "finished", None)
    assert (one.steps, one.samples, one.errors) == (1, 64, (1e-16,))
    assert (one.parameters, one.parameter_error) == ((0.5,), 0.5)


def test_an_exception_at_once_is_an_error():
    one = of([began(1), made(2), began(3, 1), raised(3.5, f"{PLACE}Connection closed by peer [::1]:4.")], 1)
    assert (one.kind, one.error, one.message) == ("error", "RuntimeError", "Connection closed by peer")
    assert one.seconds == pytest.approx(0.5)
    assert one.steps == 1


def test_an_exception_after_the_time_out_is_one_of_waiting():
    one = of(
        [began(1), raised(11.002, f"{PLACE}Timed out waiting 10000ms for recv operation to complete")], 1
    )
    assert (one.kind, one.message) == (
        "time-out",
        "Timed out waiting 10000ms for recv operation to complete",
    )
    # The other end of a wait that ran out is closed: that is an end by time-out too.
    assert of([dry(1), raised(11.01, "Connection closed by peer")], 1).kind == "time-out"


def test_a_signal_leaves_what_was_written_before():
    one = of([began(1), made(2), dry(3)], -6, at=3.25, stderr=ABORT)
    assert (one.kind, one.error, one.seconds, one.steps) == ("signal", "SIGABRT", 0.25, 1)
    assert one.message == "gloo::EnforceNotMet: op.preamble.length <= op.nbytes. 328 vs 8. Received"


def test_who_had_to_be_killed_hung():
    assert (of([began(1)], None, at=31).kind, of([began(1)], None, at=31).seconds) == ("hung", 30)
    assert of([], None).kind == "hung"


def test_an_end_without_a_word_is_an_error():
    assert (of([began(1)], 3).kind, of([began(1)], 3).error) == ("error", "exit code 3")
    assert of([began(1), made(2), finished(3)], -11).error == "SIGSEGV"  # at its very end
    assert of([], 1).kind == "error"


@settings(deadline=None)
@given(cut=st.integers(0, 8), code=st.one_of(st.none(), st.integers(-64, 255)))
def test_any_beginning_of_the_notes_will_do(cut, code):
    notes = [began(1), made(2), began(3, 1), made(4, 1), dry(5), began(6, 2), made(7, 2, 0), finished(8)][
        :cut
    ]
    one = of(notes, code)
    assert one.steps == sum(note["what"] == "made" for note in notes)
    assert (one.kind == "finished") == (cut == 8 and code == 0)
    assert one.kind == "finished" or one.seconds >= 0


def test_a_line_that_was_being_written_is_left_out(tmp_path):
    notes = Notes(tmp_path / "notes")
    notes.write("began", step=0)
    with (tmp_path / "notes").open("ab") as file:
        file.write(b'{"what": "ma')
    (note,) = read_notes(tmp_path / "notes")
    assert (note["what"], note["step"]) == ("began", 0)
    assert read_notes(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            f"{PLACE}Read error [127.0.0.1]:420: Connection reset by peer. This is typically caused by …",
            "Read error: Connection reset by peer",
        ),
        (
            "Got the following error when running the callback: PeerLost: [rank 1, step 3] rank 1 on host a left "
            "the group, while rank 0 was in all_reduce(float64[161], SUM)\n  → see its output",
            "PeerLost: rank 1 on host a left the group",
        ),
        ("first\nsecond", "first"),
        ("", ""),
        ("terminate called without an active exception", "terminate called without an active exception"),
    ],
)
def test_what_an_error_says(text, said):
    assert message_of(text) == said


# ---------------------------------------------------------------------- who runs dry


def test_the_example_starves_one_rank():
    assert (SETUP.balance.batches, SETUP.dry, SETUP.steps) == ((10, 8), [1], 10)
    kinds = [SETUP.kind(step) for step in range(10)]
    assert kinds == ["equal"] * 7 + ["unequal", "dry", "dry"]


@settings(deadline=None)
@given(
    samples=st.integers(20, 400),
    ranks=st.integers(2, 5),
    block=st.integers(1, 20),
    scheme=st.sampled_from(["round_robin", "random"]),
    batch_size=st.integers(1, 16),
    seed=st.integers(0, 9),
)
def test_every_sample_is_in_one_batch(samples, ranks, block, scheme, batch_size, seed):
    dealing = dispatch_blocks(samples, ranks, block=block, scheme=scheme, seed=seed)
    balance = BatchBalance(dealing, batch_size)
    if not balance.starving or not min(balance.batches):
        with pytest.raises(UsageError):
            Setup(balance)
        return
    setup = Setup.from_json(json.loads(json.dumps(Setup(balance, 3.0).to_json())))
    assert setup.balance.batches == balance.batches
    assert setup.balance.dispatch.counts == dealing.counts
    own = [setup.batches(rank) for rank in range(ranks)]
    assert [len(batches) for batches in own] == list(balance.batches)
    together = np.concatenate([batch for batches in own for batch in batches])
    by_step = np.concatenate([setup.global_batch(step) for step in range(setup.steps)])
    assert sorted(together) == sorted(by_step) == list(range(samples))
    assert "dry" in {setup.kind(step) for step in range(setup.steps)}


def test_the_next_epoch_has_other_batches():
    further = SETUP.further(1)
    first = [next(further) for _ in range(20)]
    assert [len(batch) for batch in first[:9]] == [64] * 7 + [52, 64]
    assert set(np.concatenate(first[:8])) != set(np.concatenate(SETUP.batches(1)))


@pytest.mark.parametrize(
    ("balance", "timeout", "said"),
    [
        (EXAMPLE, 0.5, "time-out of 0.5 s"),
        (EXAMPLE, float("inf"), "time-out of inf s"),
        (BatchBalance(dispatch_blocks(100, 1), 7), 10, "1 ranks: each is a process here"),
        (BatchBalance(dispatch_blocks(1000, MOST_RANKS + 1), 7), 10, f"{MOST_RANKS + 1} ranks"),
        (BatchBalance(dispatch_blocks(1000, 2), 7), 10, "all ranks have 72 batches, so nobody starves"),
        (BatchBalance(dispatch_blocks(3, 4), 7), 10, "rank 3 has no batch at all"),
        (
            BatchBalance(dispatch_blocks(1100, 2, block=100), 64, drop_last=True),
            10,
            "the short last ones too",
        ),
        (
            BatchBalance(dispatch_blocks(30_000_100, 2, block=100), 100_000),
            10,
            "30000100 samples in 151 steps",
        ),
        (BatchBalance(dispatch_blocks(5001, 2), 1), 10, "5001 samples in 2501 steps"),
    ],
)
def test_what_can_not_be_shown_is_refused(balance, timeout, said):
    with pytest.raises(UsageError, match=said):
        Setup(balance, timeout)


# ---------------------------------------------------------------------- scenes, and words


def test_scenes_come_in_their_order():
    assert [scene.name for scene in scenes_named(["sharded", "exits"])] == ["exits", "sharded"]
    assert tuple(scenes_named([])) == SCENES
    with pytest.raises(UsageError, match="did you mean 'barrier'"):
        scenes_named(["barier"])


def scene(name, notes, codes, at=100.0, stderr=("", "")):
    ends = {rank: End(codes[rank], at, stderr[rank]) for rank in (0, 1)}
    (wanted,) = scenes_named([name])
    return json.loads(json.dumps(outcome_of(wanted, SETUP, notes, ends).to_json()))


def steps(number, error=1e-16):
    return [note for step in range(number) for note in (began(step, step), made(step, step, error=error))]


def test_a_scene_in_which_one_hangs():
    late = [*steps(8), began(20, 8), raised(30.1, f"{PLACE}Timed out waiting 10000ms for recv operation")]
    told = scene("idles", {0: late, 1: [*steps(8), dry(8), finished(31)]}, (1, 0))
    assert cells(told)[1:5] == [
        "does something else",
        "hang, then RuntimeError: Timed out",
        "notices nothing",
        "10.1 s",
    ]
    assert (told["finished"], told["replicas_apart"], told["samples_lost"]) == (False, None, 1100 - 16 * 64)
    assert not is_exact(told)


def test_a_scene_that_ends_by_a_signal():
    notes = {
        0: [*steps(8), began(20, 8), raised(20.02, "Connection closed by peer")],
        1: [*steps(8), dry(99.9)],
    }
    told = scene("metric", notes, (1, -6), stderr=("", ABORT))
    assert cells(told)[2:5] == [
        "RuntimeError: Connection closed by peer",
        "SIGABRT: gloo::EnforceNotMet",
        "20 ms",
    ]
    assert "others: RuntimeError: Connection closed by peer (20 ms)" in sentence(told)


def test_a_scene_in_which_all_finish():
    wrong = [
        *steps(8),
        *(note for step in (8, 9) for note in (began(step, step), made(step, step, 38, 0.32))),
    ]
    told = scene(
        "join", {0: [*wrong, finished(11, 1.0, 2.0)], 1: [*steps(8), finished(11, 1.0, 2.5)]}, (0, 0)
    )
    assert told["gradient_error_with_a_dry_rank"] == 0.32
    assert told["gradient_error_with_equal_batches"] == 1e-16
    assert told["replicas_apart"] == 0.5
    assert cells(told)[2:] == ["finish", "finish", "", "32.0%", "1e-16", "0"]
    assert not is_exact(told)
    right = {rank: [*steps(10), finished(11, 1.0)] for rank in (0, 1)}
    exact = scene("bucketed", right, (0, 0)) | {"samples_lost": 0}
    assert is_exact(exact)
    assert len(cells(exact)) == len(COLUMNS)


def test_who_had_to_be_killed_is_told():
    told = scene("barrier", {0: [began(1)], 1: [dry(1)]}, (None, None))
    assert cells(told)[2:4] == ["hang for ever", "hang for ever"]


def test_the_title_tells_what_all_have_in_common():
    assert title(SETUP.told()) == (
        "2 ranks, 1100 samples in blocks of 100, batches of 64: 10, 8 batches; gloo, time-out 10 s"
    )
