"""Builds that are stopped: real processes, real signals, full disks. What goes on then ends as if nothing had been."""

import contextlib
import dataclasses
import errno
import json
import logging
import os
import shutil
import signal
import threading
import time
from collections import namedtuple
from pathlib import Path

import pytest

from niels_gpt.cache import build_cache
from niels_gpt.cache.build_cache import build_pretrain_cache
from niels_gpt.cache.pretrain_dataset import PretrainTokenStreamDataset
from niels_gpt.cache.sft_dataset import SFTExampleDataset
from niels_gpt.cache.writing import input_batches, partial_build
from tests.cache import (
    CASES,
    EOT,
    ByteTokenizer,
    build_and_die,
    build_slowly,
    build_with_limited_files,
    check_pretrain,
    check_sft,
    conversations,
    documents,
    exit_code,
    expected_pretrain,
    no_waiting,
    pipe,
    quick_folder,
    start,
    tree,
    why_no_document,
)

GB = 1 << 30
Usage = namedtuple("Usage", "total used free")
KINDS = ["pretrain", "sft"]


@pytest.fixture(autouse=True)
def quick():
    with no_waiting():
        yield


@pytest.fixture(scope="module")
def whole():
    """{case: files} of the builds that nothing stops."""
    made = {}
    with quick_folder() as folder:
        for name, case in CASES.items():
            case.build(folder / "c")
            made[name] = tree(folder / "c")
            shutil.rmtree(folder / "c")
    return made


def hidden(folder):
    return folder.parent / f".{folder.name}.partial"


def complete_shards(folder, split="train"):
    """How many shards of the interrupted build its state lists; they are there, each of its full size."""
    path = hidden(folder) / "state.json"
    shards = json.loads(path.read_text(encoding="utf-8"))["splits"][split]["shards"] if path.exists() else []
    for shard in shards:
        assert (hidden(folder) / split / shard["name"]).stat().st_size == shard["bytes"] > 0
    return len(shards)


def check_whole(folder, files):
    """The cache is byte for byte the one of an uninterrupted build, and nothing hidden is left."""
    assert tree(folder) == files
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert not [path for path in folder.rglob("*") if path.name.startswith(".")]


class Stop(Exception):
    pass


def stopping(after):
    """An input that breaks after so many items."""

    def wrap(items):
        for number, item in enumerate(items):
            if number == after:
                raise Stop("the stream broke")
            yield item

    return wrap


def interrupt(case, folder, after, **options):
    """Leave a build behind that read so many items."""
    with pytest.raises(Stop, match="the stream broke"):
        case.build(folder, wrap=stopping(after), **options)
    assert not folder.exists()
    assert hidden(folder).is_dir()


def test_the_references_of_this_file(tmp_path):
    """The uninterrupted builds are what they must be, and have several steps to be stopped at."""
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pretrain", "pretrain, shuffled", "sft"])
def test_sigkill_at_various_moments(tmp_path, whole, name):
    """A slow input; killed before the first shard, after a few, and again later; then to the end."""
    case, folder = CASES[name], tmp_path / "c"
    split = "all" if case.kind == "sft" else "train"
    for shards in (0, 2, 6):
        process = start(build_slowly, case, folder, 0.003)
        deadline = time.monotonic() + 60
        while not hidden(folder).is_dir() or complete_shards(folder, split) < shards:
            assert process.is_alive(), "it was to be killed in mid-build"
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.kill()
        assert exit_code(process) == -signal.SIGKILL
        assert not folder.exists()
        assert complete_shards(folder, split) >= shards
    case.build(folder)
    check_whole(folder, whole[name])


