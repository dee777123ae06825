"""Charts: axes, ticks, lines and bars, read back from the SVG."""

import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.report.charts import Bar, BarChart, Chart, Series, _round_up, _spaced_labels
from niels_gpt.report.document import html_block
from tests.report.pages import Page


def path_of(html, color="c0"):
    """Return the points of the first line of a color."""
    match = re.search(rf'<g class="{color} [^"]*"><title>[^<]*</title><path class="curve" d="([^"]*)"', html)
    return [tuple(map(float, point.split())) for point in re.split("[ML]", match[1])[1:]]


def chart(x, y, **options):
    return html_block(Chart("t", "y", [Series("s", x, y)], x_label="x", **options))


def slope_of(pixels, values):
    """Return the slope, after checking that pixels are a linear function of values, up to rounding."""
    slope, base = np.polyfit(values, pixels, 1)
    np.testing.assert_allclose(pixels, slope * np.asarray(values) + base, atol=0.11)
    return slope


def test_linear_axes_are_linear():
    x, y = [0, 3, 7, 10], [5.0, 2.0, 9.0, 4.0]
    points = path_of(chart(x, y, y_low=0))
    assert slope_of([a for a, _ in points], x) > 0
    assert slope_of([b for _, b in points], y) < 0


def test_log_axes_are_logarithmic():
    x, y = [1, 10, 1000], [1e-30, 1e-4, 1.0]
    points = path_of(chart(x, y, x_scale="log", y_scale="log"))
    assert slope_of([a for a, _ in points], np.log(x)) > 0
    assert slope_of([b for _, b in points], np.log(y)) < 0
    assert path_of(chart(x, np.log10(y), x_scale="log", y_scale="exponent")) == points


def y_ticks(html):
    return [text for a, text in Page(html).all("text") if a.get("text-anchor") == "end" and float(a["x"]) < 150]


def test_ticks():
    assert y_ticks(chart([0, 1], [3, 97], y_low=0)) == ["0", "25", "50", "75", "100"]
    assert y_ticks(chart([0, 1], [0, 0.9], y_low=0)) == ["0.00", "0.25", "0.50", "0.75", "1.00"]
    assert y_ticks(chart([0, 1], [1e-4, 1], y_scale="log")) == ["10⁻⁴", "0.001", "0.01", "0.1", "1"]
    assert y_ticks(chart([0, 1], [-149, 0], y_scale="exponent")) == ["10⁻¹⁵⁰", "10⁻¹²⁰", "10⁻⁹⁰", "10⁻⁶⁰", "10⁻³⁰", "1"]
    labels = [text for _, text in Page(chart([1, 32], [0, 1], x_scale="log")).all("text")]
    assert {"1", "2", "5", "10", "20"} <= set(labels)


@settings(max_examples=25)
@given(st.floats(1e-6, 1e9), st.floats(0, 1))
def test_any_range_stays_inside_the_chart(level, share):
    for y in ([level, level], [level * share, level], [0, 0]):
        html = chart([0, 5], y, y_low=0, size=(480, 270))
        Page(html)
        assert y_ticks(html)[0].strip("0.") == "", "the axis does not begin at 0"
        assert all(0 <= a <= 480 and 20 <= b <= 235 for a, b in path_of(html))


def test_a_line_over_another_is_dashed():
    """So that both colors are seen, in the legend too; of a line that only crosses another, nothing changes."""
    steps = list(range(1, 21))
    falling = [5 - step / 10 for step in steps]
    lines = {
        "c0": (steps, falling, "a"),
        "c1": (steps, [5.5 - step / 10 if step < 9 else 5 - step / 10 for step in steps], "mostly over a"),
        "c2": (steps[1::2], falling[1::2], "at other steps"),
        "c3": (steps, falling[::-1], "crosses"),
        "c4": (steps, [5.5 - step / 10 if step < 13 else 5 - step / 10 for step in steps], "less than half"),
        "c5": (steps, falling, ""),
        "c6": ([], [], "empty"),
    }
    series = [Series(name, x, y, color=name, label=label) for name, (x, y, label) in lines.items()]
    page = Page(html_block(Chart("", "y", series)))
    for tags in ("g", "span"):
        styles = dict(
            attributes["class"].partition(" ")[::2] for attributes, _ in page.all(tags) if "class" in attributes
        )
        assert {color for color, style in styles.items() if style == "dash"} == {"c1", "c2"}


def test_gaps_and_single_points():
    html = chart([0, 1, 2, 3, 4], [1, 2, math.nan, 4, 5])
    assert len(path_of(html)) == 4
    assert re.search(r'class="curve" d="M[^M]*M[^M]*"', html), "the line crosses a gap"
    Page(chart([5], [3]))
    Page(chart([], []))
    Page(chart([1, 2], [0, 0], y_scale="log"))
    Page(html_block(Chart("", "y", [])))


