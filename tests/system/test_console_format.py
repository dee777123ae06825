"""Numbers and durations as the console shows them."""

import pytest

from niels_gpt.system.console import format_duration, plural, short_number


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (7, "7"),
        (999, "999"),
        (1000, "1k"),
        (1234, "1.23k"),
        (12_345, "12.3k"),
        (123_456, "123k"),
        (1_000_000, "1M"),
        (3_210_000, "3.21M"),
        (999_999, "1M"),
        (999_999_999, "1G"),
        (2.5e9, "2.5G"),
    ],
)
def test_short_number(number, text):
    assert short_number(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (41, "0:41"),
        (59.6, "1:00"),
        (187, "3:07"),
        (3599.4, "59:59"),
        (3599.6, "1:00:00"),
        (4350, "1:12:30"),
        (360_000, "100:00:00"),
    ],
)
def test_format_duration(seconds, text):
    assert format_duration(seconds) == text


def test_plural():
    assert [plural(n, "window") for n in (0, 1, 2, 1200)] == ["0 windows", "1 window", "2 windows", "1,200 windows"]
