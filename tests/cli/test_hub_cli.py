"""`paceline hub` refuses invalid options by name, before it binds or writes."""

from __future__ import annotations

import pytest

from paceline._core.job_key import JobKey
from paceline.async_dp.wal.hub_term import HubTerm, StandbyMark
from paceline.tools.cli import hub_command
from paceline.transport.zmq.curve_keys import HubKeys, make_keys


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--exploding", "-1"], "--exploding -1\n  → give a number above 1"),
        (["--exploding", "nan"], "--exploding nan"),
        (["--outer", "adam"], "unknown outer optimizer 'adam'; valid: averaging"),
        (["--merge", "vote"], "unknown time of merging 'vote'; valid: arrival, quorum"),
        (["--merge", "quorum", "--quorum", "150%"], "--quorum 150%\n  → give a number of workers, such as 3"),
        (["--merge", "quorum", "--quorum", "most"], "--quorum most"),
        (["--merge", "quorum", "--quorum", "0"], "quorum=0"),
        (["--quorum", "3"], "--quorum 3 with --merge arrival\n  → add --merge quorum"),
        (["--strikes", "0"], "strikes=0"),
        (["--shard", "2/2"], "shard 2 of 2"),
        (["--until", "soon"], "'soon' is no time"),
        (["--keys", "nowhere"], "nowhere can't be read"),
        (["--standby", "b"], "'b' is not a hub address"),
        (["--standby", "tcp://b:7000"], "copy the active hub's folder of keys here: --keys FOLDER"),
        (["--standby", "tcp://b:7000", "--new"], "--new with --standby"),
        (["--standby", "shared", "--insecure", "--bind", "tcp://127.0.0.1:*"], "holds no run that a standby"),
    ],
)
def test_invalid_options_are_refused(command, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = command("hub", "serve", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert not list(tmp_path.iterdir())


def test_the_first_keys_that_are_given_count(tmp_path, monkeypatch):
    monkeypatch.delenv("PACELINE_JOB_KEY", raising=False)
    job, out = JobKey.generate(), tmp_path / "hub"
    given = make_keys(tmp_path / "given", "worker").parent
    assert hub_command._hub_keys(None, "ipc://hub", False, out) == (None, None)
    assert hub_command._hub_keys(None, "tcp://*:1", True, out) == (None, None)
    assert not out.exists()
    made = hub_command._hub_keys(None, "tcp://*:1", False, out)
    assert made == (HubKeys.read(out / "keys"), out / "keys" / "worker.key")
    assert hub_command._hub_keys(None, "tcp://*:1", False, out) == made, "the same after a restart"
    monkeypatch.setenv("PACELINE_JOB_KEY", job.secret.hex())
    for address in ("ipc://hub", "tcp://*:1"):
        assert hub_command._hub_keys(None, address, False, out) == (HubKeys.of_job(job), None)
    assert hub_command._hub_keys(None, "tcp://*:1", True, out) == (None, None)
    for path in (given, given / "hub.key"):
        assert hub_command._hub_keys(path, "tcp://*:1", True, out) == (
            HubKeys.read(given),
            given / "worker.key",
        )
    (out / "keys" / "worker.key").unlink()
    monkeypatch.delenv("PACELINE_JOB_KEY")
    assert hub_command._hub_keys(None, "tcp://*:1", False, out)[1] is None, "withdrawn, so not made again"


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        (HubTerm(1, 0, superseded_by=2), "continued elsewhere: a hub of term 2 took over"),
        (StandbyMark("run", 1), "is a standby's copy of another hub's folder"),
    ],
)
def test_a_hub_that_may_not_serve_its_folder_names_the_way_to_do_it_anyway(command, tmp_path, mark, message):
    mark.write(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    code, _, err = command(
        "hub", "serve", "--insecure", "--bind", "tcp://127.0.0.1:*", "--out", str(tmp_path)
    )
    assert code == 2
    assert message in err
    assert "give up the other hub's work: --standby shared" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == before
