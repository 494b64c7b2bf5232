"""A launcher that is warned passes that on to its ranks once, waits for them, and ends with their code 75."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import paceline
from paceline.launch.agent.rendezvous_address import free_port, is_port_taken
from warm_commands import start_command
from warned_training import PROGRAM, Lines, newest

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1
STEPS = 60

pytestmark = pytest.mark.timeout(120)


class Command:
    """A launcher with a training in a folder; one of several hosts has a name of its own for its output.

    The command ``paceline`` and its ranks are forked from a process that has imported torch.
    """

    def __init__(self, folder, launcher, *words, name="output", env=()):
        self.folder, self.lines, self.output = folder, Lines(folder), folder / name
        source = str(Path(paceline.__file__).parents[1])
        environment = os.environ | {"PYTHONPATH": f"{source}:{Path(PROGRAM).parent}", "OMP_NUM_THREADS": "1"}
        environment |= {"PYTHONUNBUFFERED": "1", "TMPDIR": str(folder)} | dict(env)
        words = [*launcher[1:], PROGRAM, str(folder), *words]
        with self.output.open("ab") as output:
            if launcher[0] == "paceline":
                self.process = start_command(words, env=environment, output=output)
            else:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", launcher[0], *words],
                    stdout=output,
                    stderr=output,
                    env=environment,
                    process_group=0,
                )

    def wait_for(self, condition, seconds=60):
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or self.process.poll() is not None:
                self.kill()
                raise AssertionError(self.text())
            time.sleep(0.01)

    def reach(self, step):
        self.wait_for(lambda: self.lines.last_step() >= step)

    def end(self):
        try:
            return self.process.wait(90)
        finally:
            self.kill()

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def text(self):
        logs = sorted(self.folder.rglob("rank*.log"))
        return "\n".join(path.read_text(errors="replace") for path in [self.output, *logs])

    def runs_none(self):
        """Return whether none of the ranks is left."""
        return not any(Path(f"/proc/{pid}").exists() for pid in self.lines.by_process())


def paceline_run(folder, ranks, *options):
    return ["paceline", "run", "--nproc-per-node", str(ranks), "--log-dir", str(folder / "logs"), *options]


def torchrun(ranks):
    return ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "3"]


def check_each_step_once(folder, ranks):
    """Check that all ranks have done each step once, over all their lives."""
    done = sorted(step for steps in Lines(folder).steps().values() for step in steps)
    assert done == sorted([*range(1, STEPS + 1)] * ranks)


def check_saved(command):
    """Check that the newest checkpoint is of the step that all ranks have done last."""
    assert len({steps[-1] for steps in command.lines.steps().values() if steps}) == 1
    assert newest(command.folder) == command.lines.last_step() > 0
    assert command.runs_none()


@pytest.mark.parametrize("number", [TERM, USR1])
def test_a_warned_command_saves_ends_with_75_and_continues_when_it_is_started_again(tmp_path, number):
    command = Command(tmp_path, paceline_run(tmp_path, 2))
    command.reach(5)
    command.process.send_signal(number)
    assert command.end() == 75, command.text()
    check_saved(command)
    text = command.text()
    assert f"paceline: warned by {number.name}; 2 ranks may save and leave within 600 s" in text
    assert f"warned by {number.name}: all ranks leave after step" in text or "was warned by" in text
    assert "restart 1" not in text
    again = Command(tmp_path, paceline_run(tmp_path, 2))
    assert again.end() == 0, again.text()
    check_each_step_once(tmp_path, 2)


@pytest.mark.thorough
def test_a_signal_that_a_scheduler_sends_to_every_process_is_one_warning(tmp_path):
    command = Command(tmp_path, paceline_run(tmp_path, 2))
    command.reach(5)
    for pid in [*command.lines.by_process(), command.process.pid]:
        os.kill(pid, TERM)
    with contextlib.suppress(ProcessLookupError):
        command.process.send_signal(TERM)
    assert command.end() == 75, command.text()
    check_saved(command)


@pytest.mark.parametrize("workers", ["0", "1"])
def test_torchrun_passes_a_sigterm_on_and_its_ranks_save(tmp_path, workers):
    """It signals their process groups, in which the workers of loaders are."""
    command = Command(tmp_path, torchrun(2), "3", "0.02", f"workers={workers}")
    command.reach(5)
    command.process.send_signal(TERM)
    assert command.end() != 0
    check_saved(command)
    again = Command(tmp_path, torchrun(2), "3", "0.002", f"workers={workers}")
    assert again.end() == 0, again.text()
    check_each_step_once(tmp_path, 2)


@pytest.mark.thorough
def test_ctrl_c_saves_too(tmp_path):
    command = Command(tmp_path, paceline_run(tmp_path, 2))
    command.reach(5)
    command.process.send_signal(signal.SIGINT)
    assert command.end() == 130, command.text()
    check_saved(command)
    assert "Traceback" not in command.text()


@pytest.mark.thorough
def test_a_second_ctrl_c_ends_all_at_once(tmp_path):
    (tmp_path / "hold-save").touch()
    command = Command(tmp_path, paceline_run(tmp_path, 2, "--grace", "100s"))
    command.reach(3)
    command.process.send_signal(signal.SIGINT)
    command.wait_for(lambda: command.lines.count("at save"))
    command.process.send_signal(signal.SIGINT)
    assert command.end() == 130, command.text()
    assert newest(tmp_path) == 0
    assert command.runs_none()


def test_a_second_signal_ends_all_at_once(tmp_path):
    (tmp_path / "hold-save").touch()
    command = Command(tmp_path, paceline_run(tmp_path, 2, "--grace", "100s"))
    command.reach(3)
    command.process.send_signal(TERM)
    command.wait_for(lambda: command.lines.count("at save"))
    time.sleep(2.1)
    command.process.send_signal(TERM)
    assert command.end() == 143, command.text()
    assert newest(tmp_path) == 0
    assert command.runs_none()


@pytest.mark.thorough
def test_ranks_that_still_run_after_the_grace_are_killed(tmp_path):
    (tmp_path / "hold-save").touch()
    command = Command(tmp_path, paceline_run(tmp_path, 2, "--grace", "1s"))
    command.reach(3)
    command.process.send_signal(USR1)
    assert command.end() == 138, command.text()
    assert "rank 0 is ended" in command.text()
    assert command.runs_none()


@pytest.mark.thorough
def test_a_program_that_ends_within_the_grace_has_ended_well(tmp_path):
    (tmp_path / "hold-last").touch()
    command = Command(tmp_path, paceline_run(tmp_path, 2), "1")
    command.wait_for(lambda: command.lines.count("at last") == 2)
    command.process.send_signal(TERM)
    command.wait_for(lambda: "warned by" in command.text())
    (tmp_path / "hold-last").unlink()
    assert command.end() == 0, command.text()


@pytest.mark.thorough
def test_a_save_that_fails_ends_with_the_error_and_without_a_restart(tmp_path):
    full = {"PACELINE_FAULTS": "disk_full(after_nbytes=50, rank=1)"}
    command = Command(tmp_path, paceline_run(tmp_path, 2), env=full)
    command.reach(3)
    command.process.send_signal(TERM)
    assert command.end() == 1, command.text()
    text = command.text()
    assert "ended with exit code 1" in text
    assert "No space left on device" in text
    assert "restart 1" not in text
    assert newest(tmp_path) == 0


@pytest.mark.thorough
def test_ranks_that_save_on_a_warning_do_not_hold_a_restart_up(tmp_path):
    """When one is killed, the others can't save: they are ended without the grace of a hundred seconds."""
    (tmp_path / "hold-first").write_text("3")
    command = Command(tmp_path, paceline_run(tmp_path, 2, "--grace", "100s"))
    command.wait_for(lambda: command.lines.count("at first") == 2)
    pids = sorted(command.lines.by_process())
    os.kill(pids[1], signal.SIGKILL)
    command.wait_for(lambda: len(command.lines.by_process()) == 4)
    (tmp_path / "hold-first").unlink()
    assert command.end() == 0, command.text()
    assert "restart 1: rank 1" in command.text() or "restart 1: rank 0" in command.text()


