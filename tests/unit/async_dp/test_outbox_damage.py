"""A worker's outbox on a bad disk: damaged, full or interrupted, no round is ever used twice."""

from __future__ import annotations

import json
import os
import resource

import pytest

from failing_disk import FailingDisk, die, refuse
from forked_child import ended, in_child
from journal_folders import skip_fsync
from paceline.async_dp.wal.worker_outbox import Outbox, PendingUpdate, write_update
from paceline.errors import CheckpointError, PacelineError, UsageError
from paceline.testing import fault_injection
from pending_updates import pending_rounds, put_update

quick = pytest.fixture(autouse=True)(skip_fsync)


# ------------------------------------------------------------------ damage


@pytest.mark.thorough
def test_an_update_file_with_any_flipped_bit_or_cut_is_set_aside(tmp_path, caplog):
    with Outbox(tmp_path) as outbox:
        outbox.bind("run")
        put_update(outbox, 0, b"zero")
        put_update(outbox, 1, b"one")
    path = tmp_path / "letter-000000.msg"
    data = path.read_bytes()
    bad = [data[:cut] for cut in range(len(data))]
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        bad.append(bytes(flipped))
    for each in bad:
        path.write_bytes(each)
        caplog.clear()
        with Outbox(tmp_path) as outbox:
            assert pending_rounds(outbox) == [(1, 0)]
        assert "letter-000000.msg is renamed to letter-000000.msg.damaged" in caplog.text
        assert (tmp_path / "letter-000000.msg.damaged").read_bytes() == each
    with Outbox(tmp_path) as outbox:
        assert put_update(outbox, 0) == 1


def test_a_worker_whose_status_file_is_damaged_gets_another_number(tmp_path, caplog):
    status_file = tmp_path / "worker.json"
    with Outbox(tmp_path) as outbox:
        first = outbox.worker
        put_update(outbox, 0)
    good = status_file.read_bytes()
    for bad in (b"", good[:-4], b"{}", b"[]", good.replace(b'"worker"', b'"walker"'), b"\xff"):
        status_file.write_bytes(bad)
        caplog.clear()
        with Outbox(tmp_path) as outbox:
            assert outbox.worker != first
            assert outbox.pending() == []
            put_update(outbox, 0)
            first = outbox.worker
        assert "worker.json is renamed" in caplog.text
        assert "letter-000000.msg is renamed to letter-000000.msg.damaged: it is of worker" in caplog.text
    with Outbox(tmp_path) as outbox:
        assert outbox.worker == first
        assert pending_rounds(outbox) == [(0, 0)]


@pytest.mark.parametrize("loss", ["damaged", "removed", "aside"])
def test_a_given_number_without_its_status_file_continues_with_unused_rounds(tmp_path, loss, monkeypatch):
    status_file, used = tmp_path / "worker.json", set()
    for start, clock in enumerate([2_000_000_000, 1_000_000_000, 0]):
        monkeypatch.setattr("time.time_ns", lambda clock=clock: clock)  # it is set back
        with Outbox(tmp_path, worker=5) as outbox:
            assert len(outbox.pending()) == (1 if start and loss != "aside" else 0)
            for update in outbox.pending():
                outbox.acknowledge(update.round, update.fragment)
            rounds = {outbox.next_round(0) for _ in range(4)} | {put_update(outbox, 0)}
            assert not rounds & used
            used |= rounds
            if loss == "aside":
                outbox.acknowledge(outbox.pending()[0].round, 0)
        if loss == "damaged":
            status_file.write_bytes(b"?")
        elif loss == "removed":
            status_file.unlink()
        else:  # it died after setting the file aside, before writing another
            status_file.rename(tmp_path / "worker.json.damaged")
    assert max(used) < 2**53


def test_a_given_number_whose_used_rounds_are_unknown_is_refused(tmp_path):
    with Outbox(tmp_path, worker=5) as outbox:
        put_update(outbox, 0)
    for name in ("worker.json", "rounds.json"):
        (tmp_path / name).unlink()
    with pytest.raises(UsageError, match="which rounds worker 5 has used is unknown"):
        Outbox(tmp_path, worker=5)
    with Outbox(tmp_path) as outbox:
        assert outbox.worker != 5


def test_an_update_under_the_wrong_file_name_is_set_aside(tmp_path, caplog):
    with Outbox(tmp_path) as outbox:
        put_update(outbox, 0)
        put_update(outbox, 1)
    (tmp_path / "letter-000000.msg").replace(tmp_path / "letter-000001.msg")
    with Outbox(tmp_path) as outbox:
        assert outbox.pending() == []
    assert "it is of fragment 0" in caplog.text
    write_update(
        tmp_path,
        PendingUpdate(9, 0, {}, b""),
        "",
        json.loads((tmp_path / "worker.json").read_bytes())["values"]["worker"],
    )
    with Outbox(tmp_path) as outbox:
        assert outbox.pending() == []
    assert "it is of round 9, which was not begun" in caplog.text