FEW = {
    "pretrain": dataclasses.replace(CASES["pretrain"], items=documents(14), shard_bytes=128),
    "pretrain, shuffled": dataclasses.replace(CASES["pretrain, shuffled"], items=documents(14), shard_bytes=128),
    "pretrain, val given": dataclasses.replace(
        CASES["pretrain, val given"], items=documents(10), val_items=documents(4, "held out"), shard_bytes=128
    ),
    "sft": dataclasses.replace(CASES["sft"], items=conversations(6)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_sigkill_at_every_touch_of_the_disk(name):
    """Killed right before every file that is opened, renamed or removed, until a build gets through."""
    case = FEW[name]
    with quick_folder() as place:
        folder = place / "c"
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
            check_whole(folder, files)
            shutil.rmtree(folder)
        check_whole(folder, files)
        assert number > 25


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_sigkill_while_an_old_cache_is_replaced(name, whole):
    """What lies under final names is of the old cache or of the new one, and meta.json stands beside its own files."""
    case = CASES[name]
    old_case = dataclasses.replace(case, items=case.items[:20], max_val_tokens=50)
    with quick_folder() as place:
        folder = place / "c"
        old_case.build(folder)
        old = tree(folder)
        shutil.rmtree(folder)
        last = None
        for when in [
            "rename /old/meta.json",
            "rename /old/train",
            "rename /c/train",
            "rename /c/val",
            "rename /c/meta.json",
        ]:
            if case.kind == "sft":
                when = when.replace("train", "train_idx.npy").replace("val", "val_tokens.bin")
            old_case.build(folder)
            assert exit_code(start(build_and_die, case, folder, when)) == -signal.SIGKILL, when
            found = tree(folder)
            assert found.items() <= old.items() or found.items() <= whole[name].items()
            assert "meta.json" not in found or found in (old, whole[name])
            assert found != last, "two kills at the same place"
            last = found
            case.build(folder)
            check_whole(folder, whole[name])
            shutil.rmtree(folder)


@pytest.mark.parametrize("name", CASES)
def test_a_stop_after_every_item(name, whole):
    """Not killed, but broken off, after every number of items; and gone on with other batches and workers."""
    case = CASES[name]
    with quick_folder() as place:
        for after in range(0, len(case.items), 4):
            wrap = stopping(after)
            if case.val_items is not None and after >= len(case.val_items):

                def wrap(items, after=after):
                    return stopping(after)(items) if len(items) > 20 else list(items)

            try:
                case.build(place / "c", wrap=wrap, workers=1, batch_items=1)
            except Stop:
                case.build(place / "c", batch_items=1 + after % 5, workers=1 + after % 3)
            check_whole(place / "c", whole[name])
            shutil.rmtree(place / "c")


@pytest.mark.parametrize("name", CASES)
def test_stopped_again_and_again(name, whole):
    """Every time it comes a little further."""
    case, stops = CASES[name], 0
    with quick_folder() as place:
        for after in range(1, 200, 7):
            try:
                case.build(place / "c", wrap=stopping(after), workers=1, batch_items=2)
            except Stop:
                stops += 1
            else:
                break
        assert stops > 1
        check_whole(place / "c", whole[name])


# --- what is done twice, and what is not -----------------------------------------------------------------


def test_what_is_in_complete_shards_is_not_encoded_again(tmp_path, whole):
    case, folder = CASES["pretrain"], tmp_path / "c"
    interrupt(case, folder, 50, workers=1)
    shards = {split: complete_shards(folder, split) for split in ("train", "val")}
    assert shards["train"] > 5
    done = shards["train"] * 32
    expected = expected_pretrain(case.items, max_train_tokens=done, max_val_tokens=100)
    assert len(expected.streams["train"]) == done
    behind = expected.read["texts"]  # the documents that lie in complete shards, the last one maybe in part
    cut = expected.streams["train"][-1] != EOT
    left = [text.replace("\r\n", "\n") for text in case.items[behind - cut :] if not why_no_document(text)]
    tokenizer = case.build(folder, workers=1)
    assert tokenizer.encoded == left
    check_whole(folder, whole["pretrain"])


def test_examples_in_complete_steps_are_not_encoded_again(tmp_path, whole):
    case, folder = CASES["sft"], tmp_path / "c"
    interrupt(case, folder, 25, workers=1)
    assert complete_shards(folder, "all") > 5
    tokenizer = case.build(folder, workers=1)
    contents = [message["content"] for example in case.items for message in example]
    assert len(tokenizer.encoded) < len(contents) / 2
    assert tokenizer.encoded == contents[-len(tokenizer.encoded) :]
    check_whole(folder, whole["sft"])


def test_val_texts_in_complete_shards_are_not_encoded_again(tmp_path, whole):
    case, folder = CASES["pretrain, val given and full"], tmp_path / "c"

    def wrap(items):
        return stopping(40)(items) if len(items) > 20 else list(items)

    with pytest.raises(Stop):
        case.build(folder, wrap=wrap, workers=1)
    tokenizer = case.build(folder, workers=1)
    assert not [text for text in tokenizer.encoded if text.startswith("held out")]
    check_whole(folder, whole["pretrain, val given and full"])


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("when", ["/train/documents.npy", "/val/documents.npy", "partial/meta.json"])
def test_a_kill_at_the_very_end_does_not_cost_the_whole_build(tmp_path, whole, name, when):
    """All is encoded and only names are missing: what the complete shards hold is not encoded once more."""
    case, folder = CASES[name], tmp_path / "c"
    if case.kind == "sft":
        when = when.replace("/documents", "_idx")
    assert exit_code(start(build_and_die, case, folder, f"rename {when}")) == -signal.SIGKILL
    tokenizer = case.build(folder)
    check_whole(folder, whole[name])
    everything = CASES[name].build(tmp_path / "again").encoded
    assert len(tokenizer.encoded) < len(everything) / 2


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("wrap", [list, iter])
def test_the_input_may_be_a_list_or_be_read_once(tmp_path, whole, name, wrap):
    case, folder = CASES[name], tmp_path / "c"
    interrupt(case, folder, 8 if case.val_items else 24, workers=1)
    case.build(folder, wrap=wrap)
    check_whole(folder, whole[name])


def test_going_on_is_said(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    interrupt(CASES["pretrain"], tmp_path / "c", 50)
    CASES["pretrain"].build(tmp_path / "c")
    assert [record for record in caplog.records if "going on" in record.getMessage()]


# --- another input, other parameters ---------------------------------------------------------------------


def check_fresh(case, folder):
    """The cache is that of a build of its own."""
    with quick_folder() as place:
        case.build(place / "c")
        assert tree(folder) == tree(place / "c")
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize("wrap", [list, iter])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("pretrain", {"seed": 8}),
        ("pretrain", {"shard_bytes": 32}),
        ("pretrain", {"max_val_tokens": 40}),
        ("pretrain", {"max_val_tokens": 0}),
        ("pretrain", {"max_train_tokens": 100}),
        ("pretrain", {"shuffle_buffer": 5}),
        ("pretrain", {"val_items": ("held out",)}),
        ("pretrain, shuffled", {"shuffle_buffer": None}),
        ("pretrain, shuffled", {"seed": 8}),
        ("sft", {"seed": 8}),
        ("sft", {"val_frac": 0.5}),
    ],
)
def test_other_parameters_begin_afresh(tmp_path, name, changes, wrap):
    case, folder = CASES[name], tmp_path / "c"
    interrupt(case, folder, 25)
    changed = dataclasses.replace(case, **changes)
    changed.build(folder, wrap=wrap)
    check_fresh(changed, folder)


def test_another_tokenizer_begins_afresh(tmp_path):
    """Upper and lower case: the same number of ids, another sha256."""

    class Other(ByteTokenizer):
        sha256 = "ab" * 32

        def encode(self, text):
            return super().encode(text.upper())

    case, folder = CASES["pretrain"], tmp_path / "c"
    interrupt(case, folder, 50)
    case.build(folder, tokenizer=Other())
    case.build(tmp_path / "d", tokenizer=Other())
    assert tree(folder) == tree(tmp_path / "d")


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
        "what is left out": tuple(item or other for item in items),
    }


