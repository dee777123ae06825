import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.report.charts import Series, bars, line_chart
from niels_gpt.report.html import (
    LEVELS,
    Cell,
    Column,
    Group,
    escape,
    heat_bar,
    heat_key,
    heat_spans,
    one_in,
    page,
    paragraph,
    percent,
    power,
    short,
    shortened,
    table,
)
from niels_gpt.system.console import plural
from tests.report.pages import Page, read

# --- numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0, "0%"),
        (1, "100%"),
        (0.5, "50%"),
        (0.9731, "97.3%"),
        (0.99949, "99.9%"),
        (0.99951, "> 99.9%"),
        (1 - 1e-12, "> 99.9%"),
        (0.1, "10%"),
        (0.0123, "1.23%"),
        (1e-4, "0.01%"),
        (4.5e-9, "4.5·10⁻⁷%"),
        (math.nan, "-"),
    ],
)
def test_percent(share, text):
    assert percent(share) == text


@pytest.mark.parametrize(
    ("p", "text"),
    [
        (1.0, "every time"),
        (1 - 1e-9, "nearly every time"),
        (0.998, "99 in 100"),
        (0.97, "97 in 100"),
        (0.5, "1 in 2"),
        (1 / 7, "1 in 7"),
        (0.01, "1 in 100"),
        (1 / 12345, "1 in 12,300"),
        (1 / 4.2e6, "1 in 4.2 million"),
        (1 / 1e9, "1 in 1 billion"),
        (1 / 3.5e12, "1 in 3.5 trillion"),
        (1e-52, "1 in 10⁵²"),
    ],
)
def test_one_in(p, text):
    assert one_in(math.log(p)) == text


def test_one_in_where_p_itself_is_no_float():
    assert one_in(-1000 * math.log(10)) == "1 in 10¹⁰⁰⁰"
    assert one_in(-math.inf) == "never"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1, "1"),
        (0.63217, "0.632"),
        (0.99999, "> 0.999"),
        (0.00123, "0.00123"),
        (4.56e-9, "4.6·10⁻⁹"),
        (-4.56e-9, "-4.6·10⁻⁹"),
        (1e-310, "1.0·10⁻³¹⁰"),
        (9.99e-9, "1.0·10⁻⁸"),
        (12345.6, "12,346"),
        (math.inf, "-"),
    ],
)
def test_short(value, text):
    assert short(value) == text


@given(st.floats(5e-324, 1, exclude_max=True))
def test_no_probability_below_one_is_shown_as_one_nor_one_above_zero_as_zero(p):
    assert short(p) not in ("1", "0") and percent(p) not in ("100%", "0%")
    assert one_in(math.log(p)) not in ("every time", "1 in 1")


def test_words():
    assert plural(1, "window") == "1 window"
    assert plural(0, "window") == "0 windows"
    assert plural(1200, "window") == "1,200 windows"
    assert power(-12) == "10⁻¹²"
    assert shortened("a\n b", 10) == "a b"
    assert shortened("abcdefghij", 10) == "abcdefghij"
    assert shortened("abcdefghijk", 10) == "abcdefghi…"
    assert shortened("abcdefghijk", 10, end=3) == "abcdef…ijk"


# --- text --------------------------------------------------------------------------------------------

ANY = st.text(st.characters(exclude_categories=("Cs", "Cc")) | st.sampled_from("\t\n\r<>&\"' "), max_size=40)


@given(ANY)
def test_text_comes_back_as_it_was(text):
    [found] = Page(paragraph(text)).texts("p")
    assert found == text
    [(attributes, _)] = Page(f'<p title="{escape(text)}"></p>').all("p")
    assert attributes["title"] == text


@given(st.text(st.characters(categories=("Cc", "Cs", "L")), max_size=30))
def test_what_no_page_may_hold_is_shown_as_a_sign(text):
    html = escape(text)
    html.encode("utf-8")
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", html)
    [found] = Page(f"<p>{html}</p>").texts("p")
    assert len(found) == len(text)
    assert escape("\x00\x1b\x7f\x85\ud800") == "␀␛␡\ufffd\ufffd"


