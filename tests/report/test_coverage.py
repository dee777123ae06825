"""Coverage as text, as PNG and as a page, against a naive binning."""

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.report.coverage import _mean, bin_means, blocks, coverage_page, coverage_png, coverage_text
from niels_gpt.splice.coverage import Coverage
from tests.report.pages import read

BLOCKS = " ▁▂▃▄▅▆▇█"


def document(name, seen, supervised=None):
    seen = np.asarray(seen, dtype=np.int64)
    supervised = np.maximum(seen - 1, 0) if supervised is None else np.asarray(supervised, dtype=np.int64)
    return Coverage(name, len(seen), seen, supervised)


def naive_means(values, bins):
    """Bin token by token: token j of n belongs to the last bin i with floor(i n / bins) <= j."""
    bins = min(bins, len(values))
    sums, counts = [0.0] * bins, [0] * bins
    for j, value in enumerate(values):
        i = max(i for i in range(bins) if i * len(values) // bins <= j)
        sums[i] += value
        counts[i] += 1
    return [total / count for total, count in zip(sums, counts, strict=True)]


TIMES = st.lists(st.integers(0, 40), min_size=1, max_size=60)


@settings(max_examples=40)
@given(TIMES, st.integers(1, 30))
def test_bins(values, bins):
    starts, means = bin_means(np.array(values), bins)
    assert means == pytest.approx(naive_means(values, bins))
    sizes = np.diff([*starts, len(values)])
    assert starts[0] == 0 and sizes.max() - sizes.min() <= 1


def test_text_by_hand():
    documents = [document("even", [4] * 16), document("日本", [1, 1, 2, 2, 3, 3, 4, 4, 4, 4, 3, 3, 2, 2, 0, 0])]
    assert coverage_text(documents, title="One epoch", examples=2000, frames=1, width=8) == [
        "One epoch: 2 documents, 32 tokens; 2,000 examples in 1 frame; █ = 4.00 times",
        "                            seen       supervised",
        "                tokens  min mean max  min mean max  epoch",
        "even  ████████      16    4 4.00   4    3 3.00   3  62.7%",
        "日本  ▂▄▆██▆▄       16    0 2.38   4    0 1.50   3  37.3%",
    ]
    long = [document("one", [1000, 3000]), document("a longer name", [0] * 1999 + [20_000])]
    assert coverage_text(long, title="T", examples=1, frames=30, width=4)[1:] == [
        "                                    seen            supervised",
        "                     tokens    min  mean    max  min  mean    max  epoch",
        "one            ▃█         2  1,000 2,000  3,000  999 1,999  2,999  16.7%",
        "a longer name     ▁   2,000      0  10.0 20,000    0 10.00 19,999  83.3%",
    ]


def test_names_for_the_terminal():
    names = ["\x1b[31mred\nname", "x" * 200, "short"]
    lines = coverage_text([document(name, [1]) for name in names], title="", examples=1, frames=1, width=5)[3:]
    assert "\x1b" not in "".join(lines) and lines[0].startswith("?[31mred name ")
    assert len({line.index("█") for line in lines}) == 1, "the columns are not aligned"
    assert lines[1].index("█") == 30


def test_no_documents_and_unseen_documents():
    assert coverage_text([], title="T", examples=0, frames=0) == ["T: 0 documents, 0 tokens; 0 examples in 0 frames"]
    read(coverage_page([], title="T", examples=0, frames=0))
    text = coverage_text([document("a", [0, 0])], title="T", examples=0, frames=0, width=4)
    assert "0%" in text[-1] and not set(BLOCKS[1:]) & set(text[-1])


# --- PNG -------------------------------------------------------------------------------------


@pytest.fixture
def figure(monkeypatch):
    """Collect figures instead of writing them."""
    from matplotlib.figure import Figure

    found = []

    def collect(self, file, **options):
        found.append(self)
        file.write(b"picture")

    monkeypatch.setattr(Figure, "savefig", collect)
    return found


def test_panels_of_the_png(tmp_path, figure):
    documents = [document("a $x$", [5] * 50), document("b", [0, 1, 2, 3])]
    coverage_png(documents, tmp_path / "c.png", title="T", examples=9, frames=3)
    panels = [axes for axes in figure[0].axes if axes.get_visible()]
    assert [axes.get_title() for axes in panels] == [r"a \$x\$", "b"]
    assert {axes.get_ylim() for axes in panels} == {(0, 6)}, "from 0, one scale"
    supervised, seen = panels[1].get_lines()
    assert seen.get_xydata().tolist() == [[0, 0], [1, 0], [1, 1], [2, 1], [2, 2], [3, 2], [3, 3], [4, 3]]
    assert supervised.get_ydata().tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
    assert "9 examples in 3 frames" in figure[0].get_suptitle()
    assert (tmp_path / "c.png").read_bytes() == b"picture"


def test_more_documents_than_panels(tmp_path, figure):
    coverage_png([document(f"{i}", [1, 2]) for i in range(30)], tmp_path / "c.png", title="T", examples=9, frames=3)
    assert len([axes for axes in figure[0].axes if axes.get_visible()]) == 24
    assert "6 more not drawn" in figure[0].get_suptitle()


@pytest.mark.parametrize("number", [0, 2])
def test_png(tmp_path, recwarn, number):
    coverage_png([document("日本", range(50))] * number, tmp_path / "c.png", title="T", examples=9, frames=3)
    data = (tmp_path / "c.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and data[-8:-4] == b"IEND"
    assert not [w for w in recwarn if "Glyph" in str(w.message)]


# --- page ----------------------------------------------------------------------------------------


def test_page():
    documents = [document("a <b>&", [40] * 4000, [39] * 3999 + [0]), document("b", [10] * 1000)]
    html = coverage_page(documents, title="C <i>", examples=1234, frames=56)
    page = read(html)
    assert page.texts("h1") == ["C <i>"]
    assert "2 documents, 5,000 tokens; 1,234 examples in 56 frames" in page.texts("p", "soft")
    cells = page.texts("td")
    assert cells[:11] == ["a <b>&", "4,000", "40", "40.0", "40", "0", "39.0", "39", "1", "94.1%", "80%"]
    assert cells[11:] == ["b", "1,000", "10", "10.0", "10", "9", "9.00", "9", "0", "5.88%", "20%"]
    curves = [a["d"] for a, _ in page.all("path", "curve")]
    assert len(curves) == 4
    heights = [{float(point.split()[1]) for point in re.split("[ML]", d)[1:]} for d in curves]
    assert len(heights[1]) == len(heights[3]) == 1, "uniform coverage is not flat"
    bottom, [high], [low] = 180 - 38, heights[1], heights[3]
    assert (bottom - high) / (bottom - low) == pytest.approx(4, abs=0.02), "from 0, one scale"


def test_charts_of_the_first_hundred_documents():
    page = read(coverage_page([document(f"d{i}", [1] * 9) for i in range(104)], title="T", examples=1, frames=1))
    assert len(page.texts("figure")) == 100
    assert "d103" in page.texts("td") and "4 more: in the table only." in page.texts("p", "soft")


def test_a_document_without_tokens():
    empty = document("empty", [])
    page = read(coverage_page([empty, document("a", [1])], title="T", examples=1, frames=1))
    assert page.texts("td")[:8] == ["empty", "0", "-", "-", "-", "-", "-", "-"]
    assert "empty" in coverage_text([empty], title="T", examples=1, frames=1)[-1]
    assert math.isinf(float(page.all("td")[2][0]["data-v"]))


def test_blocks_are_rounded_up_to_eighths():
    assert blocks(np.array([0, 0.01, 1, 1.01, 7.99, 8, 9]), 8.0) == " ▁▁▂███"
    assert blocks(np.array([0.0, 0.0]), 0.0) == "  "


@pytest.mark.parametrize(
    ("mean", "text"), [(0, "0.00"), (9.994, "9.99"), (10, "10.0"), (999.94, "999.9"), (1000, "1,000")]
)
def test_means_have_three_to_four_digits(mean, text):
    assert _mean(mean) == text


@pytest.mark.parametrize(("number", "across", "down"), [(1, 1, 1), (3, 3, 1), (4, 3, 2), (9, 3, 3), (10, 4, 3)])
def test_layout_of_the_panels(tmp_path, figure, number, across, down):
    coverage_png([document(f"{i}", [1]) for i in range(number)], tmp_path / "c.png", title="T", examples=1, frames=1)
    grid = figure[0].axes[0].get_gridspec()
    assert (grid.ncols, grid.nrows) == (across, down)
    assert "more" not in figure[0].get_suptitle()
    assert figure[0].get_size_inches().tolist() == pytest.approx([max(8, 3.4 * across), 1.2 + 1.9 * down])


def test_the_axis_of_tokens_has_whole_numbers():
    """A document of ten tokens had the labels 2.5 and 7.5."""
    for length in (1, 2, 3, 5, 10, 25):
        page = coverage_page([document("a", [1] * length)], title="t", examples=1, frames=1)
        labels = re.findall(r'y="159" text-anchor="\w+">([^<]+)</text>', page)
        assert labels[0] == "0" and len(labels) > 1
        assert all(label.isdigit() for label in labels)


def test_one_chart_is_as_wide_as_each_of_many():
    """auto-fit would stretch it over the page, and its axis text with it."""
    page = coverage_page([document("a", [1, 2])], title="t", examples=1, frames=1)
    assert "auto-fill" in page and "auto-fit" not in page