@pytest.mark.parametrize("change", changed_inputs(documents(60)))
@pytest.mark.parametrize("name", ["pretrain", "pretrain, shuffled", "sft"])
@pytest.mark.parametrize("batch_items", [1, 3])
def test_another_list_gives_its_own_cache(tmp_path, name, change, batch_items):
    """Never the old data, wherever the change is: before what the stopped build has stored, or after."""
    case, folder = CASES[name], tmp_path / "c"
    changed = dataclasses.replace(case, items=changed_inputs(case.items)[change])
    interrupt(case, folder, len(case.items) - 2, workers=1, batch_items=batch_items)
    changed.build(folder)
    check_fresh(changed, folder)


@pytest.mark.parametrize("name", FEW)
def test_an_item_that_has_changed_at_any_place(name):
    """Also the very item in whose middle the last complete shard ends."""
    case = FEW[name]
    with quick_folder() as place:
        for after in range(2, len(case.items), 3):
            for changed in range(after + 1):
                new = "new text " * 9 if case.kind == "pretrain" else case.items[0] * 3
                items = (*case.items[:changed], new, *case.items[changed + 1 :])
                with contextlib.suppress(Stop):
                    case.build(place / "c", wrap=stopping(after), workers=1, batch_items=1)
                changed_case = dataclasses.replace(case, items=items)
                changed_case.build(place / "c")
                changed_case.build(place / "d")
                assert tree(place / "c") == tree(place / "d"), f"stopped after {after}, item {changed} changed"
                shutil.rmtree(place / "c")
                shutil.rmtree(place / "d")