@given(ANY.filter(bool), st.data())
def test_spans_join_to_the_text_with_the_colour_of_each_character(text, data):
    p = data.draw(
        st.lists(st.sampled_from([0.0, 5e-5, *LEVELS, 0.3, 0.99, 1.0, None]), min_size=len(text), max_size=len(text))
    )
    spans = Page(heat_spans(text, p)).all("span")
    assert "".join(inside for _, inside in spans) == text
    levels = [int(a["class"].removeprefix("h")) for a, inside in spans for _ in inside]
    assert levels == [sum((x or 0) >= limit for limit in LEVELS) for x in p]
    assert all(a["class"] != b["class"] for (a, _), (b, _) in itertools.pairwise(spans)), "equal ones not merged"


def test_hovering_shows_the_range():
    html = heat_spans("abcdef", [0.5, 0.89, 0.6, 1e-6, 1e-6, None])
    assert [a["title"] for a, _ in Page(html).all("span")] == ["50% to 89%", "1.0·10⁻⁴%"]
    assert [a["title"] for a, _ in Page(heat_spans("ab", [None, math.nan])).all("span")] == ["-"]
    assert heat_spans("", []) == ""


def test_a_strip_needs_a_probability_for_each_character():
    with pytest.raises(ValueError, match="3 characters and 2 probabilities"):
        heat_spans("abc", [0.1, 0.2])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=700), st.integers(1, 300))
