"""A worker's outbox keeps updates until they are acknowledged, and never uses a round twice."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forked_child import in_child
from journal_folders import skip_fsync
from paceline.async_dp.wal.worker_outbox import Outbox, PendingUpdate, read_update, write_update
from paceline.errors import UsageError
from pending_updates import pending_rounds, put_update

quick = pytest.fixture(autouse=True)(skip_fsync)


@pytest.fixture(params=["disk", "memory"])
def outbox(request, tmp_path):
    with Outbox(tmp_path / "box" if request.param == "disk" else None) as one:
        yield one


# ------------------------------------------------------------------ updates


def test_an_update_is_pending_until_it_is_acknowledged(outbox):
    assert outbox.pending() == []
    put_update(outbox, 3, b"three", base=7)
    put_update(outbox, 0, b"")
    assert outbox.pending() == [PendingUpdate(0, 0, {}, b""), PendingUpdate(0, 3, {"base": 7}, b"three")]
    assert not outbox.acknowledge(1, 3)
    assert not outbox.acknowledge(0, 2)
    assert pending_rounds(outbox) == [(0, 0), (3, 0)]
    assert outbox.acknowledge(0, 3)
    assert not outbox.acknowledge(0, 3)
    assert pending_rounds(outbox) == [(0, 0)]
    assert put_update(outbox, 3) == 1


def test_a_fragment_has_one_pending_update(outbox):
    put_update(outbox, 3)
    number = outbox.next_round(3)
    with pytest.raises(UsageError, match="the update of fragment 3, round 0, is not acknowledged yet"):
        outbox.put(number, 3, {}, b"more")
    outbox.acknowledge(0, 3)
    outbox.put(number, 3, {}, b"more")
    assert pending_rounds(outbox) == [(3, 1)]


@pytest.mark.parametrize("round", [-1, 1, 5])
def test_a_round_that_was_not_begun_is_refused(outbox, round):
    outbox.next_round(3)
    with pytest.raises(UsageError, match=f"round {round} of fragment 3 was not begun"):
        outbox.put(round, 3, {})


def test_a_payload_may_change_once_it_was_put(outbox):
    payload = bytearray(b"update")
    outbox.put(outbox.next_round(0), 0, {}, memoryview(payload))
    payload[:] = b"xxxxxx"
    assert outbox.pending()[0].payload == b"update"


def test_values_that_are_not_plain_are_refused(tmp_path):
    with Outbox(tmp_path) as outbox:
        number = outbox.next_round(0)
        with pytest.raises(UsageError, match="can't hold a bytes"):
            outbox.put(number, 0, {"a": b"x"})
        with pytest.raises(UsageError, match="fragment=-1"):
            outbox.next_round(-1)
        outbox.put(number, 0, {"n": 1})
        assert pending_rounds(outbox) == [(0, 0)]


PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), st.text()
)


@settings(deadline=None, max_examples=100)
@given(
    update=st.builds(
        PendingUpdate,
        round=st.integers(0, 2**63 - 1),
        fragment=st.integers(0, 10**7),
        values=st.dictionaries(st.text(max_size=5), PLAIN, max_size=4),
        payload=st.binary(max_size=300),
    ),
    run=st.text(max_size=10),
    worker=st.integers(1, 2**53 - 1),
)
def test_update_files_round_trip(tmp_path_factory, update, run, worker):
    folder = tmp_path_factory.mktemp("box")
    write_update(folder, update, run, worker)
    (path,) = folder.iterdir()
    assert read_update(path) == (update, run, worker)


@settings(deadline=None, max_examples=60)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["put", "skip", "acknowledge", "restart"]), st.integers(0, 2)), max_size=25
    )
)
def test_over_restarts_updates_stay_pending_and_rounds_are_new(tmp_path_factory, steps):
    folder = tmp_path_factory.mktemp("box")
    outbox, pending, used = Outbox(folder), {}, set()
    worker = outbox.worker
    for step, fragment in steps:
        if step == "restart":
            outbox.close()
            outbox = Outbox(folder)
        elif step == "acknowledge":
            assert outbox.acknowledge(pending.get(fragment, 0), fragment) == (fragment in pending)
            pending.pop(fragment, None)
        else:
            number = outbox.next_round(fragment)
            assert (fragment, number) not in used
            used.add((fragment, number))
            if step == "put" and fragment not in pending:
                outbox.put(number, fragment, {"k": number}, b"%d" % number * 9)
                pending[fragment] = number
        assert outbox.pending() == [
            PendingUpdate(number, fragment, {"k": number}, b"%d" % number * 9)
            for fragment, number in sorted(pending.items())
        ]
        assert outbox.worker == worker
    outbox.close()


def test_an_update_file_is_flushed_before_it_is_renamed(tmp_path, monkeypatch):
    calls, replace = [], os.replace
    monkeypatch.setattr(
        os, "fsync", lambda handle: calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
    )
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), replace(a, b)))
    with Outbox(tmp_path / "box") as outbox:
        calls.clear()
        number = outbox.next_round(0)
        assert calls == ["worker.json", "replace", "box"]
        calls.clear()
        outbox.put(number, 0, {}, b"update")
        assert calls == ["letter-000000.msg", "replace", "box"]


# ------------------------------------------------------------------ worker number and run


def test_a_worker_keeps_its_random_number(tmp_path):
    numbers = []
    for k in range(50):
        with Outbox(tmp_path / str(k)) as outbox:
            numbers.append(outbox.worker)
    assert len(set(numbers)) == 50
    assert all(1 <= number < 2**53 for number in numbers)
    with Outbox(tmp_path / "7") as outbox:
        assert outbox.worker == numbers[7]


def test_a_given_number_is_the_one_of_the_folder(tmp_path):
    Outbox(tmp_path, worker=5).close()
    for worker in (None, 5):
        with Outbox(tmp_path, worker=worker) as outbox:
            assert outbox.worker == 5
    with pytest.raises(UsageError, match=rf"'{tmp_path}' is the folder of worker 5, this is worker 6"):
        Outbox(tmp_path, worker=6)
    with Outbox(tmp_path):
        pass


@pytest.mark.parametrize("worker", [0, -1, 2**53])
def test_an_invalid_worker_number_is_refused(worker):
    with pytest.raises(UsageError, match=f"worker={worker}"):
        Outbox(None, worker=worker)


def test_pending_updates_of_another_run_are_refused(tmp_path):
    with Outbox(tmp_path) as outbox:
        put_update(outbox, 0)
        outbox.bind("first")
    with Outbox(tmp_path) as outbox:
        assert outbox.run == "first"
        outbox.bind("first")
        with pytest.raises(
            UsageError,
            match=r"1 updates in .* are pending for run 'first', this is run 'second'\n.*another folder",
        ):
            outbox.bind("second")
        assert outbox.run == "first"
        outbox.acknowledge(0, 0)
        outbox.bind("second")
        assert put_update(outbox, 0) == 1
    with (
        Outbox(tmp_path) as outbox,
        pytest.raises(UsageError, match="are pending for run 'second', this is run 'first'"),
    ):
        outbox.bind("first")


def test_a_second_worker_on_a_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline._core.file_lock._TIMEOUT_SECONDS", 0.0)
    with Outbox(tmp_path), pytest.raises(UsageError, match=f"by this worker: process {os.getpid()} on "):
        Outbox(tmp_path)

    def other():
        with pytest.raises(UsageError, match=f"by another worker: process {os.getppid()} on .*, since"):
            Outbox(tmp_path)
        return True

    with Outbox(tmp_path):
        assert in_child(other) == 0
    Outbox(tmp_path).close()
