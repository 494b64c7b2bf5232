"""Versions and programs that ranks exchange: content, differences, and the ranks that are named."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import pytest

import paceline
from paceline.errors import MismatchError, UsageError
from paceline.world.consistency_check import facts_of_this_process, find_mismatch, program_fact
from paceline.world.rendezvous import RankClaim, RankRoster

USUAL = {"torch": "2.13.0", "Python": "3.11", "the program": "train.py (text 1)"}


def test_this_process_reports_its_versions_and_program():
    facts = facts_of_this_process()
    assert facts["paceline"] == paceline.__version__
    assert facts["Python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert facts["torch"].count(".") == 2
    assert "+" not in facts["torch"]
    assert all(len(value) < 100 for value in facts.values())


def test_only_the_text_of_a_program_counts_and_neither_its_path_nor_its_line_ends(tmp_path):
    texts = {"a": b"x = 1\n", "b": b"x = 1\r\n", "c": b"x = 2\n"}
    facts = {}
    for folder, text in texts.items():
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "train.py"
        file.write_bytes(text)
        facts[folder] = program_fact(file, "", tmp_path)
    assert facts["a"] == facts["b"] != facts["c"]
    assert facts["a"]["the program"].startswith("train.py (text ")
    module = program_fact(tmp_path / "a" / "train.py", "my.train", tmp_path)
    assert module["the program"] == facts["a"]["the program"].replace("train.py", "my.train")


def test_an_installed_command_is_identified_by_name_and_an_unreadable_one_is_not(tmp_path):
    (tmp_path / "paceline").write_text(f"#!{tmp_path}/python\n")
    assert program_fact(tmp_path / "paceline", "", tmp_path) == {"the program": "paceline"}
    assert program_fact(tmp_path / "gone.py", "", tmp_path / "bin") == {}


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_equal_ranks_raise_nothing(ranks):
    assert find_mismatch([USUAL] * ranks) is None
    assert find_mismatch([{}] * ranks) is None


@pytest.mark.parametrize("odd", range(4))
@pytest.mark.parametrize("name", USUAL)
def test_the_rank_that_is_unlike_the_others_is_named_with_both_values(name, odd):
    facts = [dict(USUAL) for _ in range(4)]
    facts[odd][name] = "other"
    error = find_mismatch(facts)
    assert isinstance(error, MismatchError)
    assert isinstance(error, UsageError)
    assert error.rank == odd
    assert f"{name} differs between ranks" in str(error)
    assert f"other on rank {odd}" in str(error)
    assert USUAL[name] in str(error)
    assert "alike=False" in error.remedy


def test_the_first_difference_is_reported_and_of_two_ranks_the_second_is_odd():
    error = find_mismatch([USUAL, {key: "other" for key in USUAL}])
    assert error is not None
    assert error.rank == 1
    assert "torch differs between ranks: 2.13.0 on rank 0; other on rank 1" in str(error)
    assert "Python" not in str(error).partition("→")[0]


def test_many_ranks_are_summarised():
    error = find_mismatch([USUAL] * 3 + [{**USUAL, "torch": "2.9"}] * 2 + [USUAL] * 3)
    assert error is not None
    assert "2.13.0 on ranks 0–2, 5–7; 2.9 on ranks 3–4" in str(error)
    assert error.rank == 3


def test_facts_that_a_rank_lacks_are_not_compared():
    assert find_mismatch([USUAL, {}, USUAL]) is None
    assert find_mismatch([USUAL, {"torch": "2.13.0"}]) is None
    error = find_mismatch([USUAL, {}, {**USUAL, "torch": "2.9"}])
    assert error is not None
    assert "2.13.0 on rank 0; 2.9 on rank 2" in str(error)


def test_a_claim_without_facts_and_one_with_unknown_fields_are_read():
    old = asdict(RankClaim.of_this_process(1, 2))
    del old["facts"]
    assert RankClaim.of_json(old).facts == {}
    assert RankClaim.of_json({**old, "facts": USUAL, "colour": "red"}).facts == USUAL


def test_a_claim_with_facts_round_trips_through_the_store():
    claims = tuple(RankClaim.of_this_process(rank, 2, USUAL) for rank in range(2))
    decoded = json.loads(json.dumps(asdict(RankRoster("name", claims))))
    assert RankRoster(decoded["name"], tuple(map(RankClaim.of_json, decoded["claims"]))).holds(claims[1])
    assert len({*claims}) == 2
