"""Answers of the Hub of the wrong size; tests/cache/sources/test_build_from_hub.py sends them over HTTP."""

import fsspec
import huggingface_hub.hf_file_system
import pytest

from niels_gpt.data.reading.hub_errors import is_transient
from niels_gpt.data.reading.hub_files import REQUESTS, CheckedFile, CheckedFileSystem, WrongSize, check_files


@pytest.fixture
def answers(monkeypatch):
    """Replace the requests for ranges; returns the list of answers that they get, and that of the ranges."""
    left, asked = [], []

    def fetch(self, start, end):
        asked.append((start, end))
        return left.pop(0)

    monkeypatch.setattr(huggingface_hub.hf_file_system.HfFileSystemFile, "_fetch_range", fetch)
    return left, asked


def open_file():
    file = CheckedFile.__new__(CheckedFile)
    file.path = "datasets/someone/texts@main/rows.jsonl"
    return file


@pytest.mark.parametrize("wrong", [b"", b"abc", b"abcdefgh", b"abcdefghij" * 2])
def test_an_answer_of_the_wrong_size_is_requested_again(answers, wrong):
    left, asked = answers
    left += [wrong] * (REQUESTS - 1) + [b"abcdefghi"]
    assert open_file()._fetch_range(100, 109) == b"abcdefghi"
    assert asked == [(100, 109)] * REQUESTS


def test_an_answer_that_stays_of_the_wrong_size_is_a_transient_error(answers):
    answers[0].extend([b"abc"] * REQUESTS)
    with pytest.raises(WrongSize) as caught:
        open_file()._fetch_range(1000, 2000)
    for fact in ("3 bytes", "1,000", "2,000", "someone/texts", "rows.jsonl"):
        assert fact in str(caught.value)
    assert is_transient(caught.value)


@pytest.mark.parametrize(("start", "data", "whole"), [(0, b"abcd", True), (0, b"abc", False), (2, b"cd", True)])
def test_a_whole_file_has_its_size(monkeypatch, start, data, whole):
    monkeypatch.setattr(huggingface_hub.hf_file_system.HfFileSystemFile, "read", lambda self, length=-1: data)
    file = open_file()
    file.loc, file.size = start, 4
    assert file.read(1) == data  # the caller asked for a part
    if whole:
        assert file.read() == data
    else:
        with pytest.raises(WrongSize, match=r"3 of the 4 bytes of .*rows\.jsonl"):
            file.read()


def test_fsspec_opens_files_of_the_hub_with_the_check():
    check_files()
    check_files()
    assert fsspec.get_filesystem_class("hf") is CheckedFileSystem
