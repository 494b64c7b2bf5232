"""Report pages in a real browser: they draw, load nothing, and follow pointer, keyboard and touch, also on a phone."""

from __future__ import annotations

import json
import re

import pytest

from paceline.tools.report.compare.comparison_page import write_comparison
from paceline.tools.report.hub.hub_page import write_hub_report
from paceline.tools.report.page.curve_chart import MAX_POINTS
from paceline.tools.report.run.run_page import write_run_report
from recorded_run import write_run
from reported_hub_folder import demo


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("page") / "run", ranks=2, steps=300, slow_rank=1)
    return write_run_report(folder).resolve().as_uri()


@pytest.fixture(scope="module")
def many_ranks(tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("many") / "run", ranks=64, steps=4, slow_rank=40)
    return write_run_report(folder).resolve().as_uri()


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """Return the page of 100,000 steps, of which one has a large loss."""
    folder = tmp_path_factory.mktemp("long")
    (folder / "run.json").write_text(json.dumps({"parameters": 1}))
    numbers = {"step_seconds": 0.1, "samples_per_second": 100.0, "lr": 1e-3}
    with (folder / "steps.jsonl").open("w") as file:
        for step in range(1, 100_001):
            loss = 9.0 if step == 61_803 else 1 / step
            file.write(json.dumps({"step": step, "loss": loss, **numbers}) + "\n")
    return write_run_report(folder)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    runs = [write_run(folder / name, steps=30, slow_rank=slow) for name, slow in (("old", 1), ("new", None))]
    return write_comparison(*runs).resolve().as_uri()


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    return write_hub_report(demo(tmp_path_factory.mktemp("hub") / "run")).resolve().as_uri()


@pytest.fixture
def opened(browser, address):
    """Return a function that opens the page; afterwards nothing may have been complained of, nor loaded."""
    messages, pages = [], []

    def show(at=address, **options):
        page = browser.new_page(**({"viewport": {"width": 1100, "height": 900}} | options))
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: messages.append(request.url) if request.url != at else None)
        page.goto(at)
        pages.append(page)
        return page

    yield show
    for page in pages:
        page.close()
    assert messages == []


FIRST_TICK = "document.querySelector('.curves text.tick[text-anchor=middle]').textContent"
POINTS_DRAWN = """
    [...document.querySelectorAll('.curves path')].map(path => (path.getAttribute('d').match(/[ML]/g) || []).length)
"""
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True}


def chart_of(page, title):
    """Return the figure of a chart of curves."""
    return page.locator("section", has=page.locator("h2", has_text=re.compile(f"^{title}$"))).locator(
        ".curves"
    )


def first_tick(chart):
    """Return the text of the leftmost tick of the x axis."""
    return chart.locator("text.tick[text-anchor=middle]").first.text_content()


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
    page.locator("#buckets").get_by_role("button", name="zoom in").click()
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


def test_a_chart_is_read_and_zoomed_by_keyboard_alone(opened):
    page = opened()
    chart = chart_of(page, "Loss")
    for _ in range(60):  # by the tab key only, as a reader without a pointer gets there
        page.keyboard.press("Tab")
        if chart.locator("svg").evaluate("each => each === document.activeElement"):
            break
    page.keyboard.press("ArrowRight")
    assert re.match(
        r"step 1: training 5\.\d+ \(smoothed .*\) · held out 5\.", chart.locator(".readout").inner_text()
    )
    page.keyboard.press("End")
    assert chart.locator(".readout").inner_text().startswith("step 300: training ")
    whole = first_tick(chart)
    for key in ("+", "+", "+", "Shift+ArrowRight"):
        page.keyboard.press(key)
    assert first_tick(chart) != whole
    page.keyboard.press("0")
    assert first_tick(chart) == whole
    page.keyboard.press("l")
    assert chart.get_by_label("log", exact=True).is_checked()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "training"
    page.keyboard.press("Space")
    assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "false"


@pytest.mark.thorough
def test_a_chart_follows_the_mouse(opened):
    page = opened()
    chart = chart_of(page, "Loss")
    chart.scroll_into_view_if_needed()
    box = chart.locator("svg").bounding_box()
    middle = box["y"] + 100
    page.mouse.move(box["x"] + 500, middle)
    assert chart.locator(".readout").inner_text().startswith("step 1")
    whole = first_tick(chart)
    page.mouse.down()
    page.mouse.move(box["x"] + 700, middle)
    page.mouse.up()
    assert first_tick(chart) != whole  # zoomed to what was dragged over
    chart.get_by_role("button", name="reset zoom").click()
    assert first_tick(chart) == whole
    chart.locator("svg").focus()
    chart.locator("svg").hover()
    for _ in range(6):
        page.mouse.wheel(0, -400)
    page.wait_for_function(f"{FIRST_TICK} !== {json.dumps(whole)}", timeout=10_000)
    chart.locator("svg").dblclick()
    assert first_tick(chart) == whole


def test_axis_and_smoothing_apply_to_all_charts(opened):
    page = opened()
    loss, speed = chart_of(page, "Loss"), chart_of(page, "Speed")
    loss.get_by_label("x axis").select_option("time")
    assert speed.get_by_label("x axis").input_value() == "time"
    assert speed.locator("text.tick[text-anchor=middle]").first.text_content().endswith("s")
    assert loss.locator("path.raw").count() == 1
    loss.get_by_label("smoothing").fill("0")
    assert speed.get_by_label("smoothing").input_value() == "0"
    assert loss.locator("path.raw").count() == 0