def test_the_bar_is_the_highest_level_of_each_piece(p, bins):
    rects = Page(heat_bar(p, bins=bins)).all("rect")
    drawn = [int(a["class"][1:]) for a, _ in rects for _ in range(int(a["width"]))]
    number = min(bins, len(p))
    wanted = []
    for i in range(number):
        piece = p[i * len(p) // number : (i + 1) * len(p) // number]
        wanted.append(sum(max(piece) >= limit for limit in LEVELS))
    assert drawn == wanted
    assert [int(a["x"]) for a, _ in rects] == [sum(int(b["width"]) for b, _ in rects[:i]) for i in range(len(rects))]


def test_the_key_names_every_colour():
    assert Page(heat_key()).texts("span") == [
        "below 0.01%",
        *(f"{share} or more" for share in ("0.01%", "1%", "10%", "50%", "90%")),
    ]


def contrast(one, other):
    """WCAG's ratio of two colours."""

    def light(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colours_can_be_read_in_both_themes():
    [style] = Page(page("t", [])).texts("style")
    themes = [
        {name: value + value[1:] * (len(value) == 4) for name, value in re.findall(r"--(\w+):(#[0-9a-f]+)", block)}
        for block in re.findall(r":root\{(.*?)\}", style, re.DOTALL)
    ]
    assert len(themes) == 2 and themes[0].keys() == themes[1].keys()
    for theme in themes:
        for level in range(6):
            assert contrast(theme["ht"], theme[f"h{level}"]) >= 4.5
        for ground in ("bg", "box"):
            assert contrast(theme["fg"], theme[ground]) >= 7
            assert contrast(theme["soft"], theme[ground]) >= 4.5
        for line in (*(f"c{i}" for i in range(8)), "ctl", "mark"):
            assert contrast(theme[line], theme["bg"]) >= 3


# --- tables ------------------------------------------------------------------------------------------


def test_a_table():
    columns = [Column("<name>", text=True), Column("n", over="group", hint="how & why"), Column("p", over="group")]
    rows = [
        [Cell("a&b", small="<i>"), Cell("1,000", 1000), Cell("-")],
        [Cell("all"), Cell("2", 2), Cell("x", math.nan)],
    ]
    found = read(page("t", [table(columns, [Group(rows, "G <1>", total=rows[0]), Group(rows)])]))
    assert [text for _, text in found.all("button")] == ["<name>", "n", "p"]
    assert [(a["colspan"], text) for a, text in found.all("th") if "colspan" in a] == [("1", ""), ("2", "group")]
    assert [a["title"] for a, _ in found.all("th") if "title" in a] == ["how & why"]
    assert found.texts("tr", "group") == ["G <1>"]
    assert found.texts("tr", "total") == ["a&b<i>1,000-"]
    values = [float(a["data-v"]) for a, _ in found.all("td") if "data-v" in a]
    assert values[:4] == [1000, -math.inf, 2, -math.inf]
    assert found.texts("small")[0] == "<i>"


# --- charts ------------------------------------------------------------------------------------------


def path_of(html, colour="c0"):
    """The points of the first line of a colour."""
    match = re.search(rf'<g class="{colour} [^"]*"><title>[^<]*</title><path class="curve" d="([^"]*)"', html)
    return [tuple(map(float, point.split())) for point in re.split("[ML]", match[1])[1:]]


def chart(x, y, **options):
    options = {"x_label": "x", "y_label": "y"} | options
    return line_chart([Series("s", x, y)], **options)


def affine(places, values):
    """Places are a linear function of values, up to rounding."""
    slope, base = np.polyfit(values, places, 1)
    np.testing.assert_allclose(places, slope * np.asarray(values) + base, atol=0.11)
    return slope


def test_linear_axes_are_linear():
    x, y = [0, 3, 7, 10], [5.0, 2.0, 9.0, 4.0]
    places = path_of(chart(x, y, y_low=0))
    assert affine([a for a, _ in places], x) > 0
    assert affine([b for _, b in places], y) < 0


def test_log_axes_are_logarithmic():
    x, y = [1, 10, 1000], [1e-30, 1e-4, 1.0]
    places = path_of(chart(x, y, x_scale="log", y_scale="log"))
    assert affine([a for a, _ in places], np.log(x)) > 0
    assert affine([b for _, b in places], np.log(y)) < 0
    assert path_of(chart(x, np.log10(y), x_scale="log", y_scale="exponent")) == places


def y_ticks(html):
    return [text for a, text in Page(html).all("text") if a.get("text-anchor") == "end" and float(a["x"]) < 150]


def test_ticks():
    assert y_ticks(chart([0, 1], [3, 97], y_low=0)) == ["0", "25", "50", "75", "100"]
    assert y_ticks(chart([0, 1], [0, 0.9], y_low=0)) == ["0.00", "0.25", "0.50", "0.75", "1.00"]
    assert y_ticks(chart([0, 1], [1e-4, 1], y_scale="log")) == ["10⁻⁴", "0.001", "0.01", "0.1", "1"]
    assert y_ticks(chart([0, 1], [-149, 0], y_scale="exponent")) == ["10⁻¹⁵⁰", "10⁻¹²⁰", "10⁻⁹⁰", "10⁻⁶⁰", "10⁻³⁰", "1"]
    labels = [text for _, text in Page(chart([1, 32], [0, 1], x_scale="log")).all("text")]
    assert {"1", "2", "5", "10", "20"} <= set(labels)


@given(st.floats(1e-6, 1e9), st.floats(0, 1))
def test_flat_lines_and_odd_ranges_stay_inside(level, share):
    for y in ([level, level], [level * share, level], [0, 0]):
        html = chart([0, 5], y, y_low=0, size=(480, 270))
        Page(html)
        assert y_ticks(html)[0].strip("0.") == "", "the axis begins at 0"
        assert all(0 <= a <= 480 and 20 <= b <= 235 for a, b in path_of(html))


def test_gaps_and_single_points():
    html = chart([0, 1, 2, 3, 4], [1, 2, math.nan, 4, 5])
    assert len(path_of(html)) == 4
    assert re.search(r'class="curve" d="M[^M]*M[^M]*"', html), "the pen is lifted over a gap"
    Page(chart([5], [3]))
    Page(chart([], []))
    Page(chart([1, 2], [0, 0], y_scale="log"))
    Page(line_chart([], x_label="x", y_label="y"))


def test_labels_of_an_axis_do_not_overlap():
    html = chart([0, 123456789], [0, 1])
    bottom = [(float(a["x"]), text) for a, text in Page(html).all("text") if a.get("text-anchor") == "middle"]
    for (x, text), (next_x, next_text) in itertools.pairwise(bottom):
        assert x + 3.5 * len(text) < next_x - 3.5 * len(next_text)


def test_bars():
    rows = [("one <b>", 1.0, "100%", "c0"), ("two", 1e-6, "tiny", "ctl"), ("three", 1e-40, "x", "c1")]
    found = read(page("t", [bars(rows, title="T & t", low=1e-12, high=1, scale="log")]))
    widths = [float(a["width"]) for a, _ in found.all("rect", "own")]
    assert widths[1] == pytest.approx(widths[0] / 2, abs=0.1)
    assert widths[2] == 1, "clipped at the low end, but there"
    assert {"one <b>", "two", "three", "100%", "tiny"} <= set(found.texts("text"))
