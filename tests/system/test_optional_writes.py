"""Files that a command can do without: a failure is one warning line, and no error."""

import errno
import os
import shutil
import warnings

import pytest

from niels_gpt.system import files
from niels_gpt.system.optional_writes import optional_write, remove_folder


def test_a_file_that_cannot_be_written_is_a_warning_of_one_line(tmp_path):
    with pytest.warns(UserWarning) as caught, optional_write(tmp_path / "a"):
        raise OSError(errno.ENOSPC, f"cannot write {tmp_path}/a: No space left\non device")
    (line,) = [str(warning.message) for warning in caught]
    assert str(tmp_path / "a") in line and "No space left" in line and "\n" not in line
    with pytest.warns(UserWarning, match="no matplotlib"), optional_write(tmp_path / "a", ImportError):
        raise ImportError("no matplotlib")
    with pytest.raises(ImportError), optional_write(tmp_path / "a"):
        raise ImportError


def test_what_is_written_and_removed_gives_no_warning(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with optional_write(tmp_path / "folder/a"):
            (tmp_path / "folder").mkdir()
            files.write_text(tmp_path / "folder/a", "text")
        remove_folder(tmp_path / "folder", consequence="it stays")
        remove_folder(tmp_path / "folder", consequence="it stays")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_which_a_part_stays_is_a_warning(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a").touch()

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", "a")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        with pytest.warns(UserWarning, match=r"cannot remove .*folder: .*ermission.*; the next build removes it"):
            remove_folder(tmp_path / "folder", consequence="the next build removes it")
    shutil.rmtree(tmp_path / "folder")
