"""The file of a rank that can recover in place, and the names of marks and variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.launch.process.rank_output import RankLogs
from paceline.world.live_file import LIVE_FILE_VARIABLE, LiveFile, LiveWorld, dead_key, dead_marker

WORLD = LiveWorld(3, ("a/0/0", "a/1/2"), 70)


def test_a_world_is_read_back_until_it_is_removed(tmp_path):
    file = LiveFile.from_environment({LIVE_FILE_VARIABLE: str(tmp_path / "rank.live")})
    assert (file.exists(), file.read()) == (False, None)
    file.write(WORLD)
    text = (tmp_path / "rank.live").read_text()
    assert text.startswith('{"epoch":3,"members":["a/0/0","a/1/2"],"step":70')
    assert (file.exists(), file.read()) == (True, WORLD)
    file.write(LiveWorld(4, ("a/0/0",), 71))
    assert file.read().epoch == 4
    file.remove()
    file.remove()
    assert (file.exists(), list(tmp_path.iterdir())) == (False, [])


@pytest.mark.parametrize("text", ["", "{", '{"epoch": -1, "members": [], "step": 0}', '{"epoch": 1}'])
def test_a_damaged_file_holds_no_world(tmp_path, text):
    (tmp_path / "rank.live").write_text(text)
    assert LiveFile(tmp_path / "rank.live").read() is None


def test_without_a_launcher_that_recovers_in_place_there_is_no_file():
    assert LiveFile.from_environment({}) is None


def test_marks_are_beside_the_files_and_are_cleared_with_them(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with RankLogs(None) as logs:
        file = LiveFile(logs.live_file("a/0/1"))
        file.write(WORLD)
        logs.mark_dead("a/0/1")
        marker = dead_marker(file.path.parent, "a/0/1")
        assert (marker.name, marker.exists()) == ("a-0-1.dead", True)
        logs.clear_marks()
        assert (marker.exists(), file.exists()) == (False, False)
    assert dead_key("a/0/1") == "elastic/dead/a/0/1"


def test_logs_of_joiners_have_names_of_their_own_and_those_of_an_earlier_job_go(tmp_path):
    logs = RankLogs(tmp_path)

    def written(**options):
        path = logs.path(1, 0, **options)
        path.touch()
        return path.name

    assert [written(), written(joiner=True), written(joiner=True)] == [
        "rank1.log",
        "rank1.1.log",
        "rank1.2.log",
    ]
    Path(tmp_path, "rank10.1.log").touch()
    assert written() == "rank1.log"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank1.log", "rank10.1.log"]
    assert (logs.path(0, 0, joiner=True), logs.path(2, 3, joiner=True).parent.name) == (None, "restart3")