@pytest.mark.parametrize("after", range(20, 60, 3))
def test_a_list_that_ends_where_the_stopped_build_was(tmp_path, after):
    """The shard that was being written when the build stopped is not taken into the result."""
    case, folder = CASES["pretrain"], tmp_path / "c"
    interrupt(case, folder, after, workers=1, batch_items=1)
    for less in (0, 1, 2, 5):
        changed = dataclasses.replace(case, items=case.items[: after - less])
        kept = tmp_path / f"kept {less}" / "c"
        kept.parent.mkdir()
        shutil.copytree(hidden(folder), hidden(kept))
        changed.build(kept)
        check_fresh(changed, kept)


def test_a_text_in_place_of_what_was_no_text(tmp_path):
    """None was left out; "null" is a document."""
    case, folder = CASES["pretrain"], tmp_path / "c"
    assert case.items[17] is None
    interrupt(case, folder, 50)
    changed = dataclasses.replace(case, items=(*case.items[:17], "null", *case.items[18:]))
    changed.build(folder)
    check_fresh(changed, folder)


def test_other_val_texts_give_their_own_cache(tmp_path):
    case, folder = CASES["pretrain, val given"], tmp_path / "c"
    assert case.val_items is not None
    for number, val_items in enumerate(((*case.val_items[:3], "other", *case.val_items[4:]), case.val_items[:-1], ())):

        def wrap(items):
            return stopping(40)(items) if len(items) > 20 else list(items)

        with pytest.raises(Stop):
            case.build(folder, wrap=wrap)
        changed = dataclasses.replace(case, val_items=val_items)
        changed.build(folder)
        with quick_folder() as place:
            changed.build(place / "c")
            assert tree(folder) == tree(place / "c"), f"change {number}"
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["pretrain", "pretrain, shuffled", "sft"])
def test_another_one_shot_input_is_refused_once_with_the_remedy(tmp_path, name):
    """It was read half-way and cannot be read again; the next try begins afresh."""
    case, folder = CASES[name], tmp_path / "c"
    changed = dataclasses.replace(case, items=case.items[1:])
    interrupt(case, folder, 25, workers=1)
    with pytest.raises(ValueError, match=r"c has changed .*run the build again"):
        changed.build(folder, wrap=iter)
    assert list(tmp_path.iterdir()) == []
    changed.build(folder, wrap=iter)
    check_fresh(changed, folder)


def test_another_list_is_said(tmp_path, caplog):
    case = CASES["pretrain"]
    interrupt(case, tmp_path / "c", 50)
    case.build(tmp_path / "c", items=case.items[1:])
    assert [record for record in caplog.records if "changed" in record.getMessage()]


# --- what lies in the hidden folder ----------------------------------------------------------------------


def spoil(path, how):
    if how == "remove":
        path.unlink()
    elif how == "cut":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "longer":
        path.write_bytes(path.read_bytes() + b"\x01\x02")
    else:
        path.write_bytes(b"[]")


