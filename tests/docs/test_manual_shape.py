"""Form of the manual's pages: a first sentence, a limited length, lines that fit; ideas have pictures."""

from __future__ import annotations

import re

import pytest
from manual import PAGES, ROOT, name

DOCS = [page for page in PAGES if name(page).startswith("docs/")]
IDEAS = ["launchers.md", "collectives.md", "strategies.md", "exactness.md", "profile.md", "data.md"]


@pytest.mark.parametrize("page", DOCS, ids=name)
def test_a_page_begins_with_a_title_and_a_sentence_and_ends_soon(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    assert re.match(r"[A-Z`\[]", lines[2]), "what is it for?"
    assert len(lines) <= 265
    # The table programs wrote the rest.
    written = re.sub(r"<!-- (.+): begin -->.*?<!-- \1: end -->", "", "\n".join(lines), flags=re.S)
    assert [
        line for line in written.splitlines() if len(line) > 120 and not line.startswith(("|", "    "))
    ] == []


def test_every_page_can_be_found_from_the_first_one():
    text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    listed = {(ROOT / "docs" / target).resolve() for target in re.findall(r"\]\(([^)#]+)\)", text)}
    assert [name(page) for page in DOCS if page not in listed and page.name != "README.md"] == []


@pytest.mark.parametrize("page", IDEAS)
def test_every_idea_has_its_picture(page):
    assert re.search(r"^!\[[^\]]+\]\([^)]+\.png\)$", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.M)


def test_pictures_of_ideas_are_drawn_by_the_code_beside_them(tmp_path, monkeypatch):
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("draw", ROOT / "docs" / "pictures" / "draw.py")
    draw = module_from_spec(spec)
    spec.loader.exec_module(draw)
    for picture in (draw.worlds, draw.exactness, draw.slow_link, draw.overlap):
        assert picture().save(tmp_path / f"{picture.__name__}.png").stat().st_size > 10_000
        assert (ROOT / "docs" / "pictures" / f"{picture.__name__}.png").is_file()
