"""The manual builds to a site without a warning, with every page and every docstring in it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from manual import PAGES, ROOT, name

pytest.importorskip("mkdocs", reason="the site needs the extra docs: pip install '.[docs]'")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    ended = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return folder


def page_of(site, page):
    path = name(page).removesuffix(".md")
    parts = path.removesuffix("README") + ("index" if path.endswith("README") else "")
    return site / f"{parts}.html"


@pytest.mark.thorough
def test_every_page_and_picture_is_there(site):
    assert [name(page) for page in PAGES if not page_of(site, page).is_file()] == []
    assert (site / "docs" / "pictures" / "worlds.png").is_file()


@pytest.mark.thorough
def test_a_reader_fetches_nothing_from_elsewhere(site):
    for page in PAGES:
        text = page_of(site, page).read_text(encoding="utf-8")
        assert 'src="http' not in text
        assert 'rel="stylesheet" href="http' not in text


def test_reference_entries_have_docstrings(site):
    text = (site / "docs" / "reference" / "training.html").read_text(encoding="utf-8")
    assert "<!-- reference:" not in text
    assert 'id="paceline.parallel.data_parallel.DataParallel.backward"' in text
