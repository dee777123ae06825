"""meta.json: what a cache was built from, and the size and sha256 of each of its files."""

from __future__ import annotations

import contextlib
import json
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from niels_gpt.cache.copies import ensure, fetch_again
from niels_gpt.cache.formats import CHECKSUMS, FORMAT_VERSIONS, TOKEN_DTYPES, UINT16, CacheError, dtype_name
from niels_gpt.system import files
from niels_gpt.system.checked_json import DamagedJSON, read_checked_json, write_checked_json
from niels_gpt.system.private_files import keep_private
from niels_gpt.system.program import command

FORMAT = "niels-gpt token cache"


def past_vocabulary(token: int, vocab_size: int, where: object, cache: Path) -> CacheError:
    """The error for a token id that no builder writes: the cache was changed after the build."""
    return CacheError(
        f"{where} has the token id {token}, but the vocabulary is 0..{vocab_size - 1}: the cache is damaged; run "
        f"{command('cache', 'verify', cache)}, and build it again"
    )


def write_meta(path: str | Path, meta: dict[str, Any]) -> None:
    """Write a meta.json with its checksum, atomically; the same content gives the same bytes."""
    write_checked_json(path, meta)


def read_meta(path: str | Path) -> dict[str, Any]:
    """The content of a meta.json, without its checksum.

    Raises CacheError (a ValueError) if it is missing, damaged, or has a newer format.
    """
    path = Path(path)
    try:
        meta = read_checked_json(path)
    except FileNotFoundError:
        raise CacheError(
            f"no {path}: this is not a finished cache; build it with {command('cache', 'build', 'SOURCE')}"
        ) from None
    except (DamagedJSON, IsADirectoryError) as err:
        raise CacheError(f"{path} is damaged ({err}): build the cache again") from None
    version, newest = meta.get("format_version", 1), max(FORMAT_VERSIONS.values())
    if not isinstance(version, int) or version > newest:
        raise CacheError(
            f"{path} has format version {version!r}, but this version reads up to {newest}: update niels-gpt"
        )
    return meta


def sha256_file(path: str | Path) -> str:
    """The hex sha256 of a file, read in chunks."""
    return files.sha256_file(path)


def open_meta(folder: Path, *, tokenizer_sha256: str | None) -> dict[str, Any] | None:
    """The meta of a cache folder that is opened to read its tokens, checked; None if there is no meta.

    Files without a meta are read as they are. If the folder is private, so is all that this process writes from now on.
    Raises CacheError if the meta is damaged or does not fit, and if a build is replacing the cache.
    """
    path = folder / "meta.json"
    keep_private((folder, path))
    if not path.exists():
        if (folder.parent / f".{folder.name}.partial" / "moving.json").exists():
            raise CacheError(f"{folder} is being replaced by a build: wait for it, or run a killed build again")
        if tokenizer_sha256 is not None:
            raise CacheError(f"{folder} has no meta.json, so its tokenizer is unknown: build it again")
        return None
    try:
        meta = read_meta(path)
    except CacheError:
        with contextlib.suppress(
            OSError, UnicodeError, json.JSONDecodeError, RecursionError, AttributeError
        ):  # the reason, if it was edited
            check_meta(json.loads(path.read_bytes()), folder, tokenizer_sha256=tokenizer_sha256)
        raise
    check_meta(meta, folder, tokenizer_sha256=tokenizer_sha256)
    return meta


def open_unchanged(folder: Path, open_files: Callable[[], None]) -> None:
    """Call `open_files`, which reads meta.json and opens the files; again if meta.json is replaced meanwhile.

    Raises CacheError if it is replaced every time.
    """
    for _ in range(5):
        before = _version(folder / "meta.json")
        try:
            open_files()
        except (CacheError, OSError):
            if _version(folder / "meta.json") == before:
                raise
        else:
            if _version(folder / "meta.json") == before:
                return
    raise CacheError(f"{folder} changes all the time: wait for the builds that replace it")


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def check_meta(meta: dict[str, Any], folder: Path, *, tokenizer_sha256: str | None) -> None:
    """Raise CacheError if the cache was not built, or has another dtype or tokenizer than expected."""
    if meta.get("built") is False:
        raise CacheError(f"{folder} was not built: {meta.get('reason', 'it is a placeholder')}")
    dtype_of(meta, folder)
    cache_sha = meta.get("tokenizer_sha256")
    if tokenizer_sha256 is not None and cache_sha != tokenizer_sha256:
        raise CacheError(
            f"{folder} was built with another tokenizer (sha256 {str(cache_sha)[:12]}..., yours is "
            f"{tokenizer_sha256[:12]}...): build it again with your tokenizer, or use the tokenizer of the cache"
        )


