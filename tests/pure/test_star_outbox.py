"""A worker's outbox: what was offered stays until it is acknowledged, and no round is ever used twice."""

from __future__ import annotations

import json
import os
import resource

import pytest
from failing_disk import FailingDisk, die, refuse
from forks import ended, in_child
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import faults
from paceline.errors import CheckpointError, PacelineError, UsageError
from paceline.star.keeping.letters import Letter, Sender, read_letter, write_letter
from paceline.star.keeping.outbox import Outbox


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Nobody pulls a plug here, so nobody waits for the disk."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda handle: None)
    yield
    faults.disarm()


@pytest.fixture(params=["disk", "memory"])
def outbox(request, tmp_path):
    with Outbox(tmp_path / "box" if request.param == "disk" else None) as one:
        yield one


def offer(outbox, fragment, payload=b"update", **values):
    """Put the next round of a fragment, and return its number."""
    number = outbox.next_round(fragment)
    outbox.put(number, fragment, values, payload)
    return number


def places(outbox):
    return [(letter.fragment, letter.round) for letter in outbox.pending()]


# ------------------------------------------------------------------ letters


def test_a_letter_stays_until_it_is_acknowledged(outbox):
    assert outbox.pending() == []
    offer(outbox, 3, b"three", base=7)
    offer(outbox, 0, b"")
    assert outbox.pending() == [Letter(0, 0, {}, b""), Letter(0, 3, {"base": 7}, b"three")]
    assert not outbox.acknowledge(1, 3)
    assert not outbox.acknowledge(0, 2)
    assert places(outbox) == [(0, 0), (3, 0)]
    assert outbox.acknowledge(0, 3)
    assert not outbox.acknowledge(0, 3)
    assert places(outbox) == [(0, 0)]
    assert offer(outbox, 3) == 1


def test_of_a_fragment_there_is_one_letter(outbox):
    offer(outbox, 3)
    number = outbox.next_round(3)
    with pytest.raises(UsageError, match="a letter of fragment 3, round 0, waits"):
        outbox.put(number, 3, {}, b"more")
    outbox.acknowledge(0, 3)
    outbox.put(number, 3, {}, b"more")
    assert places(outbox) == [(3, 1)]


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


def test_what_is_not_plain_is_refused(tmp_path):
    with Outbox(tmp_path) as outbox:
        number = outbox.next_round(0)
        with pytest.raises(UsageError, match="can't hold a bytes"):
            outbox.put(number, 0, {"a": b"x"})
        with pytest.raises(UsageError, match="fragment=-1"):
            outbox.next_round(-1)
        outbox.put(number, 0, {"n": 1})
        assert places(outbox) == [(0, 0)]


PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), st.text()
)


@settings(deadline=None, max_examples=100)
@given(
    letter=st.builds(
        Letter,
        round=st.integers(0, 2**63 - 1),
        fragment=st.integers(0, 10**7),
        values=st.dictionaries(st.text(max_size=5), PLAIN, max_size=4),
        payload=st.binary(max_size=300),
    ),
    run=st.text(max_size=10),
    worker=st.integers(1, 2**53 - 1),
)
def test_letters_come_back_from_their_files(tmp_path_factory, letter, run, worker):
    folder = tmp_path_factory.mktemp("box")
    write_letter(folder, letter, Sender(run, worker))
    (path,) = folder.iterdir()
    assert read_letter(path) == (letter, Sender(run, worker))


@settings(deadline=None, max_examples=60)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["put", "skip", "acknowledge", "restart"]), st.integers(0, 2)), max_size=25
    )
)
def test_over_any_restarts_letters_stay_and_rounds_are_new(tmp_path_factory, steps):
    folder = tmp_path_factory.mktemp("box")
    outbox, offered, used = Outbox(folder), {}, set()
    worker = outbox.worker
    for step, fragment in steps:
        if step == "restart":
            outbox.close()
            outbox = Outbox(folder)
        elif step == "acknowledge":
            assert outbox.acknowledge(offered.get(fragment, 0), fragment) == (fragment in offered)
            offered.pop(fragment, None)
        else:
            number = outbox.next_round(fragment)
            assert (fragment, number) not in used
            used.add((fragment, number))
            if step == "put" and fragment not in offered:
                outbox.put(number, fragment, {"k": number}, b"%d" % number * 9)
                offered[fragment] = number
        assert outbox.pending() == [
            Letter(number, fragment, {"k": number}, b"%d" % number * 9)
            for fragment, number in sorted(offered.items())
        ]
        assert outbox.worker == worker
    outbox.close()


