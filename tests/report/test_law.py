"""The memorization law as text, as PNG and as a page."""

import math

import numpy as np
import pytest

from niels_gpt.memorization.law import Law, LawPoint, fit_law
from niels_gpt.report.law import _groups, law_page, law_png, law_text
from tests.memorization.models import points
from tests.report.pages import read


def test_text():
    noisy = points(1.8, -1.1, -2, noise=0.3)
    law = fit_law(noisy)
    first, *rest = law_text(law)
    assert first == f"log P(z) = {law.c1:.4g} log(epochs) - {-law.c2:.4g} log(tokens) - {-law.c3:.4g}"
    assert rest[0] == f"c1 (log(epochs)): {law.c1:.4g} ± {law.errors[0]:.2g}"
    assert rest[3].startswith(f"R² {law.r2:.4f}, 12 points")
    one_size = law_text(fit_law(points(2, -1, -3, [(e, 10) for e in (1, 2, 4)])))
    assert one_size[0] == "log P(z) = 2 log(epochs) - 5.303" and one_size[2] == "c2 (log(tokens)): unidentifiable"
    nothing = law_text(fit_law([LawPoint(1, 5, -3), LawPoint(2, 10, -2)]))
    assert nothing[0].startswith("log P(z): no coefficient")
    assert any("above P(z) = 1" in line for line in law_text(fit_law(points(3, -0.1, 1))))


CASES = {
    "full": points(1.8, -1.1, -2, noise=0.3),
    "one point": [LawPoint(3, 100, -5.0)],
    "many sizes": points(1.8, -1.1, -2, [(e, 10 * k) for e in (1, 4) for k in range(1, 30)], noise=0.3),
    "named": [LawPoint(1, 10, -900.0, "<a & b>"), LawPoint(2, 30, -3.0, "c")],
}


@pytest.mark.parametrize("case", CASES)
def test_page(case):
    data = CASES[case]
    law = fit_law(data)
    page = read(law_page(data, law, title="The law <of> $x$"))
    assert page.texts("h1") == ["The law <of> $x$"]
    assert page.texts("div", "lead") == [law_text(law)[0]]
    assert page.texts("li") == law_text(law)[1:]
    assert len(page.all("circle")) == 2 * len(data), "each point in both charts"
    cells = page.texts("td")
    for point, fit in zip(data, law.fitted, strict=True):
        assert f"{point.log_p:.3f}" in cells and f"{fit:.3f}" in cells
    assert not any(p.name for p in data) or "<a & b>" in cells


@pytest.mark.parametrize("case", ["one point", "many sizes"])
def test_png(case, tmp_path):
    data = CASES[case]
    law_png(data, fit_law(data), tmp_path / "law.png", title="The law $x")
    picture = (tmp_path / "law.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n") and picture[-8:-4] == b"IEND"


def test_lines_of_the_png(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    found = []
    monkeypatch.setattr(Figure, "savefig", lambda self, file, **options: (found.append(self), file.write(b"picture")))
    data = points(1.8, -1.1, -2, [(e, t) for e in (1, 2, 4) for t in (10, 20)], noise=0.3)
    law = fit_law(data)
    law_png(data, law, tmp_path / "law.png", title="T")
    over, against = found[0].axes
    dots = {line.get_label(): line.get_xydata() for line in over.get_lines() if line.get_marker() == "o"}
    assert list(dots) == ["10 tokens", "20 tokens"]
    assert dots["20 tokens"].tolist() == [[p.epochs, p.log_p / math.log(10)] for p in data if p.tokens == 20]
    drawn = np.concatenate([line.get_xydata() for line in against.get_lines() if line.get_marker() == "o"])
    wanted = [(fit / math.log(10), p.log_p / math.log(10)) for p, fit in zip(data, law.fitted, strict=True)]
    np.testing.assert_allclose(sorted(map(tuple, drawn.tolist())), sorted(wanted))
    assert "T\nlog P(z) = " in found[0].get_suptitle()


def test_sizes_are_grouped_by_color():
    """Up to eight sizes have a group each; more are split evenly, in ascending order."""
    few = [LawPoint(1, 10 * k, -1.0) for k in (3, 1, 2)]
    assert _groups(few) == [("10 tokens", [1]), ("20 tokens", [2]), ("30 tokens", [0])]
    many = [LawPoint(1, 10 * k, -1.0) for k in range(1, 18)]
    groups = _groups(many)
    assert [len(members) for _, members in groups] == [2] * 7 + [3]
    assert groups[0] == ("10 to 20 tokens", [0, 1]) and groups[-1][0] == "150 to 170 tokens"


def test_signs_of_the_terms():
    def first(c1, c2, c3):
        return law_text(Law(c1, c2, c3, (None, 0.25, None), 0.5, 1, 3, (0.0, 0.1)))[0]

    assert first(0.5, -0.5, 0.5) == "log P(z) = 0.5 log(epochs) - 0.5 log(tokens) + 0.5"
    assert first(-0.5, 0.0, -1.0) == "log P(z) = -0.5 log(epochs) + 0 log(tokens) - 1"
    assert first(None, 0.5, -0.5) == "log P(z) = 0.5 log(tokens) - 0.5"
    lines = law_text(Law(1.0, 2.0, 3.0, (None, 0.25, None), None, 1, 3, (0.0, 0.1)))
    assert lines[1:5] == [
        "c1 (log(epochs)): 1",
        "c2 (log(tokens)): 2 ± 0.25",
        "c3 (constant): 3",
        "R² unknown, 1 point",
    ]
    assert lines[5].startswith("1 fitted") and len(lines) == 6  # P(z) = 1 is not above 1
