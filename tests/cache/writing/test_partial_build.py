"""Interrupted builds: real processes, real signals, full disks. A resumed build ends like an uninterrupted one."""

import contextlib
import dataclasses
import errno
import json
import os
import random
import shutil
import signal
import threading
from collections import namedtuple
from pathlib import Path

import pytest

from niels_gpt.cache.writing import partial_build
from tests.cache import (
    CASES,
    EOT,
    ByteTokenizer,
    build_and_die,
    build_pretrain,
    build_with_limited_files,
    check_pretrain,
    check_sft,
    conversations,
    documents,
    drop_reason,
    exit_code,
    expected_pretrain,
    pipe,
    quick_folder,
    start,
    tree,
)

GB = 1 << 30
Usage = namedtuple("Usage", "total used free")
KINDS = ["pretrain", "sft"]


@pytest.fixture(scope="module")
def complete():
    """{case: files} of the uninterrupted builds."""
    files = {}
    with quick_folder() as folder:
        for name, case in CASES.items():
            case.build(folder / "c")
            files[name] = tree(folder / "c")
            shutil.rmtree(folder / "c")
    return files


def hidden(folder):
    return folder.parent / f".{folder.name}.partial"


def complete_shards(folder, split="train"):
    """Number of shards in the state of an interrupted build; all of them exist with their full size."""
    path = hidden(folder) / "state.json"
    shards = json.loads(path.read_text(encoding="utf-8"))["splits"][split]["shards"] if path.exists() else []
    for shard in shards:
        assert (hidden(folder) / split / shard["name"]).stat().st_size == shard["bytes"] > 0
    return len(shards)


def check_complete(folder, files):
    """The cache is byte for byte that of an uninterrupted build, and nothing hidden is left."""
    assert tree(folder) == files
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert not [path for path in folder.rglob("*") if path.name.startswith(".")]


class Stop(Exception):
    pass


def stopping(after, error=None):
    """An input that fails after `after` items."""

    def wrap(items):
        for number, item in enumerate(items):
            if number == after:
                raise error or Stop("connection lost")
            yield item

    return wrap


def interrupt(case, folder, after, **options):
    """Leave a build that read `after` items."""
    with pytest.raises(Stop, match="connection lost"):
        case.build(folder, wrap=stopping(after), **options)
    assert not folder.exists()
    assert hidden(folder).is_dir()


def test_complete_builds_equal_the_reference(tmp_path):
    """The premise of this file; every build has several shards."""
    for name, case in CASES.items():
        folder = tmp_path / name
        case.build(folder)
        if case.kind == "sft":
            kept = [example for example in case.items if example]
            check_sft(folder, kept, tokenizer=ByteTokenizer(), val_frac=case.val_frac, seed=case.seed)
        elif not case.shuffle_buffer:
            budgets = {"max_train_tokens": case.max_train_tokens, "max_val_tokens": case.max_val_tokens}
            check_pretrain(folder, expected_pretrain(case.items, val_texts=case.val_items, **budgets), case.shard_bytes)
            assert len(list((folder / "train").glob("shard_*.bin"))) > 8


# --- kills ---------------------------------------------------------------------------------------------


