"""HTML: escaping, tables, text colored by a probability."""

import itertools
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.report.document import (
    BAR_BINS,
    LEVELS,
    Cell,
    Column,
    Details,
    Document,
    Group,
    HeatKey,
    HeatText,
    Section,
    Table,
    escape,
    heat_html,
    html_block,
    html_page,
)
from tests.report.pages import Page, read

# --- text --------------------------------------------------------------------------------------------

ANY = st.text(st.characters(exclude_categories=("Cs", "Cc")) | st.sampled_from("\t\n\r<>&\"' "), max_size=40)


@settings(max_examples=30)
@given(ANY)
def test_escaped_text_is_read_back_unchanged(text):
    [found] = Page(f"<p>{escape(text)}</p>").texts("p")
    assert found == text
    [(attributes, _)] = Page(f'<p title="{escape(text)}"></p>').all("p")
    assert attributes["title"] == text


@settings(max_examples=30)
@given(st.text(st.characters(categories=("Cc", "Cs", "L")), max_size=30))
def test_control_characters_become_visible_signs(text):
    html = escape(text)
    html.encode("utf-8")
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", html)
    [found] = Page(f"<p>{html}</p>").texts("p")
    assert len(found) == len(text)
    assert escape("\x00\x1b\x7f\x85\ud800") == "␀␛␡\ufffd\ufffd"


@settings(max_examples=30)
@given(ANY.filter(bool), st.data())
def test_spans_join_to_the_text_with_the_color_of_each_character(text, data):
    p = data.draw(
        st.lists(st.sampled_from([0.0, 5e-5, *LEVELS, 0.3, 0.99, 1.0, None]), min_size=len(text), max_size=len(text))
    )
    spans = Page(heat_html(text, p)).all("span")
    assert "".join(inside for _, inside in spans) == text
    levels = [int(a["class"].removeprefix("h")) for a, inside in spans for _ in inside]
    assert levels == [sum((x or 0) >= limit for limit in LEVELS) for x in p]
    assert all(a["class"] != b["class"] for (a, _), (b, _) in itertools.pairwise(spans)), "equal ones not merged"


def test_hover_shows_the_range_of_probabilities():
    html = heat_html("abcdef", [0.5, 0.89, 0.6, 1e-6, 1e-6, None])
    assert [a["title"] for a, _ in Page(html).all("span")] == ["50% to 89%", "1.0·10⁻⁴%"]
    unknown = Page(html_block(HeatText("ab", [None, math.nan], "prompt")))
    assert [a.get("title") for a, _ in unknown.all("span")] == [None, "-"]
    assert heat_html("", []) == ""


def test_a_strip_needs_one_probability_per_character():
    with pytest.raises(ValueError, match=r"3 .*2 "):
        html_block(HeatText("abc", [0.1, 0.2]))


@settings(max_examples=30)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=700))
def test_the_strip_shows_the_highest_level_of_each_bin(p):
    html = html_block(Details("d", [], bar=p))
    rects = Page(html).all("rect")
    drawn = [int(a["class"][1:]) for a, _ in rects for _ in range(int(a["width"]))]
    number = min(BAR_BINS, len(p))
    wanted = []
    for i in range(number):
        piece = p[i * len(p) // number : (i + 1) * len(p) // number]
        wanted.append(sum(max(piece) >= limit for limit in LEVELS))
    assert drawn == wanted and f'viewBox="0 0 {number} 1"' in html
    assert "svg" not in html_block(Details("d", []))
    assert [int(a["x"]) for a, _ in rects] == [sum(int(b["width"]) for b, _ in rects[:i]) for i in range(len(rects))]


def test_the_legend_names_every_color():
    assert Page(html_block(HeatKey())).texts("span") == [
        "below 0.01%",
        *(f"{share} or more" for share in ("0.01%", "1%", "10%", "50%", "90%")),
    ]


def contrast(one, other):
    """Return the WCAG contrast ratio of two colors."""

    def luminance(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colors_have_contrast_in_both_themes():
    [style] = Page(html_page(Document("t", "", []))).texts("style")
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
    found = Page(html_block(Table(columns, groups=[Group(rows, "G <1>", total=rows[0]), Group(rows)])))
    assert [text for _, text in found.all("button")] == ["<name>", "n", "p"]
    assert [(a["colspan"], text) for a, text in found.all("th") if "colspan" in a] == [("1", ""), ("2", "group")]
    assert [a["title"] for a, _ in found.all("th") if "title" in a] == ["how & why"]
    assert found.texts("tr", "group") == ["G <1>"]
    assert found.texts("tr", "total") == ["a&b<i>1,000-"]
    values = [float(a["data-v"]) for a, _ in found.all("td") if "data-v" in a]
    assert values[:4] == [1000, -math.inf, 2, -math.inf]
    assert found.texts("small")[0] == "<i>"


def test_headings_over_columns_are_merged():
    columns = [Column("a"), Column("b", over="x"), Column("c", over="x"), Column("d", over="y"), Column("e")]
    spans = [(int(a["colspan"]), text) for a, text in Page(html_block(Table(columns))).all("th") if "colspan" in a]
    assert spans == [(1, ""), (2, "x"), (1, "y"), (1, "")]
    assert "over" not in html_block(Table([Column("a"), Column("b")]))


def test_rows_must_fit_the_columns():
    for group in (Group([[Cell("1")]]), Group([], total=[Cell("1")])):
        with pytest.raises(ValueError, match=r"1 .*2 "):
            Table([Column("a"), Column("b")], groups=[group])


def test_pages_are_self_contained():
    page = read(html_page(Document("T <&>", "", [Section("", [])])))
    assert page.texts("title") == ["T <&>"]
    assert "default-src 'none'" in page.all("meta")[1][0]["content"]
    [style], [script] = page.texts("style"), page.texts("script")
    assert ".c7{--k:var(--c7)}" in style and ".c8" not in style and ".h5{" in style and ".h6" not in style
    assert 'querySelectorAll("thead button")' in script
