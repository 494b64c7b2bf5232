"""A standby has every update before its worker is answered, takes over to the bit, and the old hub gives way."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
import torch

from hub_driver import LAYOUT, ONES, RUN, HubDriver
from journal_folders import skip_fsync
from paceline.async_dp.hub.hub_server import HubServer
from paceline.async_dp.hub.hub_settings import HubRules
from paceline.async_dp.standby import mirror_source
from paceline.async_dp.standby.standby_hub import StandbyHub, begin_term
from paceline.async_dp.standby.standby_link import StandbyLink
from paceline.async_dp.standby.term_proof import TermProof
from paceline.async_dp.wal.decision_ledger import read_ledger
from paceline.async_dp.wal.hub_journal import HubJournal
from paceline.async_dp.wal.hub_term import HubTerm
from paceline.errors import UsageError
from paceline.testing import fault_injection

quick = pytest.fixture(autouse=True)(skip_fsync)

STANDBY, SECRET = 900, "the hub's secret"


@pytest.fixture(autouse=True)
def disarmed():
    yield
    fault_injection.disarm()


class Wire:
    """One end of a connection; what is sent through it arrives in the inbox of the other end."""

    def __init__(self):
        self.refused, self.sent_nbytes, self.received_nbytes = Counter(), 0, 0
        self.inbox, self.sent, self.other, self.cut = [], [], None, False

    def send(self, envelope):
        if self.cut:
            return False
        self.sent.append(envelope)
        if self.other is not None and (self.other.number in (None, envelope.header.target)):
            self.other.inbox.append(envelope)
        return True

    number = None

    def poll(self, seconds=0.0):
        taken, self.inbox = self.inbox, []
        return taken

    def peers(self):
        return [] if self.cut else range(2000)

    def close(self):
        pass

    def messages(self, target):
        """Return what was sent to a worker since the last call, as (kind, metadata)."""
        found = [(each.header.kind, each.header) for each in self.sent if each.header.target == target]
        self.sent = [each for each in self.sent if each.header.target != target]
        return found


class Pair:
    """An active hub, and a standby that follows it, in virtual time."""

    def __init__(self, folder, rules=None, *, secret=SECRET):
        self.folder, self.now = folder, 0.0
        self.journal = HubJournal.open(folder / "a", resume=True)
        self.driver = HubDriver(rules, self.journal)
        self.to_workers, self.from_standby = Wire(), Wire()
        self.to_workers.other, self.from_standby.other = self.from_standby, self.to_workers
        self.from_standby.number = STANDBY
        self.link = self.new_link(SECRET)
        self.driver.hub.welcome_meta = self.link.welcome_meta
        self.server = HubServer(self.driver.hub, self.to_workers, self.link)
        self.standby_workers = Wire()
        self.standby = self.new_standby(secret)

    def new_link(self, secret):
        return StandbyLink(self.journal, RUN, HubTerm.read(self.journal.folder.path), secret, lambda: 0.0)

    def new_standby(self, secret=SECRET):
        return StandbyHub(
            self.folder / "b", self.from_standby, self.standby_workers,
            number=STANDBY, secret=secret, address="tcp://b:7000", silent_after=15.0,
        )  # fmt: skip

    def serve(self, *envelopes):
        """Let the active hub handle envelopes of workers, and what came from the standby."""
        self.driver.now = self.now
        self.server.turn([*envelopes, *self.to_workers.poll()], self.now)

    def follow(self):
        return self.standby.turn(self.from_standby.poll(), self.standby_workers.poll(), self.now)

    def run(self, seconds=0.0, *, standby=True):
        """Let both run for a while, 0.1 s per turn and at least 20 turns; return whether the standby takes over."""
        end = self.now + seconds
        for _ in range(20) if not seconds else iter(lambda: self.now < end, False):
            self.serve()
            if standby and self.follow():
                return True
            self.now += 0.1
        return False

    def hello(self, worker):
        self.driver.deliver = self._deliver
        self.driver.hello(worker)

    def _deliver(self, *envelopes):
        self.serve(*envelopes)
        return []

    def join(self, worker):
        self.driver.deliver = self._deliver
        self.driver.join(worker)

    def update(self, worker, round, delta=ONES):
        self.driver.deliver = self._deliver
        self.driver.update(worker, round, delta)

    def acks(self, worker):
        return [header.round for kind, header in self.to_workers.messages(worker) if kind == "ack"]

    def take_over(self):
        """Return the driver of the standby's hub, after the active one is gone."""
        self.standby._target.close()
        journal = HubJournal.open(self.folder / "b", resume=True)
        self.term = begin_term(journal, lambda: 0.0)
        return HubDriver(self.driver.rules, journal)


