import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.report.law import LawPoint, fit_law, law_page, law_png, law_text
from tests.report.pages import read

GRID = [(epochs, tokens) for epochs in (1, 2, 5, 30) for tokens in (100, 1000, 40_000)]


def points(c1, c2, c3, grid=GRID, noise=0.0, seed=0):
    random = np.random.default_rng(seed)
    return [
        LawPoint(e, t, c1 * math.log(e) + c2 * math.log(t) + c3 + noise * random.standard_normal()) for e, t in grid
    ]


@given(st.floats(-5, 5), st.floats(-5, 5), st.floats(-50, 50))
def test_known_coefficients_are_found(c1, c2, c3):
    law = fit_law(points(c1, c2, c3))
    assert (law.c1, law.c2, law.c3) == pytest.approx((c1, c2, c3), abs=1e-9)
    assert law.points == len(GRID) and law.rank == 3 and not law.notes
    assert law.r2 is None or law.r2 == pytest.approx(1, abs=1e-6) or max(abs(c1), abs(c2)) < 1e-6
    assert max(law.errors) < 1e-8


@given(st.integers(0, 10**6), st.integers(4, 40))
def test_against_the_textbook(seed, number):
    random = np.random.default_rng(seed)
    epochs, tokens = random.uniform(1, 100, number), random.uniform(50, 50_000, number)
    log_p = random.normal(-20, 10, number)
    law = fit_law([LawPoint(*row) for row in zip(epochs, tokens, log_p, strict=True)])
    x = np.column_stack([np.log(epochs), np.log(tokens), np.ones(number)])
    inverse = np.linalg.inv(x.T @ x)
    wanted = inverse @ x.T @ log_p
    left = log_p - x @ wanted
    deviations = np.sqrt(left @ left / (number - 3) * np.diag(inverse))
    assert (law.c1, law.c2, law.c3) == pytest.approx(tuple(wanted), rel=1e-5, abs=1e-6)
    assert law.errors == pytest.approx(tuple(deviations), rel=1e-5, abs=1e-9)
    assert law.r2 == pytest.approx(1 - left @ left / ((log_p - log_p.mean()) ** 2).sum(), abs=1e-8)
    assert law.fitted == pytest.approx(tuple(x @ wanted), rel=1e-6, abs=1e-6)
    assert np.linalg.lstsq(x, log_p, rcond=None)[0] == pytest.approx((law.c1, law.c2, law.c3), rel=1e-5, abs=1e-6)


def test_by_hand():
    # log e = 0, 1, 2 and log t constant: slope 3.5, mean -4, residuals 0.5, -1, 0.5
    law = fit_law([LawPoint(1, 10, -7.0), LawPoint(math.e, 10, -5.0), LawPoint(math.e**2, 10, 0.0)])
    assert law.c1 == pytest.approx(3.5)
    assert law.c2 is None
    assert law.c3 == pytest.approx(-7.5)
    assert law.errors[0] == pytest.approx(math.sqrt(1.5 / 1 / 2))
    assert law.errors[1] is None
    assert law.errors[2] == pytest.approx(math.sqrt(1.5 * (1 / 3 + 1 / 2)))
    assert law.r2 == pytest.approx(1 - 1.5 / 26)
    assert law.rank == 2
    assert law.notes == ("c2 is unidentifiable: all points have the same tokens (10); c3 holds its part",)


def test_one_number_of_epochs():
    law = fit_law(points(2, -1.5, -3, [(8, tokens) for tokens in (10, 100, 1000, 5000)]))
    assert law.c1 is None and law.errors[0] is None
    assert law.c2 == pytest.approx(-1.5)
    assert law.c3 == pytest.approx(-3 + 2 * math.log(8)), "the constant holds what the epochs add"
    assert "c1 is unidentifiable: all points have the same epochs (8)" in law.notes[0]


@given(st.floats(0.25, 3), st.floats(1, 1000))
def test_tokens_that_follow_from_epochs(exponent, factor):
    grid = [(e, factor * e**exponent) for e in (1, 2, 3, 10, 50)]
    law = fit_law(points(2, -1, -3, grid))
    assert (law.c1, law.c2, law.c3) == (None, None, None)
    assert law.errors == (None, None, None)
    assert law.fitted == pytest.approx(tuple(p.log_p for p in points(2, -1, -3, grid)), abs=1e-6)
    assert law.rank == 2 and "linear function" in law.notes[0]


