"""The secret of a job: made, read, written, derived from, never shown."""

import os

import pytest
import zmq
from zmq.utils import z85

from paceline._core.job_key import KEY_FILE_VARIABLE, KEY_VARIABLE, JobKey
from paceline.errors import UsageError

KEY = JobKey(bytes(range(32)))


def test_a_new_key_is_new_and_a_child_gets_the_same():
    assert JobKey.generate() != JobKey.generate()
    assert JobKey.from_environment(KEY.environment()) == KEY
    assert JobKey.from_environment({}) is None
    assert JobKey.from_environment({KEY_VARIABLE: "", KEY_FILE_VARIABLE: ""}) is None


def test_a_file_holds_a_key_for_its_owner_only(tmp_path):
    before = os.umask(0)
    try:
        KEY.write(tmp_path / "key")
    finally:
        os.umask(before)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert JobKey.from_environment({KEY_FILE_VARIABLE: str(tmp_path / "key")}) == KEY
    other = JobKey.generate()
    both = other.environment() | {KEY_FILE_VARIABLE: str(tmp_path / "key")}
    assert JobKey.from_environment(both) == other
    with pytest.raises(UsageError, match="already exists"):
        other.write(tmp_path / "key")
    with pytest.raises(UsageError, match="No such file"):
        other.write(tmp_path / "none" / "key")
    assert JobKey.read(tmp_path / "key") == KEY


def _refusal(path) -> str:
    with pytest.raises(UsageError) as refused:
        JobKey.read(path)
    return str(refused.value)


def test_files_that_are_no_private_key_are_refused(tmp_path):
    path = tmp_path / "key"
    assert "No such file" in _refusal(path)
    assert "not a regular file" in _refusal(tmp_path)
    os.mkfifo(path, 0o600)
    assert "not a regular file" in _refusal(path)
    path.unlink()
    KEY.write(path)
    path.chmod(0o640)
    assert "can be read by others (mode 0640)" in _refusal(path)
    assert f"chmod 600 {path}" in _refusal(path)
    path.chmod(0o600)
    for content in ("", "ab" * 31, "ab" * 33, "xy" * 32, "ab" * 32 + "\nab"):
        path.write_text(content)
        assert "64 hexadecimal digits" in _refusal(path)
    path.write_bytes(b"\xff" * 100)
    assert "64 hexadecimal digits" in _refusal(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_refused(tmp_path):
    KEY.write(tmp_path / "key")
    os.chown(tmp_path / "key", 1234, 1234)
    assert "belongs to another user (uid 1234)" in _refusal(tmp_path / "key")


def test_a_malformed_variable_is_refused_without_showing_it():
    secret = "c0ffee" * 10
    with pytest.raises(UsageError, match=KEY_VARIABLE) as refused:
        JobKey.from_environment({KEY_VARIABLE: secret})
    assert secret not in str(refused.value)
    with pytest.raises(UsageError, match="31 bytes"):
        JobKey(bytes(31))


def test_the_key_is_never_shown():
    for text in (repr(KEY), str(KEY), f"{KEY}", repr({"key": KEY})):
        assert KEY.secret.hex() not in text
        assert "\\x01" not in text


def test_derived_keys_differ_by_purpose_and_job():
    # Fixed, as hosts with different releases of Paceline derive the same.
    assert KEY.derive("store").hex() == "18a5a721f54ad9ede963052db4c045b9efa5f0816fc4e51f0586377c5f543ef9"
    assert len({KEY.derive("store"), KEY.derive("watchdog"), JobKey.generate().derive("store")}) == 3


def test_curve_keys_are_a_valid_pair():
    public, secret = KEY.curve_pair("store")
    assert zmq.curve_public(secret) == public
    assert len(z85.decode(public)) == len(z85.decode(secret)) == 32
    assert KEY.curve_pair("store") == (public, secret)
    assert KEY.curve_pair("hub") != (public, secret)
