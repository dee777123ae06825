"""Build caches: texts or conversations in, verified token files out.

The bytes of a cache depend on the input and the seed only: not on the number of workers, the machine or the time.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
import torch

from niels_gpt.cache.checksums import BlockHasher, write_table
from niels_gpt.cache.formats import (
    CHECKSUMS,
    DOCUMENTS,
    FORMAT_VERSIONS,
    NO_LIMIT,
    OFFSET_DTYPE,
    SPLITS,
    TEST,
    dtype_name,
)
from niels_gpt.cache.meta import FORMAT, sha256_file, write_meta
from niels_gpt.cache.writing.checks import (
    check_no_foreign_files,
    check_seed,
    check_shard_bytes,
    check_space,
    check_tokenizer,
)
from niels_gpt.cache.writing.encoding import encode_chats, encode_texts
from niels_gpt.cache.writing.partial_build import OnProgress, PartialBuild
from niels_gpt.chat.formats import chat_format
from niels_gpt.data.split import check_val_frac, split_items
from niels_gpt.system import files
from niels_gpt.system.executors import Executor, ThreadExecutor
from niels_gpt.system.rng import derive_seed
from niels_gpt.tokenizer import ForeignTokenizer
from niels_gpt.tokenizer.dtypes import token_dtype
from niels_gpt.tokenizer.interface import TokenizerLike
from niels_gpt.tokenizer.special import SPECIAL_NAMES

log = logging.getLogger("niels_gpt.cache")

SFT_CHECKPOINT_BYTES = 4 << 20
"""An SFT build saves its state after this many bytes; a killed build resumes there."""
# Stored in meta.json: another wording would change the bytes of caches.
SPLIT_RULES = {
    "budget": "whole documents go to val until its budget is full, then to train; the document that fills a budget is "
    "cut there and its rest discarded (a cut document has no EOT at its cut)",
    "given": "train and val (and test, if there is one) come from separate inputs; the document that fills a budget is "
    "cut there and its rest discarded (a cut document has no EOT at its cut)",
    "examples": "the first n_val of torch.randperm(n), seeded, over the examples that were kept; both splits in input "
    "order; n_val = 0 for n < 2 or val_frac == 0, else min(n - 1, max(1, int(n * val_frac)))",
}


class TrainEmpty(ValueError):
    """The train split would be empty. `budget` is the budget that causes it: "train", "val", or "" for neither."""

    def __init__(self, message: str, budget: str) -> None:
        super().__init__(message)
        self.budget = budget


class Message(TypedDict):
    role: Literal["system", "user", "assistant"]
    content: str


def build_pretrain_cache(
    texts: Iterable[str],
    out_dir: str | Path,
    *,
    tokenizer: TokenizerLike,
    max_train_tokens: int,
    max_val_tokens: int,
    shard_bytes: int,
    seed: int,
    shuffle_buffer: int | None,
    val_texts: Iterable[str] | None = None,
    test_texts: Iterable[str] | None = None,
    dataset_name: str | None = None,
    dataset_config: str | None = None,
    revision: str | None = None,
    streaming: bool = False,
    source: Mapping[str, Any] | None = None,
    workers: int | None = None,
    executor: Executor | None = None,
    expected_tokens: int | None = None,
    expected_documents: int | None = None,
    on_progress: OnProgress | None = None,
    also_dropped: Callable[[], Mapping[str, int]] | None = None,
) -> None:
    """Write out_dir/train/shard_*.bin, out_dir/val/shard_*.bin and out_dir/meta.json.

    Tokens are uint16, or uint32 if the vocabulary has more than 65,536 ids.
    Each split also has documents.npy (offsets) and checksums.npy, which readers check its tokens with.
    Every document is followed by one EOT. Complete documents go to val until its budget is full, then to train; the
    document that fills a budget is cut there. With `val_texts`, val is built from them, and all `texts` go to train.
    `test_texts` (only with `val_texts`) are a third split, out_dir/test, without a budget.
    `shuffle_buffer` shuffles the documents through a buffer of that size, seeded. Documents that contain a special
    string, encode to no tokens, or are not utf-8 text are dropped and counted in the meta.
    `dataset_name` ... `source` are recorded in the meta. `expected_tokens` is checked against the free disk space
    first; `expected_tokens`, the budgets and `expected_documents` are the totals of the progress. `also_dropped`
    returns, after all input was read, what the reader of the input dropped.

    `executor` encodes (a `RayExecutor`: on a cluster); None: `workers` threads. The bytes are the same.

    No file has a final name before the build is complete; a killed build resumes from its last complete shard.
    Raises ValueError for invalid numbers, a vocabulary past 2**31, input that leaves train empty, an out_dir that is a
    mount point, or one whose train/, val/ or test/ contain other files; OSError if the disk is full or read-only.
    """
    check_tokenizer(tokenizer)
    for name, value in (("max_train_tokens", max_train_tokens), ("max_val_tokens", max_val_tokens)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")
    dtype = token_dtype(tokenizer.vocab_size)
    check_shard_bytes(shard_bytes, dtype)
    if shuffle_buffer is not None and shuffle_buffer < 0:
        raise ValueError(f"shuffle_buffer must be at least 0 (0: no shuffle), got {shuffle_buffer}")
    check_seed(seed)
    if test_texts is not None and val_texts is None:
        raise ValueError("test_texts need val_texts: a source with a test split also has a validation split")
    executor = executor or ThreadExecutor(workers)
    described = {
        **_description(tokenizer, "pretrain", seed, dataset_name, dataset_config, revision, streaming, source),
        "split_rule": SPLIT_RULES["budget" if val_texts is None else "given"],
        "shuffle_buffer": shuffle_buffer or 0,
        "max_train_tokens": max_train_tokens,
        "max_val_tokens": max_val_tokens,
        "shard_bytes": shard_bytes,
    }
    budgets = {"train": max_train_tokens, "val": max_val_tokens} | ({} if test_texts is None else {TEST: NO_LIMIT})
    total = min(expected_tokens or NO_LIMIT, max_train_tokens + max_val_tokens)
    check_no_foreign_files(Path(out_dir))
    if expected_tokens is not None:
        check_space(Path(out_dir), expected_tokens * dtype.itemsize)

    with PartialBuild(
        out_dir,
        described,
        budgets,
        dtype=dtype,
        shard_bytes=shard_bytes,
        executor=executor,
        on_progress=on_progress,
        expected=(total if total < NO_LIMIT else None, expected_documents),
    ) as build:

        def shuffled(items: Iterable[str], name: str) -> Iterable[str]:
            if not shuffle_buffer or isinstance(items, str):
                return items
            return _shuffle(items, shuffle_buffer, derive_seed(seed, "shuffle", name))

        def step() -> None:
            encode = functools.partial(encode_texts, tokenizer=tokenizer)
            if val_texts is None:
                build.write_input("texts", shuffled(texts, "texts"), ("val", "train"), encode)
            else:
                build.write_input("val_texts", shuffled(val_texts, "val_texts"), ("val",), encode)
                build.write_input("texts", shuffled(texts, "texts"), ("train",), encode)
            if test_texts is not None:
                build.write_input("test_texts", test_texts, (TEST,), encode)

        inputs = (texts, val_texts, test_texts)
        build.write_inputs(step, rereadable=all(items is None or iter(items) is not items for items in inputs))
        if not build.splits["train"].tokens:
            counts = f"{sum(run['items'] for run in build.inputs.values())} documents were read"
            held = build.splits["val"].tokens
            if max_train_tokens == 0:
                budget, why = "train", f"{max_train_tokens=}"
            elif held:
                budget = "val" if val_texts is None else ""
                why = f"all {held} tokens went to val ({max_val_tokens=})"
            else:
                budget, why = "", _list_reasons(build.dropped)
            build.discard()
            raise TrainEmpty(f"{out_dir}: train would be empty: {counts}" + (f", {why}" if why else ""), budget)
        _log_dropped(out_dir, build.dropped, "documents")
        meta = dict(described)
        listing: dict[str, Any] = {}
        with build.write_errors():
            for name, split in build.splits.items():
                meta[f"{name}_tokens"] = split.tokens
                meta[f"{name}_documents"] = len(split.starts)
                split.write_tables()
                for shard in split.shards:
                    listing[f"{name}/{shard['name']}"] = {k: shard[k] for k in ("bytes", "tokens", "sha256")}
                for table in (DOCUMENTS, CHECKSUMS):
                    listing[f"{name}/{table}"] = _file_entry(split.folder / table)
            _write_meta(build, meta, listing, also_dropped)
        build.publish((*SPLITS, TEST, "meta.json"))


def build_sft_cache(
    examples: Iterable[Sequence[Message]],
    out_dir: str | Path,
    *,
    tokenizer: TokenizerLike,
    val_frac: float,
    seed: int,
    dataset_name: str | None = None,
    dataset_config: str | None = None,
    revision: str | None = None,
    streaming: bool = False,
    source: Mapping[str, Any] | None = None,
    workers: int | None = None,
    executor: Executor | None = None,
    expected_documents: int | None = None,
    on_progress: OnProgress | None = None,
    also_dropped: Callable[[], Mapping[str, int]] | None = None,
) -> None:
    """Write out_dir/{train,val}_tokens.bin, out_dir/{train,val}_idx.npy (int64 starts) and out_dir/meta.json.

    The dtype of the tokens is as for `build_pretrain_cache`.
    out_dir/{train,val}_checksums.npy are what readers check the tokens with.
    An example is `[role] + content + [eot]` for each message. The split is by example, seeded, over the kept examples.
    Dropped and counted in the meta: examples without messages, with an unknown role, a message without content, or a
    special string in the text. Resuming, ValueError and OSError as for `build_pretrain_cache`.
    """
    check_tokenizer(tokenizer)
    check_val_frac(val_frac)
    check_seed(seed)
    dtype = token_dtype(tokenizer.vocab_size)
    executor = executor or ThreadExecutor(workers)
    described = {
        **_description(tokenizer, "sft", seed, dataset_name, dataset_config, revision, streaming, source),
        "split_rule": SPLIT_RULES["examples"],
        "val_frac": val_frac,
    }
    with PartialBuild(
        out_dir,
        described,
        {"all": NO_LIMIT},
        dtype=dtype,
        shard_bytes=SFT_CHECKPOINT_BYTES,
        executor=executor,
        on_progress=on_progress,
        expected=(None, expected_documents),
    ) as build:

        def step() -> None:
            build.write_input("examples", examples, ("all",), functools.partial(encode_chats, tokenizer=tokenizer))

        build.write_inputs(step, rereadable=iter(examples) is not examples)
        everything = build.splits["all"]
        if not everything.starts:
            read = sum(run["items"] for run in build.inputs.values())
            why = f": {_list_reasons(build.dropped)}" if build.dropped else ""
            build.discard()
            raise ValueError(f"{out_dir}: all {read} examples were dropped{why}")
        _log_dropped(out_dir, build.dropped, "examples")
        train, val = split_items(range(len(everything.starts)), val_frac=val_frac, seed=seed)
        meta = dict(described)
        listing: dict[str, Any] = {}
        bounds = np.array([*everything.starts, everything.tokens], dtype=np.int64)
        with build.write_errors():
            check_space(Path(out_dir), dtype.itemsize * everything.tokens)
            shards = [everything.folder / shard["name"] for shard in everything.shards]
            for name, kept in zip(SPLITS, (train, val), strict=True):
                tokens, idx = build.folder / f"{name}_tokens.bin", build.folder / f"{name}_idx.npy"
                table = build.folder / f"{name}_{CHECKSUMS}"
                lengths, checksums = _copy_examples(shards, bounds, np.array(kept, dtype=np.int64), tokens, dtype)
                write_table(table, checksums)
                with files.atomic_write(idx) as file:
                    np.save(file, (lengths.cumsum() - lengths).astype(OFFSET_DTYPE))
                meta[f"{name}_examples"] = len(kept)
                meta[f"{name}_tokens"] = int(lengths.sum())
                listing[tokens.name] = {**_file_entry(tokens), "tokens": int(lengths.sum())}
                listing |= {path.name: _file_entry(path) for path in (idx, table)}
            _write_meta(build, meta, listing, also_dropped)
        build.publish((*(name for name in listing), "meta.json"))


def _write_meta(
    build: PartialBuild,
    meta: dict[str, Any],
    listing: dict[str, Any],
    also_dropped: Callable[[], Mapping[str, int]] | None,
) -> None:
    """Write meta.json, with the items that the builder and the reader of its input dropped, by reason."""
    dropped = Counter(build.dropped)
    dropped.update(also_dropped() if also_dropped else {})
    found = {"dropped": dict(sorted(dropped.items())), "inputs": build.inputs, "files": listing}
    write_meta(build.folder / "meta.json", {**meta, **found})


def _copy_examples(
    shards: list[Path], bounds: np.ndarray, kept: np.ndarray, path: Path, dtype: np.dtype
) -> tuple[np.ndarray, list[int]]:
    """Write the kept examples of the shards to one file; the lengths of these examples, and the block checksums."""
    chosen = np.zeros(len(bounds) - 1, dtype=bool)
    chosen[kept] = True
    begin = 0
    blocks = BlockHasher()
    with files.atomic_write(path) as file:
        for shard in shards:
            tokens = np.fromfile(shard, dtype=dtype)
            end = begin + len(tokens)
            first = int(np.searchsorted(bounds, begin, side="right")) - 1
            last = int(np.searchsorted(bounds, end, side="left"))
            inside = np.diff(bounds[first : last + 1].clip(begin, end))  # tokens of each example in this shard
            data = tokens[np.repeat(chosen[first:last], inside)].tobytes()
            file.write(data)
            blocks.update(data)
            begin = end
    lengths: np.ndarray = np.diff(bounds)[kept]
    return lengths, blocks.finish()


def _shuffle(items: Iterable[str], size: int, seed: int) -> Iterator[str]:
    """The items in a seeded order: each new item replaces, and yields, a random one of the buffer."""
    generator = torch.Generator().manual_seed(seed)
    buffer: list[str] = []
    draws: Iterator[int] = iter(())
    for item in items:
        if len(buffer) < size:
            buffer.append(item)
            continue
        slot = next(draws, None)
        if slot is None:
            draws = iter(torch.randint(size, (4096,), generator=generator).tolist())
            slot = next(draws)
        buffer[slot], item = item, buffer[slot]
        yield item
    for slot in torch.randperm(len(buffer), generator=generator).tolist():
        yield buffer[slot]


def _description(
    tokenizer: TokenizerLike,
    kind: str,
    seed: int,
    dataset_name: str | None,
    dataset_config: str | None,
    revision: str | None,
    streaming: bool,
    source: Mapping[str, Any] | None,
) -> dict[str, Any]:
    dtype = token_dtype(tokenizer.vocab_size)
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSIONS[dtype],
        "kind": kind,
        "dataset_name": dataset_name,
        "dataset_config": dataset_config,
        "revision": revision,
        "streaming": streaming,
        "source": None if source is None else dict(source),
        "seed": seed,
        "token_dtype": dtype_name(dtype),
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "vocab_size": tokenizer.vocab_size,
        "special_token_ids": _special_ids(tokenizer),
        **(_reply_marks(tokenizer) if kind == "sft" and isinstance(tokenizer, ForeignTokenizer) else {}),
    }


def _special_ids(tokenizer: TokenizerLike) -> dict[str, int]:
    """The special ids that a reader needs: of a tokenizer of others only the end of a document."""
    names = ("eot",) if isinstance(tokenizer, ForeignTokenizer) else SPECIAL_NAMES
    return {name: int(tokenizer.special_token_ids()[name]) for name in names}


def _reply_marks(tokenizer: ForeignTokenizer) -> dict[str, list[int]]:
    """The ids between which a reader finds replies. Raises ValueError for a template that cannot be masked."""
    chats = chat_format(tokenizer)
    return {"reply_start": list(chats.reply_start), "reply_ends": list(chats.reply_ends)}


def tokenizer_sha256(tokenizer: TokenizerLike) -> str | None:
    """The sha256 of the tokenizer's model file; None for an object without one."""
    sha: str | None = getattr(tokenizer, "sha256", None)
    return sha if isinstance(sha, str) else None


def _file_entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


def _list_reasons(dropped: dict[str, int]) -> str:
    return ", ".join(f"{number} {reason}" for reason, number in dropped.items())


def _log_dropped(out_dir: str | Path, dropped: dict[str, int], unit: str) -> None:
    if dropped:
        log.warning("%s: dropped %d %s: %s", Path(out_dir).name, sum(dropped.values()), unit, _list_reasons(dropped))