# ------------------------------------------------------------------ a full disk, and interruptions


def test_a_full_disk_is_reported_and_unwritten_updates_are_not_pending(tmp_path):
    with Outbox(tmp_path) as outbox:
        number = outbox.next_round(0)
        fault_injection.disk_full(after_nbytes=10)
        with pytest.raises(
            CheckpointError,
            match=r"letter-000000\.msg' can't be written: the disk is full .*\n.*put it again",
        ):
            outbox.put(number, 0, {}, b"update")
        with pytest.raises(CheckpointError, match=r"worker\.json' can't be written: the disk is full"):
            outbox.next_round(0)
        with pytest.raises(CheckpointError, match=r"worker\.json' can't be written"):
            outbox.bind("run")
        assert (outbox.run, outbox.pending()) == ("", [])
        fault_injection.disarm()
        outbox.put(number, 0, {}, b"update")
        outbox.bind("run")
        assert outbox.next_round(0) > number
    with Outbox(tmp_path) as outbox:
        assert (outbox.run, pending_rounds(outbox)) == ("run", [(0, 0)])


def test_a_partly_written_update_is_not_pending(tmp_path):
    """With the kernel's file size limit, so that a part is written."""

    def fill():
        with Outbox(tmp_path) as outbox:
            number = outbox.next_round(0)
            _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most))
            with pytest.raises(CheckpointError, match="the disk is full"):
                outbox.put(number, 0, {}, bytes(200_000))
            return True

    assert in_child(fill) == 0
    with Outbox(tmp_path) as outbox:
        assert outbox.pending() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outbox.lock", "rounds.json", "worker.json"]


def live(folder, log):
    """Put and acknowledge updates; log operations before (# begun, ~ acknowledging) and after (+ put, - removed)."""
    with Outbox(folder) as outbox:
        outbox.bind("run")
        for update in outbox.pending():
            log("?", update.fragment, update.round)
        for number in range(6):
            fragment = number % 2
            for update in outbox.pending():
                if update.fragment == fragment:
                    log("~", fragment, update.round)
                    outbox.acknowledge(update.round, fragment)
                    log("-", fragment, update.round)
            begun = outbox.next_round(fragment)
            log("#", fragment, begun)
            outbox.put(begun, fragment, {}, b"%d" % begun * 50)
            log("+", fragment, begun)


@pytest.mark.thorough
def test_a_worker_that_dies_at_any_disk_operation_keeps_its_pending_updates(tmp_path):
    at = 0
    while True:
        at += 1
        folder, (reading, writing) = tmp_path / f"box-{at}", os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with FailingDisk(at, die):
                    live(
                        folder,
                        lambda *report, pipe=writing: os.write(
                            pipe, b"%s %d %d;" % (report[0].encode(), *report[1:])
                        ),
                    )
                code = 0
            finally:
                os._exit(code)
        os.close(writing)
        code = ended(pid)
        report = [each.split() for each in os.read(reading, 10_000).decode().split(";") if each]
        os.close(reading)
        assert code in (0, 9)
        pending, doubtful, begun = {}, set(), set()
        for what, *place in report:
            fragment, number = map(int, place)
            if what == "#":
                assert (fragment, number) not in begun
                begun.add((fragment, number))
                doubtful = {(fragment, number)}
            elif what == "~":
                doubtful = {(fragment, number)}
            elif what == "+":
                pending[fragment], doubtful = number, set()
            else:
                del pending[fragment]
                doubtful = set()
        with Outbox(folder) as outbox:
            found = {(update.fragment, update.round) for update in outbox.pending()}
            assert found | doubtful == set(pending.items()) | doubtful
            assert all(update.payload == b"%d" % update.round * 50 for update in outbox.pending())
            for fragment in (0, 1):
                assert (fragment, outbox.next_round(fragment)) not in begun
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]
        if code == 0:
            break
    assert at > 100


@pytest.mark.thorough
def test_a_failure_of_any_disk_operation_is_reported_and_no_round_is_used_twice(tmp_path):
    at, refusals = 0, 0
    while True:
        at += 1
        begun, folder = [], tmp_path / f"box-{at}"

        def note(what, *place, begun=begun):
            if what == "#":
                begun.append(place)

        with FailingDisk(at, refuse) as disk:
            try:
                live(folder, note)
            except PacelineError:
                refusals += 1
                live(folder, note)
        assert len(begun) == len(set(begun))
        if disk.count < at:
            break
    assert refusals > 100
