"""Rows of a dataset, from the Hugging Face Hub or from local files, through `datasets.load_dataset`.

Every loader reads through here. What the Hub does to a reader happens here once: transient failures are
waited out, a stream that breaks goes on from where it was, and what is final says what to do.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import inspect
import logging
import os
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from niels_gpt.data.reading.diagnose import explain, refuse_odd_json
from niels_gpt.data.reading.hub_errors import (
    chain,
    is_transient,
    reason,
    retry_after,
    status,
)
from niels_gpt.data.reading.local import (
    VARIABLE,
    DataUnavailable,
    builder,
    choose_split,
    find_files,
    find_local,
)
from niels_gpt.data.split import shuffled

log = logging.getLogger("niels_gpt.data")

ATTEMPTS = 5
"""Tries without any new row before a transient failure counts as final."""
PATIENCE = 30.0
"""Seconds of failing calls without any new row, after which there is no further try: the Hub's own library waits
and tries for some 25 seconds itself when there is no network."""
LONGEST_PAUSE = 60.0
"""Seconds; pauses double from one second up to this, all times one random factor of 0.5 to 1.5, so that none is shorter
than the one before."""
_jitter = random.Random()  # its own: waiting must not move anybody's random numbers
TABLE_ROWS = 1000
"""Rows taken at once from a dataset that lies on disk."""


@dataclass(frozen=True)
class HubRequest:
    """Which rows to read."""

    dataset_id: str
    """On the Hub; also the key in NIELS_GPT_DATA."""
    config: str | None = None
    split: str | None = "train"
    """None: all splits, as a dict."""
    streaming: bool = False
    path: str | Path | None = None
    """A local file or folder instead."""
    text_file_is_document: bool = False
    """Whether a .txt file is one row (a book) or a row per line."""
    columns: tuple[str, ...] | None = None
    """The only columns that are needed of a dataset on disk; those it has not are passed over."""
    revision: str | None = None
    """A branch, tag or commit of the dataset on the Hub; None: its main branch."""

    def __str__(self) -> str:
        return self.dataset_id + (f" ({self.config})" if self.config else "")


@dataclass(frozen=True)
class Shuffle:
    """How to shuffle: all rows of a dataset on disk, a buffer of rows of a stream."""

    seed: int
    buffer_size: int = 10_000


class HubReader:
    """Iterates over (row number, row) of one split; the number is None where a shuffled stream does not tell it.

    A stream that breaks is opened again and goes on: the same order, nothing twice, nothing lost (the rows
    before are read again, for only so is a shuffle buffer what it was). Raises DataUnavailable.
    """

    def __init__(self, request: HubRequest, *, shuffle: Shuffle | None = None) -> None:
        self.request, self.shuffle = request, shuffle
        self.revision: str | None = None
        """The commit of the dataset, once rows have come and if the Hub tells it."""

    def __iter__(self) -> Iterator[tuple[int | None, dict[str, Any]]]:
        request, done = self.request, 0
        files = _local_files(request)
        failures = _Failures(request, files)
        dataset: Any = None
        while True:
            failures.start()
            try:
                dataset = None
                dataset = _load(request, files)
                revision = revision_of(dataset)
                if done and revision != self.revision:
                    was, now = self.revision, revision
                    raise DataUnavailable(
                        f"{request} changed on the Hub while it was read ({was}, now {now}): start again"
                    )
                self.revision = revision
                dataset = _shuffled_stream(dataset, request, self.shuffle)
                for number, item in enumerate(_iterate(dataset, request, self.shuffle)):
                    if number >= done:
                        done += 1
                        failures.number = 0
                        yield item
                    failures.start()  # what came was read well, and what was done with it is not the Hub's time
                return
            except Exception as err:
                failures.wait_or_raise(err, after=done, place=_place_of(dataset))


def open_dataset(request: HubRequest) -> Any:
    """The `datasets` object itself, transient failures waited out; {split: dataset} where no split is asked for.

    Raises DataUnavailable.
    """
    files = _local_files(request)
    failures = _Failures(request, files)
    while True:
        failures.start()
        try:
            return _load(request, files)
        except Exception as err:
            failures.wait_or_raise(err, after=0)


def go_offline() -> None:
    """From now on nothing in this process asks the Hub; what is cached or local can still be read."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name, flag in (("huggingface_hub.constants", "HF_HUB_OFFLINE"), ("datasets.config", "HF_HUB_OFFLINE")):
        if name in sys.modules:
            setattr(sys.modules[name], flag, True)


