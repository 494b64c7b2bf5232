"""What the site is made of: the pages of the repository, in its own layout, so that links between them hold.

A hook of MkDocs (mkdocs.yml). Three things differ from a site made of one folder:

1. Pages are the README and its neighbours, everything in docs/ and the README of every benchmark, each at the place it
   has in the repository; a file that one of them links to (a picture, a source) comes along. A link to a folder, which
   a site has no page for, becomes its text.
2. The navigation is the page list in docs/README.md: its headings, and the first link of each item. A page of docs/
   that is not in it is a warning, and so an error; benchmarks come last by themselves.
3. `<!-- reference: paceline.Sync -->` is where the docstring goes. Nobody who reads the Markdown sees it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/**/*.md",
    "benchmarks/**/README.md",
    "tests/**/README.md",
)
CONTENTS = "docs/README.md"
_STYLE = "docs/site/site.css"
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_TARGET = re.compile(r"\]\(([^()\s]+)\)")
_FENCED = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)
_REFERENCE = re.compile(r"^<!-- reference: ([\w.]+) -->$", re.M)


def pages() -> list[Path]:
    """Return the Markdown files of the manual."""
    return sorted({path for pattern in PAGES for path in ROOT.glob(pattern)})


def linked(page: Path) -> list[Path]:
    """Return what of this repository a page links to, files and folders, there or not."""
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    targets = [target.partition("#")[0] for target in _TARGET.findall(text) if ":" not in target]
    return [(page.parent / target).resolve() for target in targets if target]


def contents(text: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the page list of docs/README.md: for each heading with pages, its title and (title, page) of each."""
    found = []
    for part in re.split(r"^## ", text, flags=re.M)[1:]:
        title, _, rest = part.partition("\n")
        items = re.findall(r"^- \[([^\]]+)\]\(([^)#]+\.md)\)", rest, re.M)
        if items:
            found.append((title, items))
    return found


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the navigation from the page list."""
    here = ROOT / CONTENTS

    def place(target: str) -> str:
        return (here.parent / target).resolve().relative_to(ROOT).as_posix()

    nav: list[Any] = [{"Paceline": "README.md"}, {"The manual": CONTENTS}]
    for heading, items in contents(here.read_text(encoding="utf-8")):
        nav.append({heading: [{title: place(target)} for title, target in items]})
    listed = {
        page for section in nav[2:] for items in section.values() for item in items for page in item.values()
    }
    rest = [path.relative_to(ROOT).as_posix() for path in pages()]
    rest = [page for page in rest if not page.startswith("docs/") and page not in {*listed, "README.md"}]
    nav.append({"Figures": [{page.split("/")[-2]: page} for page in rest]})
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the repository's pages and what they link to, each at its own place."""
    from mkdocs.structure.files import File, InclusionLevel

    for old in list(files):
        if old.src_dir == config.docs_dir:  # the theme's and plugins' own files stay
            files.remove(old)
    sources = {
        *pages(),
        ROOT / _STYLE,
        *(path for page in pages() for path in linked(page) if path.is_file()),
    }
    for path in sorted(sources):
        name = path.relative_to(ROOT).as_posix()
        new = File.generated(config, name, abs_src_path=str(path), inclusion=InclusionLevel.INCLUDED)
        files.append(new)
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Return a page's text with docstrings asked for and links to folders taken out."""
    here = (ROOT / page.file.src_uri).parent

    def unlinked(found: re.Match[str]) -> str:
        text, path = found[1], found[2].partition("#")[0]
        return text if path and ":" not in path and (here / path).is_dir() else found[0]

    return _REFERENCE.sub(r"::: \1", _LINK.sub(unlinked, markdown))
