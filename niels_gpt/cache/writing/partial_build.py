"""A build in progress: it writes to a hidden folder beside the cache, and publishes it when it is complete.

Whenever a shard or a split is full, `state.json` records how many items it covers. A killed build reads its input
again, checks by sha256 that the items are the same, and continues after them: the result is byte for byte that of an
uninterrupted build. Nothing under a final name is ever incomplete.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from niels_gpt.cache.writing.checks import check_same_file_system
from niels_gpt.cache.writing.encoding import Encoded
from niels_gpt.cache.writing.input_batches import InputBatch, InputReader
from niels_gpt.cache.writing.publish import MOVING, OLD, is_published, publish_files, roll_back
from niels_gpt.cache.writing.shards import (
    MARGIN_BYTES,
    SavedSplit,
    ShardWriter,
    load_split,
    starts_path,
    write_error,
)
from niels_gpt.system import files
from niels_gpt.system.checked_json import read_checked_json, write_checked_json
from niels_gpt.system.console import remove_folder
from niels_gpt.system.executors import Executor

log = logging.getLogger("niels_gpt.cache")
STATE = "state.json"
"""File of the hidden folder: what the build has finished."""


class Progress(NamedTuple):
    """Progress of a build."""

    split: str
    tokens: int
    """Tokens written so far, in all splits."""
    documents: int
    share: float | None = None
    """Fraction of the total, if the total is known."""
    workers: str = ""
    """What encodes now (`Executor.status`); empty for threads of this process."""


OnProgress = Callable[[Progress], None]


def _empty_record() -> dict[str, Any]:
    """The record of an input of which nothing was read."""
    empty = hashlib.sha256().hexdigest()
    return {"items": 0, "within": 0, "sha256": empty, "next_sha256": "", "dropped": {}, "ended": ""}


class _SavedBuild(NamedTuple):
    """What a killed build wrote."""

    runs: dict[str, dict[str, Any]]
    splits: dict[str, SavedSplit]


def hidden_folder(out_dir: Path) -> Path:
    """The folder in which a cache is built."""
    return out_dir.parent / f".{out_dir.name}.partial"


def remove_published(out_dir: Path) -> None:
    """Remove the hidden folder of a build that was killed after it published the cache; keep one that can resume."""
    folder = hidden_folder(out_dir)
    if not folder.is_dir():
        return
    with contextlib.suppress(OSError), files.lock(folder / "build.lock", wait=False):
        can_resume = (folder / STATE).exists() and not (folder / OLD).exists()
        if is_published(folder) if (folder / MOVING).exists() else not can_resume:
            _remove_hidden(folder)


def _remove_hidden(folder: Path) -> None:
    remove_folder(folder, consequence="the next build of this cache removes it")


class PartialBuild:
    """Writes the splits of a cache. Use as a context manager: `write_input` for each input, then `publish`."""

    def __init__(
        self,
        out_dir: str | Path,
        recipe: Mapping[str, Any],
        budgets: Mapping[str, int],
        *,
        dtype: np.dtype,
        shard_bytes: int,
        executor: Executor,
        on_progress: OnProgress | None = None,
        expected: tuple[int | None, int | None] = (None, None),
    ) -> None:
        """`recipe` is everything the result depends on besides the input; only a build of the same recipe resumes."""
        self.out_dir = Path(out_dir).resolve() if Path(out_dir).is_symlink() else Path(out_dir)
        self.folder = hidden_folder(self.out_dir)
        self._recipe = json.loads(json.dumps(recipe))
        self._dtype, self._shard_bytes = dtype, shard_bytes
        self._executor = executor
        self._on_progress = on_progress
        self._expected = expected
        self._budgets = dict(budgets)
        self._stack = contextlib.ExitStack()
        self._runs: dict[str, dict[str, Any]] = {}
        self.splits: dict[str, ShardWriter] = {}

    # --- the folder --------------------------------------------------------------------------------

    def __enter__(self) -> PartialBuild:
        try:
            if self.out_dir.exists() and not self.out_dir.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            check_same_file_system(self.out_dir)
            self.folder.mkdir(parents=True, exist_ok=True)
            self._stack.enter_context(files.lock(self.folder / "build.lock", wait=False))
            roll_back(self.folder, self.out_dir)
            self._open(self._saved_state())
        except BlockingIOError:
            raise ValueError(f"another process is building {self.out_dir}: wait for it") from None
        except BaseException as err:
            self.__exit__()
            if isinstance(err, OSError):
                raise write_error(err, self.out_dir) from err
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for split in self.splits.values():
            split.abandon()
        self._stack.close()

    def _saved_state(self) -> _SavedBuild | None:
        """What a killed build wrote, if it can be resumed."""
        try:
            state = read_checked_json(self.folder / STATE)
            if state["recipe"] != self._recipe or state["splits"].keys() != self._budgets.keys():
                return None
            for run in state["runs"].values():
                if not _empty_record().keys() <= run.keys():
                    return None
            splits = {name: load_split(self.folder / name, saved) for name, saved in state["splits"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return _SavedBuild(state["runs"], splits)

    def _open(self, saved: _SavedBuild | None) -> None:
        """Continue what a killed build wrote, or start from the beginning; remove everything else in the folder."""
        kept = {self.folder / "build.lock"}
        for name, split in saved.splits.items() if saved is not None else ():
            kept |= {self.folder / STATE, self.folder / name, starts_path(self.folder / name)}
            kept |= {self.folder / name / shard["name"] for shard in split.shards}
        for entry in [*self.folder.glob("*/*"), *self.folder.iterdir()]:
            if entry not in kept and (entry.exists() or entry.is_symlink()):
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        self._runs = {} if saved is None else saved.runs
        self.splits = {
            name: ShardWriter(
                self.folder / name, budget, self._shard_bytes, saved.splits[name] if saved else None, self._dtype
            )
            for name, budget in self._budgets.items()
        }

    def _restart(self) -> None:
        for split in self.splits.values():
            split.abandon()
        self._open(None)

    # --- writing -----------------------------------------------------------------------------------

    def write_input(
        self, name: str, items: Iterable[Any], splits: Sequence[str], encode: Callable[[list[Any]], Encoded]
    ) -> None:
        """Encode the items and write them to the splits, in order: to the first until its budget is full, and so on.

        The item that fills a budget is cut there and its rest discarded. `name` identifies the input within the build.
        Raises InputChanged if a resumed build reads other items than before; see `write_inputs`.
        """
        saved = self._runs.get(name) or _empty_record()
        reader = InputReader(items)
        reader.skip(saved["items"])
        if reader.hash.hexdigest() != saved["sha256"]:
            raise InputChanged
        if saved["within"]:  # the last complete shard ends inside this item
            if reader.peek().hexdigest() != saved["next_sha256"]:
                raise InputChanged
        elif saved["ended"] == "input" and not reader.at_end():
            raise InputChanged
        if saved["items"] or saved["within"]:
            log.warning("%s: resuming an interrupted build after %d items", self.out_dir, saved["items"])
        if saved["ended"]:
            return
        state = _InputState(name, saved, splits)
        done, ended = saved["items"], "input"
        last = InputBatch(done, [], reader.hash.copy())
        if not any(self.splits[split].tokens_left for split in splits):
            ended = "budget"
        else:
            jobs = self._executor.in_order(reader.batches(), encode, lambda batch: batch.items)
            with contextlib.closing(jobs):  # type: ignore[type-var]
                for batch, encoded in jobs:
                    with self.write_errors():
                        done = batch.first + self._write_batch(state, batch, encoded)
                    last = batch
                    self._report_progress(state.split)
                    full = not any(self.splits[split].tokens_left for split in splits)
                    if done < batch.first + len(batch.items) or full:
                        ended = "budget"
                        break
        with self.write_errors():
            for split in splits:
                self.splits[split].close_shard()
            self._runs[name] = {**_empty_record(), "items": done, "ended": ended}
            self._runs[name]["sha256"] = last.hash_after(done - last.first).hexdigest()
            self._runs[name]["dropped"] = dict(sorted(state.dropped.items()))
            self._save()

    def _report_progress(self, name: str) -> None:
        if self._on_progress is None:
            return
        done = [(split.tokens, len(split.starts)) for split in self.splits.values()]
        tokens, documents = sum(a for a, _ in done), sum(b for _, b in done)
        shares = [n / total for n, total in zip((tokens, documents), self._expected, strict=True) if total]
        self._on_progress(
            Progress(name, tokens, documents, min(max(shares), 1.0) if shares else None, self._executor.status())
        )

    def _write_batch(self, state: _InputState, batch: InputBatch, encoded: Encoded) -> int:
        """Write a batch; returns how many of its items were used."""
        tokens, ends = encoded.tokens, encoded.lengths.cumsum()
        begins = ends - encoded.lengths
        count = len(batch.items)
        dropped = dict(encoded.dropped)

        def checkpoint(position: int, used: int | None) -> None:
            """Record that all tokens before `position` are in finished shards; `used` items are complete, if known."""
            if used is None:
                used = int(np.searchsorted(ends, position, side="right"))
                within = position - int(begins[used]) if used < count else 0
            else:
                within = 0
            counted = dict(state.dropped + Counter(reason for i, reason in dropped.items() if i < used))
            self._runs[state.name] = {
                "items": batch.first + used,
                "within": within,
                "sha256": batch.hash_after(used).hexdigest(),
                "next_sha256": batch.hash_after(used + 1).hexdigest() if within else "",
                "dropped": counted,
                "ended": "",
            }
            self._save()

        i = 0
        position = state.within if count else 0  # tokens of the first item that an interrupted build has written
        resumed_inside = position > 0
        state.within = 0
        while i < count:
            split = next((self.splits[name] for name in state.order if self.splits[name].tokens_left), None)
            if split is None:
                break
            state.split = split.name
            rest = int(ends[-1]) - position
            if rest < split.tokens_left:
                stop, j = int(ends[-1]), count
            else:
                stop = position + split.tokens_left
                j = int(np.searchsorted(ends, stop, side="left")) + 1
            fresh = encoded.lengths[i:j] > 0
            if resumed_inside:
                fresh[0] = False  # its offset is already recorded
                resumed_inside = False
            starts = begins[i:j][fresh] - position + split.tokens
            self._append(split, tokens[position:stop], starts, position, stop, j, checkpoint)
            i, position = j, int(ends[j - 1])
        state.dropped += Counter(reason for item, reason in dropped.items() if item < i)
        return i

    def _append(
        self,
        split: ShardWriter,
        tokens: np.ndarray,
        starts: np.ndarray,
        position: int,
        stop: int,
        used: int,
        checkpoint: Callable[[int, int | None], None],
    ) -> None:
        """Append tokens[position:stop] of a batch to a split, with a checkpoint at every full shard."""
        self._check_space(tokens.nbytes)
        while len(tokens):
            chunk = tokens[: split.shard_tokens_left]
            end = split.tokens + len(chunk)
            now = int(np.searchsorted(starts, end))
            split.append(chunk, starts[:now])
            starts, tokens, position = starts[now:], tokens[len(chunk) :], position + len(chunk)
            if split.shard_tokens_left == 0 or not split.tokens_left:
                split.close_shard()
                checkpoint(position, used if position == stop else None)

    def _save(self) -> None:
        splits = {name: split.state() for name, split in self.splits.items()}
        state = {"recipe": self._recipe, "runs": self._runs, "splits": splits}
        write_checked_json(self.folder / STATE, state)

    def _check_space(self, needed: int) -> None:
        """Raise OSError before the disk is full, so that the finished shards stay usable."""
        free = shutil.disk_usage(self.folder).free
        if free < needed + MARGIN_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @property
    def dropped(self) -> dict[str, int]:
        """Dropped items by reason, over all inputs."""
        total: Counter[str] = Counter()
        for run in self._runs.values():
            total.update(run["dropped"])
        return dict(sorted(total.items()))

    @property
    def inputs(self) -> dict[str, dict[str, Any]]:
        """Per input: the number of items read, and their sha256."""
        return {name: {"items": run["items"], "sha256": run["sha256"]} for name, run in sorted(self._runs.items())}

    # --- publishing --------------------------------------------------------------------------------

    def publish(self, names: Sequence[str]) -> None:
        """Move the finished files and folders to out_dir, meta.json (the last name) last, and remove the hidden folder.

        Existing entries of these names are replaced, or removed if this build has none; other files are untouched. An
        error restores the old cache; after a kill the next build continues from here.
        """
        with self.write_errors():
            publish_files(self.folder, self.out_dir, names)
        (self.folder / STATE).unlink(missing_ok=True)  # first: what a kill leaves now is no build to resume
        _remove_hidden(self.folder)

    def discard(self) -> None:
        """Remove the hidden folder."""
        for split in self.splits.values():
            split.abandon()
        _remove_hidden(self.folder)

    @contextlib.contextmanager
    def write_errors(self) -> Iterator[None]:
        """Add the path of the cache and a remedy to OSErrors of the block."""
        try:
            yield
        except OSError as err:
            raise write_error(err, self.out_dir) from err

    def write_inputs(self, step: Callable[[], None], *, rereadable: bool) -> None:
        """Call `step`, which calls `write_input`; restart it once if the input of a killed build has changed.

        `rereadable`: whether the input can be read twice. If not, raise ValueError; the next build starts from scratch.
        """
        try:
            step()
        except InputChanged:
            if not rereadable:
                self.discard()
                raise ValueError(
                    f"the input of {self.out_dir} has changed since its build was interrupted; the partial build was "
                    "removed: run the build again"
                ) from None
            log.warning("%s: the input has changed since the build was interrupted; rebuilding", self.out_dir)
            self._restart()
            step()


class InputChanged(ValueError):
    """The input of a resumed build differs from that of the interrupted build."""


class _InputState:
    """What `write_input` carries from batch to batch."""

    def __init__(self, name: str, saved: Mapping[str, Any], splits: Sequence[str]) -> None:
        self.name = name
        self.within: int = saved["within"]
        self.dropped: Counter[str] = Counter(saved["dropped"])
        self.order = tuple(splits)
        self.split = splits[0]