@pytest.mark.parametrize("how", ["remove", "cut", "empty", "longer", "other"])
@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_partial_build_is_begun_afresh_or_mended(tmp_path, name, how):
    """Every file of it, one after the other."""
    case, folder = FEW[name], tmp_path / "c"
    case.build(folder)
    files = tree(folder)
    shutil.rmtree(folder)
    interrupt(case, folder, len(case.items) - 1, workers=1, batch_items=1)
    left = tree(hidden(folder))
    assert len(left) > 5
    for path in left:
        place = tmp_path / "one" / "c"
        shutil.copytree(hidden(folder), hidden(place))
        spoil(hidden(place) / path, how)
        case.build(place)
        assert tree(place) == files, path
        shutil.rmtree(place.parent)


@pytest.mark.parametrize("key", ["recipe", "runs", "splits"])
@pytest.mark.parametrize("value", [None, []])
def test_a_damaged_state_is_begun_afresh(tmp_path, whole, key, value):
    case, folder = CASES["pretrain"], tmp_path / "c"
    interrupt(case, folder, 50)
    path = hidden(folder) / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), key: value}), encoding="utf-8")
    case.build(folder)
    check_whole(folder, whole["pretrain"])


def test_a_state_of_nothing_but_brackets_is_begun_afresh(tmp_path, whole):
    case, folder = CASES["pretrain"], tmp_path / "c"
    interrupt(case, folder, 50)
    (hidden(folder) / "state.json").write_text("[" * 100_000, encoding="utf-8")
    case.build(folder)
    check_whole(folder, whole["pretrain"])


def test_foreign_files_in_the_hidden_folder_do_not_get_into_the_cache(tmp_path, whole):
    case, folder = CASES["pretrain"], tmp_path / "c"
    for after in (1, 50):
        interrupt(case, folder, after)
        (hidden(folder) / "train" / "shard_09999.bin").write_bytes(b"\x01\x00")
        (hidden(folder) / "train" / ".documents.npy.1.1.tmp").write_bytes(b"half")
        (hidden(folder) / "x").mkdir()
        case.build(folder)
        check_whole(folder, whole["pretrain"])
        shutil.rmtree(folder)


def test_an_empty_hidden_folder(tmp_path, whole):
    hidden(tmp_path / "c").mkdir()
    CASES["pretrain"].build(tmp_path / "c")
    check_whole(tmp_path / "c", whole["pretrain"])


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("name", KINDS)
def test_every_file_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch, name):
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


@pytest.mark.parametrize("error", [RuntimeError("no connection"), KeyboardInterrupt(), OSError(errno.EIO, "input")])
@pytest.mark.parametrize("name", ["pretrain", "pretrain, shuffled", "sft"])
def test_an_error_of_the_input_is_raised_as_it_is_and_the_build_can_go_on(tmp_path, whole, name, error):
    def wrap(items):
        for number, item in enumerate(items):
            if number == 24:
                raise error
            yield item

    case, folder = CASES[name], tmp_path / "c"
    with pytest.raises(type(error)) as raised:
        case.build(folder, wrap=wrap, workers=1)
    assert raised.value is error
    assert not folder.exists()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("encode")]
    tokenizer = case.build(folder)
    if name != "pretrain, shuffled":
        assert len(tokenizer.encoded) < len(case.build(tmp_path / "again").encoded)
        shutil.rmtree(tmp_path / "again")
    check_whole(folder, whole[name])


def test_an_error_of_the_tokenizer_is_raised_and_the_build_can_go_on(tmp_path, whole):
    class Breaking(ByteTokenizer):
        def encode(self, text):
            if " 50:" in text:
                raise RuntimeError("out of order")
            return super().encode(text)

    case, folder = CASES["pretrain"], tmp_path / "c"
    with pytest.raises(RuntimeError, match="out of order"):
        case.build(folder, tokenizer=Breaking())
    assert not folder.exists()
    assert complete_shards(folder) > 5
    case.build(folder)
    check_whole(folder, whole["pretrain"])


def test_an_error_of_the_progress_callback_is_raised_and_the_build_can_go_on(tmp_path, whole):
    case, folder = CASES["pretrain"], tmp_path / "c"

    def told(progress):
        raise Stop("no more")

    with pytest.raises(Stop):
        build_pretrain_cache(
            case.items,
            folder,
            tokenizer=ByteTokenizer(),
            max_train_tokens=case.max_train_tokens,
            max_val_tokens=case.max_val_tokens,
            shard_bytes=case.shard_bytes,
            seed=case.seed,
            shuffle_buffer=None,
            on_progress=told,
        )
    case.build(folder)
    check_whole(folder, whole["pretrain"])


