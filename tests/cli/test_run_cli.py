"""`paceline run`: options, arguments of the script, one clear message for every invalid input."""

from __future__ import annotations

import pytest

from paceline.errors import RankFailed
from paceline.tools.cli import run_command as module


@pytest.fixture
def call(command):
    """Run `paceline run` in this process; return exit code and stderr."""
    return lambda *words: command("run", *words)[::2]


@pytest.fixture
def jobs(monkeypatch):
    """Collect the jobs instead of running them."""
    started = []
    monkeypatch.setattr(module, "run_job", started.append)
    return started


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit(7)")
    return path


def test_options_become_a_job(call, jobs, script, tmp_path):
    words = "--nnodes 3 --nproc-per-node 2 --min-ranks 4 --rendezvous pc1:4000 --max-restarts 9 --no-rejoin"
    code, err = call(
        *words.split(),
        "--last-call",
        "8s",
        "--wait",
        "2min",
        "--log-dir",
        tmp_path,
        script,
        "--nproc-per-node",
        "7",
        "-m",
    )
    assert (code, err) == (0, "")
    [job] = jobs
    assert list(job.argv) == [str(script), "--nproc-per-node", "7", "-m"]
    assert (job.hosts, job.ranks, job.min_ranks, job.min_hosts) == (3, 2, 4, 2)
    assert (str(job.address), job.max_restarts, job.rejoin, job.log_dir) == ("pc1:4000", 9, False, tmp_path)
    assert (job.timeouts.last_call, job.timeouts.join) == (8.0, 120.0)
    assert job.recovery == "live"
    call("--recovery", "restart", script)
    assert jobs[1].recovery == "restart"


def test_the_fewest_hosts_give_the_fewest_ranks(call, jobs, script):
    assert call("--nnodes", "2:4", "--nproc-per-node", 3, "--rendezvous", "pc1:4000", script) == (0, "")
    assert (jobs[0].hosts, jobs[0].min_ranks, jobs[0].min_hosts) == (4, 6, 2)
    code, err = call("--nnodes", "2:4", "--min-ranks", 3, "--rendezvous", "pc1:4000", script)
    assert (code, len(jobs)) == (2, 1)
    assert "both --min-ranks and --nnodes MIN:MAX" in err


@pytest.mark.parametrize("nnodes", ["0", "3:2", "two", "1:2:3", "-1", ""])
def test_invalid_numbers_of_hosts_are_refused(call, script, nnodes):
    code, err = call("--nnodes", nnodes, script)
    assert code == 2
    assert f"--nnodes {nnodes}" in err


def test_one_host_needs_no_options_and_modules_have_one(call, jobs, script):
    call(script)
    call("--nproc-per-node", 4, "-m", "my.module", "--steps", "3")
    assert [(list(job.argv), job.ranks, job.min_ranks, job.address) for job in jobs] == [
        ([str(script)], 1, 1, None),
        (["-m", "my.module", "--steps", "3"], 4, 4, None),
    ]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "no script to run"),
        (["absent.py"], "no such script: absent.py"),
        (["--nproc-per-node", 0, "SCRIPT"], "ranks=0"),
        (["--nproc-per-node", 2, "--min-ranks", 3, "SCRIPT"], "min_ranks=3, of 2 ranks"),
        (["--nnodes", 2, "SCRIPT"], "2 hosts, but no rendezvous"),
        (["--nnodes", 2, "--rendezvous", "pc1:x", "SCRIPT"], "'pc1:x' is not a rendezvous address"),
        (["--nnodes", 2, "--rendezvous", "no-such-host.invalid", "SCRIPT"], "does not resolve"),
        (["--wait", "soon", "SCRIPT"], "soon"),
        (["--recovery", "alive", "SCRIPT"], "unknown recovery 'alive'; valid: live, restart"),
        (["--grace", "0s", "SCRIPT"], "--grace 0s: must be above 0"),
        (["--log-dir", "SCRIPT/logs", "SCRIPT"], "can't be written"),
        (["--serve", "127.0.0.1:4000", "SCRIPT"], "--serve runs no script"),
        (["--serve", "192.0.2.1:4000"], "192.0.2.1 is not an address of this machine"),
    ],
)
def test_bad_input_is_refused(call, script, words, text):
    code, err = call(*(str(word).replace("SCRIPT", str(script)) for word in words))
    assert code == 2
    assert text in err
    assert "→" in err


def test_an_unserved_address_times_out(call, script):
    words = ("--nnodes", 2, "--wait", "100ms", "--rendezvous", "192.0.2.1:4000", "--insecure", script)
    code, err = call(*words)
    assert code == 1
    assert "192.0.2.1:4000" in err


@pytest.mark.parametrize(
    "words", [("--nnodes", 2, "--rendezvous", "127.0.0.1:4000", "SCRIPT"), ("--serve", "127.0.0.1:4000")]
)
def test_several_hosts_without_a_job_key_are_refused(call, script, monkeypatch, tmp_path, words):
    monkeypatch.delenv("PACELINE_JOB_KEY", raising=False)
    monkeypatch.delenv("PACELINE_JOB_KEY_FILE", raising=False)
    words = [str(script) if word == "SCRIPT" else word for word in words]
    code, err = call(*words)
    assert (code, "several hosts, but no job key" in err) == (2, True)
    for remedy in ("openssl rand -hex 32", "PACELINE_JOB_KEY_FILE", "--insecure"):
        assert remedy in err
    monkeypatch.setenv("PACELINE_JOB_KEY_FILE", str(tmp_path / "absent"))
    code, err = call(*words)
    assert (code, "absent can't be read" in err) == (2, True)


def test_the_exit_code_is_that_of_the_first_failure(call, script, monkeypatch):
    def run(job):
        raise RankFailed("was ended by SIGKILL", rank=1, remedy="try fewer ranks", exit_code=137)

    monkeypatch.setattr(module, "run_job", run)
    code, err = call(script)
    assert code == 137
    assert err == "Error: [rank 1] was ended by SIGKILL\n  → try fewer ranks\n"
