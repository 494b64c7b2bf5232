"""The manual builds to a site without a warning, with every page and docstring; a browser finds its way through it."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

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


@pytest.fixture(scope="module")
def address(site):
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        server.handle_error = lambda *_: None  # a page that was left while it loaded
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture
def opened(browser, address):
    """Return a function that opens a page; nothing may fail to load, raise, or come from elsewhere."""
    wrong, pages = [], []

    def show(path, width=1280, search=False):
        page = browser.new_page(viewport={"width": width, "height": 800})
        if not search:
            page.route("**/search/**", lambda route: route.abort())  # every page would build its index
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: request.url.startswith(address) or wrong.append(request.url))
        page.on(
            "response", lambda answer: answer.status < 400 or wrong.append(f"{answer.status} {answer.url}")
        )
        page.goto(address + path)
        pages.append(page)
        return page

    yield show
    for page in pages:
        page.close()
    assert wrong == []


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


def test_links_within_a_page_stay_and_links_to_folders_become_text(site):
    text = (site / "docs" / "commands.html").read_text(encoding="utf-8")
    assert '<a href="#paceline-train"><code>paceline train</code></a>' in text
    assert ">tests/ranks</a>" not in (site / "docs" / "migrate" / "ddp.html").read_text(encoding="utf-8")


def test_navigation_leads_through_every_heading_of_the_page_list(opened):
    page = opened("index.html")
    headings = page.locator(".wy-menu .caption").all_inner_texts()
    assert len(headings) > 4
    for number in range(len(headings)):
        link = page.locator(".wy-menu .caption + ul").nth(number).locator("a").first
        title = link.inner_text()
        link.click()
        assert page.inner_text(".wy-breadcrumbs").strip().endswith(title)
        assert page.locator(".document h1").is_visible()


def test_search_finds_a_page(opened):
    page = opened("docs/index.html", search=True)
    page.fill("#rtd-search-form input", "straggler")
    page.press("#rtd-search-form input", "Enter")
    page.wait_for_selector("#mkdocs-search-results article")
    with page.expect_navigation():  # until the page is loaded
        page.locator("#mkdocs-search-results article a").first.click()
    assert "straggler" in page.inner_text(".document").lower()


def test_a_phone_shows_the_page_and_opens_the_menu(opened):
    page = opened("docs/reference/tools.html", width=390)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    link = page.locator(".wy-menu a", has_text="The manual").first
    assert link.bounding_box()["x"] < 0
    page.click(".wy-nav-top .fa-bars")
    link.click()
    assert page.url.endswith("/docs/index.html")


@pytest.mark.thorough
def test_no_page_is_wider_than_a_phone(opened, site, address):
    page = opened("index.html", width=390)
    wide = []
    for path in sorted(site.rglob("*.html")):
        page.goto(address + path.relative_to(site).as_posix())
        if page.evaluate("document.documentElement.scrollWidth") > 390:
            wide.append(path.relative_to(site).as_posix())
    assert wide == []