def revision_of(dataset: Any) -> str | None:
    """The commit that a dataset from the Hub was read at, where it tells: it stands in the names of its files."""
    places: list[Any] = [getattr(getattr(dataset, "info", None), "download_checksums", None)]
    places.append(getattr(dataset, "cache_files", None))
    inner = getattr(dataset, "_ex_iterable", None)
    while inner is not None:
        places.append(getattr(inner, "kwargs", None))
        inner = getattr(inner, "ex_iterable", None)
    commit = re.search(r"(?:@|/0\.0\.0/)([0-9a-f]{40})/", " ".join(map(str, places)))
    return commit[1] if commit else None


# --- opening and iterating ---------------------------------------------------------------------------


Files = dict[str, list[str]]  # split -> its files


def _local_files(request: HubRequest) -> Files | None:
    """The local files of the split (or of all) that are asked for; None: it is the Hub's."""
    place = find_local(request.dataset_id, request.path)
    if place is None:
        return None
    files = find_files(place, request.config)
    if request.split is not None:
        name = request.split.partition("[")[0]  # "train[:100]" is a part of train
        files = {name: choose_split(files, name, place)}
    elif "" in files:
        files = {"train": files[""]}
    refuse_odd_json([file for part in files.values() for file in part])
    for file in (file for part in files.values() for file in part):
        if "::" in str(Path(file).absolute()):
            raise ValueError(f"cannot read {file}: its path has `::`, which `datasets` takes apart; rename what has it")
    return files


def _load(request: HubRequest, files: Files | None) -> Any:
    import datasets

    with _quiet(datasets, local=files is not None):
        if files is None:
            arguments = [request.dataset_id] + ([request.config] if request.config else [])
            chosen = {"revision": request.revision} if request.revision else {}
            if request.split is None:
                return datasets.load_dataset(*arguments, **chosen)
            return datasets.load_dataset(*arguments, split=request.split, streaming=request.streaming, **chosen)
        if request.split is not None:
            return _load_local(request, files, request.split)
        return {split: _load_local(request, {split: files[split]}, split) for split in files}


def _load_local(request: HubRequest, files: Files, split: str) -> Any:
    """One split of local files: with others beside it, it would have to have their columns."""
    import datasets

    kind = builder(next(iter(files.values())))
    options: dict[str, Any] = {"name": _stamp(files)} if not request.streaming else {}
    if kind == "text" and request.text_file_is_document:
        options["sample_by"] = "document"
    # Names are patterns to `datasets`, also those of the folders above, which it adds to a relative one.
    escaped = {name: [glob.escape(str(Path(file).absolute())) for file in part] for name, part in files.items()}
    return datasets.load_dataset(kind, data_files=escaped, split=split, streaming=request.streaming, **options)


def _stamp(files: Files) -> str:
    """A name for this state of the files. `datasets` keeps its converted copy by path and time of change alone, and
    would serve the old rows of a file that was unpacked again with its old time."""
    states = [Path(name).stat() for part in files.values() for name in part]
    told = [(state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns) for state in states]
    return "at-" + hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def _shuffled_stream(dataset: Any, request: HubRequest, shuffle: Shuffle | None) -> Any:
    """A stream with its shuffle buffer; what is no stream, as it is."""
    if shuffle is None or not request.streaming or hasattr(dataset, "__len__"):
        return dataset
    return dataset.shuffle(seed=shuffle.seed, buffer_size=shuffle.buffer_size, **_one_shard(dataset))


def _place_of(dataset: Any) -> tuple[int, int] | None:
    """(shard, row of it) up to which a stream has been read, its buffer included; None where it does not tell."""

    def places(state: Any) -> Iterator[tuple[int, int]]:
        if isinstance(state, dict) and {"shard_idx", "shard_example_idx"} <= state.keys():
            yield int(state["shard_idx"]), int(state["shard_example_idx"])
        for inner in state.values() if isinstance(state, dict) else state if isinstance(state, list) else ():
            yield from places(inner)

    try:
        return max(places(dataset.state_dict()), default=None)
    except Exception:  # no stream, or one of another kind
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
    for start in range(0, len(table), TABLE_ROWS):  # whole columns at once: twice as fast as row by row
        part = order[start : start + TABLE_ROWS]
        columns = table[part]
        names = tuple(columns)
        for number, values in zip(part, zip(*columns.values(), strict=True), strict=True):
            yield number, dict(zip(names, values, strict=True))