def test_nearly_equal_tokens_are_still_told_apart():
    law = fit_law(points(2, -1, -3, [(e, t) for e in (1, 4, 9) for t in (40_000, 40_001)]))
    assert law.c2 == pytest.approx(-1, abs=1e-4)


def test_few_points():
    one = fit_law([LawPoint(3, 100, -5.0)])
    assert (one.c1, one.c2, one.c3, one.r2, one.errors) == (None, None, -5.0, None, (None, None, None))
    assert len(one.notes) == 3
    three = fit_law(points(2, -1, -3, [(1, 10), (2, 10), (1, 30)]))
    assert (three.c1, three.c2, three.c3) == pytest.approx((2, -1, -3))
    assert three.r2 is None and three.errors == (None, None, None)
    assert three.notes == ("as many coefficients as points (3): nothing is left to judge the fit by",)
    two = fit_law(points(2, -1, -3, [(1, 10), (2, 30)]))
    assert (two.c1, two.c2, two.c3) == (None, None, None)


def test_a_flat_measurement_has_no_share_explained():
    law = fit_law(points(0, 0, -7))
    assert law.r2 is None and law.c1 == pytest.approx(0, abs=1e-12) and law.c3 == pytest.approx(-7)


@pytest.mark.parametrize(
    "point", [LawPoint(0, 10, -1), LawPoint(1, -5, -1), LawPoint(1, 10, -math.inf), LawPoint(math.nan, 10, -1)]
)
def test_numbers_without_a_logarithm_are_refused(point):
    with pytest.raises(ValueError, match=r"positive epochs and tokens and a finite log P\(z\), not epochs="):
        fit_law([*points(1, 1, 1), point])


def test_no_points_are_refused():
    with pytest.raises(ValueError, match="no points"):
        fit_law([])


def test_the_text():
    noisy = points(1.8, -1.1, -2, noise=0.3)
    law = fit_law(noisy)
    first, *rest = law_text(law)
    assert first == f"log P(z) = {law.c1:.4g} log(epochs) - {-law.c2:.4g} log(tokens) - {-law.c3:.4g}"
    assert rest[0] == f"c1 (log(epochs)): {law.c1:.4g} ± {law.errors[0]:.2g}"
    assert rest[3].startswith(f"R² {law.r2:.4f}, 12 points")
    one_size = law_text(fit_law(points(2, -1, -3, [(e, 10) for e in (1, 2, 4)])))
    assert one_size[0] == "log P(z) = 2 log(epochs) - 5.303" and one_size[2] == "c2 (log(tokens)): unidentifiable"
    nothing = law_text(fit_law([LawPoint(1, 5, -3), LawPoint(2, 10, -2)]))
    assert nothing[0] == "log P(z): no coefficient is identifiable from these points"
    assert any("above P(z) = 1" in line for line in law_text(fit_law(points(3, -0.1, 1))))


CASES = {
    "full": points(1.8, -1.1, -2, noise=0.3),
    "one size": points(1.8, -1.1, -2, [(e, 10) for e in (1, 2, 4)], noise=0.3),
    "one point": [LawPoint(3, 100, -5.0)],
    "many sizes": points(1.8, -1.1, -2, [(e, 10 * k) for e in (1, 4) for k in range(1, 30)], noise=0.3),
    "named": [LawPoint(1, 10, -900.0, "<a & b>"), LawPoint(2, 30, -3.0, "c")],
}


@pytest.mark.parametrize("case", CASES)
def test_the_page(case):
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


@pytest.mark.parametrize("case", CASES)
def test_a_picture(case, tmp_path):
    data = CASES[case]
    law_png(data, fit_law(data), tmp_path / "law.png", title="The law $x")
    picture = (tmp_path / "law.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n") and picture[-8:-4] == b"IEND"


def test_what_is_drawn(tmp_path, monkeypatch):
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
