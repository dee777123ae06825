"""Numbers, counts and errors as they are printed."""

import errno
import os
import shutil
import warnings

import pytest

from niels_gpt.system import console, files


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


def test_a_file_that_cannot_be_written_is_a_warning_of_one_line(tmp_path):
    with pytest.warns(UserWarning) as caught, console.optional_write(tmp_path / "a"):
        raise OSError(errno.ENOSPC, f"cannot write {tmp_path}/a: No space left\non device")
    (line,) = [str(warning.message) for warning in caught]
    assert str(tmp_path / "a") in line and "No space left" in line and "\n" not in line
    with pytest.warns(UserWarning, match="no matplotlib"), console.optional_write(tmp_path / "a", ImportError):
        raise ImportError("no matplotlib")
    with pytest.raises(ImportError), console.optional_write(tmp_path / "a"):
        raise ImportError


def test_what_is_written_and_removed_gives_no_warning(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with console.optional_write(tmp_path / "folder/a"):
            (tmp_path / "folder").mkdir()
            files.write_text(tmp_path / "folder/a", "text")
        console.remove_folder(tmp_path / "folder", consequence="it stays")
        console.remove_folder(tmp_path / "folder", consequence="it stays")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_which_a_part_stays_is_a_warning(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a").touch()

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", "a")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        with pytest.warns(UserWarning, match=r"cannot remove .*folder: .*ermission.*; the next build removes it"):
            console.remove_folder(tmp_path / "folder", consequence="the next build removes it")
    shutil.rmtree(tmp_path / "folder")