FEW = {
    "pretrain": dataclasses.replace(CASES["pretrain"], items=documents(14), shard_bytes=128),
    "pretrain, shuffled": dataclasses.replace(CASES["pretrain, shuffled"], items=documents(14), shard_bytes=128),
    "pretrain, val given": dataclasses.replace(
        CASES["pretrain, val given"], items=documents(8), val_items=documents(4, "held out"), shard_bytes=128
    ),
    "sft": dataclasses.replace(CASES["sft"], items=conversations(6)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pretrain, val given", "sft"])
def test_sigkill_at_every_touch_of_the_disk(name):
    """Killed right before every file that is opened, renamed or removed, until a build succeeds."""
    case = dataclasses.replace(FEW[name], items=FEW[name].items[:4])
    with quick_folder() as root:
        folder = root / "c"
        case.build(folder)
        files = tree(folder)
        shutil.rmtree(folder)
        for number in range(10_000):
            code = exit_code(start(build_and_die, case, folder, number))
            if code == 0:
                break
            assert code == -signal.SIGKILL
            found = tree(folder) if folder.exists() else {}
            assert found.items() <= files.items(), f"unfinished files at touch {number}"
            assert "meta.json" not in found or found == files
            case.build(folder)
            assert tree(folder) == files, f"another result after a kill at touch {number}"
            check_complete(folder, files)
            shutil.rmtree(folder)
        check_complete(folder, files)
        assert number > 25


@pytest.mark.parametrize("name", CASES)
def test_stop_after_any_item(name, complete):
    """Stopped by an exception, and resumed with other batch sizes and workers."""
    case = CASES[name]
    with quick_folder() as root:
        for after in range(0, len(case.items), 7):
            try:
                case.build(root / "c", wrap=stopping(after), workers=1, batch_items=1)
            except Stop:
                case.build(root / "c", wrap=[list, iter][after % 2], batch_items=1 + after % 5, workers=1 + after % 3)
            check_complete(root / "c", complete[name])
            shutil.rmtree(root / "c")


@pytest.mark.parametrize("name", ["pretrain, shuffled", "pretrain, val given", "sft"])
def test_repeated_stops(name, complete):
    """Each attempt gets a little further."""
    case, stops = CASES[name], 0
    with quick_folder() as root:
        for after in range(1, 200, 7):
            try:
                case.build(root / "c", wrap=stopping(after), workers=1, batch_items=2)
            except Stop:
                stops += 1
            else:
                break
        assert stops > 1
        check_complete(root / "c", complete[name])


# --- what is encoded again ---------------------------------------------------------------------------


def test_complete_shards_are_not_encoded_again(tmp_path, complete):
    case, folder = CASES["pretrain"], tmp_path / "c"
    interrupt(case, folder, 50, workers=1)
    shards = {split: complete_shards(folder, split) for split in ("train", "val")}
    assert shards["train"] > 5
    done = shards["train"] * 32
    expected = expected_pretrain(case.items, max_train_tokens=done, max_val_tokens=100)
    assert len(expected.streams["train"]) == done
    behind = expected.read["texts"]  # documents in complete shards; the last one may be partial
    cut = expected.streams["train"][-1] != EOT
    left = [text.replace("\r\n", "\n") for text in case.items[behind - cut :] if not drop_reason(text)]
    tokenizer = case.build(folder, workers=1)
    assert tokenizer.encoded == left
    check_complete(folder, complete["pretrain"])


def test_complete_sft_examples_are_not_encoded_again(tmp_path, complete):
    case, folder = CASES["sft"], tmp_path / "c"
    interrupt(case, folder, 25, workers=1)
    assert complete_shards(folder, "all") > 5
    tokenizer = case.build(folder, workers=1)
    contents = [message["content"] for example in case.items for message in example]
    assert len(tokenizer.encoded) < len(contents) / 2
    assert tokenizer.encoded == contents[-len(tokenizer.encoded) :]
    check_complete(folder, complete["sft"])


def test_complete_val_texts_are_not_encoded_again(tmp_path, complete):
    case, folder = CASES["pretrain, val given and full"], tmp_path / "c"
    with pytest.raises(Stop):
        case.build(folder, wrap=stopping(40), workers=1)
    tokenizer = case.build(folder, workers=1)
    assert not [text for text in tokenizer.encoded if text.startswith("held out")]
    check_complete(folder, complete["pretrain, val given and full"])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "when"), [("pretrain", "/val/documents.npy"), ("sft", "partial/meta.json")])
def test_kill_before_publishing_keeps_the_encoded_shards(tmp_path, complete, name, when):
    """Everything is encoded and only the final names are missing."""
    case, folder = CASES[name], tmp_path / "c"
    assert exit_code(start(build_and_die, case, folder, f"rename {when}")) == -signal.SIGKILL
    tokenizer = case.build(folder)
    check_complete(folder, complete[name])
    everything = CASES[name].build(tmp_path / "again").encoded
    assert len(tokenizer.encoded) < len(everything) / 2


# --- other inputs and options ------------------------------------------------------------------------


def check_fresh(case, folder):
    """The cache equals that of a fresh build."""
    with quick_folder() as root:
        case.build(root / "c")
        assert tree(folder) == tree(root / "c")
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("pretrain", {"seed": 8}),
        ("pretrain", {"shard_bytes": 32}),
        ("pretrain", {"max_val_tokens": 40}),
        ("pretrain", {"max_train_tokens": 100}),
        ("pretrain", {"shuffle_buffer": 5}),
        ("pretrain", {"val_items": ("held out",)}),
        ("pretrain, shuffled", {"shuffle_buffer": None}),
        ("sft", {"seed": 8}),
        ("sft", {"val_frac": 0.5}),
    ],
)
def test_other_options_restart_the_build(tmp_path, name, changes):
    case, folder = CASES[name], tmp_path / "c"
    interrupt(case, folder, 25)
    changed = dataclasses.replace(case, **changes)
    changed.build(folder, wrap=iter)
    check_fresh(changed, folder)


