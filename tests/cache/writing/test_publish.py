"""The last step of a build: whatever stops it, neither the finished build nor the cache it replaces is lost."""

import contextlib
import dataclasses
import errno
import shutil
import signal
from pathlib import Path

import pytest

from niels_gpt.cache.writing.publish import MOVING, move_back, move_in
from tests.cache import CASES, build_and_die, ended, no_waiting, quick_folder, start, tree

KINDS = ["pretrain", "sft"]
NAMES = {
    "pretrain": ["train", "val", "meta.json"],
    "sft": ["train_tokens.bin", "train_idx.npy", "val_tokens.bin", "val_idx.npy", "meta.json"],
}
PLACES = [
    *((kind, False, f"rename /c/{name}") for kind in KINDS for name in NAMES[kind]),
    *((kind, True, f"rename /{place}/{name}") for kind in KINDS for name in NAMES[kind] for place in ("old", "c")),
]


@pytest.fixture(autouse=True)
def quick():
    with no_waiting():
        yield


def earlier(case):
    """Another build for the same place."""
    return dataclasses.replace(case, items=case.items[:20], max_val_tokens=50, seed=99)


def hidden(folder):
    return folder.parent / f".{folder.name}.partial"


@pytest.fixture(scope="module")
def whole():
    """{kind: (files of the cache, files of the one before)}"""
    made = {}
    with quick_folder() as folder:
        for kind in KINDS:
            for name, case in (("new", CASES[kind]), ("old", earlier(CASES[kind]))):
                case.build(folder / kind / name)
            made[kind] = tree(folder / kind / "new"), tree(folder / kind / "old")
    return made


class Stop(Exception):
    pass


def broken(items):
    raise Stop
    yield


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "old", "when"), PLACES)
def test_after_a_kill_between_the_renames_nothing_is_encoded_again(whole, kind, old, when):
    case = CASES[kind]
    with quick_folder() as place:
        folder = place / "c"
        if old:
            earlier(case).build(folder)
        assert exit_code(start(build_and_die, case, folder, when)) == -signal.SIGKILL
        assert case.build(folder, wrap=iter).encoded == []
        assert tree(folder) == whole[kind][0]
        assert [path.name for path in place.iterdir()] == ["c"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "old", "when"), [place for place in PLACES if place[1]])
