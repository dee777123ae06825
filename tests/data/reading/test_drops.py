"""Counting dropped rows, and what counts as text."""

import logging

import pytest

from niels_gpt.data.reading.drops import Drops, is_text, text_problem
from tests.data import dropped_lines


def test_counts_and_one_log_line(caplog):
    caplog.set_level(logging.INFO)
    stats = {"empty": 5}
    with Drops("pages", stats) as drops:
        drops.add("empty")
        drops.add("empty")
        drops.add("not utf-8", 3)
        drops.add("without text", 0)  # counts nothing
    assert drops.counts == {"empty": 2, "not utf-8": 3}
    assert stats == {"empty": 7, "not utf-8": 3}
    assert dropped_lines(caplog) == ["pages: dropped 5 rows: 2 empty, 3 not utf-8"]


@pytest.mark.parametrize(
    ("unit", "number", "text"),
    [
        ("row", 1, "dropped 1 row: 1 bad"),
        ("row", 2, "dropped 2 rows: 2 bad"),
        ("message or thread", 2, "dropped 2 messages or threads: 2 bad"),
    ],
)
def test_units(caplog, unit, number, text):
    with Drops("s", None, unit=unit) as drops:
        drops.add("bad", number)
    assert dropped_lines(caplog) == [f"s: {text}"]


def test_nothing_dropped_is_not_logged(caplog):
    caplog.set_level(logging.INFO)
    with Drops("s", {}):
        pass
    assert dropped_lines(caplog) == []


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (None, "without text"),
        (b"bytes", "without text"),
        ("", "empty"),
        (" \n\u3000", "empty"),
        ("a\ud800", "not utf-8"),
        (" a ", None),
        ("é", None),
    ],
)
def test_text_problem(value, problem):
    assert text_problem(value) == problem


def test_is_text():
    assert all(map(is_text, ["", "abc", "é😀", "\u0000"]))
    assert not any(map(is_text, [None, 5, b"abc", "\ud800", "é\udfff", ["a"]]))
