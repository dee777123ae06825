"""Files that are created after private files were read are private."""

import os
import stat

import pytest

from niels_gpt.system import files
from niels_gpt.system.private_files import keep_private, restrict


@pytest.fixture
def umask():
    """The usual umask for the test; the umask of before after it."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def _made(folder):
    """(mode of a new folder, mode of a new file in it)."""
    (folder / "made").mkdir()
    files.write_text(folder / "made" / "file", "text")
    return tuple(oct(stat.S_IMODE(path.stat().st_mode)) for path in (folder / "made", folder / "made" / "file"))


@pytest.mark.parametrize(
    ("modes", "folder", "expected"),
    [
        ([0o644, 0o644], 0o755, ("0o755", "0o644")),
        ([0o644, 0o600], 0o755, ("0o700", "0o600")),
        ([0o644, 0o640], 0o755, ("0o750", "0o640")),
        ([0o644, 0o644], 0o700, ("0o700", "0o600")),
        ([0o644, 0o644], 0o750, ("0o750", "0o640")),
        ([0o644, 0o644], 0o744, ("0o700", "0o600")),  # others can list the folder, but not enter it
        ([0o400], 0o755, ("0o700", "0o600")),
    ],
)
def test_new_files_are_as_private_as_the_strictest_source(tmp_path, umask, modes, folder, expected):
    vault = tmp_path / "vault"
    vault.mkdir()
    for i, mode in enumerate(modes):
        (vault / f"{i}.md").touch()
        (vault / f"{i}.md").chmod(mode)
    vault.chmod(folder)
    keep_private([vault, *sorted(vault.glob("*.md")), tmp_path / "missing"])
    assert _made(tmp_path) == expected


def test_the_umask_never_becomes_looser(tmp_path, umask):
    os.umask(0o077)
    (tmp_path / "public").touch(mode=0o666)
    (tmp_path / "public").chmod(0o666)
    keep_private([tmp_path / "public"])
    assert _made(tmp_path) == ("0o700", "0o600")


def test_existing_files_lose_only_what_was_denied(tmp_path, umask):
    (tmp_path / "file").touch(mode=0o644)
    restrict([tmp_path / "file", tmp_path / "missing"])
    assert _mode(tmp_path / "file") == "0o644"
    (tmp_path / "note").touch(mode=0o640)
    keep_private([tmp_path / "note"])
    restrict([tmp_path / "file", tmp_path / "missing"])
    assert _mode(tmp_path / "file") == "0o640"


def _mode(path):
    return oct(stat.S_IMODE(path.stat().st_mode))
