"""A document as HTML and as Markdown: the same content, nothing loaded, nothing executed."""

import math
import re

import pytest

from niels_gpt.report.charts import Chart, Series
from niels_gpt.report.document import (
    Cell,
    Charts,
    Column,
    Details,
    Document,
    Facts,
    Lead,
    Paragraph,
    Section,
    Table,
    Text,
    html_page,
    markdown,
)
from tests.report.pages import read

EVIL = "<script>alert(1)</script> [x](javascript:1) | `code` *b* \x1b[31m"


def make(*blocks):
    return Document("A run", "written today", [Section("Part", blocks)])


def rows_of(text):
    """Return the cells of the table rows in a Markdown text."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_every_block_is_in_both():
    document = make(
        Paragraph("one"),
        Lead(["two"]),
        Facts([("three", "four")]),
        Table([Column("five", text=True), Column("six")], [[Cell("seven"), Cell("8", 8)]]),
        Text("nine\n  ten"),
        Details("eleven", [Paragraph("twelve")]),
        Charts([Chart("thirteen", "nats", [Series("a", [1, 2], [3.0, 4.0], label="fourteen")])]),
    )
    page, text = html_page(document), markdown(document)
    shown = " ".join(read(page).texts("main"))
    words = ["A run", "written today", "Part", "one", "two", "three", "four", "five", "seven", "nine\n  ten"]
    for word in [*words, "eleven", "twelve", "thirteen", "fourteen"]:
        assert word in shown and word in text, word


def test_texts_of_others_are_text():
    blocks = [Paragraph(EVIL), Facts([(EVIL, EVIL)]), Text(EVIL), Details(EVIL, []), Lead([EVIL])]
    cells = Table([Column(EVIL, text=True)], [[Cell(EVIL, small=EVIL)]])
    charts = Charts([Chart(EVIL, EVIL, [Series(EVIL, [1], [1.0], label=EVIL)])])
    document = Document(EVIL, EVIL, [Section(EVIL, [*blocks, cells, charts])])
    page = read(html_page(document))
    assert ["alert" in text for text in page.texts("script")] == [False]
    text = markdown(document)
    outside = re.sub(r"```text\n.*?\n```\n", "", text, flags=re.DOTALL)
    assert "alert" in outside and not re.search(r"(?<!\\)[<`*\[]", outside)
    assert "\x1b" not in text and "\x1b" not in html_page(document)


@pytest.mark.parametrize("ticks", ["`", "```", "`````"])
def test_a_text_cannot_end_its_fence(ticks):
    lines = markdown(make(Text(f"{ticks}\n# not a heading\n{ticks}"))).splitlines()
    fence = next(line for line in lines if line.endswith("text"))[: -len("text")]
    assert len(fence) > len(ticks) and set(fence) == {"`"}
    assert lines.count(fence) == 1


def test_a_chart_has_a_name_and_its_values_in_words():
    series = [Series("x", [1, 2, 3], [5.0, math.nan, 2.5], label="loss"), Series("hidden", [1], [9.0])]
    page = read(html_page(make(Charts([Chart("Loss", "nats", series)]))))
    [(attributes, _)] = page.all("svg")
    assert attributes["role"] == "img"
    assert attributes["aria-label"] == "Loss: nats by steps; loss from 5 to 2.5"


def test_a_chart_in_markdown_is_a_table_of_points():
    steps = list(range(1, 101))
    long = Series("long", steps, [float(step) for step in steps], label="long")
    short = Series("short", [10, 20], [1.5, 2.5], label="short")
    header, _, *rows = rows_of(markdown(make(Charts([Chart("Loss", "nats", [short, long])]))))
    assert header == ["steps", "short", "long"]
    assert [row[0] for row in rows] == [row[2] for row in rows]
    assert (rows[0][0], rows[-1][0], len(rows)) == ("1", "100", 9)
    assert [row[1] for row in rows] == ["", "1.5", "2.5", *[""] * 6]


def test_the_page_needs_no_script():
    page = read(html_page(make(Charts([Chart("Loss", "nats", [Series("a", [1, 2], [1.0, 2.0])])]), Text("x"))))
    assert page.all("path", "curve")
    assert page.texts("h2") == ["Part"]
