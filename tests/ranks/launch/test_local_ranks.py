"""Local ranks: success, failures, hangs, signals, and nothing left behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

import paceline
from paceline._core.processes.child_process import ChildProcess, stop_processes
from paceline.errors import RankFailed, UsageError
from paceline.launch.process.local_ranks import run_ranks

SOURCE = str(Path(paceline.__file__).parents[1])

# Every rank first records its process id, so that the test can check whether it still runs.
NOTE = """
import os, signal, subprocess, sys, time
from pathlib import Path
rank, folder = int(os.environ["RANK"]), Path(os.environ["FOLDER"])
def note(name, text):
    (folder / "part").mkdir(exist_ok=True)
    part = folder / "part" / name
    part.write_text(str(text))
    part.rename(folder / name)
def wait_for(*names):
    while not all((folder / name).exists() for name in names):
        time.sleep(0.01)
note(f"pid{rank}", os.getpid())
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder of its own for temporary files, where nothing may stay, and one for the program's notes."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "notes").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("FOLDER", str(tmp_path / "notes"))
    monkeypatch.setenv("PYTHONPATH", SOURCE)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def program(body):
    return ["-c", NOTE + body]


def notes(home):
    return {path.name: path.read_text() for path in (home / "notes").iterdir() if path.is_file()}


def assert_gone(home, *names):
    for name in names:
        process = int((home / "notes" / name).read_text())
        deadline = time.monotonic() + 20
        while psutil.pid_exists(process) and psutil.Process(process).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, f"process {process} ({name}) is still there"
            time.sleep(0.02)


def assert_clean(home, ranks):
    assert_gone(home, *(f"pid{rank}" for rank in range(ranks)))
    assert list((home / "tmp").iterdir()) == []


@pytest.mark.thorough
def test_ranks_get_their_numbers_and_join_without_a_port(home):
    body = """
import paceline, torch
world = paceline.init()
total = torch.tensor([world.rank + 1.0])
torch.distributed.all_reduce(total)
note(f"world{rank}", (world.rank, world.size, world.local_rank, world.local_size, world.nodes, total.item()))
paceline.shutdown()
"""
    run_ranks(program(body), 3, timeout=120)
    lines = notes(home)
    assert [eval(lines[f"world{rank}"]) for rank in range(3)] == [
        (rank, 3, rank, 3, 1, 6.0) for rank in range(3)
    ]
    assert_clean(home, 3)


def test_variables_are_passed_on_and_arguments_kept(home):
    body = 'note(f"said{rank}", os.environ["GREETING"] + " " + " ".join(sys.argv[1:]))'
    run_ranks([*program(body), "--a b", "é"], 2, env={"GREETING": "hello"}, timeout=60)
    assert notes(home)["said1"] == "hello --a b é"


def test_rank_0_writes_here_and_the_others_to_logs(home, capfd):
    run_ranks(
        program('print("out", rank); print("err", rank, file=sys.stderr)'),
        2,
        log_dir=home / "a/logs",
        timeout=60,
    )
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("out 0\n", "err 0\n")
    assert (home / "a/logs/rank1.log").read_text() == "out 1\nerr 1\n"
    assert sorted(path.name for path in (home / "a/logs").iterdir()) == ["rank1.log"]
    assert_clean(home, 2)


@pytest.mark.sweep
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_the_first_rank_that_fails_ends_all_and_is_named(home, bad):
    body = f"""
wait_for("pid0", "pid1", "pid2")
if rank == {bad}:
    sys.stderr.write("line one\\nthe reason\\n")
    sys.exit(3)
time.sleep(600)
"""
    with pytest.raises(RankFailed, match=rf"\[rank {bad}\] ended with exit code 3") as caught:
        run_ranks(program(body), 3, timeout=120)
    assert caught.value.rank == bad
    if bad:
        assert f"rank {bad} | line one\n  rank {bad} | the reason" in str(caught.value)
    assert_clean(home, 3)


def test_a_kept_log_is_named_and_only_its_end_is_shown(home):
    with pytest.raises(RankFailed) as caught:
        run_ranks(
            program("[print('line', n) for n in range(100)]; sys.exit(rank)"),
            2,
            log_dir=home / "logs",
            timeout=60,
        )
    text = str(caught.value)
    assert f"its complete output is in {home}/logs/rank1.log" in text
    assert "line 99" in text
    assert "line 50\n" not in text
    assert "after it" not in text


def test_ranks_that_fail_of_the_same_cause_are_named_after_the_first(home):
    body = """
if rank == 1:
    note("failed", "")
    os.kill(os.getpid(), signal.SIGKILL)
wait_for("failed")
time.sleep(0.3)
sys.exit(5)
"""
    with pytest.raises(
        RankFailed, match=r"\[rank 1\] was ended by SIGKILL; after it rank 0 \(ended with exit code 5\)"
    ) as caught:
        run_ranks(program(body), 2, timeout=60)
    assert "out of memory" in caught.value.remedy
    assert_clean(home, 2)


@pytest.mark.thorough
def test_a_hang_ends_when_time_is_up(home):
    body = """
if rank == 1:
    print("waiting for godot")
    note("printed", "")
    time.sleep(600)
wait_for("printed")
"""
    with pytest.raises(
        RankFailed, match=r"\[rank 1\] not finished within 3 s: rank 1 still running"
    ) as caught:
        run_ranks(program(body), 2, timeout=3)
    assert "rank 1 | waiting for godot" in str(caught.value)
    assert_clean(home, 2)


