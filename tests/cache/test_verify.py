import hashlib
import io
import json

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.cache.formats import CacheError
from niels_gpt.cache.verify import differences, find_caches, stream_slice, verify_cache
from niels_gpt.cache.writing.partial_build import PartialBuild
from tests.cache import (
    HELD_OUT,
    NOTES,
    UNLIMITED,
    conversations,
    meta_of,
    notes_cache,
    read_offsets,
    read_tokens,
    real_tokenizer,
    stream_of,
    talk_cache,
    tree,
    write_tokens,
)


def flip(path, at=None):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 4
    path.write_bytes(data)


def rewrite_meta(folder, **changes):
    meta = meta_of(folder) | changes
    (folder / "meta.json").write_text(json.dumps({k: v for k, v in meta.items() if v is not None}), "utf-8")


def replace_file(folder, name, data):
    """Write a file and update its entry in the meta."""
    (folder / name).write_bytes(data)
    files = meta_of(folder)["files"]
    files[name] = files[name] | {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    rewrite_meta(folder, files=files)


def rewrite_table(folder):
    """Update the checksums of the train shards."""
    data = io.BytesIO()
    blocks = [path.read_bytes() for path in sorted((folder / "train").glob("shard_*.bin"))]
    np.save(data, np.array([xxhash.xxh3_64_intdigest(block) for block in blocks], dtype="<u8"))
    replace_file(folder, "train/checksums.npy", data.getvalue())


def error_of(root):
    """The error message of verify."""
    with pytest.raises(CacheError) as caught:
        verify_cache(root)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- finding -----------------------------------------------------------------------------------------


def test_find_caches_is_sorted(cache):
    assert find_caches(cache) == [
        cache / "pretrain" / "books",
        cache / "pretrain" / "gutenberg",
        cache / "pretrain" / "notes",
        cache / "sft" / "talk",
    ]
    assert find_caches(cache / "sft" / "talk") == [cache / "sft" / "talk"]


@pytest.mark.parametrize("name", ["nowhere", "empty", "cache/tokenizer", "file"])
def test_no_caches(cache, tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x", "utf-8")
    for function in (find_caches, verify_cache):
        with pytest.raises(CacheError) as caught:
            function(tmp_path / name)
        assert f"no cache at {tmp_path / name}" in str(caught.value)


# --- verify ------------------------------------------------------------------------------------------


def test_verified_caches(cache):
    before = tree(cache)
    visited = []
    verified = verify_cache(cache, on_file=visited.append)
    assert verified == [cache / "pretrain" / "books", cache / "pretrain" / "notes", cache / "sft" / "talk"]
    listed = {folder / name for folder in verified for name in meta_of(folder)["files"]}
    assert set(visited) == listed and len(visited) == len(listed)
    assert listed == {
        path
        for path in cache.rglob("*")
        if path.is_file() and path.name not in ("meta.json", "spm.model") and "gutenberg" not in path.parts
    }
    assert tree(cache) == before


@pytest.mark.parametrize("damage", ["flipped", "cut", "a folder"])
def test_damage_of_any_file_is_found(cache, damage):
    """The damaged file is named, and no other."""
    paths = [
        folder / name
        for folder in find_caches(cache)
        for name, listed in meta_of(folder).get("files", {}).items()
        if listed["bytes"]
    ]
    assert len(paths) >= 10 and {path.suffix for path in paths} == {".bin", ".npy"}
    for path in paths:
        data = path.read_bytes()
        if damage == "flipped":
            flip(path, len(data) - 1)
        elif damage == "a folder":
            path.unlink()
            path.mkdir()
        else:
            path.write_bytes(data[:-2])
        folder = next(folder for folder in find_caches(cache) if path.is_relative_to(folder))
        assert str(path) in error_of(folder)
        message = error_of(cache)
        assert str(path) in message
        assert not any(str(other) in message for other in paths if other != path)
        if damage == "a folder":
            path.rmdir()
        path.write_bytes(data)
    assert verify_cache(cache)


@pytest.mark.parametrize(
    "name", ["pretrain/notes/train/shard_00077.bin", "pretrain/notes/val/shard_x.bin", "sft/talk/test_tokens.bin"]
)
def test_unlisted_file_is_named(cache, name):
    write_tokens(cache / name, [1, 2, 3])
    message = error_of(cache)
    assert str(cache / name) in message and "meta.json" in message


def test_damaged_meta_is_named(cache):
    path = cache / "sft" / "talk" / "meta.json"
    path.write_bytes(path.read_bytes()[:-20])
    assert str(path) in error_of(cache)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("pretrain/notes", {"files": None}, ""),
        ("sft/talk", {"files": None}, ""),
        ("pretrain/notes", {"vocab_size": None}, ""),
        ("sft/talk", {"train_tokens": None}, ""),
        ("pretrain/notes", {"val_tokens": None}, ""),
        ("sft/talk", {"tokenizer_sha256": None}, ""),
        ("pretrain/notes", {"token_dtype": "uint64-le"}, "uint64-le"),
        ("pretrain/notes", {"token_dtype": "uint32-le"}, ""),  # the files are of uint16
        ("sft/talk", {"token_dtype": "uint32-le"}, ""),
    ],
)
def test_missing_or_wrong_field_of_the_meta_is_named(cache, name, changes, named):
    rewrite_meta(cache / name, **changes)
    message = error_of(cache)
    assert str(cache / name) in message and named in message


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("pretrain/notes", "train_tokens"),
        ("pretrain/notes", "val_tokens"),
        ("pretrain/notes", "train_documents"),
        ("sft/talk", "train_tokens"),
        ("sft/talk", "val_examples"),
    ],
)
def test_totals_must_match_the_files(cache, name, key):
    total = meta_of(cache / name)[key]
    for by in (-1, 1):
        rewrite_meta(cache / name, **{key: total + by})
        assert str(cache / name) in error_of(cache)


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_damaged_tokenizer_is_named(cache, damage):
    path = cache / "tokenizer" / "spm.model"
    if damage == "flipped":
        flip(path)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    assert str(path) in error_of(cache)


