"""Publishing: whatever interrupts it, neither the finished build nor the cache it replaces is lost."""

import contextlib
import dataclasses
import errno
import shutil
import signal
from pathlib import Path
from unittest import mock

import pytest

from niels_gpt.cache.writing.publish import MOVING, publish_files, roll_back
from tests.cache import CASES, build_and_die, conversations, documents, exit_code, quick_folder, start, tree

KINDS = ["pretrain", "sft"]
NAMES = {
    "pretrain": ["train", "val", "meta.json"],
    "sft": ["train_tokens.bin", "train_idx.npy", "val_tokens.bin", "val_idx.npy", "meta.json"],
}
SMALL = {
    "pretrain": dataclasses.replace(CASES["pretrain"], items=documents(24), max_val_tokens=60, shard_bytes=256),
    "sft": dataclasses.replace(CASES["sft"], items=conversations(8)),
}
KILLS = [
    ("pretrain", False, "rename /c/train"),
    ("sft", False, "rename /c/meta.json"),
    ("pretrain", True, "rename /old/train"),
    ("pretrain", True, "rename /c/meta.json"),
    ("sft", True, "rename /old/meta.json"),
    ("sft", True, "rename /c/val_tokens.bin"),
]


def earlier(case):
    """Another build for the same folder."""
    return dataclasses.replace(case, items=case.items[:5], max_val_tokens=30, seed=99)


def hidden(folder):
    return folder.parent / f".{folder.name}.partial"


@pytest.fixture(scope="module")
def complete():
    """{kind: (files of the cache, files of the one before)}"""
    files = {}
    with quick_folder() as folder:
        for kind in KINDS:
            for name, case in (("new", SMALL[kind]), ("old", earlier(SMALL[kind]))):
                case.build(folder / kind / name)
            files[kind] = tree(folder / kind / "new"), tree(folder / kind / "old")
    return files


class Stop(Exception):
    pass


def broken(items):
    raise Stop
    yield


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "old", "when"), KILLS)
def test_nothing_is_encoded_again_after_a_kill_between_renames(complete, kind, old, when):
    case = SMALL[kind]
    with quick_folder() as root:
        folder = root / "c"
        if old:
            earlier(case).build(folder)
        assert exit_code(start(build_and_die, case, folder, when)) == -signal.SIGKILL
        assert case.build(folder, wrap=iter).encoded == []
        assert tree(folder) == complete[kind][0]
        assert [path.name for path in root.iterdir()] == ["c"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "old", "when"), [kill for kill in KILLS if kill[1]][1:3])
