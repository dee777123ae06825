"""Read the rows of a dataset from the Hugging Face Hub or from local files, with `datasets.load_dataset`.

All loaders use this module. It retries transient failures, resumes a broken stream at the same row, and turns final
failures into messages with a remedy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import hashlib
import inspect
import logging
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from niels_gpt.data.reading.diagnose import check_json_start, explain
from niels_gpt.data.reading.hub_errors import chain, is_transient, reason, retry_after, status
from niels_gpt.data.reading.local import VARIABLE, DataUnavailable, builder, choose_split, find_files, find_local
from niels_gpt.data.split import shuffled
from niels_gpt.system.host_limits import fit_datasets
from niels_gpt.system.rng import derive_seed

log = logging.getLogger("niels_gpt.data")

ATTEMPTS = 5
"""Attempts without a new row after which a transient failure counts as final."""
PATIENCE = 30.0
"""Seconds of failing calls without a new row after which there is no further attempt. Without a network, the Hub's
library itself retries for about 25 seconds."""
LONGEST_PAUSE = 60.0
"""Upper limit in seconds: pauses double from one second up to this. All are multiplied by one random factor of 0.5 to
1.5, so that no pause is shorter than the previous one."""
LIBRARY_RETRIES = 3
"""Retries of a read inside `datasets`, which continue at the same byte; each makes six requests. Its default of 20
waits for more than an hour if the Hub answers 429, and then hides the reason."""
MOVED = {"wikitext": "Salesforce/wikitext"}
"""Ids that versions of `huggingface_hub` refuse, because they have no namespace -> ids of the same datasets."""
TABLE_ROWS = 1000
"""Rows read at once from a dataset on disk."""


@dataclass(frozen=True)
class HubRequest:
    """Which rows to read."""

    dataset_id: str
    """Id on the Hub; also the key in NIELS_GPT_DATA."""
    config: str | None = None
    split: str | None = "train"
    """None: all splits, as a dict."""
    streaming: bool = False
    path: str | Path | None = None
    """A local file or folder to read instead of the Hub."""
    text_file_is_document: bool = False
    """Whether a .txt file is one row (a book), not one row per line."""
    columns: tuple[str, ...] | None = None
    """Columns to read from a dataset on disk; missing ones are ignored. None: all."""
    revision: str | None = None
    """A branch, tag or commit of the dataset on the Hub; None: its main branch."""
    only: frozenset[str] | None = None
    """The files of a local folder that are read; None: all."""

    def __str__(self) -> str:
        return self.dataset_id + (f" ({self.config})" if self.config else "")


@dataclass(frozen=True)
class Shuffle:
    """How to shuffle: all rows of a dataset on disk, or a buffer of rows of a stream."""

    seed: int
    buffer_size: int = 10_000


class HubReader:
    """Iterate over (row number, row) of one split; the number is None in a shuffled stream.

    A broken stream is reopened and resumed in the same order, without duplicates or gaps. Earlier rows are read again,
    because only this restores the shuffle buffer. Raises DataUnavailable.
    """

    def __init__(self, request: HubRequest, *, shuffle: Shuffle | None = None) -> None:
        self.request, self.shuffle = request, shuffle
        self.revision: str | None = None
        """Commit of the dataset, known after the first row if the Hub reports it."""

    def __iter__(self) -> Iterator[tuple[int | None, dict[str, Any]]]:
        request, done = self.request, 0
        fit_datasets()
        files = _local_files(request)
        failures = _Failures(request, files)
        while True:
            dataset: Any = None
            failures.start()
            try:
                dataset = _load_revision(request, files, self.revision if done else None)
                self.revision = revision_of(dataset)
                dataset = _shuffled_stream(dataset, request, self.shuffle)
                for number, item in enumerate(_iterate(dataset, request, self.shuffle)):
                    if number >= done:
                        done += 1
                        failures.number = 0
                        yield item
                    failures.start()  # do not count the time that the caller spends on the row
                return
            except Exception as err:
                failures.wait_or_raise(err, after=done, position=_stream_position(dataset))


def open_dataset(request: HubRequest) -> Any:
    """Return the `datasets` object, with retries; {split: dataset} if the request has no split.

    Raises DataUnavailable.
    """
    files = _local_files(request)
    failures = _Failures(request, files)
    while True:
        failures.start()
        try:
            return _load_revision(request, files)
        except Exception as err:
            failures.wait_or_raise(err, after=0)


@contextlib.contextmanager
def fixed_revisions() -> Iterator[None]:
    """Inside this context, read each dataset of the Hub at the commit at which it was first opened.

    A build opens a dataset several times: for the tokenizer, for its revision, for each split. A commit pushed in
    between would mix two versions.
    """
    global _fixed
    before = _fixed
    _fixed = {} if before is None else before
    try:
        yield
    finally:
        _fixed = before


_fixed: dict[str, str] | None = None  # dataset id -> commit, inside `fixed_revisions`


def go_offline() -> None:
    """Stop all requests of this process to the Hub; cached and local data can still be read."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in ("huggingface_hub.constants", "datasets.config"):  # they read the variable when they are imported
        if name in sys.modules:
            sys.modules[name].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]


