"""Exit status of a process that is not our child: by exit code, by signal, reaped or not."""

from __future__ import annotations

import os
import signal
import time

import pytest

from forked_child import start
from paceline._core.processes.process_exit import ExitStatus, exit_status_of, has_ended


def end(how):
    def work():
        if how < 0:
            if how != -signal.SIGKILL:
                signal.signal(-how, signal.SIG_DFL)  # whatever handler this process has inherited
            os.kill(os.getpid(), -how)
            time.sleep(30)
        os._exit(how)

    return start(work)


@pytest.mark.parametrize("how", [0, 1, 3, 255, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGUSR1])
def test_an_exit_is_detected_before_the_parent_reaps_it(how):
    pid = end(how)
    pidfd = os.pidfd_open(pid)
    try:
        assert exit_status_of(pidfd, pid) == ExitStatus(how)
        assert exit_status_of(-1, pid) == ExitStatus(how)
        assert has_ended(pidfd)
    finally:
        os.waitpid(pid, 0)
        os.close(pidfd)


@pytest.mark.parametrize("how", [0, 3, -signal.SIGKILL])
def test_an_exit_is_detected_after_the_parent_reaped_it(how):
    pid = end(how)
    pidfd = os.pidfd_open(pid)
    os.waitpid(pid, 0)
    try:
        assert exit_status_of(pidfd, pid) in (
            ExitStatus(how),
            ExitStatus(None),
        )  # Linux reports it since 6.15
    finally:
        os.close(pidfd)


def test_a_process_that_continues_is_not_waited_for():
    pidfd = os.pidfd_open(os.getpid())
    assert not has_ended(pidfd)
    assert exit_status_of(pidfd, os.getpid()) == ExitStatus(None)
    assert not has_ended(-1)
    os.close(pidfd)


def test_descriptors_beyond_1024_do():
    """As select() does not."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 2048:
        pytest.skip("no more than 2048 files may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, limits[1]))
    pid = end(3)
    pidfd = os.pidfd_open(pid)
    try:
        os.dup2(pidfd, 1500)
        assert exit_status_of(1500, pid) == ExitStatus(3)
    finally:
        os.close(1500)
        os.close(pidfd)
        os.waitpid(pid, 0)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-9, "ended by SIGKILL"),
        (-99, "ended by signal 99"),
        (None, "exit code unknown"),
    ],
)
def test_an_end_is_described_in_words(code, text):
    assert str(ExitStatus(code)) == text