def dtype_of(meta: Mapping[str, Any] | None, folder: Path) -> np.dtype:
    """The dtype of the tokens of a cache; uint16 without a meta. Raises CacheError for a dtype that is not known."""
    name = (meta or {}).get("token_dtype", dtype_name(UINT16))
    if not isinstance(name, str) or name not in TOKEN_DTYPES:
        known = " or ".join(map(repr, TOKEN_DTYPES))
        raise CacheError(f"{folder} has tokens of dtype {name!r}, expected {known}: build it again")
    return TOKEN_DTYPES[name]


def listed_files(meta: dict[str, Any], folder: Path) -> dict[str, dict[str, Any]]:
    """The files listed in a meta, by name. Raises CacheError if the list is damaged."""
    listed = meta.get("files", {})
    if not isinstance(listed, dict) or not all(
        isinstance(entry, dict) and isinstance(entry.get("bytes"), int) and isinstance(entry.get("sha256"), str)
        for entry in listed.values()
    ):
        raise CacheError(f"{folder / 'meta.json'} is damaged (field files): build the cache again")
    return listed


def fingerprint(meta: dict[str, Any], folder: Path, split: str) -> str:
    """A sha256 that identifies the tokens of a split: the hash of the hashes of its files."""
    listed = listed_files(meta, folder)
    names = sorted(name for name in listed if name.startswith(split) and not name.endswith(CHECKSUMS))
    return files.sha256_bytes("".join(f"{name} {listed[name]['sha256']}\n" for name in names).encode("utf-8"))


def split_tokens(meta: dict[str, Any], folder: Path, split: str) -> int:
    """Tokens of a split. Raises CacheError if the meta has no such number."""
    total = meta.get(f"{split}_tokens")
    if not isinstance(total, int) or isinstance(total, bool) or total < 0:
        raise CacheError(f"{folder / 'meta.json'} has no {split}_tokens: build the cache again")
    return total


def check_total(meta: dict[str, Any], folder: Path, key: str, counted: int) -> None:
    """Raise CacheError if a total of the meta differs from that of the files: `token_dtype` may be wrong."""
    if meta[key] != counted:
        dtype = dtype_name(dtype_of(meta, folder))
        raise CacheError(
            f"{folder / 'meta.json'} has {key} {meta[key]:,}, but the files (of {dtype}) have {counted:,}: build the "
            "cache again"
        )


def check_file(meta: dict[str, Any], folder: Path, name: str, *, verify: bool = False) -> None:
    """Raise CacheError for a file that is missing, not listed, or differs from the listed size (verify: sha256)."""
    path = folder / name
    if "files" in meta:
        check_listed(path, listed_files(meta, folder).get(name), verify=verify)
    elif not path.is_file():
        raise CacheError(f"{path} is missing: build the cache again")


def check_listed(path: Path, listed: dict[str, Any] | None, *, verify: bool = False) -> int:
    """The size of a file, checked against its entry of `listed_files`. Raises CacheError if it differs."""
    ensure(path, listed)
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        status = None
    except OSError as err:
        raise CacheError(f"cannot read {path}: {err.strerror or err}") from err
    if status is None or not stat.S_ISREG(status.st_mode):
        raise CacheError(f"{path} is missing: build the cache again")
    size = status.st_size
    if listed is None:
        raise CacheError(f"{path} is not listed in meta.json: build the cache again")
    if size != listed["bytes"]:
        raise CacheError(f"{path} has {size:,} bytes, but meta.json lists {listed['bytes']:,}: build the cache again")
    if verify and sha256_file(path) != listed["sha256"] and not fetch_again(path, listed):
        raise CacheError(f"{path} is damaged (its sha256 differs from meta.json): build the cache again (--force)")
    return size