def changed_inputs(items):
    other = "another one" if isinstance(items[0], str) else items[1] * 2
    return {
        "first": (other, *items[1:]),
        "middle": (*items[:12], other, *items[13:]),
        "last": (*items[:-1], other),
        "longer": (*items, other),
        "one less": items[1:],
        "shorter, by the end": items[:-10],
        "much shorter": items[:10],
        "other order": items[::-1],
        "one more before": (other, *items),
        "dropped items": tuple(item or other for item in items),
    }


CHANGES = list(changed_inputs(documents(60)))


@pytest.mark.parametrize(
    ("change", "name", "batch_items"),
    [
        *((change, "pretrain", 1) for change in CHANGES[::2]),
        *((change, "pretrain, shuffled", 3) for change in CHANGES[1::4]),
        *((change, "sft", 3) for change in CHANGES[1::2]),
    ],
)
def test_changed_list_gives_a_fresh_cache(tmp_path, caplog, change, name, batch_items):
    """Wherever the change is: before or after the data that the interrupted build has stored."""
    case, folder = CASES[name], tmp_path / "c"
    changed = dataclasses.replace(case, items=changed_inputs(case.items)[change])
    interrupt(case, folder, len(case.items) - 2, workers=1, batch_items=batch_items)
    changed.build(folder)
    assert change in ("last", "longer") or [r for r in caplog.records if "changed" in r.getMessage()]
    check_fresh(changed, folder)


@pytest.mark.parametrize("name", ["pretrain, shuffled", "sft"])
def test_any_changed_item_gives_a_fresh_cache(name):
    """Also the item in which the last complete shard ends."""
    case = FEW[name]
    with quick_folder() as root:
        for after in range(2, len(case.items), 3):
            for changed in range(after + 1):
                new = "new text " * 9 if case.kind == "pretrain" else case.items[0] * 3
                items = (*case.items[:changed], new, *case.items[changed + 1 :])
                with contextlib.suppress(Stop):
                    case.build(root / "c", wrap=stopping(after), workers=1, batch_items=1)
                changed_case = dataclasses.replace(case, items=items)
                changed_case.build(root / "c")
                changed_case.build(root / "d")
                assert tree(root / "c") == tree(root / "d"), f"stopped after {after}, item {changed} changed"
                shutil.rmtree(root / "c")
                shutil.rmtree(root / "d")


@pytest.mark.parametrize("after", range(20, 60, 18))
def test_list_that_ends_where_the_build_stopped(tmp_path, after):
    """The unfinished shard of the interrupted build is not part of the result."""
    case, folder = CASES["pretrain"], tmp_path / "c"
    interrupt(case, folder, after, workers=1, batch_items=1)
    for less in (0, 1, 2, 5):
        changed = dataclasses.replace(case, items=case.items[: after - less])
        kept = tmp_path / f"kept {less}" / "c"
        kept.parent.mkdir()
        shutil.copytree(hidden(folder), hidden(kept))
        changed.build(kept)
        check_fresh(changed, kept)


def test_changed_val_texts_give_a_fresh_cache(tmp_path):
    case, folder = CASES["pretrain, val given"], tmp_path / "c"
    assert case.val_items is not None
    for number, val_items in enumerate(((*case.val_items[:3], "other", *case.val_items[4:]), case.val_items[:-1], ())):
        with pytest.raises(Stop):
            case.build(folder, wrap=stopping(40))
        changed = dataclasses.replace(case, val_items=val_items)
        changed.build(folder)
        with quick_folder() as root:
            changed.build(root / "c")
            assert tree(folder) == tree(root / "c"), f"change {number}"
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["pretrain, shuffled", "sft"])
def test_changed_iterator_raises_once_with_the_remedy(tmp_path, name):
    """It was partly read and cannot be read again; the next build starts from scratch."""
    case, folder = CASES[name], tmp_path / "c"
    changed = dataclasses.replace(case, items=case.items[1:])
    interrupt(case, folder, 25, workers=1)
    with pytest.raises(ValueError, match=r"c has changed .*again"):
        changed.build(folder, wrap=iter)
    assert list(tmp_path.iterdir()) == []
    changed.build(folder, wrap=iter)
    check_fresh(changed, folder)


