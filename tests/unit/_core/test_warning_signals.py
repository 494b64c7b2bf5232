"""Signals that warn a process: the first is taken, its repetitions are the same warning, a later one ends it."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from forked_child import ended, in_child, start
from paceline._core.processes.warning_signals import SAME_SECONDS, WarnedExit, WarningSignals, warnings_raise

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


@pytest.fixture(autouse=True)
def default_actions():
    """Other tests may have left handlers."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (TERM, USR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_first_signal_is_taken_and_its_repetitions_are_the_same_warning():
    def work():
        taken, now = [], [0.0]
        signals = WarningSignals(taken.append, clock=lambda: now[0])
        assert signals.install() == [TERM, USR1]
        assert not signals.taken
        for seconds, number in ((0.0, USR1), (0.1, TERM), (SAME_SECONDS - 0.01, USR1)):
            now[0] = seconds
            signal.raise_signal(number)
        assert signals.taken
        signals.restore()
        assert signal.getsignal(TERM) is signal.getsignal(USR1) is signal.SIG_DFL
        return taken == [USR1]

    assert in_child(work) == 0


@pytest.mark.parametrize("number", [TERM, USR1])
def test_a_later_signal_has_its_default_action(number):
    def work():
        now = [0.0]
        WarningSignals(lambda _: None, clock=lambda: now[0]).install()
        signal.raise_signal(TERM)
        now[0] = SAME_SECONDS
        signal.raise_signal(number)

    assert in_child(work) == -number


def test_the_first_signal_after_a_warning_from_elsewhere_does_nothing_however_late_it_comes():
    def work():
        taken, ended, now = [], [], [0.0]
        signals = WarningSignals(taken.append, ended.append, clock=lambda: now[0])
        signals.install()
        signals.note_warning()
        assert signals.taken
        for seconds, number in ((100.0, USR1), (100.0 + SAME_SECONDS - 0.01, TERM)):
            now[0] = seconds
            signal.raise_signal(number)
        assert not ended
        now[0] = 100.0 + SAME_SECONDS
        signal.raise_signal(TERM)
        return not taken and ended == [TERM]

    assert in_child(work) == 0


def test_other_handlers_stay_and_those_of_c_code_too():
    def work():
        signal.signal(TERM, lambda *_: None)
        faulthandler.register(USR1)
        signals = WarningSignals(lambda _: None)
        found = [signals.install()]
        faulthandler.unregister(USR1)
        found.append(signals.install())
        signal.signal(TERM, signal.SIG_IGN)
        found.append(signals.install())
        found.append(signals.install([TERM], replace=True))
        signals.restore()
        assert signal.getsignal(TERM) is signal.SIG_IGN
        return found == [[], [USR1], [USR1], [USR1, TERM]]

    assert in_child(work) == 0


def test_handlers_that_replaced_ours_stay():
    def work():
        signals = WarningSignals(lambda _: None)
        signals.install()
        signal.signal(TERM, signal.SIG_IGN)
        signals.restore()
        return signal.getsignal(TERM) is signal.SIG_IGN

    assert in_child(work) == 0


def test_a_forked_child_is_warned_of_nothing_and_ended_by_sigterm():
    def work():
        taken = []
        WarningSignals(taken.append).install()

        def child():
            signal.raise_signal(USR1)
            assert not taken
            signal.raise_signal(TERM)

        pid = start(child)
        return ended(pid) == -TERM and not taken

    assert in_child(work) == 0


def test_a_child_that_trains_itself_is_warned():
    def work():
        taken = []
        signals = WarningSignals(taken.append)
        signals.install()
        signal.raise_signal(USR1)

        def child():
            signals.install()
            signal.raise_signal(TERM)
            return taken == [USR1, TERM]

        return ended(start(child)) == 0

    assert in_child(work) == 0


def test_in_other_threads_nothing_is_installed():
    found = []

    def work():
        signals = WarningSignals(lambda _: None)
        found.append(signals.install())
        signals.restore()
        with warnings_raise():
            found.append(signal.getsignal(TERM))

    before = signal.getsignal(TERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [[], before]


@pytest.mark.parametrize("number", [TERM, USR1])
def test_a_launcher_is_warned_by_an_exception_and_then_ended_by_another(number):
    def work():
        with warnings_raise():
            with pytest.raises(WarnedExit) as warned:
                os.kill(os.getpid(), number)
            signal.raise_signal(number)  # from a scheduler and a launcher
            with pytest.raises(SystemExit) as hangup:
                signal.raise_signal(signal.SIGHUP)
            time.sleep(SAME_SECONDS + 0.01)
            with pytest.raises(SystemExit) as again:
                signal.raise_signal(number)
        assert warned.value.number == number
        codes = [each.value.code for each in (warned, hangup, again)]
        assert codes == [128 + number, 129, 128 + number]
        assert not any(isinstance(each.value, WarnedExit) for each in (hangup, again))
        return all(signal.getsignal(each) is signal.SIG_DFL for each in (TERM, USR1, signal.SIGHUP))

    assert in_child(work) == 0


def test_a_launcher_that_was_warned_by_another_is_not_ended_by_its_first_signal():
    def work():
        with warnings_raise() as warnings:
            warnings.note_warning()
            signal.raise_signal(TERM)
            time.sleep(SAME_SECONDS + 0.01)
            with pytest.raises(SystemExit) as again:
                signal.raise_signal(TERM)
        return not isinstance(again.value, WarnedExit) and again.value.code == 143

    assert in_child(work) == 0


RANK = """
signals = WarningSignals(lambda number: None)
signals.install()
signal.raise_signal(signal.SIGTERM)
signals.ignore_at_exit()
raise SystemExit(75)
"""
LAUNCHER = """
with warnings_raise():
    try:
        signal.raise_signal(signal.SIGTERM)
    except WarnedExit:
        raise SystemExit(75)
"""


@pytest.mark.parametrize("leave", [RANK, LAUNCHER], ids=["rank", "launcher"])
@pytest.mark.parametrize("number", [TERM, USR1])
def test_a_signal_while_the_interpreter_ends_does_not_change_the_exit_code(leave, number):
    """Modules are torn down after Python has reset its handlers."""
    begin = f"""
import os, signal
from paceline._core.processes.warning_signals import *

class TornDown:
    def __del__(self, kill=os.kill, pid=os.getpid()):
        kill(pid, {int(number)})

torn_down = TornDown()
"""
    done = subprocess.run([sys.executable, "-c", begin + leave], capture_output=True, text=True, check=False)
    assert done.returncode == 75, done.stderr


def test_ignored_signals_stay_ignored():
    def work():
        for number in (TERM, USR1, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        with warnings_raise():
            for number in (TERM, USR1, signal.SIGHUP):
                signal.raise_signal(number)
        return all(signal.getsignal(each) is signal.SIG_IGN for each in (TERM, USR1, signal.SIGHUP))

    assert in_child(work) == 0