def revision_of(dataset: Any) -> str | None:
    """Return the commit of a dataset from the Hub, or None; it is part of the names of its files."""
    sources: list[Any] = [getattr(getattr(dataset, "info", None), "download_checksums", None)]
    sources.append(getattr(dataset, "cache_files", None))
    inner = getattr(dataset, "_ex_iterable", None)
    while inner is not None:
        sources.append(getattr(inner, "kwargs", None))
        inner = getattr(inner, "ex_iterable", None)
    commit = re.search(r"(?:@|/0\.0\.0/)([0-9a-f]{40})/", " ".join(map(str, sources)))
    return commit[1] if commit else None


# --- opening and iterating ---------------------------------------------------------------------------


Files = dict[str, list[str]]  # split -> its files


def _local_files(request: HubRequest) -> Files | None:
    """Return the local files of the requested split, or of all splits; None: read from the Hub."""
    path = find_local(request.dataset_id, request.path)
    if path is None:
        return None
    files = find_files(path, request.config, only=request.only)
    if request.split is not None:
        name = request.split.partition("[")[0]  # "train[:100]" is a slice of train
        files = {name: choose_split(files, name, path)}
    elif "" in files:
        files = {"train": files[""]}
    paths = [file for names in files.values() for file in names]
    check_json_start(paths)
    for file in paths:
        if "::" in str(Path(file).absolute()):
            raise ValueError(f"cannot read {file}: its path contains `::`, which `datasets` cannot read; rename it")
    return files


def _load_revision(request: HubRequest, files: Files | None, commit: str | None = None) -> Any:
    """Load the dataset at this commit; None: at the one that `fixed_revisions` has recorded, or else as requested.

    Raises DataUnavailable if the Hub no longer has the commit.
    """
    dataset = _load(request, files)
    if files is not None:
        return dataset
    fixed = {} if _fixed is None or request.revision else _fixed
    commit = commit or fixed.get(request.dataset_id)
    found = revision_of(dataset)
    if commit is not None and found != commit:
        try:
            dataset = _load(dataclasses.replace(request, revision=commit), files)
        except Exception as err:
            if is_transient(err):
                raise
            log.debug("%s at %s: %s", request, commit, reason(err))
        if revision_of(dataset) != commit:
            raise DataUnavailable(
                f"{request} changed on the Hub while it was being read ({commit}, now {found}): start again"
            )
    elif found is not None:
        fixed[request.dataset_id] = found
    return dataset


def _load(request: HubRequest, files: Files | None) -> Any:
    import datasets

    if files is None:
        from niels_gpt.data.reading.hub_files import check_files

        check_files()
        datasets.config.STREAMING_READ_MAX_RETRIES = min(datasets.config.STREAMING_READ_MAX_RETRIES, LIBRARY_RETRIES)
    with _quiet(datasets, local=files is not None):
        if files is None:
            try:
                return _load_id(request, request.dataset_id)
            except Exception as err:
                if request.dataset_id not in MOVED or is_transient(err):
                    raise
            return _load_id(request, MOVED[request.dataset_id])
        if request.split is not None:
            return _load_local(request, files, request.split)
        return {split: _load_local(request, {split: files[split]}, split) for split in files}


def _load_id(request: HubRequest, dataset_id: str) -> Any:
    import datasets

    arguments = [dataset_id] + ([request.config] if request.config else [])
    revision = {"revision": request.revision} if request.revision else {}
    if request.split is None:
        return datasets.load_dataset(*arguments, **revision)
    return datasets.load_dataset(*arguments, split=request.split, streaming=request.streaming, **revision)