def test_axis_labels_do_not_overlap():
    html = chart([0, 123456789], [0, 1])
    bottom = [(float(a["x"]), text) for a, text in Page(html).all("text") if a.get("text-anchor") == "middle"]
    assert len(bottom) > 2
    for (x, text), (next_x, next_text) in itertools.pairwise(bottom):
        assert x + 3.5 * len(text) < next_x - 3.5 * len(next_text)


def test_bars():
    bars = [Bar("one <b>", 1.0, "100%", "c0"), Bar("two", 1e-6, "tiny", "ctl"), Bar("three", 1e-40, "x", "c1")]
    bars = [*bars, Bar("four", math.nan, "-", "c2")]
    found = Page(html_block(BarChart("T & t", bars, low=1e-12, high=1, scale="log")))
    assert [(float(a["x"]), float(a["y"]), float(a["width"]), float(a["height"])) for a, _ in found.all("rect")] == [
        (230, 3, 570, 15),
        (230, 25, 285, 15),
        (230, 47, 1, 15),  # clipped at the low end, but visible
        (230, 69, 1, 15),
    ]
    assert [a["viewbox"] for a, _ in found.all("svg")] == ["0 0 960 112"]
    notes = {text: (float(a["x"]), float(a["y"])) for a, text in found.all("text")}
    assert notes["100%"] == (230 + 570 + 6, 15) and notes["tiny"] == (230 + 285 + 6, 22 + 15)
    assert notes["two"] == (222, 37) and notes["10⁻¹²"] == (230, 106)
    assert found.texts("figcaption") == ["T & t"]
    assert {"one <b>", "two", "three", "100%", "tiny"} <= set(found.texts("text"))


def test_geometry_of_a_line_chart():
    """The plot area is 24 below the top, 38 above the bottom, 14 from the right, and begins after the labels."""
    series = [Series("a <&>", [0, 10], [0, 100], label="A", dots=True), Series("b", [5], [50], line=False, dots=True)]
    html = html_block(Chart("t", "ys", series, x_label="xs", y_low=0, size=(400, 200)))
    page, left, right = Page(html), 12 + 7 * len("100"), 400 - 14
    assert [a["viewbox"] for a, _ in page.all("svg")] == ["0 0 400 200"]
    assert page.all("svg")[0][0]["aria-label"] == "t: ys by xs; A from 0 to 100"
    assert path_of(html) == [(left, 162.0), (right, 24.0)]
    dots = [(float(a["cx"]), float(a["cy"])) for a, _ in page.all("circle")]
    assert dots == [(left, 162.0), (right, 24.0), ((left + right) / 2, 93.0)]
    frames = [a["d"] for a, _ in page.all("path", "frame")]
    assert frames[0] == f"M{left} 162.0H{right}" and f"M{left}.0 162v4" in frames
    at = {text: (a["x"], a["y"]) for a, text in page.all("text")}
    assert at["0"] == (str(left - 6), "166.0") and at["0.0"] == (f"{left}.0", "179")
    assert at["100"] == (str(left - 6), "28.0") and at["xs"] == (str(right), "196")
    assert page.texts("div", "key") == ["A"] and page.texts("figcaption") == ["t"]
    assert "key" not in html_block(Chart("", "y", series, key=False))


def test_labels_near_the_edges():
    """A label that would cross the left edge is dropped, one that would cross the right edge is moved."""
    ticks = [(1.0, "x" * 20), (2.0, "b"), (3.0, "c" * 8)]
    page = Page(chart([1, 2, 3], [0, 1, 2], x_ticks=ticks))
    labels = {text: (a["x"], a.get("text-anchor")) for a, text in page.all("text")}
    assert "x" * 20 not in labels
    assert labels["b"][1] == "middle" and labels["c" * 8] == ("478.0", "end")
    assert _spaced_labels([(3.6, "a")], 100) == [(3.6, "middle", "a")]  # touches the edge, 3.6 per half character
    assert _spaced_labels([(3.5, "a")], 100) == []


@pytest.mark.parametrize(
    ("step", "rounded"), [(1.0, 1), (1.01, 2), (2.0, 2), (2.01, 2.5), (2.6, 5), (5.1, 10), (0.03, 0.05), (700, 1000)]
)
def test_steps_between_ticks_are_rounded_up(step, rounded):
    assert _round_up(step) == pytest.approx(rounded)


def test_series_without_labels_have_no_legend():
    assert not Page(chart([], [])).all("div")
    page = Page(html_block(Chart("", "y", [Series("a", [], [], label="<x>", style="dash")])))
    assert page.all("span") == [({"class": "c0 dash"}, "<x>")]