# --- the hidden folder -------------------------------------------------------------------------------


def damage(path, how):
    if how == "remove":
        path.unlink()
    elif how == "cut":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "longer":
        path.write_bytes(path.read_bytes() + b"\x01\x02")
    else:
        path.write_bytes(b"[]")


@pytest.mark.parametrize(
    ("name", "how"),
    [("pretrain", "remove"), ("sft", "cut"), ("pretrain", "longer"), ("sft", "other"), ("pretrain", "cut")],
)
def test_damaged_partial_build_is_repaired(tmp_path, name, how):
    """For every file of it."""
    case, folder = FEW[name], tmp_path / "c"
    case.build(folder)
    files = tree(folder)
    shutil.rmtree(folder)
    interrupt(case, folder, len(case.items) - 1, workers=1, batch_items=1)
    left = tree(hidden(folder))
    assert len(left) > 5
    for path in left:
        copied = tmp_path / "one" / "c"
        shutil.copytree(hidden(folder), hidden(copied))
        damage(hidden(copied) / path, how)
        case.build(copied)
        assert tree(copied) == files, path
        shutil.rmtree(copied.parent)


@pytest.mark.parametrize(("key", "value"), [("recipe", None), ("runs", []), ("splits", None)])
def test_damaged_state_restarts_the_build(tmp_path, complete, key, value):
    case, folder = CASES["pretrain"], tmp_path / "c"
    interrupt(case, folder, 50)
    path = hidden(folder) / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), key: value}), encoding="utf-8")
    case.build(folder)
    check_complete(folder, complete["pretrain"])


@pytest.mark.parametrize("file", ["state.json", "train.starts", "train/shard_00000.bin"])
def test_flipped_bits_of_a_partial_build_never_reach_the_cache(tmp_path, complete, file):
    case, folder = CASES["pretrain"], tmp_path / "caches" / "c"
    interrupt(case, folder, 50)
    saved = tmp_path / "saved"
    hidden(folder).rename(saved)
    content = (saved / file).read_bytes()
    assert content
    draw = random.Random(3)
    for at in draw.sample(range(8 * len(content)), 40):
        shutil.copytree(saved, hidden(folder))
        flipped = bytearray(content)
        flipped[at // 8] ^= 1 << at % 8
        (hidden(folder) / file).write_bytes(flipped)
        case.build(folder)
        check_complete(folder, complete["pretrain"])
        shutil.rmtree(folder)


def test_foreign_files_in_the_hidden_folder_are_removed(tmp_path, complete):
    case, folder = CASES["pretrain"], tmp_path / "c"
    for after in (1, 50):
        interrupt(case, folder, after)
        (hidden(folder) / "train" / "shard_09999.bin").write_bytes(b"\x01\x00")
        (hidden(folder) / "train" / ".documents.npy.1.1.tmp").write_bytes(b"half")
        (hidden(folder) / "x").mkdir()
        case.build(folder)
        check_complete(folder, complete["pretrain"])
        shutil.rmtree(folder)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("name", KINDS)
def test_every_file_is_synced_before_publishing(tmp_path, monkeypatch, name):
    synced = []

    def fsync(descriptor):
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    monkeypatch.setattr(os, "fsync", fsync)
    CASES[name].build(tmp_path / "c")
    for path in tree(tmp_path / "c"):
        base = Path(path).name
        assert [seen for seen in synced if seen == base or seen.startswith(f".{base}.")], path
    assert "c" in synced  # the folder itself, after the renames


# --- errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("pretrain", RuntimeError("no connection")),
        ("pretrain, shuffled", KeyboardInterrupt()),
        ("sft", OSError(errno.EIO, "input")),
    ],
)
def test_input_error_is_raised_and_the_build_resumes(tmp_path, complete, name, error):
    case, folder = CASES[name], tmp_path / "c"
    with pytest.raises(type(error)) as raised:
        case.build(folder, wrap=stopping(24, error), workers=1)
    assert raised.value is error
    assert not folder.exists()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("encode")]
    tokenizer = case.build(folder)
    if name != "pretrain, shuffled":
        assert len(tokenizer.encoded) < len(case.build(tmp_path / "again").encoded)
        shutil.rmtree(tmp_path / "again")
    check_complete(folder, complete[name])