# --- two at once -------------------------------------------------------------------------------------------


def test_a_second_build_at_the_same_place_is_refused(tmp_path, whole):
    """Another process is at it; when it is dead, its work is gone on with."""
    case, folder = CASES["pretrain"], tmp_path / "c"
    process = start(build_slowly, case, folder, 0.05)
    try:
        deadline = time.monotonic() + 60
        while not (hidden(folder) / "train").is_dir():
            assert process.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.001)
        with pytest.raises(ValueError, match=r"another process is building .*c: wait"):
            case.build(folder)
        assert process.is_alive()
        assert not folder.exists()
    finally:
        process.kill()
        exit_code(process)
    case.build(folder)
    check_whole(folder, whole["pretrain"])


@pytest.mark.parametrize("name", KINDS)
def test_a_refused_second_build_does_not_disturb_the_first(tmp_path, whole, name):
    case, folder = CASES[name], tmp_path / "c"
    refused = []

    def wrap(items):
        for number, item in enumerate(items):
            if number in (0, 20):
                with pytest.raises(ValueError, match="another process"):
                    case.build(folder)
                refused.append(number)
            yield item

    case.build(folder, wrap=wrap)
    assert refused == [0, 20]
    check_whole(folder, whole[name])


# --- disks -------------------------------------------------------------------------------------------------


def free_space(monkeypatch, values):
    """Let the disk have so many bytes free, one value after the other; the last one stays."""
    values = list(values)

    def disk_usage(path):
        free = values.pop(0) if len(values) > 1 else values[0]
        return Usage(100 * GB, 100 * GB - free, free)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)


def check_full(error, folder):
    assert error.value.errno == errno.ENOSPC
    assert str(folder) in str(error.value)
    assert not folder.exists()


