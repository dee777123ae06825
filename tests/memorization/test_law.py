"""The fit of the memorization law against the textbook and by hand; its points from report files."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.memorization.law import LawPoint, fit_law, law_points
from niels_gpt.system.checked_json import write_checked_json
from tests.faults import flipped
from tests.memorization.models import points


@settings(max_examples=25)
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
    assert (law.points, law.rank, law.notes) == (number, 3, ())


def test_fit_by_hand():
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
    [note] = law.notes
    assert note.startswith("c2 ") and "tokens (10)" in note and "c3" in note
    law = fit_law(points(2, -1.5, -3, [(8, tokens) for tokens in (10, 100, 1000, 5000)]))
    assert law.c1 is None and law.errors[0] is None
    assert (law.c2, law.c3) == pytest.approx((-1.5, -3 + 2 * math.log(8)))  # c3 contains what the epochs contribute
    assert law.notes[0].startswith("c1 ") and "epochs (8)" in law.notes[0]


@settings(max_examples=25)
@given(st.floats(0.25, 3), st.floats(1, 1000))
def test_tokens_as_a_function_of_epochs(exponent, factor):
    grid = [(e, factor * e**exponent) for e in (1, 2, 3, 10, 50)]
    law = fit_law(points(2, -1, -3, grid))
    assert (law.c1, law.c2, law.c3) == (None, None, None)
    assert law.errors == (None, None, None)
    assert law.fitted == pytest.approx(tuple(p.log_p for p in points(2, -1, -3, grid)), abs=1e-6)
    assert law.rank == 2 and "linear function" in law.notes[0]


def test_nearly_equal_tokens_determine_c2():
    law = fit_law(points(2, -1, -3, [(e, t) for e in (1, 4, 9) for t in (40_000, 40_001)]))
    assert law.c2 == pytest.approx(-1, abs=1e-4)


def test_few_points():
    one = fit_law([LawPoint(3, 100, -5.0)])
    assert (one.c1, one.c2, one.c3, one.r2, one.errors) == (None, None, -5.0, None, (None, None, None))
    assert len(one.notes) == 3
    three = fit_law(points(2, -1, -3, [(1, 10), (2, 10), (1, 30)]))
    assert (three.c1, three.c2, three.c3) == pytest.approx((2, -1, -3))
    assert three.r2 is None and three.errors == (None, None, None)
    assert len(three.notes) == 1 and "(3)" in three.notes[0]
    two = fit_law(points(2, -1, -3, [(1, 10), (2, 30)]))
    assert (two.c1, two.c2, two.c3) == (None, None, None)


def test_a_constant_has_no_r2():
    law = fit_law(points(0, 0, -7))
    assert law.r2 is None and law.c1 == pytest.approx(0, abs=1e-12) and law.c3 == pytest.approx(-7)


@pytest.mark.parametrize(
    "point", [LawPoint(0, 10, -1), LawPoint(1, -5, -1), LawPoint(1, 10, -math.inf), LawPoint(math.nan, 10, -1)]
)
def test_values_without_a_logarithm_raise(point):
    with pytest.raises(ValueError, match=rf"epochs={point.epochs}, tokens={point.tokens}, log_p={point.log_p}"):
        fit_law([*points(1, 1, 1), point])
    with pytest.raises(ValueError, match="no points"):
        fit_law([])


def test_points_are_the_trained_means_at_checkpoints_with_epochs(tmp_path):
    run = tmp_path / "my run"
    documents = [(-3.0, False), (-5.0, False), (-900.0, True)]
    rows = [{"mean_log_p": log_p, "control": control} for log_p, control in documents]
    report = {
        "train_tokens": 700,
        "checkpoints": [
            {"step": 0, "epochs": 0.0, "documents": rows},
            {"step": 10, "epochs": 0.5, "documents": rows},
            {"step": 20, "epochs": 1.0, "documents": rows[2:]},
        ],
    }
    with pytest.raises(ValueError, match="my run"):
        law_points(run)
    run.mkdir()
    with pytest.raises(ValueError, match=r"niels-gpt research memorize '.*my run'"):
        law_points(run)
    (run / "memorization").mkdir()
    path = run / "memorization" / "report.json"
    path.write_text(json.dumps(report), encoding="utf-8")
    assert law_points(run) == [LawPoint(0.5, 700, -4.0, "my run, step 10")]
    write_checked_json(path, report)
    for damaged in flipped(path.read_bytes()):
        path.write_bytes(damaged)
        try:
            assert law_points(run) == [LawPoint(0.5, 700, -4.0, "my run, step 10")]
        except ValueError as err:
            assert "report.json" in str(err)
    for wrong in ("{", "[]", '{"checkpoints": []}', '{"train_tokens": 1, "checkpoints": [{"documents": []}]}'):
        path.write_text(wrong, encoding="utf-8")
        with pytest.raises(ValueError, match=r"memorization/report\.json.*niels-gpt research memorize"):
            law_points(run)