def test_tokenizer_must_match_the_caches(cache, other_tokenizer):
    (cache / "tokenizer" / "spm.model").write_bytes(other_tokenizer.model)
    (cache / "tokenizer" / "meta.json").write_text(json.dumps({"sha256": other_tokenizer.sha256}), "utf-8")
    message = error_of(cache)
    assert str(cache / "pretrain" / "books") in message and "another tokenizer" in message
    (cache / "tokenizer" / "meta.json").unlink()
    assert "another tokenizer" in error_of(cache)


def test_table_that_does_not_match_the_tokens(cache):
    folder = cache / "pretrain" / "notes"
    table = bytearray((folder / "train" / "checksums.npy").read_bytes())
    table[-8] ^= 1
    replace_file(folder, "train/checksums.npy", bytes(table))
    assert "differ from their checksum" in error_of(cache)
    replace_file(folder, "train/checksums.npy", bytes(table[:-8]))
    assert "checksums.npy is damaged" in error_of(cache)


def test_tokens_past_the_vocabulary(cache):
    folder, size = cache / "pretrain" / "notes", real_tokenizer().vocab_size
    tokens = read_tokens(folder / "train" / "shard_00001.bin")
    for value in (size - 1, size, 65_535):
        tokens[37] = value
        replace_file(folder, "train/shard_00001.bin", np.array(tokens, dtype="<u2").tobytes())
        rewrite_table(folder)
        if value < size:
            assert verify_cache(cache)
        else:
            message = error_of(cache)
            assert "shard_00001.bin" in message and "token 37" in message and str(value) in message