def test_percentiles_of_step_time_are_drawn(opened):
    names = chart_of(opened(), "Step time over the run").locator(".legend button").all_inner_texts()
    assert names == ["step", "p50", "p90", "p99"]


@pytest.mark.thorough
def test_a_chart_is_used_by_touch(opened):
    from playwright.sync_api import expect

    page = opened(**PHONE)
    chart = chart_of(page, "Loss")
    chart.scroll_into_view_if_needed()
    box = chart.locator("svg").bounding_box()
    page.touchscreen.tap(box["x"] + 200, box["y"] + 80)
    expect(chart.locator(".readout")).to_have_text(re.compile("^step "))
    whole = first_tick(chart)
    client = page.context.new_cdp_session(page)

    def touch(kind, *xs):
        points = [{"x": box["x"] + x, "y": box["y"] + 80, "id": number} for number, x in enumerate(xs)]
        client.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touch("touchStart", 180, 220)
    touch("touchMove", 140, 260)
    touch("touchMove", 90, 310)
    touch("touchEnd")
    tick = chart.locator("text.tick[text-anchor=middle]").first
    expect(tick).not_to_have_text(whole)
    page.wait_for_timeout(1000)  # Chromium may take a tap right after a pinch for the end of the pinch
    chart.get_by_role("button", name="reset zoom").tap()
    expect(tick).to_have_text(whole)


@pytest.mark.sweep
@pytest.mark.parametrize("options", [{}, PHONE], ids=["desk", "phone"])
def test_of_64_ranks_the_straggler_is_shown_and_others_can_be_chosen(opened, many_ranks, options):
    page = opened(many_ranks, **options)
    labels = page.locator(".bars > div:visible .label, .bars > div:not([hidden]) .label")
    shown = labels.all_inner_texts()
    assert shown[0] == "rank 40 (worst)"
    assert len(shown) == 10
    assert "rank 40" in "".join(page.locator("#buckets svg .name").all_text_contents()) or options
    page.get_by_label("ranks to show").fill("0, 62-63")
    assert sorted(labels.all_inner_texts()) == ["rank 0", "rank 62", "rank 63"]
    assert page.locator("tbody tr[data-rank='40']:not([hidden])").count() == 0
    page.get_by_label("ranks to show").fill("x")
    assert page.locator("#rank-choice output").inner_text() == "write ranks as 0, 40-43"
    page.locator("#rank-choice select").select_option("all")
    assert page.locator("#rank-choice output").inner_text() == "64 of 64 shown"
    assert page.evaluate("document.documentElement.scrollWidth") == page.viewport_size["width"]


def test_charts_are_drawn_when_the_page_has_loaded(browser, address):
    page = browser.new_page()
    page.add_init_script("window.ResizeObserver = class { observe() {} }")  # as if it called much later
    page.goto(address)
    points, pieces = page.evaluate(POINTS_DRAWN), bars(page)
    page.close()
    assert points
    assert pieces > 20


@pytest.mark.thorough
def test_a_chart_follows_the_width_of_the_window(opened):
    from playwright.sync_api import expect

    page = opened()
    svg = chart_of(page, "Loss").locator("svg")
    for width in (700, 900):
        page.set_viewport_size({"width": width, "height": 900})
        drawn = round(svg.bounding_box()["width"])
        expect(svg).to_have_attribute("viewBox", f"0 0 {drawn} 240")


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, PHONE], ids=["desk", "phone"])
def test_100_000_steps_are_bounded_in_bytes_and_in_points_drawn(opened, long_run, options):
    assert long_run.stat().st_size < 800_000
    page = opened(long_run.resolve().as_uri(), **options)
    counts = page.evaluate(POINTS_DRAWN)
    assert counts
    assert max(counts) <= 2 * MAX_POINTS
    assert page.locator("circle").count() < 100
    svg = chart_of(page, "Loss").locator("svg")
    svg.focus()
    page.keyboard.press("End")
    assert "steps 99," in chart_of(page, "Loss").locator(".readout").inner_text()
    top = svg.locator("text.tick[text-anchor=end]").last.text_content()
    assert float(top) >= 5  # the one large loss is not lost


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["address", "many_ranks", "hub", "compared"])
def test_axe_finds_no_violation(opened, request, name):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")
    at = request.getfixturevalue(name)
    for scheme in ("light", "dark"):
        for options in ({}, PHONE):
            page = opened(at, color_scheme=scheme, **options)
            results = axe.Axe().run(page)
            assert results.violations_count == 0, results.generate_report()


def test_two_runs_lie_over_each_other(opened, compared):
    page = opened(compared)
    assert re.search(
        r"new is \d+ % faster than old: .* per step instead of .*95 % interval", page.inner_text(".said")
    )
    chart = chart_of(page, "Loss")
    names = chart.locator(".legend button").all_inner_texts()
    assert names == ["old, training", "old, held out", "new, training", "new, held out"]
    chart.locator("svg").focus()
    page.keyboard.press("End")
    assert chart.locator(".readout").inner_text().count("training") == 2
    chart.get_by_label("x axis").select_option("time")
    assert chart.locator("path.mean").count() == 4
