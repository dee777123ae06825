"""Numbers, counts and errors as they are printed."""

import errno

import pytest

from niels_gpt.system import console


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999.4, "999"),
        (999.5, "1k"),
        (1000, "1k"),
        (12_345, "12.3k"),
        (999_499, "999k"),
        (999_500, "1M"),
        (4_500_000, "4.5M"),
        (999_500_000, "1G"),
        (7_000_000_000, "7G"),
    ],
)
def test_short_number(number, text):
    assert console.short_number(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (41.4, "0:41"), (59.6, "1:00"), (187, "3:07"), (3599, "59:59"), (3600, "1:00:00"), (4350, "1:12:30")],
)
def test_format_duration(seconds, text):
    assert console.format_duration(seconds) == text


def test_first_few():
    names = [*"abcdefg"]
    assert [console.first_few(names[:n]) for n in (0, 1, 5, 6)] == [
        "",
        "a",
        "a, b, c, d, e",
        "a, b, c, d, e and 1 more",
    ]
    assert console.first_few([*"ab"] * 1000, 2) == "a, b and 1,998 more"


def test_plural():
    assert [console.plural(n, "row") for n in (0, 1, 2, 1200)] == ["0 rows", "1 row", "2 rows", "1,200 rows"]


def test_errors_of_the_system_have_a_path_and_a_remedy():
    message = console.error_message(OSError(errno.ENOENT, "No such file", "/a/b"))
    assert "/a/b" in message and "No such file" in message
    assert console.error_message(ValueError("as it is")) == "as it is"