@pytest.mark.parametrize(
    ("name", "file", "damage"),
    [
        ("pretrain/notes", "train/documents.npy", "decrease"),
        ("sft/talk", "train_idx.npy", "repeat"),
        ("pretrain/notes", "train/documents.npy", "not from 0"),
        ("sft/talk", "train_idx.npy", "past the end"),
        ("pretrain/notes", "train/documents.npy", "past the end"),
        ("sft/talk", "train_idx.npy", "negative"),
    ],
)
def test_invalid_offsets_are_named(cache, name, file, damage, tmp_path):
    folder = cache / name
    starts = read_offsets(folder / file)
    starts[3] = starts[2] - 1 if damage == "decrease" else starts[2] if damage == "repeat" else starts[3]
    starts[0] = {"not from 0": 1, "negative": -1}.get(damage, starts[0])
    starts[-1] = meta_of(folder)["train_tokens"] if damage == "past the end" else starts[-1]
    np.save(tmp_path / "x.npy", np.array(starts, dtype="<i8"))
    replace_file(folder, file, (tmp_path / "x.npy").read_bytes())
    assert str(folder / file) in error_of(cache)


def test_killed_build_is_ignored(cache, monkeypatch):
    """Also right before publishing, when the hidden folder has all files and meta.json."""

    def die(build, names):
        raise KeyboardInterrupt

    monkeypatch.setattr(PartialBuild, "publish", die)
    with pytest.raises(KeyboardInterrupt):
        notes_cache(cache / "pretrain" / "web")
    (hidden,) = cache.glob("pretrain/.*/meta.json")
    flip(hidden.parent / "train" / "shard_00000.bin")
    assert [folder.name for folder in find_caches(cache)] == ["books", "gutenberg", "notes", "talk"]
    assert [folder.name for folder in verify_cache(cache)] == ["books", "notes", "talk"]


# --- differences -------------------------------------------------------------------------------------


def test_identical_caches_do_not_differ(cache, tmp_path):
    for a, b in (
        (notes_cache(tmp_path / "a", workers=1), notes_cache(tmp_path / "b", workers=4)),
        (talk_cache(tmp_path / "c", workers=1), talk_cache(tmp_path / "d", workers=4)),
        (tmp_path / "a", tmp_path / "a"),
    ):
        assert list(differences(a, b)) == []


def first_difference(a, b):
    return next(i for i, (x, y) in enumerate(zip(read_tokens(a), read_tokens(b), strict=False)) if x != y)


def test_first_differing_token(tmp_path):
    texts = [*NOTES[:9], "note 9 and 9 and 9", *NOTES[10:]]
    a = notes_cache(tmp_path / "a", texts)
    b = notes_cache(tmp_path / "b", [text.replace("9 and 9", "8 and 8") for text in texts])
    lines = list(differences(a, b))
    assert [line.split(":")[0] for line in lines[:1]] == ["input texts"]
    mine, theirs = tree(a / "train"), tree(b / "train")
    (name,) = [f"train/{file}" for file in mine if mine[file] != theirs[file] and file != "checksums.npy"]
    at = first_difference(a / name, b / name)
    x, y = read_tokens(a / name)[at], read_tokens(b / name)[at]
    assert lines[1:] == [f"{name}: differ from token {at} on ({x} and {y})"]


def test_added_held_out_text(tmp_path):
    a = notes_cache(tmp_path / "a")
    b = notes_cache(tmp_path / "b", val_texts=[*HELD_OUT, "one more"])
    first, *rest = differences(a, b)
    assert first.startswith("input val_texts: 4 items") and " 5 " in first
    n = len(read_tokens(a / "val" / "shard_00000.bin"))
    m = len(read_tokens(b / "val" / "shard_00000.bin"))
    assert n < m
    assert any(f"val/shard_00000.bin: {n} and {m} tokens" in line for line in rest)
    assert not any("train" in line for line in rest)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"seed": 2}, "seed: 1 and 2"),
        ({"shard_bytes": 100}, "shard_bytes: 200 and 100"),
        ({"shuffle_buffer": 4}, "shuffle_buffer: 0 and 4"),
        ({"max_train_tokens": 50}, f"max_train_tokens: {UNLIMITED} and 50"),
        ({"max_val_tokens": 5}, f"max_val_tokens: {UNLIMITED} and 5"),
        ({"dataset_name": "other"}, "dataset_name: None and 'other'"),
        ({"dataset_config": "large"}, "dataset_config: None and 'large'"),
        ({"revision": "abc"}, "revision: None and 'abc'"),
        ({"val_texts": None, "max_val_tokens": 50}, "split_rule: "),
    ],
)
def test_causes_come_first(tmp_path, change, cause):
    lines = list(differences(notes_cache(tmp_path / "a"), notes_cache(tmp_path / "b", **change)))
    consequences = [i for i, line in enumerate(lines) if line.startswith(("train", "val/"))]
    at = next(i for i, line in enumerate(lines) if line.startswith(cause))
    assert all(at < i for i in consequences)
    names = {key.split(":")[0] for key in lines if not key.startswith(("train", "val/", "input", "dropped"))}
    assert names == set(change) - {"val_texts"} | ({"split_rule"} if "val_texts" in change else set())