def test_a_letter_is_on_the_disk_before_it_has_its_place(tmp_path, monkeypatch):
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


# ------------------------------------------------------------------ who the worker is, and whom it serves


def test_a_worker_has_one_number_all_its_life(tmp_path):
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
def test_a_number_that_is_none_is_refused(worker):
    with pytest.raises(UsageError, match=f"worker={worker}"):
        Outbox(None, worker=worker)


def test_letters_of_another_run_are_refused(tmp_path):
    with Outbox(tmp_path) as outbox:
        offer(outbox, 0)
        outbox.bind("first")
    with Outbox(tmp_path) as outbox:
        assert outbox.run == "first"
        outbox.bind("first")
        with pytest.raises(
            UsageError, match=r"1 letters in .* wait for run 'first', this is run 'second'\n.*another folder"
        ):
            outbox.bind("second")
        assert outbox.run == "first"
        outbox.acknowledge(0, 0)
        outbox.bind("second")
        assert offer(outbox, 0) == 1
    with (
        Outbox(tmp_path) as outbox,
        pytest.raises(UsageError, match="wait for run 'second', this is run 'first'"),
    ):
        outbox.bind("first")


def test_two_workers_on_one_folder_are_one_too_many(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.star.keeping.lock._PATIENCE_SECONDS", 0.0)
    with Outbox(tmp_path), pytest.raises(UsageError, match=f"by this worker: process {os.getpid()} on "):
        Outbox(tmp_path)

    def other():
        with pytest.raises(UsageError, match=f"by another worker: process {os.getppid()} on .*, since"):
            Outbox(tmp_path)
        return True

    with Outbox(tmp_path):
        assert in_child(other) == 0
    Outbox(tmp_path).close()


# ------------------------------------------------------------------ damage


def test_any_flipped_bit_or_cut_of_a_letter_puts_it_aside(tmp_path, caplog):
    with Outbox(tmp_path) as outbox:
        outbox.bind("run")
        offer(outbox, 0, b"zero")
        offer(outbox, 1, b"one")
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
            assert places(outbox) == [(1, 0)]
        assert "letter-000000.msg is put aside as letter-000000.msg.damaged" in caplog.text
        assert (tmp_path / "letter-000000.msg.damaged").read_bytes() == each
    with Outbox(tmp_path) as outbox:
        assert offer(outbox, 0) == 1


def test_a_worker_whose_page_is_damaged_is_another_worker(tmp_path, caplog):
    page = tmp_path / "worker.json"
    with Outbox(tmp_path) as outbox:
        first = outbox.worker
        offer(outbox, 0)
    good = page.read_bytes()
    for bad in (b"", good[:-4], b"{}", b"[]", good.replace(b'"worker"', b'"walker"'), b"\xff"):
        page.write_bytes(bad)
        caplog.clear()
        with Outbox(tmp_path) as outbox:
            assert outbox.worker != first
            assert outbox.pending() == []
            offer(outbox, 0)
            first = outbox.worker
        assert "worker.json is put aside" in caplog.text
        assert "letter-000000.msg is put aside as letter-000000.msg.damaged: it is of worker" in caplog.text
    with Outbox(tmp_path) as outbox:
        assert outbox.worker == first
        assert places(outbox) == [(0, 0)]


@pytest.mark.parametrize("loss", ["damaged", "removed", "aside"])
def test_a_given_number_whose_page_is_lost_goes_on_with_rounds_that_were_never_used(tmp_path, loss):
    page, used = tmp_path / "worker.json", set()
    for life in range(3):
        with Outbox(tmp_path, worker=5) as outbox:
            assert len(outbox.pending()) == (1 if life and loss != "aside" else 0)
            for letter in outbox.pending():
                outbox.acknowledge(letter.round, letter.fragment)
            rounds = {outbox.next_round(0) for _ in range(4)} | {offer(outbox, 0)}
            assert not rounds & used
            used |= rounds
            if loss == "aside":
                outbox.acknowledge(outbox.pending()[0].round, 0)
        if loss == "damaged":
            page.write_bytes(b"?")
        elif loss == "removed":
            page.unlink()
        else:  # it died between putting the page aside and writing another
            page.rename(tmp_path / "worker.json.damaged")
    assert max(used) < 2**53


def test_a_letter_in_anothers_place_is_put_aside(tmp_path, caplog):
    with Outbox(tmp_path) as outbox:
        offer(outbox, 0)
        offer(outbox, 1)
    (tmp_path / "letter-000000.msg").replace(tmp_path / "letter-000001.msg")
    with Outbox(tmp_path) as outbox:
        assert outbox.pending() == []
    assert "it is of fragment 0" in caplog.text
    write_letter(
        tmp_path,
        Letter(9, 0, {}, b""),
        Sender("", json.loads((tmp_path / "worker.json").read_bytes())["values"]["worker"]),
    )
    with Outbox(tmp_path) as outbox:
        assert outbox.pending() == []
    assert "it is of round 9, which was not begun" in caplog.text


# ------------------------------------------------------------------ a full disk, and interruptions


def test_a_full_disk_is_told_and_what_did_not_fit_is_not_offered(tmp_path):
    with Outbox(tmp_path) as outbox:
        number = outbox.next_round(0)
        faults.disk_full(after_nbytes=10)
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
        faults.disarm()
        outbox.put(number, 0, {}, b"update")
        outbox.bind("run")
        assert outbox.next_round(0) > number
    with Outbox(tmp_path) as outbox:
        assert (outbox.run, places(outbox)) == ("run", [(0, 0)])


def test_a_letter_that_was_half_written_is_no_letter(tmp_path):
    """With a limit of the kernel, so that a part is really written."""

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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outbox.lock", "worker.json"]


def live(folder, tell):
    """A worker's life: what is offered and what is acknowledged is told, as +fragment.round and -fragment.round."""
    with Outbox(folder) as outbox:
        outbox.bind("run")
        for letter in outbox.pending():
            tell("?", letter.fragment, letter.round)
        for number in range(6):
            fragment = number % 2
            for letter in outbox.pending():
                if letter.fragment == fragment:
                    tell("~", fragment, letter.round)
                    outbox.acknowledge(letter.round, fragment)
                    tell("-", fragment, letter.round)
            begun = outbox.next_round(fragment)
            tell("#", fragment, begun)
            outbox.put(begun, fragment, {}, b"%d" % begun * 50)
            tell("+", fragment, begun)


def test_a_worker_that_dies_between_any_two_operations_of_its_disk_offers_what_it_offered(tmp_path):
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
                        lambda *told, pipe=writing: os.write(
                            pipe, b"%s %d %d;" % (told[0].encode(), *told[1:])
                        ),
                    )
                code = 0
            finally:
                os._exit(code)
        os.close(writing)
        code = ended(pid)
        told = [each.split() for each in os.read(reading, 10_000).decode().split(";") if each]
        os.close(reading)
        assert code in (0, 9)
        offered, doubtful, begun = {}, set(), set()
        for what, *place in told:
            fragment, number = map(int, place)
            if what == "#":
                assert (fragment, number) not in begun
                begun.add((fragment, number))
                doubtful = {(fragment, number)}
            elif what == "~":
                doubtful = {(fragment, number)}
            elif what == "+":
                offered[fragment], doubtful = number, set()
            else:
                del offered[fragment]
                doubtful = set()
        with Outbox(folder) as outbox:
            found = {(letter.fragment, letter.round) for letter in outbox.pending()}
            assert found | doubtful == set(offered.items()) | doubtful
            assert all(letter.payload == b"%d" % letter.round * 50 for letter in outbox.pending())
            for fragment in (0, 1):
                assert (fragment, outbox.next_round(fragment)) not in begun
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]
        if code == 0:
            break
    assert at > 100


def test_a_disk_that_refuses_any_one_operation_is_told_and_no_round_is_used_twice(tmp_path):
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
