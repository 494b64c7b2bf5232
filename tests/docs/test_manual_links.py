"""Every link of the manual has a target: files, headings, pictures. Web addresses are checked, not fetched."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import pytest
from manual import PAGES, ROOT, name, prose, prose_with_code

_TARGET = re.compile(r"\]\(([^()\s]*)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.M)


def anchors(page):
    """The anchors of a page's headings, as code hosts make them."""
    found = {}
    for heading in _HEADING.findall(prose_with_code(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
        if found[slug]:
            found[f"{slug}-{found[slug]}"] = 0
    return set(found)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    wrong = []
    for target in _TARGET.findall(prose(page)):
        parts = urlsplit(target)
        if parts.scheme:
            if parts.scheme not in ("http", "https") or "." not in parts.netloc:
                wrong.append(f"{target}: no web address")
            continue
        there = (page.parent / parts.path).resolve() if parts.path else page
        if not there.exists():
            wrong.append(f"{target}: no such file")
        elif not there.is_relative_to(ROOT) or parts.path.startswith("/"):
            wrong.append(f"{target}: outside of the repository")
        elif parts.fragment and there.suffix == ".md" and parts.fragment not in anchors(there):
            wrong.append(f"{target}: no such heading")
    assert not wrong, "\n".join(wrong)


def test_the_manual_has_links():
    assert sum(len(_TARGET.findall(prose(page))) for page in PAGES) > 200
