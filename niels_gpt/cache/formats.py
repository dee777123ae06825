"""File names and number formats of token caches.

    pretrain/NAME/  train/shard_00000.bin ...  train/documents.npy  train/checksums.npy  (val/, test/)  meta.json
    sft/NAME/       train_tokens.bin           train_idx.npy        train_checksums.npy  (val_*)        meta.json

Tokens are little-endian uint16, or uint32 where the vocabulary has more than 65,536 ids: the field `token_dtype` of
meta.json names the dtype, and files without a meta.json are uint16. Offsets are little-endian int64. The shards of a
split are one stream; all but the last have exactly `shard_bytes` bytes. `documents.npy` and `*_idx.npy` hold the offset
of the first token of each document or example within the stream of the split. `checksums.npy` holds the checksums of
the blocks of the token files; see checksums.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from niels_gpt.system import files
from niels_gpt.tokenizer.dtypes import token_dtype

UINT16, UINT32 = np.dtype("<u2"), np.dtype("<u4")
TOKEN_DTYPES: dict[str, np.dtype] = {"uint16-le": UINT16, "uint32-le": UINT32}
"""Name in meta.json -> dtype of the tokens."""
FORMAT_VERSIONS: dict[np.dtype, int] = {UINT16: 1, UINT32: 2}
"""Versions that know only uint16 refuse a cache of uint32 by its format version."""
OFFSET_DTYPE = np.dtype("<i8")
SPLITS = ("train", "val")
TEST = "test"
"""A third split of a pretrain cache, for sources that come with one."""
DOCUMENTS = "documents.npy"
CHECKSUMS = "checksums.npy"
"""Name of the table of a split of a pretrain cache; the end of the name for an SFT cache."""
NO_LIMIT = 1 << 62
"""A token budget that is never reached."""


class CacheError(ValueError):
    """A cache that cannot be used. The message names the cache, the reason and the remedy."""


def dtype_name(dtype: np.dtype) -> str:
    """The name of a token dtype in meta.json."""
    return next(name for name, known in TOKEN_DTYPES.items() if known == dtype)


def splits_of(meta: Mapping[str, Any]) -> tuple[str, ...]:
    """The splits of the cache that this meta describes."""
    return (*SPLITS, TEST) if f"{TEST}_tokens" in meta else SPLITS


def cache_folders(root: Path, *kinds: str) -> list[Path]:
    """The folders of finished caches of these kinds (`pretrain`, `sft`; default: both) under a folder, sorted."""
    folders = (path for kind in kinds or ("pretrain", "sft") for path in files.matching(root / kind, "[!.]*"))
    return [path for path in folders if (path / "meta.json").exists()]  # a dot: a build in progress


def shard_name(number: int) -> str:
    """shard_00000.bin, shard_00001.bin, ..."""
    return f"shard_{number:05d}.bin"


def list_shards(folder: Path) -> list[Path]:
    """The shards of a folder in order (99999 before 100000)."""
    return sorted(files.matching(folder, "shard_*.bin"), key=lambda path: (len(path.name), path.name))


def as_tokens(ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """Token ids in the stored dtype. Raises ValueError for ids that are negative or past the vocabulary."""
    values = np.asarray(ids)
    dtype = token_dtype(vocab_size)
    if values.size == 0:
        return np.empty(0, dtype=dtype)
    if values.dtype.kind not in "iu":
        raise ValueError(f"token ids must be integers, got {values.dtype}")
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise ValueError(f"token id {bad} is outside 0..{vocab_size - 1}, the vocabulary of the tokenizer")
    return values.astype(dtype)