def _one_shard(dataset: Any) -> dict[str, int]:
    """The option that fills the buffer from one shard after the other. By default `datasets` 5 fills it from ten at
    once, and reads rows of each ahead that nobody asked for."""
    name = "max_buffer_input_shards"
    return {name: 1} if name in inspect.signature(dataset.shuffle).parameters else {}


@contextlib.contextmanager
def _quiet(datasets: Any, *, local: bool) -> Iterator[None]:
    """No log lines of the libraries about what we say ourselves; no progress bars for local files."""
    for handler in (*logging.getLogger("datasets").handlers, *logging.getLogger("huggingface_hub").handlers):
        if _is_news not in handler.filters:
            handler.addFilter(_is_news)  # for good: rows are read long after the dataset was opened
    shown = not datasets.utils.are_progress_bars_disabled()
    if local or not sys.stderr.isatty():
        datasets.utils.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.utils.enable_progress_bars()


_NO_NEWS = re.compile(r"Failed to load JSON|Failed to read|Retrying in|.* thrown while requesting")


def _is_news(record: logging.LogRecord) -> bool:
    return not _NO_NEWS.match(record.getMessage())


# --- failures ----------------------------------------------------------------------------------------


class _Failures:
    """Counts the failures since a stream last got further: waits after those that may pass, raises what the user
    should read."""

    def __init__(self, request: HubRequest, files: Files | None) -> None:
        self.request, self.files = request, files
        self.number = 0
        self._spent = 0.0
        self._began = 0.0
        self._furthest: tuple[int, int] = (0, 0)
        self._factor = 1.0

    def start(self) -> None:
        """A try begins, or goes on after a row."""
        self._began = time.monotonic()

    def wait_or_raise(self, err: Exception, *, after: int, place: tuple[int, int] | None = None) -> None:
        """`place`: how far the stream was read, rows that only fill a buffer included."""
        if isinstance(err, DataUnavailable) or (self.files is not None and isinstance(err, OSError) and err.filename):
            raise err
        if self.files is not None:
            names = [name for part in self.files.values() for name in part]
            listed = ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")
            said = reason(err)
            remedy = "; give all files of a split the same columns" if said.startswith("Couldn't cast") else ""
            raise ValueError(explain(names) or f"cannot read {listed}: {said}{remedy}") from err
        if place is not None and place > self._furthest:
            self.number, self._furthest = 0, place
        self.number += 1
        self._spent = (self._spent if self.number > 1 else 0.0) + time.monotonic() - self._began
        if not is_transient(err) or self.number >= ATTEMPTS or (self.number > 1 and self._spent > PATIENCE):
            raise _final(self.request, err, self.number, after) from err
        if self.number == 1:
            self._factor = _jitter.uniform(0.5, 1.5)
        growing = min(2.0 ** (self.number - 1), LONGEST_PAUSE) * self._factor
        pause = max(growing, min(retry_after(err), 5 * LONGEST_PAUSE))
        log.warning("%s: %s (after %d rows); trying again in %.0f s", self.request, reason(err), after, pause)
        time.sleep(pause)


def _final(request: HubRequest, err: Exception, failures: int, after: int) -> DataUnavailable:
    """What the user reads: which dataset, what happened, the two ways out."""
    code = next(filter(None, map(status, chain(err))), None)
    text = " ".join(str(e) for e in chain(err)).lower()
    page = f"https://huggingface.co/datasets/{request.dataset_id}"
    names = {cls.__name__ for e in chain(err) for cls in type(e).__mro__}
    if "unknown split" in text or "bad split" in text or "BuilderConfig" in str(err):
        return DataUnavailable(f"{request}, split {request.split!r}: {reason(err)}")
    if "GatedRepoError" in names or "is a gated dataset" in text:
        remedy = f"It is gated: ask for access at {page} and log in with `hf auth login`, "
    elif names & {"DatasetNotFoundError", "RepositoryNotFoundError"} or code == 404:
        remedy = f"Check the id ({page} should exist; if it is private, log in with `hf auth login`), "
    elif code in (401, 403):
        remedy = f"It is gated or private: ask for access at {page} and log in with `hf auth login`, "
    else:
        remedy = "Either connect to the Hub (without HF_HUB_OFFLINE and --offline) and try again, "
    tried = f" ({failures} tries, {after} rows read)" if failures > 1 else ""
    name = request.dataset_id.rpartition("/")[2]
    return DataUnavailable(
        f"cannot read {request} from the Hugging Face Hub: {reason(err)}{tried}. {remedy}"
        f"or give its files as parquet, jsonl, jsonl.gz or txt: path=... (--path), or {VARIABLE}=FOLDER with "
        f"FOLDER/{name}/"
    )
