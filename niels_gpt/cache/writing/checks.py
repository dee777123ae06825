"""Checks before a build: tokenizer, numbers, disk space and output folder."""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
from pathlib import Path

import numpy as np

from niels_gpt.cache.formats import CHECKSUMS, DOCUMENTS, SPLITS, TEST, UINT16
from niels_gpt.cache.writing.shards import MARGIN_BYTES
from niels_gpt.tokenizer import ForeignTokenizer
from niels_gpt.tokenizer.dtypes import token_dtype
from niels_gpt.tokenizer.interface import TokenizerLike
from niels_gpt.tokenizer.special import SPECIAL_NAMES

_SHARD = re.compile(r"shard_\d{5,}\.bin")


def check_tokenizer(tokenizer: TokenizerLike) -> None:
    """Raise ValueError for a vocabulary that cannot be stored, or special ids outside the vocabulary."""
    vocab = tokenizer.vocab_size
    token_dtype(vocab)
    special = tokenizer.special_token_ids()
    for name in ("eot",) if isinstance(tokenizer, ForeignTokenizer) else SPECIAL_NAMES:
        if name not in special or not 0 <= special[name] < vocab:
            raise ValueError(f"the tokenizer's id of {name} is {special.get(name)!r}, not in 0..{vocab - 1}")


def check_seed(seed: int) -> None:
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise ValueError(f"seed must be an integer in 0..2**63-1, got {seed!r}")


def check_shard_bytes(shard_bytes: int, dtype: np.dtype = UINT16) -> None:
    width = dtype.itemsize
    if shard_bytes < width or shard_bytes % width:
        raise ValueError(
            f"shard_bytes must be at least {width} and a multiple of {width} ({width} bytes per token), got "
            f"{shard_bytes}"
        )


def check_space(out_dir: Path, needed: int) -> None:
    """Raise OSError if the disk has less free space than the cache needs."""
    existing = out_dir.absolute()
    while not existing.exists():
        existing = existing.parent
    with contextlib.suppress(FileNotFoundError):
        free = shutil.disk_usage(existing).free
        if free < needed:
            raise OSError(
                errno.ENOSPC,
                f"{out_dir} will need {needed / 1e9:.2f} GB, but {existing} has {free / 1e9:.2f} GB free "
                f"({MARGIN_BYTES >> 20} MiB of it stay free): free some space, or request fewer tokens",
            )


def check_same_file_system(out_dir: Path) -> None:
    """Raise ValueError if the hidden build folder and `out_dir` are on different file systems."""
    if out_dir.is_dir() and out_dir.stat().st_dev != out_dir.parent.stat().st_dev:
        raise ValueError(
            f"{out_dir} is a mount point; the final rename would cross file systems. "
            f"Use a sub-folder, such as {out_dir / 'cache'}"
        )


def check_no_foreign_files(out_dir: Path) -> None:
    """Raise ValueError if the build would replace files that do not belong to a pretrain cache."""
    for folder in (out_dir / split for split in (*SPLITS, TEST)):
        entries = sorted(folder.iterdir()) if folder.is_dir() else [folder] if folder.exists() else []
        for path in entries:
            if path.is_dir() or not (path.name in (DOCUMENTS, CHECKSUMS) or _SHARD.fullmatch(path.name)):
                raise ValueError(
                    f"{path} does not belong to a cache, and the build would replace {folder}: move it, or choose "
                    "another folder"
                )