def test_too_little_space_is_found_beforehand(tmp_path, whole, monkeypatch):
    case, folder = CASES["pretrain"], tmp_path / "deep" / "c"
    options = {
        "tokenizer": ByteTokenizer(),
        "max_train_tokens": case.max_train_tokens,
        "max_val_tokens": case.max_val_tokens,
        "shard_bytes": case.shard_bytes,
        "seed": case.seed,
        "shuffle_buffer": None,
    }

    def never():
        pytest.fail("the input was read")
        yield

    with monkeypatch.context() as patch:
        free_space(patch, [GB])
        with pytest.raises(OSError, match="free some space") as error:
            build_pretrain_cache(never(), folder, expected_tokens=GB // 2 + 1, **options)
        check_full(error, folder)
        assert list(tmp_path.iterdir()) == []
        build_pretrain_cache(case.items, folder, expected_tokens=GB // 2, **options)
    check_whole(folder, whole["pretrain"])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("checks", [0, 1, 5, 9])
def test_a_disk_that_fills_up_while_writing(tmp_path, whole, monkeypatch, name, checks):
    case, folder = CASES[name], tmp_path / "c"
    with monkeypatch.context() as patch:
        free_space(patch, [100 * GB] * checks + [1000])
        with pytest.raises(OSError, match="free some space") as error:
            case.build(folder, workers=1)
        check_full(error, folder)
    tokenizer = case.build(folder)
    check_whole(folder, whole[name])
    if checks == 9:
        assert len(tokenizer.encoded) < len(case.build(tmp_path / "again").encoded)


def test_a_disk_that_is_full_before_the_examples_are_split(tmp_path, whole, monkeypatch):
    """The tokens of an SFT cache are there twice for a moment: room for every step, but not for all at once."""
    case, folder = CASES["sft"], tmp_path / "c"
    with monkeypatch.context() as patch:
        patch.setattr(partial_build, "MARGIN_BYTES", 0)
        free_space(patch, [400])
        with pytest.raises(OSError, match="space") as error:
            case.build(folder, batch_items=1)
        check_full(error, folder)
    case.build(folder)
    check_whole(folder, whole["sft"])


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("limit", [30, 1000, 3000])
def test_a_write_that_fails(tmp_path, whole, name, limit):
    """No file can grow past a limit: in a shard, in the state, or at the end in the meta."""
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
    check_whole(folder, whole[name])


@pytest.mark.parametrize("kind", KINDS)
def test_a_parent_that_is_a_file(tmp_path, kind):
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    for folder in (tmp_path / "file" / "c", tmp_path / "file" / "deep" / "c"):
        with pytest.raises(OSError, match="cannot write the cache") as error:
            CASES[kind].build(folder)
        assert str(folder) in str(error.value)
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("kind", KINDS)
def test_a_place_that_is_a_file(tmp_path, kind):
    (tmp_path / "c").write_text("mine", encoding="utf-8")
    with pytest.raises(OSError, match="cannot write the cache") as error:
        CASES[kind].build(tmp_path / "c")
    assert str(tmp_path / "c") in str(error.value)
    assert (tmp_path / "c").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
@pytest.mark.parametrize("method", ["mkdir", "open"])
def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch, kind, number, method):
    real = getattr(Path, method)

    def refuse(self, *args, **kwargs):
        if str(self).startswith(str(tmp_path)):
            raise OSError(number, os.strerror(number), str(self))
        return real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, method, refuse)
        with pytest.raises(OSError, match=r"cannot write the cache .*choose a folder that can be written") as error:
            CASES[kind].build(tmp_path / "c")
    assert error.value.errno == number
    assert str(tmp_path / "c") in str(error.value)
    assert not (tmp_path / "c").exists()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(PermissionError, match="choose a folder that can be written"):
        CASES["pretrain"].build(tmp_path / "locked" / "c")
    assert list((tmp_path / "locked").iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("renames", range(3))
def test_names_that_cannot_be_given(tmp_path, whole, monkeypatch, kind, renames):
    """The last step fails, at the first rename or a later one; when the reason is gone, a build succeeds."""
    case, folder = CASES[kind], tmp_path / "c"
    real, count = Path.rename, 0

    def refuse(self, target):
        nonlocal count
        if Path(target).parent == folder:
            count += 1
            if count > renames:
                raise PermissionError(errno.EACCES, "no")
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        with pytest.raises(OSError, match="cannot write the cache") as error:
            case.build(folder)
        assert str(folder) in str(error.value)
    found = tree(folder)
    assert "meta.json" not in found
    assert found.items() <= whole[kind].items()
    case.build(folder)
    check_whole(folder, whole[kind])


def test_a_failed_build_does_not_lock_the_next_one_out(tmp_path, whole, monkeypatch):
    """Also while the error of the first one is still held."""
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
    check_whole(folder, whole["pretrain"])
    assert error.value.errno == errno.EIO
    assert str(folder) in str(error.value)


# --- what is read of an interrupted build ------------------------------------------------------------------


def test_no_reader_takes_an_unfinished_build_for_a_cache(tmp_path):
    interrupt(CASES["pretrain"], tmp_path / "p", 50)
    interrupt(CASES["sft"], tmp_path / "s", 20)
    with pytest.raises(ValueError, match="no folder of shards"):
        PretrainTokenStreamDataset(tmp_path / "p" / "train", T=4, device="cpu")
    with pytest.raises(ValueError, match=r"no .*train_tokens\.bin"):
        paths = tmp_path / "s" / "train_tokens.bin", tmp_path / "s" / "train_idx.npy"
        SFTExampleDataset(*paths, T=4, device="cpu", eot_id=EOT, asst_id=258)
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".")]


def test_the_hidden_folder_is_beside_the_cache(tmp_path):
    """On the same disk, so that a rename is enough; and no command that walks the caches looks into it."""
    interrupt(CASES["pretrain"], tmp_path / "c", 50)
    assert [path.name for path in tmp_path.iterdir()] == [".c.partial"]


def test_the_default_steps():
    assert input_batches.BATCH_ITEMS >= 100
    assert build_cache.SFT_CHECKPOINT_BYTES % 2 == 0
    assert partial_build.MARGIN_BYTES >= 1 << 20