@pytest.fixture
def pair(tmp_path):
    made = Pair(tmp_path)
    made.run()
    assert made.standby.state == "in sync"
    return made


def test_a_standby_takes_over_to_the_bit(pair):
    pair.join(1)
    for round in range(5):
        pair.update(1, round, torch.randn(LAYOUT.numel))
        pair.run()
    assert pair.acks(1) == [0, 1, 2, 3, 4]
    theta = pair.driver.theta.clone()
    driver = pair.take_over()
    assert torch.equal(driver.theta, theta)
    assert driver.hub.updates == 5
    assert pair.term == HubTerm(2, since=max(each["n"] for each in read_ledger(pair.folder / "b")))
    driver.hello(1)
    (answer,) = driver.update(1, 4, ONES)
    assert (answer.kind, answer.meta["why"], driver.hub.updates) == ("ack", "", 5), "none is merged twice"


def test_no_update_is_answered_before_the_standby_has_it(pair):
    pair.join(1)
    pair.run()
    pair.update(1, 0)
    pair.serve()
    assert pair.acks(1) == []
    assert pair.driver.hub.updates == 1
    pair.follow()
    pair.serve()
    assert pair.acks(1) == [0]
    pair.update(1, 1)
    assert pair.acks(1) == []
    driver = pair.take_over()
    assert driver.hub.updates == 1
    driver.hello(1)
    driver.update(1, 1, ONES)
    assert driver.hub.updates == 2, "its worker was not answered, so it sends it again"


def test_a_standby_that_confirms_nothing_is_dropped_after_a_while(pair, caplog):
    pair.join(1)
    pair.run()
    pair.update(1, 0)
    pair.run(4.0, standby=False)
    assert pair.acks(1) == []
    pair.run(2.0, standby=False)
    assert pair.acks(1) == [0]
    assert "dropped the standby at tcp://b:7000: it confirms nothing" in caplog.text
    states = [each["state"] for each in read_ledger(pair.folder / "a") if each["kind"] == "standby"]
    assert states == ["copying", "in sync", "dropped"]
    pair.run(5.0)
    assert pair.standby.state == "in sync"
    assert pair.take_over().hub.updates == 1


def test_a_standby_continues_an_interrupted_copy(pair, monkeypatch):
    monkeypatch.setattr(mirror_source, "CHUNK_NBYTES", 100)
    pair.join(1)
    for round in range(5):
        pair.update(1, round)
    for _ in range(3):
        pair.serve()
        pair.follow()
    pair.standby._target.close()
    pair.from_standby.inbox.clear()
    pair.standby = pair.new_standby()
    pair.run(5.0)
    pair.run(5.0)
    assert pair.standby.state == "in sync"
    assert pair.take_over().hub.updates == 5


def test_snapshots_are_copied_and_old_files_removed_at_the_standby_too(tmp_path):
    pair = Pair(tmp_path, HubRules(snapshot_every=3))
    pair.run()
    pair.join(1)
    for round in range(20):
        pair.update(1, round)
        pair.run()
    names = [sorted(path.name for path in (tmp_path / each).glob("*-*")) for each in "ab"]
    assert names[0] == names[1]
    assert len(names[0]) == 4
    theta = pair.driver.theta.clone()
    driver = pair.take_over()
    assert (driver.hub.updates, torch.equal(driver.theta, theta)) == (20, True)


def test_a_late_standby_gets_the_newest_snapshot_first(tmp_path):
    pair = Pair(tmp_path, HubRules(snapshot_every=3))
    pair.join(1)
    for round in range(20):
        pair.update(1, round)
    pair.run()
    assert pair.standby.state == "in sync"
    assert pair.take_over().hub.updates == 20


def test_a_standby_with_a_full_disk_continues_when_there_is_room(pair):
    pair.join(1)
    pair.run()
    pair.update(1, 0)
    fault_injection.disk_full(after_nbytes=0)
    pair.follow()
    assert not pair.standby._may_take_over()
    fault_injection.disarm()
    pair.run(5.0)
    assert pair.standby.state == "in sync"
    assert pair.acks(1) == [0]


