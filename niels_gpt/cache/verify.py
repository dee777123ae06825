"""Verify caches, read slices of them, and explain how two caches differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from niels_gpt.cache.checksums import load_array
from niels_gpt.cache.formats import (
    CHECKSUMS,
    DOCUMENTS,
    NO_LIMIT,
    SPLITS,
    TEST,
    cache_folders,
    list_shards,
    splits_of,
)
from niels_gpt.cache.meta import (
    CacheError,
    check_file,
    check_meta,
    check_total,
    dtype_of,
    listed_files,
    open_meta,
    read_meta,
    sha256_file,
)
from niels_gpt.cache.mmap import MappedTokens
from niels_gpt.cache.sft_dataset import open_sft_tokens
from niels_gpt.cache.token_stream import TokenStream
from niels_gpt.system import files
from niels_gpt.system.program import command
from niels_gpt.tokenizer import has_tokenizer, load_tokenizer

_SETTINGS = ("kind", "dataset_name", "dataset_config", "revision", "seed", "shuffle_buffer", "max_train_tokens",
             "max_val_tokens", "val_frac", "split_rule", "shard_bytes", "token_dtype", "format_version")  # fmt: skip


def find_caches(root: Path) -> list[Path]:
    """The cache folders at or under a folder, sorted. Raises CacheError if there are none."""
    if not root.exists():
        raise CacheError(f"no cache at {root}: build one with {command('cache', 'build-all', '--cache-dir', root)}")
    found = [root] if (root / "meta.json").exists() and root.name != "tokenizer" else []
    found += cache_folders(root)
    if not found:
        raise CacheError(f"no cache at {root}: it has no meta.json, and no caches in pretrain/ or sft/")
    return found


def verify_cache(root: Path, *, on_file: Callable[[Path], None] = lambda path: None) -> list[Path]:
    """Hash every file of all caches under a folder again; the caches, all of them verified.

    Raises CacheError that names the first file that is missing, not listed, or differs from meta.json.
    """
    caches = find_caches(root)
    tokenizer = None if caches[0] == root else _verify_tokenizer(root / "tokenizer")
    verified = []
    for folder in caches:
        meta = read_meta(folder / "meta.json")
        if meta.get("built") is False:
            continue
        check_meta(meta, folder, tokenizer_sha256=tokenizer)
        if "files" not in meta:
            raise CacheError(f"{folder / 'meta.json'} lists no files: build the cache again")
        files = listed_files(meta, folder)
        for name in files:
            on_file(folder / name)
            check_file(meta, folder, name, verify=True)
        for path in _token_files(folder):
            if path.relative_to(folder).as_posix() not in files:
                raise CacheError(f"{path} is not listed in {folder / 'meta.json'}: remove it, or build the cache again")
        _verify_content(folder, meta)
        verified.append(folder)
    return verified


def _verify_tokenizer(folder: Path) -> str:
    model = folder / "spm.model"
    if not model.is_file() and has_tokenizer(folder):
        return load_tokenizer(folder).sha256
    if not model.is_file():
        raise CacheError(f"{model} is missing: the caches beside it cannot be decoded")
    sha = sha256_file(model)
    if (folder / "meta.json").exists() and read_meta(folder / "meta.json").get("sha256") != sha:
        raise CacheError(f"{model} is damaged (its sha256 differs from its meta.json)")
    return sha


def _token_files(folder: Path) -> list[Path]:
    """The token files that readers open."""
    shards = (path for split in (*SPLITS, TEST) for path in list_shards(folder / split))
    return [*shards, *files.matching(folder, "*_tokens.bin")]


def _verify_content(folder: Path, meta: dict[str, Any]) -> None:
    """Check that ids are in the vocabulary, totals match the files, and offsets increase and are in range."""
    pretrain = meta.get("kind") == "pretrain"
    unit = "documents" if pretrain else "examples"
    splits = splits_of(meta)
    for key in ("vocab_size", *(f"{split}_{what}" for split in splits for what in ("tokens", unit))):
        if not isinstance(meta.get(key), int):
            raise CacheError(f"{folder / 'meta.json'} has no {key}: build the cache again")
    for split in splits:
        if pretrain:
            opened = TokenStream(folder / split).shards if (folder / split).is_dir() else []
        else:
            opened = [open_sft_tokens(folder / f"{split}_tokens.bin", meta)]
        tokens = sum(_verify_ids(file, meta["vocab_size"]) for file in opened)
        check_total(meta, folder, f"{split}_tokens", tokens)
        name = f"{split}/{DOCUMENTS}" if pretrain else f"{split}_idx.npy"
        offsets = load_array(folder / name, listed_files(meta, folder).get(name))
        check_total(meta, folder, f"{split}_{unit}", len(offsets))
        if len(offsets) and (offsets[0] != 0 or (np.diff(offsets) <= 0).any() or offsets[-1] >= tokens):
            raise CacheError(f"{folder / name}: the offsets do not increase from 0 to below {tokens}")


def _verify_ids(file: MappedTokens, vocab_size: int) -> int:
    """Number of tokens of a file. Raises CacheError for an id past the vocabulary, or a block that is damaged."""
    for at in range(0, file.size, 1 << 24):
        chunk = file.slice(at, min(at + (1 << 24), file.size))
        if int(chunk.max()) >= vocab_size:
            where = int(np.argmax(chunk >= vocab_size))
            token = int(chunk[where])
            raise CacheError(f"{file.path}: token {at + where} is {token}, past the vocabulary of {vocab_size}")
        file.release()
    return file.size


def differences(a: Path, b: Path) -> Iterator[str]:
    """Descriptions of how two caches differ, causes first; nothing if they are equal."""
    first, second = read_meta(a / "meta.json"), read_meta(b / "meta.json")
    for folder, meta in ((a, first), (b, second)):
        inputs = meta.get("inputs", {})
        valid = isinstance(inputs, dict) and all(isinstance(each, dict) for each in inputs.values())
        if not valid or not isinstance(meta.get("source") or {}, dict):
            raise CacheError(f"{folder / 'meta.json'} is damaged (field inputs or source): build the cache again")
    if first.get("tokenizer_sha256") != second.get("tokenizer_sha256"):
        yield f"tokenizer: {_short(first.get('tokenizer_sha256'))} and {_short(second.get('tokenizer_sha256'))}"
    for key in _SETTINGS:
        if first.get(key) != second.get(key):
            yield f"{key}: {_limit(first.get(key))} and {_limit(second.get(key))}"
    sources = [meta.get("source") or {} for meta in (first, second)]
    for key in sorted({*sources[0], *sources[1]} - {"files", "sha256"}):
        if sources[0].get(key) != sources[1].get(key):
            yield f"{key}: {sources[0].get(key)!r} and {sources[1].get(key)!r}"
    inputs, others = first.get("inputs", {}), second.get("inputs", {})
    for name in sorted({*inputs, *others}):
        mine, theirs = inputs.get(name, {}), others.get(name, {})
        if mine != theirs:
            yield (
                f"input {name}: {mine.get('items')} items ({_short(mine.get('sha256'))}) and "
                f"{theirs.get('items')} ({_short(theirs.get('sha256'))})"
            )
    if first.get("dropped") != second.get("dropped"):
        yield f"dropped: {first.get('dropped')} and {second.get('dropped')}"
    files, more = listed_files(first, a), listed_files(second, b)
    dtypes = dtype_of(first, a), dtype_of(second, b)
    for name in sorted(name for name in {*files, *more} if not name.endswith(CHECKSUMS)):
        if name not in files or name not in more:
            yield f"{name} is only in {b if name not in files else a}"
            continue
        check_file(first, a, name)
        check_file(second, b, name)
        difference = _first_difference(a / name, b / name, name, dtypes)
        if difference:
            yield difference


def _limit(value: Any) -> str:
    return "no limit" if value == NO_LIMIT else repr(value)


def _first_difference(a: Path, b: Path, name: str, dtypes: tuple[np.dtype, np.dtype]) -> str | None:
    """Description of the first difference of two files, compared by content, not by their metas."""
    if a.suffix == ".npy":
        return None if a.read_bytes() == b.read_bytes() else f"{name}: the offsets differ"
    x, y = (MappedTokens(path, dtype=dtype) for path, dtype in zip((a, b), dtypes, strict=True))
    width = min(x.size, y.size)
    for at in range(0, width, 1 << 22):
        mine, theirs = (file.slice(at, min(at + (1 << 22), width)) for file in (x, y))
        differing = np.flatnonzero(mine != theirs)
        if len(differing):
            i = int(differing[0])
            return f"{name}: differ from token {at + i:,} on ({int(mine[i])} and {int(theirs[i])})"
    if x.size != y.size:
        return f"{name}: {x.size:,} and {y.size:,} tokens; the shorter is a prefix of the longer"
    return None


def _short(sha: str | None) -> str:
    return "none" if sha is None else f"{sha[:12]}..."


def stream_slice(folder: Path, split: str, start: int, length: int) -> np.ndarray:
    """The tokens start .. start + length - 1 of a split, across shards, as far as there are any. Raises CacheError."""
    if (folder / split).is_dir():
        stream = TokenStream(folder / split)
        start, length = _within(start, length, stream.num_tokens)
        tokens = np.empty(length, dtype=stream.dtype)
        stream.read(start, tokens)
        return tokens
    file = open_sft_tokens(folder / f"{split}_tokens.bin", open_meta(folder, tokenizer_sha256=None))
    start, length = _within(start, length, file.size)
    return np.array(file.slice(start, start + length))


def _within(start: int, length: int, total: int) -> tuple[int, int]:
    start = min(start, total)
    return start, max(min(length, total - start), 0)