def test_tokenizer_error_is_raised_and_the_build_resumes(tmp_path, complete):
    class Breaking(ByteTokenizer):
        def encode(self, text):
            if " 50:" in text:
                raise RuntimeError("tokenizer failed")
            return super().encode(text)

    case, folder = CASES["pretrain"], tmp_path / "c"
    with pytest.raises(RuntimeError, match="tokenizer failed"):
        case.build(folder, tokenizer=Breaking())
    assert not folder.exists()
    assert complete_shards(folder) > 5
    case.build(folder)
    check_complete(folder, complete["pretrain"])


# --- concurrent builds ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_second_build_raises_and_does_not_disturb_the_first(tmp_path, complete, name):
    case, folder = CASES[name], tmp_path / "c"
    raised = []

    def wrap(items):
        for number, item in enumerate(items):
            if number in (0, 20):
                with pytest.raises(ValueError, match="another process"):
                    case.build(folder)
                raised.append(number)
            yield item

    case.build(folder, wrap=wrap)
    assert raised == [0, 20]
    check_complete(folder, complete[name])


# --- disks -------------------------------------------------------------------------------------------------


def free_space(monkeypatch, values):
    """Free bytes of the disk, one value per call; the last one repeats."""
    values = list(values)

    def disk_usage(path):
        free = values.pop(0) if len(values) > 1 else values[0]
        return Usage(100 * GB, 100 * GB - free, free)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)


def check_full(error, folder):
    assert error.value.errno == errno.ENOSPC
    assert str(folder) in str(error.value)
    assert not folder.exists()


def test_too_little_space_is_detected_before_the_build(tmp_path, complete, monkeypatch):
    case, folder = CASES["pretrain"], tmp_path / "deep" / "c"
    options = {"max_val_tokens": case.max_val_tokens, "shard_bytes": case.shard_bytes, "seed": case.seed}

    def never():
        pytest.fail("the input was read")
        yield

    with monkeypatch.context() as patch:
        free_space(patch, [GB])
        with pytest.raises(OSError, match="free some space") as error:
            build_pretrain(never(), folder, expected_tokens=GB // 2 + 1, **options)
        check_full(error, folder)
        assert list(tmp_path.iterdir()) == []
        build_pretrain(case.items, folder, expected_tokens=GB // 2, **options)
    check_complete(folder, complete["pretrain"])


@pytest.mark.parametrize(("name", "checks"), [("pretrain", 0), ("sft", 1), ("pretrain", 5), ("sft", 9)])
def test_disk_fills_up_during_the_build(tmp_path, complete, monkeypatch, name, checks):
    case, folder = CASES[name], tmp_path / "c"
    with monkeypatch.context() as patch:
        free_space(patch, [100 * GB] * checks + [1000])
        with pytest.raises(OSError, match="free some space") as error:
            case.build(folder, workers=1)
        check_full(error, folder)
    tokenizer = case.build(folder)
    check_complete(folder, complete[name])
    if checks == 9:
        assert len(tokenizer.encoded) < len(case.build(tmp_path / "again").encoded)


def test_disk_is_full_before_the_examples_are_split(tmp_path, complete, monkeypatch):
    """The tokens of an SFT cache are on disk twice for a moment: enough space for each shard, but not for the copy."""
    case, folder = CASES["sft"], tmp_path / "c"
    with monkeypatch.context() as patch:
        patch.setattr(partial_build, "MARGIN_BYTES", 0)
        free_space(patch, [400])
        with pytest.raises(OSError, match="space") as error:
            case.build(folder, batch_items=1)
        check_full(error, folder)
    case.build(folder)
    check_complete(folder, complete["sft"])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "limit"), [("sft", 30), ("pretrain", 1000)])
def test_failed_write(tmp_path, complete, name, limit):
    """With a file size limit: in a shard, in the state, or in the meta."""
    case, folder = CASES[name], tmp_path / "c"
    ours, theirs = pipe()
    process = start(build_with_limited_files, case, folder, limit, theirs)
    assert ours.poll(60)
    number, message = ours.recv()
    assert exit_code(process) == 0
    assert number == errno.EFBIG
    assert str(folder) in message
    assert not folder.exists() or not tree(folder)
    case.build(folder)
    check_complete(folder, complete[name])


