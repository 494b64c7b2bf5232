"""The page of a run in a real browser: it draws, loads nothing, and follows pointer and keyboard, also on a phone."""

from __future__ import annotations

import shutil

import pytest

from paceline.tools.report.run.run_page import write_run_report
from recorded_run import write_run

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on the PATH")


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("page") / "run", ranks=2, steps=30, slow_rank=1)
    return write_run_report(folder).resolve().as_uri()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser, address):
    """Return a function that opens the page; afterwards nothing may have been complained of, nor loaded."""
    messages, pages = [], []

    def show(**options):
        page = browser.new_page(**({"viewport": {"width": 1100, "height": 900}} | options))
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: messages.append(request.url) if request.url != address else None)
        page.goto(address)
        pages.append(page)
        return page

    yield show
    for page in pages:
        page.close()
    assert messages == []


def bars(page):
    return page.locator("#buckets rect").count()


@pytest.mark.thorough
def test_it_draws_every_rank_and_loads_nothing(opened):
    page = opened()
    assert page.locator("#buckets svg .name").all_text_contents() == ["rank 0", "rank 1"]
    assert bars(page) > 20
    assert "Rank 1 limits this run" in page.inner_text(".said")


@pytest.mark.thorough
def test_pointer_and_buttons(opened):
    page = opened()
    page.locator("#buckets rect.piece").nth(1).hover()
    assert page.inner_text("#buckets .selected").startswith("rank 0: forward")
    whole = page.locator("#buckets rect.piece").nth(2).bounding_box()["width"]
    page.get_by_role("button", name="zoom in").click()
    assert page.locator("#buckets rect.piece").nth(1).bounding_box()["width"] > 1.2 * whole
    page.get_by_role("button", name="whole step").click()
    assert page.locator("#buckets rect.piece").nth(2).bounding_box()["width"] == pytest.approx(whole, abs=1)
    page.locator("#buckets svg").hover()
    page.keyboard.down("Control")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Control")
    assert page.locator("#buckets .tick").first.text_content() != "0 µs"


def test_keyboard_alone(opened):
    page = opened()
    page.locator("#buckets svg").focus()
    page.keyboard.press("n")
    first = page.inner_text("#buckets .selected")
    page.keyboard.press("n")
    assert page.inner_text("#buckets .selected") != first
    page.keyboard.press("p")
    assert page.inner_text("#buckets .selected") == first
    for key in ("+", "+", "ArrowRight"):
        page.keyboard.press(key)
    assert page.locator("#buckets .tick").first.text_content() != "0 µs"
    page.keyboard.press("0")
    assert page.locator("#buckets .tick").first.text_content() == "0 µs"


def test_another_step_can_be_looked_at(opened):
    page = opened()
    choice = page.locator("#buckets select")
    names = choice.locator("option").all_inner_texts()
    assert names[0].startswith("typical step")
    assert any(name.startswith("slowest step") for name in names)
    choice.select_option("1")
    assert bars(page) > 20


@pytest.mark.thorough
def test_light_and_dark_follow_the_reader(opened):
    colours = [
        opened(color_scheme=scheme).evaluate("getComputedStyle(document.body).backgroundColor")
        for scheme in ("light", "dark")
    ]
    assert colours == ["rgb(255, 255, 255)", "rgb(20, 23, 29)"]


@pytest.mark.sweep
@pytest.mark.parametrize("width", [360, 390, 768, 1400])
def test_nothing_is_wider_than_the_screen(opened, width):
    page = opened(viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.locator("#buckets rect").count() > 20