def test_old_cache_is_restored_after_a_kill_between_renames(complete, kind, old, when):
    """As soon as the next build starts, even if it has other options or fails."""
    case = SMALL[kind]
    with quick_folder() as root:
        folder = root / "c"
        earlier(case).build(folder)
        assert exit_code(start(build_and_die, case, folder, when)) == -signal.SIGKILL
        with pytest.raises(Stop):
            case.build(folder, wrap=broken, seed=123)
        assert tree(folder) == complete[kind][1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_second_kill_during_the_roll_back(complete, kind):
    case, number = SMALL[kind], 0
    with quick_folder() as root:
        folder = root / "c"
        while True:
            earlier(case).build(folder)
            assert exit_code(start(build_and_die, case, folder, "rename /c/meta.json")) == -signal.SIGKILL
            code = exit_code(start(build_and_die, case, folder, number))
            if code == 0:
                break
            found = tree(folder)
            assert "meta.json" not in found or found in complete[kind]
            case.build(folder)
            assert tree(folder) == complete[kind][0], number
            assert [path.name for path in root.iterdir()] == ["c"]
            shutil.rmtree(folder)
            number += 6
    assert number > 12


@contextlib.contextmanager
def failing_renames(error, *, after, number=1 << 30):
    """Raise `error` in the next `number` renames after the first `after`."""
    real, count = Path.rename, 0

    def rename(self, target):
        nonlocal count
        count += 1
        if after < count <= after + number:
            raise error
        return real(self, target)

    with mock.patch.object(Path, "rename", rename):
        yield


@pytest.mark.parametrize(
    ("kind", "old", "error"),
    [
        ("sft", True, OSError(errno.EIO, "no")),
        ("pretrain", True, KeyboardInterrupt()),
        ("pretrain", False, OSError(errno.EIO, "no")),
    ],
)
def test_error_in_a_rename_restores_the_old_state(tmp_path, complete, kind, old, error):
    case, folder = SMALL[kind], tmp_path / "c"
    for failing in range(2 * len(NAMES[kind]) if old else len(NAMES[kind])):
        if old:
            earlier(case).build(folder)
        before = tree(folder)
        with failing_renames(error, after=failing, number=1), pytest.raises(type(error)) as caught:
            case.build(folder)
        if isinstance(error, OSError):
            assert "cannot write the cache" in str(caught.value) and str(folder) in str(caught.value)
        assert tree(folder) == before
        assert case.build(folder, wrap=iter).encoded == []
        assert tree(folder) == complete[kind][0]
        assert [path.name for path in tmp_path.iterdir()] == ["c"]
        shutil.rmtree(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_renames_fail_during_the_roll_back_too(tmp_path, complete, kind):
    """The next build rolls back and continues."""
    case, folder = SMALL[kind], tmp_path / "c"
    earlier(case).build(folder)
    with failing_renames(OSError(errno.EIO, "no"), after=len(NAMES[kind]) + 1):
        for _ in range(2):
            with pytest.raises(OSError, match="cannot write the cache"):
                case.build(folder)
    assert (hidden(folder) / MOVING).exists()
    assert case.build(folder).encoded == []
    assert tree(folder) == complete[kind][0]
    assert not hidden(folder).exists()


def folders(tmp_path):
    """A hidden folder with `a` and `meta.json`, and an output folder with older `a`, `b` and `meta.json`."""
    folder, out_dir = tmp_path / ".c.partial", tmp_path / "c"
    for each, names in ((folder, ["a", "meta.json"]), (out_dir, ["a", "b", "meta.json"])):
        each.mkdir()
        for name in names:
            (each / name).write_text(f"{name} of {each.name}", encoding="utf-8")
    (out_dir / "other").write_text("mine", encoding="utf-8")
    return folder, out_dir


def test_old_names_are_replaced_and_other_files_stay(tmp_path):
    folder, out_dir = folders(tmp_path)
    publish_files(folder, out_dir, ["a", "b", "meta.json"])
    assert tree(out_dir) == {"a": b"a of .c.partial", "meta.json": b"meta.json of .c.partial", "other": b"mine"}
    assert not (folder / MOVING).exists()


def killed(folder, out_dir, after):
    """`publish_files`, as if killed after so many renames."""
    with failing_renames(SystemExit(), after=after), contextlib.suppress(SystemExit):
        publish_files(folder, out_dir, ["a", "b", "meta.json"])


def test_roll_back_without_a_move_does_nothing(tmp_path):
    folder, out_dir = folders(tmp_path)
    before = tree(tmp_path)
    roll_back(folder, out_dir)
    (folder / MOVING).write_text("[" * 200_000, encoding="utf-8")
    roll_back(folder, out_dir)
    (folder / MOVING).unlink()
    assert tree(tmp_path) == before


@pytest.mark.parametrize("after", range(1, 5))
def test_damaged_record_of_a_killed_move_restores_the_old_cache(tmp_path, after):
    folder, out_dir = folders(tmp_path)
    before = tree(out_dir)
    killed(folder, out_dir, after)
    data = bytearray((folder / MOVING).read_bytes())
    data[data.index(b"meta")] ^= 1
    (folder / MOVING).write_bytes(data)
    roll_back(folder, out_dir)
    assert tree(out_dir).items() >= before.items()


@pytest.mark.parametrize("after", range(5))
def test_roll_back_after_the_output_folder_was_removed(tmp_path, after):
    """The parts of the old cache that were moved aside are restored."""
    folder, out_dir = folders(tmp_path)
    killed(folder, out_dir, after)
    shutil.rmtree(out_dir)
    roll_back(folder, out_dir)
    assert all(data.decode("utf-8").endswith("of c") for data in tree(out_dir).values())
    assert not (folder / MOVING).exists()


def test_roll_back_does_not_replace_newer_files(tmp_path):
    folder, out_dir = folders(tmp_path)
    killed(folder, out_dir, 3)
    (out_dir / "meta.json").write_text("a copy", encoding="utf-8")
    roll_back(folder, out_dir)
    assert tree(out_dir)["meta.json"] == b"a copy"
    assert tree(out_dir)["a"] == b"a of c"