@pytest.mark.thorough
def test_a_notice_that_stays_ends_the_command_with_75(tmp_path):
    """The first time the ranks are started again; then they leave at once."""
    command = Command(tmp_path, paceline_run(tmp_path, 2), "3", "0.1")
    command.reach(3)
    (tmp_path / "notice").touch()
    assert command.end() == 75, command.text()
    check_saved(command)
    text = command.text()
    assert "restart 1: rank" in text
    assert "left in order (exit code 75)" in text
    assert "as in the world before" in text


# ------------------------------------------------------------------ two hosts


def two_hosts(folder, minimum, second_module="paceline"):
    """Start two hosts of one rank each on this machine; return that which serves the rendezvous, and the other.

    `second_module` has the command of the other one.
    """
    port = free_port()
    options = ["--nnodes", f"{minimum}:2", "--rendezvous", f"127.0.0.1:{port}", "--insecure"]
    launcher = paceline_run(folder, 1, *options, "--last-call", "1s")
    first = Command(folder, launcher, "3", "0.03", name="first")
    first.wait_for(lambda: is_port_taken(port))
    return first, Command(folder, [second_module, *launcher[1:]], "3", "0.03", name="second")


def test_one_of_two_hosts_is_warned_and_the_other_continues_from_the_same_step(tmp_path):
    first, second = two_hosts(tmp_path, 1)
    first.reach(5)
    second.process.send_signal(TERM)
    assert second.end() == 75, second.text()
    saved = newest(tmp_path)
    assert saved >= 5
    assert first.end() == 0, first.text()
    steps = sorted(first.lines.steps().values())
    assert [each[0] for each in steps] == [1, 1, saved + 1], "each step once"
    assert "1 rank on 1 host" in first.text()


@pytest.mark.thorough
def test_the_host_that_serves_the_rendezvous_is_warned_and_all_end_with_75(tmp_path):
    first, second = two_hosts(tmp_path, 2)
    first.reach(5)
    first.process.send_signal(TERM)
    assert (first.end(), second.end()) == (75, 75), first.text() + second.text()
    check_saved(first)
    assert "restart 1" not in first.text() + second.text()


def test_a_host_that_learns_of_the_warning_and_is_signalled_as_well_lets_its_ranks_save(tmp_path):
    """A scheduler signals all hosts, and the signal may reach one after the news of the others."""
    first, second = two_hosts(tmp_path, 2, second_module="signalled_launcher")
    first.reach(5)
    first.process.send_signal(USR1)
    assert (first.end(), second.end()) == (75, 75), first.text() + second.text()
    check_saved(first)


@pytest.mark.thorough
@pytest.mark.parametrize("seconds", [0.0, 0.3, 1.0])
def test_a_host_that_learns_of_the_warning_while_its_ranks_end_or_after_ends_with_75(tmp_path, seconds):
    first, second = two_hosts(tmp_path, 2)
    first.reach(5)
    second.process.send_signal(signal.SIGSTOP)  # its command, not its rank
    first.process.send_signal(USR1)
    first.wait_for(lambda: newest(tmp_path) > 0)
    time.sleep(seconds)
    second.process.send_signal(signal.SIGCONT)
    assert (first.end(), second.end()) == (75, 75), first.text() + second.text()
    check_saved(first)
    assert "restart 1" not in first.text() + second.text()