def test_after_a_kill_between_the_renames_the_old_cache_comes_back(whole, kind, old, when):
    """As soon as the next build begins, also one that is another, or fails."""
    case = CASES[kind]
    with quick_folder() as place:
        folder = place / "c"
        earlier(case).build(folder)
        assert exit_code(start(build_and_die, case, folder, when)) == -signal.SIGKILL
        with pytest.raises(Stop):
            case.build(folder, wrap=broken, seed=123)
        assert tree(folder) == whole[kind][1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_second_kill_on_the_way_back(whole, kind):
    case, number = CASES[kind], 0
    with quick_folder() as place:
        folder = place / "c"
        while True:
            earlier(case).build(folder)
            assert exit_code(start(build_and_die, case, folder, "rename /c/meta.json")) == -signal.SIGKILL
            code = exit_code(start(build_and_die, case, folder, number))
            if code == 0:
                break
            found = tree(folder)
            assert "meta.json" not in found or found in whole[kind]
            case.build(folder)
            assert tree(folder) == whole[kind][0], number
            assert [path.name for path in place.iterdir()] == ["c"]
            shutil.rmtree(folder)
            number += 3
    assert number > 15


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "no"), KeyboardInterrupt()])
def test_an_error_in_a_rename_leaves_all_as_it_was(tmp_path, monkeypatch, whole, kind, old, error):
    case, folder, real = CASES[kind], tmp_path / "c", Path.rename
    for failing in range(2 * len(NAMES[kind]) if old else len(NAMES[kind])):
        if old:
            earlier(case).build(folder)
        before, count = tree(folder), 0

        def rename(self, target, failing=failing):
            nonlocal count
            count += 1
            if count == failing + 1:
                raise error
            return real(self, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", rename)
            with pytest.raises(type(error)) as caught:
                case.build(folder)
        if isinstance(error, OSError):
            assert "cannot write the cache" in str(caught.value) and str(folder) in str(caught.value)
        assert tree(folder) == before
        assert case.build(folder, wrap=iter).encoded == []
        assert tree(folder) == whole[kind][0]
        assert [path.name for path in tmp_path.iterdir()] == ["c"]
        shutil.rmtree(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_renames_that_fail_on_the_way_back_too(tmp_path, monkeypatch, whole, kind):
    """Then the next build goes back, and on."""
    case, folder, real, count = CASES[kind], tmp_path / "c", Path.rename, 0
    earlier(case).build(folder)

    def rename(self, target):
        nonlocal count
        count += 1
        if count > len(NAMES[kind]) + 1:
            raise OSError(errno.EIO, "no")
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with pytest.raises(OSError, match="cannot write the cache"):
            case.build(folder)
        with pytest.raises(OSError, match="cannot write the cache"):
            case.build(folder)
    assert (hidden(folder) / MOVING).exists()
    assert case.build(folder).encoded == []
    assert tree(folder) == whole[kind][0]
    assert not hidden(folder).exists()


def folders(tmp_path):
    """A hidden folder with `a` and `meta.json` to move in, where an old `a`, `b` and `meta.json` stand."""
    folder, out_dir = tmp_path / ".c.partial", tmp_path / "c"
    for place, names in ((folder, ["a", "meta.json"]), (out_dir, ["a", "b", "meta.json"])):
        place.mkdir()
        for name in names:
            (place / name).write_text(f"{name} of {place.name}", encoding="utf-8")
    (out_dir / "other").write_text("mine", encoding="utf-8")
    return folder, out_dir


def test_old_names_go_and_other_files_stay(tmp_path):
    folder, out_dir = folders(tmp_path)
    move_in(folder, out_dir, ["a", "b", "meta.json"])
    assert tree(out_dir) == {
        "a": b"a of .c.partial",
        "meta.json": b"meta.json of .c.partial",
        "other": b"mine",
    }
    assert not (folder / MOVING).exists()


def killed(folder, out_dir, monkeypatch, after):
    """`move_in`, as if killed after so many renames."""
    real, count = Path.rename, 0

    def rename(self, target):
        nonlocal count
        count += 1
        if count > after:
            raise SystemExit
        return real(self, target)

    with monkeypatch.context() as patch, contextlib.suppress(SystemExit):
        patch.setattr(Path, "rename", rename)
        move_in(folder, out_dir, ["a", "b", "meta.json"])


def test_nothing_to_go_back_from(tmp_path):
    folder, out_dir = folders(tmp_path)
    before = tree(tmp_path)
    move_back(folder, out_dir)
    (folder / MOVING).write_text("[" * 200_000, encoding="utf-8")
    move_back(folder, out_dir)
    (folder / MOVING).unlink()
    assert tree(tmp_path) == before


@pytest.mark.parametrize("after", range(5))
def test_a_place_that_was_removed_meanwhile(tmp_path, monkeypatch, after):
    """The old cache comes back as far as it was aside; nothing fails."""
    folder, out_dir = folders(tmp_path)
    killed(folder, out_dir, monkeypatch, after)
    shutil.rmtree(out_dir)
    move_back(folder, out_dir)
    assert all(data.decode("utf-8").endswith("of c") for data in tree(out_dir).values())
    assert not (folder / MOVING).exists()


def test_what_was_put_there_meanwhile_is_not_replaced(tmp_path, monkeypatch):
    folder, out_dir = folders(tmp_path)
    killed(folder, out_dir, monkeypatch, 3)
    (out_dir / "meta.json").write_text("a copy", encoding="utf-8")
    move_back(folder, out_dir)
    assert tree(out_dir)["meta.json"] == b"a copy"
    assert tree(out_dir)["a"] == b"a of c"
