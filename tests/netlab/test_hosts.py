"""Hosts of a lab: isolation, running, killing and stopping programs, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from paceline.errors import HostFailed, UsageError
from paceline.testing.netlab import Lab

pytestmark = pytest.mark.timeout(120)

FOREVER = "while :; do sleep 0.05; done"
# setsid leaves the process group, and its parent ends: an orphan
ORPHAN = "setsid sh -c 'sleep 1000' & sleep 0.2"


def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def processes(lab, host):
    """Return the command lines of a host, but for its first process and those that list them."""
    listing = "for p in /proc/[0-9]*; do tr '\\0\\n' '  ' < $p/cmdline; echo; done 2>/dev/null"
    lines = lab.run(listing, on=host)[0].stdout.splitlines()
    return [
        line for line in lines if line.strip() and "namespace_main.py" not in line and "cmdline" not in line
    ]


def test_each_host_has_a_name_an_address_and_knows_the_others(lab):
    command = "hostname; getent hosts host0 host1 host2 | awk '{print $1}'"
    for host, result in enumerate(lab.run(command)):
        name, *addresses = result.stdout.split()
        assert (result.host, result.code, name) == (host, 0, f"host{host}")
        assert addresses == lab.addresses


def test_each_host_has_its_own_network_processes_and_shared_memory(lab):
    lab.run("echo secret > /dev/shm/mine; ls /dev/shm", on=0)
    seen = lab.run(
        "ls /dev/shm; cut -d: -f1 /proc/net/dev | tail -n +3; cat /proc/1/cmdline | tr '\\0' ' '", on=1
    )
    devices = seen[0].stdout
    assert "mine" not in devices
    assert "eth0" in devices
    assert "hold host1" in devices
    assert not Path("/dev/shm/mine").exists()
    assert lab.run("cat /dev/shm/mine", on=0)[0].stdout == "secret\n"


def test_the_disk_the_folder_and_the_environment_are_shared(lab, tmp_path):
    (tmp_path / "greeting.txt").write_text("hello\n")
    env = {"COLOUR": "blue"}
    (result,) = lab.run(
        "cat greeting.txt; echo $COLOUR $GLOO_SOCKET_IFNAME; pwd", on=2, cwd=tmp_path, env=env
    )
    assert result.stdout == f"hello\nblue eth0\n{tmp_path}\n"
    assert (
        lab.run(["python", "-c", "import sys; print(sys.executable)"], on=0)[0].stdout.strip()
        == sys.executable
    )


def test_a_module_is_run_by_this_python(lab, tmp_path):
    (tmp_path / "named.py").write_text("import socket, sys; print(socket.gethostname(), sys.argv[1:])")
    results = lab.run(["-m", "named", "a", "-b"], cwd=tmp_path, on=[0, 1])
    assert [one.stdout for one in results] == [f"host{host} ['a', '-b']\n" for host in range(2)]


def test_output_and_exit_codes_are_per_host(lab):
    command = "echo out; echo err >&2; [ $(hostname) = host1 ] && exit 3; [ $(hostname) = host2 ] && kill -SEGV $$; :"
    results = lab.run(command, check=False)
    assert [result.code for result in results] == [0, 3, -signal.SIGSEGV]
    assert {(result.stdout, result.stderr) for result in results} == {("out\n", "err\n")}
    assert all(result.seconds > 0 for result in results)


def test_much_output_does_not_block(lab):
    (result,) = lab.run("seq 200000; seq 200000 >&2", on=0, timeout=60)
    assert len(result.stdout) == len(result.stderr) > 1_000_000


def test_lines_appear_while_it_runs(lab):
    job = lab.start(
        "echo first; while [ ! -e /dev/shm/go ]; do sleep 0.02; done; echo second; printf end", on=[0, 1]
    )
    seen = []
    until(lambda: seen.extend(job.lines()) or len(seen) == 2)
    assert sorted(seen) == [(0, "first"), (1, "first")]
    assert job.running() == [0, 1]
    lab.run("touch /dev/shm/go", on=[0, 1])
    until(lambda: not job.running())
    assert sorted(job.lines()) == [(0, "end"), (0, "second"), (1, "end"), (1, "second")]
    assert [result.stdout for result in job.wait()] == ["first\nsecond\nend"] * 2
    lab.run("rm /dev/shm/go", on=[0, 1])


def test_follow_counts_ticks_and_shows_the_rest(lab, capsys):
    ticks = []
    lab.start("echo tick; echo between; echo tick; echo behind", on=1).follow(lambda: ticks.append(1), 2)
    assert (len(ticks), capsys.readouterr().err) == (2, "host1 | between\n")


def test_follow_shows_the_last_output_if_the_job_fails(lab, capsys):
    job = lab.start("echo tick; echo behind; exit 3", on=0)
    with pytest.raises(HostFailed):
        job.follow(lambda: None, 1)
    assert "host0 | behind\n" in capsys.readouterr().err
    assert not job.running()


@pytest.mark.thorough
def test_a_failure_names_the_host_and_ends_the_others(lab):
    line = f"echo started; [ $(hostname) = host1 ] && {{ echo 'no such luck' >&2; exit 7; }}; {FOREVER}"
    with pytest.raises(HostFailed) as caught:
        lab.run(line, timeout=60)
    assert caught.value.host == 1
    assert str(caught.value).startswith(
        "host1 ended with exit code 7\n  host1 | started\n  host1 | no such luck\n  → "
    )
    assert processes(lab, 0) == processes(lab, 2) == []


def test_a_failure_lists_later_ones(lab):
    with pytest.raises(
        HostFailed, match=r"host0 ended with exit code 2; after it host2 \(ended with exit code 5\)"
    ):
        lab.run("[ $(hostname) = host2 ] && { sleep 0.5; exit 5; }; exit 2", on=[0, 2], timeout=60)


def test_a_hang_names_the_hosts(lab):
    with pytest.raises(
        HostFailed, match=r"not finished within 0.5 s: still running on host0, host2\n  host0 \| tick"
    ):
        lab.run(f"echo tick; [ $(hostname) = host1 ] || {{ {FOREVER}; }}", timeout=0.5)
    assert processes(lab, 0) == processes(lab, 2) == []


def test_ending_kills_descendants_and_processes_that_ignore_sigterm(lab, monkeypatch):
    monkeypatch.setattr("paceline.testing.netlab.lab_job._END_SECONDS", 0.5)
    job = lab.start(f"trap '' TERM; setsid sh -c 'trap : TERM; {FOREVER}' & {FOREVER}", on=0)
    until(lambda: len(processes(lab, 0)) >= 2)
    job.end()
    assert job.wait(check=False)[0].code == -signal.SIGKILL
    assert processes(lab, 0) == []


def test_ending_misses_no_process_that_is_started_meanwhile(lab):
    job = lab.start("while :; do sleep 2 & sleep 0.001; done", on=0)
    until(lambda: len(processes(lab, 0)) >= 10)
    job.end()
    assert processes(lab, 0) == []


def test_a_program_may_clean_up_when_ended(lab, tmp_path):
    job = lab.start(f"trap 'echo tidy; exit 4' TERM; echo ready; {FOREVER}", on=0)
    until(lambda: list(job.lines()))
    job.end()
    (result,) = job.wait(check=False)
    assert (result.code, result.stdout) == (4, "ready\ntidy\n")


def test_a_process_that_just_started_can_be_ended(lab):
    for _ in range(5):
        job = lab.start(FOREVER)
        job.end()
        assert all(result.code in (-signal.SIGKILL, -signal.SIGTERM) for result in job.wait(check=False))
    assert all(processes(lab, host) == [] for host in range(3))


def test_a_host_whose_first_process_was_killed_has_ended():
    with Lab(hosts=2) as lab:
        os.kill(lab._nodes[1].ready(), signal.SIGKILL)
        with pytest.raises(HostFailed, match="host1 has ended"):
            lab.kill(1)
        with pytest.raises(HostFailed, match="this host can't be entered"):
            lab.run("true", on=1)
        assert lab.run("hostname", on=0)[0].stdout == "host0\n"


@pytest.mark.thorough
def test_kill_takes_every_process_of_one_host(lab):
    job = lab.start(f"{ORPHAN}; {FOREVER}", on=[0, 1])
    until(lambda: any("sleep 1000" in line for line in processes(lab, 1)))
    lab.kill(1)
    until(lambda: job.running() == [0])
    assert processes(lab, 1) == []
    assert processes(lab, 0) != []
    with pytest.raises(HostFailed, match="host1 was ended by SIGKILL"):
        job.wait(60)
    assert lab.run("hostname", on=1)[0].stdout == "host1\n"  # it can be used again
    lab.kill(1)  # nothing is there to kill


def test_stop_and_resume(lab):
    job = lab.start("while :; do echo tick; sleep 0.02; done", on=1)
    until(lambda: list(job.lines()))
    lab.stop(1)
    time.sleep(0.1)
    list(job.lines())
    time.sleep(0.3)
    assert list(job.lines()) == []
    assert job.running() == [1]
    lab.resume(1)
    until(lambda: list(job.lines()))
    lab.stop(1)
    job.end()  # a stopped program too
    assert job.running() == []


def test_popen_passes_pipes_and_dies_alone(lab):
    process = lab.popen(0, ["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.communicate(b"hello", timeout=30)[0] == b"hello"
    other = lab.popen(0, ["sleep", "1000"])
    until(lambda: "sleep 1000 " in processes(lab, 0))
    other.kill()
    other.wait(30)
    until(lambda: processes(lab, 0) == [])


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda lab: lab.run("true", on=3), r"no host 3\n.*0 to 2"),
        (lambda lab: lab.run("true", on=[-1]), "no host -1"),
        (lambda lab: lab.run("true", on=[]), "no host selected"),
        (lambda lab: lab.run([]), "no program"),
        (lambda lab: lab.run(["no-such-program"]), "no such program: no-such-program"),
        (lambda lab: lab.run(["true"], cwd="no/such/folder"), "no/such/folder: no such folder"),
        (lambda lab: lab.torchrun([]), "no program"),
        (lambda lab: lab.torchrun(["no/train.py"]), "no such script: no/train.py"),
        (lambda lab: lab.torchrun(["true"], ranks_per_host=0), "ranks_per_host=0: at least 1"),
        (lambda lab: lab.rate(0, "fast"), "'fast' is no rate"),
        (lambda lab: lab.rate(0, 0), "at least 8 kbit/s"),
        (lambda lab: lab.cut(9), "no host 9"),
        (lambda lab: lab.bytes(9), "no host 9"),
        (lambda lab: lab.kill(9), "no host 9"),
    ],
)
def test_wrong_input_is_refused(lab, call, message):
    with pytest.raises(UsageError, match=message):
        call(lab)
    assert all(processes(lab, host) == [] for host in range(3))


def test_a_closed_lab_raises_and_keeps_results():
    with Lab(hosts=1) as lab:
        job = lab.start("echo here; sleep 1000")
        until(lambda: list(job.lines()))
    lab.close()
    with pytest.raises(UsageError, match="closed"):
        lab.run("true")
    (result,) = job.wait(check=False)
    assert (result.code, result.stdout) == (-signal.SIGKILL, "here\n")


OWNER = """
import os, sys, time
from paceline.testing.netlab import Lab
lab = Lab(hosts=2, rate="100Mbit/s")
job = lab.start(sys.argv[1])
piped = lab.popen(0, ["sleep", "1001"])
while len(lab.run("grep -l 100[01] /proc/[0-9]*/cmdline", check=False)[0].stdout.split()) < 3:
    pass
