"""Numbers as people read them."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.report.numbers import one_in, passage_probability, percent, power, probability, short, shorten

PERCENT = {
    0: "0%", 1: "100%", 0.5: "50%", 0.9731: "97.3%", 0.99949: "99.9%", 0.9995: "> 99.9%", 0.99951: "> 99.9%",
    1 - 1e-12: "> 99.9%", 0.1: "10%", 0.0999: "9.99%", 0.0123: "1.23%", 1e-4: "0.01%", 4.5e-9: "4.5·10⁻⁷%",
    math.nan: "-",
}  # fmt: skip
ONE_IN = {
    1.0: "every time", 1 - 1e-9: "nearly every time", 0.998: "99 in 100", 0.97: "97 in 100", 1 / 1.99: "50 in 100",
    0.5: "1 in 2", 1 / 7: "1 in 7", 0.0101: "1 in 99", 0.01: "1 in 100", 1 / 12345: "1 in 12,300",
    1 / 999_400: "1 in 999,000", 1 / 999_600: "1 in 1 million", 1 / 4.2e6: "1 in 4.2 million",
    1 / 1e9: "1 in 1 billion", 1 / 3.5e12: "1 in 3.5 trillion",
    1.1e-15: "1 in 909 trillion", 1 / 9.99e14: "1 in 999 trillion", 1 / 9.996e14: "1 in 10¹⁵",
    1e-15: "1 in 10¹⁵", 0.9e-15: "1 in 10¹⁵", 1e-52: "1 in 10⁵²",
}  # fmt: skip
SHORT = {
    0: "0", 1: "1", 0.63217: "0.632", 0.99999: "> 0.999", 0.001: "0.001", 0.000999: "1.0·10⁻³", 0.00123: "0.00123",
    4.56e-9: "4.6·10⁻⁹", -4.56e-9: "-4.6·10⁻⁹", 1e-310: "1.0·10⁻³¹⁰", 9.99e-9: "1.0·10⁻⁸", 12345.6: "12,346",
    math.inf: "-",
}  # fmt: skip


@pytest.mark.parametrize(("share", "text"), PERCENT.items())
def test_percent(share, text):
    assert percent(share) == text


@pytest.mark.parametrize(("p", "text"), ONE_IN.items())
def test_one_in(p, text):
    assert one_in(math.log(p)) == text


def test_one_in_where_p_underflows():
    assert one_in(-1000 * math.log(10)) == "1 in 10¹⁰⁰⁰"
    assert one_in(-math.inf) == "never"


@pytest.mark.parametrize(("value", "text"), SHORT.items())
def test_short(value, text):
    assert short(value) == text


@settings(max_examples=50)
@given(st.floats(5e-324, 1, exclude_max=True))
def test_only_exact_probabilities_are_shown_as_zero_or_one(p):
    assert short(p) not in ("1", "0") and percent(p) not in ("100%", "0%")
    assert one_in(math.log(p)) not in ("every time", "1 in 1")


def test_probability():
    assert [probability(p) for p in (1, 0.7314, 0.001, 0.00099, 3.2e-9, 0)] == [
        "1.000", "0.731", "0.001", "9.9e-04", "3.2e-09", "0",
    ]  # fmt: skip
    assert passage_probability({"p": 0.5, "log_p": math.log(0.5)}) == "0.500"
    assert passage_probability({"p": 0.25, "log_p": math.log(0.25)}) == "0.250 (1 in 4)"


def test_power_and_shorten():
    assert power(-12.4) == "10⁻¹²"
    assert shorten("a\n b", 10) == "a b"
    assert shorten("abcdefghij", 10) == "abcdefghij"
    assert shorten("abcdefghijk", 10) == "abcdefghi…"
    assert shorten("abcdefghijk", 10, end=3) == "abcdef…ijk"