def test_a_rank_that_ignores_sigterm_or_is_stopped_is_ended_too(home, monkeypatch):
    monkeypatch.setattr("paceline._core.processes.child_process._TERMINATE_SECONDS", 0.5)
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
note(f"ready{rank}", "")
wait_for("ready0", "ready1", "ready2")
if rank == 0:
    sys.exit(1)
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(600)
"""
    with pytest.raises(RankFailed, match=r"\[rank 0\]"):
        run_ranks(program(body), 3, timeout=60)
    assert_clean(home, 3)


def test_children_of_ranks_end_with_them(home):
    body = (
        'note(f"child{rank}", subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)'
    )
    run_ranks(program(body), 2, timeout=60)
    assert_gone(home, "child0", "child1")
    assert_clean(home, 2)


PARENT = """
import sys
from paceline.launch.process.local_ranks import run_ranks
try:
    run_ranks(sys.argv[1:], 2, timeout=300)
except KeyboardInterrupt:
    print("interrupted"); sys.exit(130)
"""


def print_signals():
    """Take signals as usual, also where the tests run under a shell's background job or nohup."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def ignore_hangups():
    """As nohup does."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


@pytest.fixture
def start_parent(home):
    """Start a process that runs two ranks which sleep; it is ended with the test at the latest."""
    started = []

    def start(prepare=print_signals):
        body = 'note(f"ready{rank}", ""); time.sleep(600)'
        command = [sys.executable, "-c", PARENT, *program(body)]
        parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=prepare)
        started.append(parent)
        deadline = time.monotonic() + 60
        while not {"ready0", "ready1"} <= notes(home).keys():
            assert parent.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return parent

    yield start
    for parent in started:
        parent.kill()  # its ranks end with it
        parent.wait()


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, ""), (signal.SIGHUP, 129, "")],
)
def test_a_signal_to_the_parent_ends_all_in_order(home, start_parent, number, code, message):
    parent = start_parent()
    parent.send_signal(number)
    assert parent.communicate(timeout=60)[0] == message
    assert parent.returncode == code
    assert_clean(home, 2)


def test_a_hangup_that_is_ignored_stays_ignored(home, start_parent):
    parent = start_parent(ignore_hangups)
    parent.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        parent.wait(timeout=1)
    parent.send_signal(signal.SIGTERM)
    parent.communicate(timeout=60)
    assert parent.returncode == 143
    assert_clean(home, 2)


def test_a_log_folder_that_cannot_be_made_or_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="logs can't be written"):
        run_ranks(["-c", "pass"], 1, log_dir=tmp_path / "file" / "logs")

    def refuse(**_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(UsageError, match="Read-only file system"):
        run_ranks(["-c", "pass"], 2, log_dir=tmp_path)


def test_a_reaped_process_is_sent_no_signal(monkeypatch):
    """Its number may be another process's by then."""
    child = ChildProcess(subprocess.Popen([sys.executable, "-S", "-c", ""], process_group=0))
    stop_processes([child])
    monkeypatch.setattr(os, "killpg", lambda *_: pytest.fail("a signal was sent"))
    child.signal_group(signal.SIGKILL)
    stop_processes([child])


def test_a_signal_without_a_name_is_reported_by_number(home):
    with pytest.raises(RankFailed, match="was ended by signal 40"):
        run_ranks(["-c", "import os; os.kill(os.getpid(), 40)"], 1, timeout=60)


def test_ranks_die_with_a_parent_that_is_killed(home, start_parent):
    parent = start_parent()
    parent.kill()
    parent.communicate(timeout=60)
    assert_gone(home, "pid0", "pid1")


def test_signal_handlers_are_put_back(home):
    before = signal.getsignal(signal.SIGTERM)
    run_ranks(program(""), 1, timeout=60)
    assert signal.getsignal(signal.SIGTERM) is before


def test_it_runs_in_a_thread_too(home):
    outcome = []

    def run():
        try:
            run_ranks(program("sys.exit(rank)"), 2, timeout=60)
        except RankFailed as error:
            outcome.append(error.rank)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=60)
    assert outcome == [1]
    assert_clean(home, 2)


def test_an_outer_launcher_does_not_confuse_the_ranks(home, monkeypatch):
    for name, value in {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "OMPI_COMM_WORLD_RANK": "5"}.items():
        monkeypatch.setenv(name, value)
    body = """
from paceline.world import read_environment
place = read_environment(os.environ)
note(f"place{rank}", (place.rank, place.size, place.init_method.startswith("file:///")))
"""
    run_ranks(program(body), 2, timeout=60)
    assert [notes(home)[f"place{rank}"] for rank in range(2)] == ["(0, 2, True)", "(1, 2, True)"]


@pytest.mark.parametrize(
    ("argv", "ranks", "text"), [([], 2, "no program"), (["-V"], 0, "ranks=0"), (["-V"], -1, "ranks=-1")]
)
def test_programs_that_cannot_run_are_refused(argv, ranks, text):
    with pytest.raises(UsageError, match=text):
        run_ranks(argv, ranks)


def test_the_pdeathsig_wrapper_keeps_the_process_id():
    from paceline._core.processes import pdeathsig

    code = "import os; print(os.getpid())"
    command = [sys.executable, pdeathsig.__file__, str(os.getpid()), sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert int(child.communicate(timeout=60)[0]) == child.pid
