"""Rows of decisions: repeated refusals are merged, the newest are kept, important ones are not displaced."""

from __future__ import annotations

from paceline.tools.report.hub.bounded_decision_log import DecisionLog, HubDecision


def refused(at, worker=1, reason="not finite"):
    return HubDecision(at=at, worker=worker, what="update refused", why=f"{reason}: at {at}", reason=reason)


def test_a_worker_that_is_refused_again_and_again_has_one_row():
    log = DecisionLog()
    for at in range(1000):
        log.add(refused(at, worker=at % 2))
    first, second = log.newest()
    assert (first.worker, first.repeats, first.at, first.last, first.why) == (
        0,
        500,
        0,
        998,
        "not finite: at 0",
    )
    assert (second.worker, second.repeats) == (1, 500)
    assert (log.rows, log.hidden) == (2, 0)


def test_another_reason_or_something_in_between_is_another_row():
    log = DecisionLog()
    for each in (
        refused(0),
        refused(1, reason="stale"),
        refused(2),
        HubDecision(at=3, worker=1, what="left"),
        refused(4),
    ):
        log.add(each)
    log.add(HubDecision(at=5, worker=1, what="put in quarantine"), important=True)
    log.add(refused(6))
    assert [each.repeats for each in log.newest()] == [1] * 7


def test_a_worker_that_joins_twice_has_two_rows():
    log = DecisionLog()
    log.add(HubDecision(at=0, worker=1, what="joined"))
    log.add(HubDecision(at=1, worker=1, what="joined"))
    assert log.rows == 2


def test_only_the_newest_are_shown_with_the_number_of_the_others():
    log = DecisionLog(limit=10)
    for at in range(25):
        log.add(HubDecision(at=at, worker=at, what="joined"))
    assert [each.at for each in log.newest()] == list(range(15, 25))
    assert log.hidden == 15


def test_joins_do_not_displace_important_decisions_or_the_reverse():
    log = DecisionLog(limit=10)
    for at in range(8):
        log.add(HubDecision(at=at, worker=at, what="replaced"), important=True)
    for at in range(100, 200):
        log.add(HubDecision(at=at, worker=at, what="joined"))
    assert [each.at for each in log.newest()] == [3, 4, 5, 6, 7, 195, 196, 197, 198, 199]
    log = DecisionLog(limit=10)
    for at in range(100):
        log.add(HubDecision(at=at, worker=at, what="replaced"), important=True)
    log.add(HubDecision(at=200, worker=1, what="joined"))
    assert [each.at for each in log.newest()] == [*range(91, 100), 200]


def test_an_evicted_row_is_not_counted_further():
    log = DecisionLog(limit=3)
    log.add(refused(0, worker=7))
    for at in range(1, 4):
        log.add(HubDecision(at=at, worker=at, what="joined"))
    log.add(refused(4, worker=7))
    assert [(each.at, each.repeats) for each in log.newest()] == [(2, 1), (3, 1), (4, 1)]