def test_dropped_examples_are_a_difference(tmp_path):
    examples = list(conversations(20))
    lines = list(
        differences(talk_cache(tmp_path / "a", examples), talk_cache(tmp_path / "b", [e for e in examples if e]))
    )
    assert any(line.startswith("dropped: {'without messages': 2} and {}") for line in lines)
    assert lines[0].startswith("input examples: 20 items") and " 18 " in lines[0]
    assert not any(".bin" in line for line in lines)  # the tokens are the same


def test_tokenizer_difference_comes_first(tmp_path, other_tokenizer):
    lines = list(differences(notes_cache(tmp_path / "a"), notes_cache(tmp_path / "b", tokenizer=other_tokenizer)))
    assert lines[0].startswith("tokenizer: ")
    assert real_tokenizer().sha256[:12] in lines[0] and other_tokenizer.sha256[:12] in lines[0]


def test_file_in_one_cache_only(tmp_path):
    a, b = notes_cache(tmp_path / "a"), notes_cache(tmp_path / "b", NOTES[:-8])
    only = sorted({path.name for path in (a / "train").iterdir()} - {path.name for path in (b / "train").iterdir()})
    assert only
    lines = list(differences(a, b))
    for name in only:
        assert f"train/{name} is only in {a}" in lines
    assert f"train/{only[0]} is only in {a}" in list(differences(b, a))


def test_flipped_byte_is_a_difference(tmp_path):
    """The metas are equal, the files are not."""
    a, b = notes_cache(tmp_path / "a"), notes_cache(tmp_path / "b")
    flip(b / "train" / "shard_00001.bin", 20)
    lines = list(differences(a, b))
    assert len(lines) == 1 and "train/shard_00001.bin" in lines[0]


def test_differences_with_a_missing_cache_raise(tmp_path):
    a = notes_cache(tmp_path / "a")
    for first, second in ((a, tmp_path / "nowhere"), (tmp_path / "nowhere", a)):
        with pytest.raises(CacheError, match=r"nowhere.meta\.json"):
            list(differences(first, second))


# --- slices ------------------------------------------------------------------------------------------


@given(start=st.integers(0, 400), length=st.integers(0, 400))
def test_slices(caches, start, length):
    folder = caches / "pretrain" / "notes"
    stream = stream_of(folder)
    assert 250 < len(stream) < 400
    found = stream_slice(folder, "train", start, length)
    assert found.dtype == np.dtype("<u2")
    assert found.tolist() == stream[start : start + length]
    stream = read_tokens(caches / "sft" / "talk" / "val_tokens.bin")
    assert 30 < len(stream) < 120
    assert stream_slice(caches / "sft" / "talk", "val", start // 4, length).tolist() == stream[start // 4 :][:length]


def test_a_missing_limit_is_named_so(tmp_path):
    a, b = notes_cache(tmp_path / "a"), notes_cache(tmp_path / "b")
    for folder, limit in ((a, 1 << 62), (b, 1000)):
        rewrite_meta(folder, max_train_tokens=limit)
    assert list(differences(a, b)) == ["max_train_tokens: no limit and 1000"]