# ------------------------------------------------------------------ when it takes over


def hello(pair, worker=1):
    pair.standby_workers.inbox += pair.driver.envelopes(_message("hello", worker))


def _message(kind, worker):
    from paceline.async_dp.protocol.hub_messages import HubMessage

    return HubMessage(kind, worker, 0)


def silence(pair, seconds):
    """Let time pass for the standby while the active hub is gone; return whether it takes over."""
    end, taken = pair.now + seconds, False
    while pair.now < end and not taken:
        taken = pair.follow()
        pair.now += 0.5
    return taken


def test_a_standby_takes_over_once_the_hub_is_silent_and_a_worker_comes(pair):
    assert not silence(pair, 60.0)
    hello(pair)
    assert silence(pair, 1.0)


def test_a_standby_waits_out_the_silence_although_workers_come(pair):
    hello(pair)
    assert not silence(pair, 10.0)
    hello(pair)
    assert silence(pair, 10.0)


def test_a_standby_sends_workers_back_while_the_active_hub_answers(pair):
    hello(pair)
    assert not pair.run(20.0)
    assert [kind for kind, _ in pair.standby_workers.messages(1)] == ["standby"]


def test_a_standby_that_lacks_acknowledged_updates_does_not_take_over(pair):
    pair.join(1)
    pair.run()
    pair.update(1, 0)
    pair.run(6.0, standby=False)
    assert pair.acks(1) == [0]
    pair.follow()
    assert not silence(pair, 20.0)
    hello(pair)
    assert not silence(pair, 5.0)
    assert pair.standby.state == "the active hub is gone, and this copy lacks something that it acknowledged"


def test_a_standby_without_the_secret_key_is_refused(tmp_path, caplog):
    pair = Pair(tmp_path, secret="another")
    pair.run(3.0)
    assert "it does not have the hub's secret key (--keys)" in caplog.text
    assert pair.standby.run == ""


def test_a_folder_that_holds_a_run_is_no_standbys(tmp_path):
    with HubJournal.open(tmp_path / "b", resume=False) as journal:
        journal.describe({"run": "x"})
    with pytest.raises(UsageError, match="holds a run that is no standby's copy"):
        Pair(tmp_path)


# ------------------------------------------------------------------ terms


def test_an_old_hub_gives_way_and_names_the_updates_that_the_new_one_lacks(pair, caplog):
    caplog.set_level(logging.INFO)
    pair.join(1)
    pair.update(1, 0)
    pair.run()
    pair.update(1, 1)
    pair.run(6.0, standby=False)
    assert pair.acks(1) == [0, 1], "the standby was dropped"
    driver = pair.take_over()
    proof = TermProof.make(SECRET, RUN, pair.term.number, pair.term.since)
    pair.driver.deliver = pair._deliver
    with pytest.raises(
        UsageError, match=r"term 2 from record \d+ on; this is term 1.* 1 update .*round 1"
    ) as error:
        pair.driver.hello(7, **proof.meta())
    assert "round 0" not in str(error.value)
    assert HubTerm.read(pair.folder / "a").superseded_by == 2
    assert list(read_ledger(pair.folder / "a"))[-1]["kind"] == "superseded"
    assert driver.hub.updates == 1


@pytest.mark.parametrize(
    "proof",
    [
        TermProof(2, 0, ""),
        TermProof.make("another secret", RUN, 2, 0),
        TermProof.make(SECRET, "another run", 2, 0),
        TermProof.make(SECRET, RUN, 1, 0),
    ],
)
def test_a_term_without_a_proof_does_not_stop_a_hub(pair, proof):
    pair.driver.deliver = pair._deliver
    pair.driver.hello(7, **proof.meta())
    pair.run()
    assert [kind for kind, _ in pair.to_workers.messages(7)] == ["welcome", "ask"]


def test_terms_rise_with_every_take_over(tmp_path):
    for number in (2, 3):
        with HubJournal.open(tmp_path, resume=True) as journal:
            assert begin_term(journal, lambda: 0.0).number == number
    HubTerm(3, 0, superseded_by=7).write(tmp_path)
    with HubJournal.open(tmp_path, resume=True) as journal:
        assert begin_term(journal, lambda: 0.0).number == 8