def _load_local(request: HubRequest, files: Files, split: str) -> Any:
    """Load one split of local files; splits loaded together would need the same columns."""
    import datasets

    kind = builder(next(iter(files.values())))
    options: dict[str, Any] = {"name": _state_name(files)} if not request.streaming else {}
    if kind == "text" and request.text_file_is_document:
        options["sample_by"] = "document"
    # `datasets` treats names as glob patterns, including the parent folders that it adds to relative paths.
    escaped = {name: [glob.escape(str(Path(file).absolute())) for file in paths] for name, paths in files.items()}
    return datasets.load_dataset(kind, data_files=escaped, split=split, streaming=request.streaming, **options)


def _state_name(files: Files) -> str:
    """Return a name for the current state of the files.

    `datasets` identifies its converted copy by path and mtime only, and would return old rows for a file that was
    unpacked again with its old mtime.
    """
    stats = [Path(path).stat() for paths in files.values() for path in paths]
    states = [(stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for stat in stats]
    return "at-" + hashlib.sha256(repr(states).encode()).hexdigest()[:16]


def _shuffled_stream(dataset: Any, request: HubRequest, shuffle: Shuffle | None) -> Any:
    """Add the shuffle buffer to a stream; return a dataset on disk unchanged."""
    if shuffle is None or not request.streaming or hasattr(dataset, "__len__"):
        return dataset
    return dataset.shuffle(seed=shuffle.seed, buffer_size=shuffle.buffer_size, **_one_shard(dataset))


def _stream_position(dataset: Any) -> tuple[int, int] | None:
    """Return (shard, row in it) up to which a stream has been read, with its buffer; None if unknown."""

    def positions(state: Any) -> Iterator[tuple[int, int]]:
        if isinstance(state, dict) and {"shard_idx", "shard_example_idx"} <= state.keys():
            yield int(state["shard_idx"]), int(state["shard_example_idx"])
        for inner in state.values() if isinstance(state, dict) else state if isinstance(state, list) else ():
            yield from positions(inner)

    try:
        return max(positions(dataset.state_dict()), default=None)
    except Exception:  # not a stream, or another type of stream
        return None


def _iterate(dataset: Any, request: HubRequest, shuffle: Shuffle | None) -> Iterator[tuple[int | None, dict[str, Any]]]:
    if request.streaming and not hasattr(dataset, "__len__"):
        for number, row in enumerate(dataset):
            yield (number if shuffle is None else None), row
        return
    table = dataset if hasattr(dataset, "__len__") else list(dataset)
    if request.columns and not isinstance(table, list):
        known = [name for name in table.column_names if name in request.columns]
        table = table.select_columns(known) if known else table
    order: Sequence[int] = range(len(table))
    if shuffle is not None:
        order = shuffled(order, shuffle.seed)
    if isinstance(table, list):
        for number in order:
            yield number, table[number]
        return
    for start in range(0, len(table), TABLE_ROWS):  # by columns: twice as fast as row by row
        numbers = order[start : start + TABLE_ROWS]
        columns = table[numbers]
        names = tuple(columns)
        for number, values in zip(numbers, zip(*columns.values(), strict=True), strict=True):
            yield number, dict(zip(names, values, strict=True))


def _one_shard(dataset: Any) -> dict[str, int]:
    """Return the option that fills the buffer from one shard at a time.

    By default, `datasets` 5 fills it from ten shards at once, and reads rows of each that are never used.
    """
    name = "max_buffer_input_shards"
    return {name: 1} if name in inspect.signature(dataset.shuffle).parameters else {}


@contextlib.contextmanager
def _quiet(datasets: Any, *, local: bool) -> Iterator[None]:
    """Suppress library log lines for failures that we report ourselves, and progress bars for local files."""
    for handler in (*logging.getLogger("datasets").handlers, *logging.getLogger("huggingface_hub").handlers):
        if _is_unreported not in handler.filters:
            handler.addFilter(_is_unreported)  # stays: rows are read long after the dataset is opened
    bars_enabled = not datasets.utils.are_progress_bars_disabled()
    if local or not sys.stderr.isatty():
        datasets.utils.disable_progress_bars()
    try:
        yield
    finally:
        if bars_enabled:
            datasets.utils.enable_progress_bars()


_REPORTED_HERE = re.compile(r"Failed to load JSON|Failed to read|Retrying in|.* thrown while requesting")


def _is_unreported(record: logging.LogRecord) -> bool:
    return not _REPORTED_HERE.match(record.getMessage())


# --- failures ----------------------------------------------------------------------------------------


class _Failures:
    """Count failures since a stream last advanced: wait after transient ones, raise final ones as user messages."""

    def __init__(self, request: HubRequest, files: Files | None) -> None:
        self.request, self.files = request, files
        self.number = 0
        self._spent = 0.0
        self._began = 0.0
        self._furthest: tuple[int, int] = (0, 0)
        self._factor = 1.0

    def start(self) -> None:
        """Start the clock of an attempt; call it again after each row."""
        self._began = time.monotonic()

    def wait_or_raise(self, err: Exception, *, after: int, position: tuple[int, int] | None = None) -> None:
        """Wait before the next attempt, or raise a final error.

        `after` is the number of rows that were yielded, `position` how far the stream was read, with the rows that
        only filled the buffer.
        """
        if isinstance(err, DataUnavailable) or (self.files is not None and isinstance(err, OSError) and err.filename):
            raise err
        if self.files is not None:
            names = [path for paths in self.files.values() for path in paths]
            listed = ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")
            message = reason(err)
            remedy = "; give all files of a split the same columns" if message.startswith("Couldn't cast") else ""
            raise ValueError(explain(names) or f"cannot read {listed}: {message}{remedy}") from err
        if position is not None and position > self._furthest:
            self.number, self._furthest = 0, position
        self.number += 1
        self._spent = (self._spent if self.number > 1 else 0.0) + time.monotonic() - self._began
        if not is_transient(err) or self.number >= ATTEMPTS or (self.number > 1 and self._spent > PATIENCE):
            raise _final(self.request, err, self.number, after) from err
        if self.number == 1:
            self._factor = 0.5 + derive_seed(os.getpid(), int(1e9 * time.monotonic())) / 2**63
        growing = min(2.0 ** (self.number - 1), LONGEST_PAUSE) * self._factor
        pause = max(growing, min(retry_after(err), 5 * LONGEST_PAUSE))
        log.warning("%s: %s (after %d rows); retrying in %.0f s", self.request, reason(err), after, pause)
        time.sleep(pause)


def _final(request: HubRequest, err: Exception, failures: int, after: int) -> DataUnavailable:
    """Return the final error: which dataset, what happened, and the two remedies."""
    code = next(filter(None, map(status, chain(err))), None)
    text = " ".join(str(e) for e in chain(err)).lower()
    page = f"https://huggingface.co/datasets/{request.dataset_id}"
    names = {cls.__name__ for e in chain(err) for cls in type(e).__mro__}
    if "unknown split" in text or "bad split" in text or "BuilderConfig" in str(err):
        return DataUnavailable(f"{request}, split {request.split!r}: {reason(err)}")
    if "GatedRepoError" in names or "is a gated dataset" in text:
        remedy = f"It is gated: request access at {page} and log in with `hf auth login`, "
    elif names & {"DatasetNotFoundError", "RepositoryNotFoundError"} or code == 404:
        remedy = f"Check the id ({page} should exist; if it is private, log in with `hf auth login`), "
    elif code in (401, 403):
        remedy = f"It is gated or private: request access at {page} and log in with `hf auth login`, "
    elif code == 429:
        remedy = (
            "The Hub limits the rate of requests: wait a few minutes (or log in with `hf auth login`) and try again, "
        )
    else:
        remedy = "Either connect to the Hub (without HF_HUB_OFFLINE and --offline) and try again, "
    attempts = f" ({failures} attempts, {after} rows read)" if failures > 1 else ""
    name = request.dataset_id.rpartition("/")[2]
    return DataUnavailable(
        f"cannot read {request} from the Hugging Face Hub: {reason(err)}{attempts}. {remedy}"
        f"or provide its files as parquet, jsonl, jsonl.gz or txt: {VARIABLE}=FOLDER with FOLDER/{name}/, or path=... "
        "(--path, if the command has it)"
    )