@pytest.mark.parametrize("kind", KINDS)
def test_out_dir_or_its_parent_is_a_file(tmp_path, kind):
    (tmp_path / "c").write_text("mine", encoding="utf-8")
    for folder in (tmp_path / "c", tmp_path / "c" / "d", tmp_path / "c" / "deep" / "d"):
        with pytest.raises(OSError, match="cannot write the cache") as error:
            CASES[kind].build(folder)
        assert str(folder) in str(error.value)
    assert (tmp_path / "c").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("kind", "number", "method"), [("pretrain", errno.EACCES, "mkdir"), ("sft", errno.EROFS, "open")]
)
def test_folder_without_write_permission(tmp_path, monkeypatch, kind, number, method):
    real = getattr(Path, method)

    def refuse(self, *args, **kwargs):
        if str(self).startswith(str(tmp_path)):
            raise OSError(number, os.strerror(number), str(self))
        return real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, method, refuse)
        with pytest.raises(OSError, match=r"cannot write the cache .*writable folder") as error:
            CASES[kind].build(tmp_path / "c")
    assert error.value.errno == number
    assert str(tmp_path / "c") in str(error.value)
    assert not (tmp_path / "c").exists()


def test_failed_build_releases_the_lock(tmp_path, complete, monkeypatch):
    """Even while the error of the first build is referenced."""
    case, folder, mkdir = CASES["pretrain"], tmp_path / "c", Path.mkdir

    def refuse(self, *args, **kwargs):
        if self.name == "val":
            raise OSError(errno.EIO, "no")
        mkdir(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        with pytest.raises(OSError, match=r"no|cannot") as error:
            case.build(folder)
    case.build(folder)
    check_complete(folder, complete["pretrain"])
    assert error.value.errno == errno.EIO
    assert str(folder) in str(error.value)


@pytest.mark.parametrize("name", KINDS)
def test_what_a_kill_after_publishing_leaves_is_removed(tmp_path, name, monkeypatch):
    folder = tmp_path / "c"
    removed = []
    with monkeypatch.context() as patch:
        patch.setattr(partial_build.shutil, "rmtree", lambda path, **options: removed.append(path))
        CASES[name].build(folder)
    assert hidden(folder) in removed and hidden(folder).is_dir()
    partial_build.remove_published(folder)
    assert list(tmp_path.iterdir()) == [folder]


def test_a_build_that_can_resume_is_not_removed(tmp_path):
    interrupt(CASES["pretrain"], tmp_path / "c", after=40)
    assert complete_shards(tmp_path / "c")
    before = tree(hidden(tmp_path / "c"))
    partial_build.remove_published(tmp_path / "c")
    assert tree(hidden(tmp_path / "c")) == before


@pytest.mark.parametrize("name", KINDS)
def test_a_hidden_folder_that_cannot_be_removed_is_reported_and_removed_later(tmp_path, name, monkeypatch):
    folder = tmp_path / "c"
    CASES[name].build(folder)

    def refuse(path, *, onerror):
        onerror(os.unlink, str(path), (OSError, OSError(errno.EIO, "Input/output error"), None))

    with monkeypatch.context() as patch:
        patch.setattr("niels_gpt.system.console.shutil.rmtree", refuse)
        with pytest.warns(UserWarning, match=r"cannot remove .*\.c\.partial.*next build"):
            CASES[name].build(folder)
    assert hidden(folder).is_dir()
    partial_build.remove_published(folder)
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("name", KINDS)
def test_a_kill_before_the_record_of_the_move_is_deleted_leaves_nothing(tmp_path, name, monkeypatch):
    """All names are moved, so the cache is complete; with a name still to move, the next build rolls back."""
    folder, unlink = tmp_path / "c", Path.unlink

    def die_at_record(path, **options):
        if path.name == "moving.json":
            raise KeyboardInterrupt
        unlink(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", die_at_record)
        with pytest.raises(KeyboardInterrupt):
            CASES[name].build(folder)
    assert (hidden(folder) / "moving.json").exists() and (folder / "meta.json").exists()
    (folder / "meta.json").rename(hidden(folder) / "meta.json")
    partial_build.remove_published(folder)
    assert hidden(folder).is_dir()
    (hidden(folder) / "meta.json").rename(folder / "meta.json")
    partial_build.remove_published(folder)
    assert list(tmp_path.iterdir()) == [folder]
