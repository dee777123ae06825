"""Histograms of lengths as text and as PNG, against a naive count."""

import matplotlib.image
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.report.histogram import count_by_doubling, histogram_text, plot_histogram

LENGTHS = st.lists(
    st.one_of(
        st.integers(0, 20),
        st.integers(0, 2**53),
        st.builds(lambda power, step: max(2**power + step, 0), st.integers(0, 52), st.integers(-1, 1)),
    ),
    max_size=40,
)


def naive(lengths):
    """Count in the bins 0, 1, 2-3, 4-7, ..., doubling until the largest fits."""
    if not lengths:
        return []
    edges = [(0, 1), (1, 2)]
    while edges[-1][1] <= max(lengths):
        edges.append((edges[-1][1], 2 * edges[-1][1]))
    bins = [(low, high, sum(low <= n < high for n in lengths)) for low, high in edges]
    while not bins[0][2]:
        bins.pop(0)
    while not bins[-1][2]:
        bins.pop()
    return bins


@settings(max_examples=50)
@given(LENGTHS)
def test_bins_equal_a_naive_count(lengths):
    assert count_by_doubling(lengths) == naive(lengths)


@pytest.mark.parametrize("length", [0, 1, 2, 1023, 1024, 2**53 - 1, 2**53, 2**54 - 1, 2**63 - 1])
def test_one_length(length):
    assert count_by_doubling([length]) == count_by_doubling(np.array([length])) == naive([length])


def test_no_lengths():
    assert count_by_doubling([]) == []
    assert histogram_text([]) == []


def test_text_by_hand():
    lines = histogram_text([0] * 2 + [1] * 4 + [2, 3, 3, 3] * 2 + [17], width=8)
    assert lines == [
        "       0  ██        2",
        "       1  ████      4",
        "  2 to 3  ████████  8",
        "  4 to 7            0",
        " 8 to 15            0",
        "16 to 31  █         1",
    ]
    eighths = histogram_text([1] * 16 + [2] * 9 + [4] * 6 + [8], width=1)  # rounded up
    assert eighths == ["      1  █  16", " 2 to 3  ▋  9", " 4 to 7  ▍  6", "8 to 15  ▏  1"]


def test_a_single_sample_shows_beside_many():
    first, *_, last = histogram_text([1] * 100_000 + [100])
    assert first == "        1  " + "█" * 40 + "  100,000"
    assert last == "64 to 127  ▏" + " " * 39 + "  1"


# --- PNG -------------------------------------------------------------------------------------


def test_png(tmp_path, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setenv("MPLBACKEND", "TkAgg")  # no display is needed
    plot_histogram([0, 0, 1, 2, 1000, 10_000_000], tmp_path / "h.png", title="a title with [brackets] & ü")
    image = matplotlib.image.imread(tmp_path / "h.png")
    assert image.shape[1] > image.shape[0] > 300
    bars = (abs(image[..., :3] - np.array([0x2C, 0x63, 0xB8]) / 255) < 0.01).all(axis=2)
    assert bars.sum() > 1000, "no bars"
    assert [file.name for file in tmp_path.iterdir()] == ["h.png"]


def test_bars_of_the_png(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    found = {}

    def collect(self, file, **options):
        axes = self.axes[0]
        found["heights"] = axes.get_lines()[0].get_ydata()[::2].tolist()
        found["title"] = axes.get_title()
        found["labels"] = [label.get_text() for label in axes.get_xticklabels()]
        file.write(b"picture")

    monkeypatch.setattr(Figure, "savefig", collect)
    plot_histogram([0, 1, 1, 5, 1030], tmp_path / "h.png", title="poems")
    assert found["heights"] == [1, 2, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1]
    assert found["title"] == "poems"
    assert found["labels"][:4] == ["0", "1", "2", "4"] and "1,024" in found["labels"]
    assert (tmp_path / "h.png").read_bytes() == b"picture"


def test_the_png_is_replaced_atomically(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    path = tmp_path / "h.png"
    path.write_bytes(b"old")

    def fail(self, file, **options):
        file.write(b"half a pic")
        raise OSError("no space left")

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError, match="no space left"):
        plot_histogram([4, 5], path, title="third")
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["h.png"]
