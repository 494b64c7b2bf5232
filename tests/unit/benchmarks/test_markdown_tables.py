"""Generated blocks in Markdown files."""

from __future__ import annotations

import pytest

from bench_harness.markdown import fill, table
from paceline.errors import UsageError

PLACE = "<!-- figures: begin -->{}<!-- figures: end -->"


def test_words_stand_left_and_numbers_right():
    made = table(["what", "of", "ms"], [["a", "b", "1.0"], ["c", "d", "20.5"]], words=2)
    assert made.splitlines() == [
        "| what | of | ms |",
        "|---|---|--:|",
        "| a | b | 1.0 |",
        "| c | d | 20.5 |",
    ]


def test_a_block_replaces_what_was_there_and_nothing_else():
    text = "# Title\n\n" + PLACE.format("\nold\n") + "\n\nAfter.\n"
    filled = fill(text, "figures", "new")
    assert filled == "# Title\n\n" + PLACE.format("\nnew\n") + "\n\nAfter.\n"
    assert fill(filled, "figures", "new") == filled


@pytest.mark.parametrize(
    "text",
    ["", "<!-- figures: begin -->", "<!-- figures: end --><!-- figures: begin -->", PLACE * 2],
)
def test_a_file_without_one_place_is_refused(text):
    with pytest.raises(UsageError, match="figures"):
        fill(text, "figures", "new")