print("ready", flush=True)
time.sleep(1000)
"""


@pytest.mark.sweep
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_remains_of_a_killed_owner(number):
    devices = os.listdir("/sys/class/net")
    words = [sys.executable, "-c", OWNER, f"{ORPHAN}; {FOREVER}"]
    owner = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert owner.stdout.readline() == b"ready\n"
        assert os.listdir("/sys/class/net") == devices
        family = psutil.Process(owner.pid).children(recursive=True)
        network_of = {one: network_of_process(one.pid) for one in family}
        first = next(
            one for one in family if holds(one, "host0") and network_of[one] != network_of_process("self")
        )
        # Outlives its processes, to be looked into.
        pinned = os.open(f"/proc/{first.pid}/ns/net", os.O_RDONLY)
        assert "eth0" in devices_of(pinned)
    finally:
        owner.send_signal(number)
        owner.wait(30)
    until(lambda: not any(is_alive(one) for one in family))
    foreign = set(network_of.values()) - {None, network_of_process("self")}
    assert len(foreign) == 3  # two hosts and the switch
    until(lambda: foreign.isdisjoint(map(network_of_process, psutil.pids())))
    until(lambda: "eth0" not in devices_of(pinned))  # its other end was at the switch, which is gone
    os.close(pinned)
    assert os.listdir("/sys/class/net") == devices


def is_alive(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def holds(process, name):
    try:
        return process.cmdline()[-3:-1] == ["hold", name]
    except psutil.NoSuchProcess:
        return False


def network_of_process(pid):
    """Return which network namespace a process is in, None if it has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None


def devices_of(network):
    command = ["nsenter", f"--net=/proc/self/fd/{network}", "ip", "-oneline", "link"]
    return subprocess.run(command, pass_fds=[network], capture_output=True, text=True, timeout=30).stdout


def test_one_core_receives_all_packets_of_a_host(lab):
    command = "ls /sys/class/net; cat /sys/class/net/eth0/queues/rx-0/rps_cpus"
    for result in lab.run(command):
        *devices, mask = result.stdout.split()
        assert devices == ["eth0", "lo"]
        assert int(mask.replace(",", ""), 16).bit_count() == 1
