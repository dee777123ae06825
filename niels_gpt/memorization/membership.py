"""What a checkpoint was trained on: the documents of its run, and of the runs that its weights came from."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from niels_gpt.config import RunConfig
from niels_gpt.runs.checkpoint import read_checkpoint
from niels_gpt.runs.loading import LoadedRun, history
from niels_gpt.system.console import error_message, one_line, plural
from niels_gpt.tokenizer import AnyTokenizer
from niels_gpt.training.tasks.documents import DocumentSet, content_key, open_chats, open_documents, uses_bytes
from niels_gpt.training.tasks.splice_task import SpliceTask

TRAINED, HELD_OUT, UNKNOWN = "trained on", "held out", "not in the run's data"


class RunSource(NamedTuple):
    """The documents of one source of a run."""

    name: str
    config: RunConfig
    train: DocumentSet
    chosen: Sequence[int]
    """The documents of `train` that the run was trained on: all, except in a splice run."""
    held_out: DocumentSet
    changed: str
    """How the data differs from that of the training; empty: it is the same."""
    path: str
    """Where the documents are from: a file, a folder, or a token cache."""
    tokenizer: AnyTokenizer
    fingerprint: Mapping[str, str]
    """Hashes that identify the documents of `train` that were trained on, as in a checkpoint."""


def run_sources(loaded: LoadedRun, problems: list[str]) -> Iterator[RunSource]:
    """Yield every source of the checkpoint's run, then of the run its weights came from, and so on.

    What cannot be opened or has changed since the training is appended to `problems`.
    """
    for config, data in run_history(loaded, problems):
        for name in source_names(config):
            source = open_source(config, data, name, problems)
            if source is not None:
                yield source


def open_source(config: RunConfig, data: Mapping[str, str], name: str | None, problems: list[str]) -> RunSource | None:
    """Open one of `source_names`; None if that fails. `data`: the fingerprint of the training data.

    What cannot be opened or has changed since the training is appended to `problems`.
    """
    try:
        task = SpliceTask(config) if config.task == "splice" else None
        if task is not None:
            documents = task.documents
        else:
            documents = open_chats(config, name) if config.task == "sft" else open_documents(config, name)
        current = task.fingerprint() if task else {documents.source: documents.train.sha256}
        changed = any(data.get(key) != sha for key, sha in current.items())
        chosen = task.chosen if task else range(len(documents.train.lengths))
    except (ValueError, OSError) as err:
        problems.append(_problem(err))
        return None
    problem = f"{documents.path} has changed since the training" if changed else ""
    problems += [problem] * changed
    return RunSource(
        name=documents.source,
        config=config,
        train=documents.train,
        chosen=chosen,
        held_out=documents.held_out,
        changed=problem,
        path=documents.path,
        tokenizer=documents.tokenizer,
        fingerprint=current,
    )


def membership(loaded: LoadedRun, notes: Mapping[str, np.ndarray]) -> tuple[dict[str, str], str]:
    """Return (note -> TRAINED, HELD_OUT or UNKNOWN; why notes can be unknown).

    Notes are compared by content, not by path. Where the data has changed since the training, no note is known to be
    held out.
    """
    trained, held_out = set[bytes](), set[bytes]()
    problems, suffix = list[str](), list[int]()
    for source in run_sources(loaded, problems):
        if not uses_bytes(source.config):
            suffix = [loaded.tokenizer.special_token_ids()["eot"]]
        if source.changed:
            continue
        rest = sorted(set(range(len(source.train.lengths))) - set(source.chosen))
        trained |= _keys(source.train, source.chosen)
        held_out |= _keys(source.train, rest) | _keys(source.held_out)
    status = {}
    for name, ids in notes.items():
        # A text ends with EOT in a cache, unless the end of the cache cuts it; a conversation has its EOT already.
        keys = {content_key(ids), content_key(np.append(ids, suffix))}
        held = keys & held_out and not problems  # data that cannot be read may contain it
        status[name] = TRAINED if keys & trained else HELD_OUT if held else UNKNOWN
    why = "; ".join(problems) or "their text is not among the run's documents (edited since, or never part of them)"
    return status, why


def run_history(loaded: LoadedRun, problems: list[str]) -> Iterator[tuple[RunConfig, Mapping[str, str]]]:
    """Yield (config, data fingerprint) of the checkpoint's run, then of the run its weights came from, and so on.

    The history ends at a public model, imported or read by `init_from: hf:...`: it was not trained on data of the user.
    """
    path, data, run, before = loaded.path, loaded.data, loaded.home, loaded.data_changed
    if run is not None and run.no_data:
        problems.append(run.no_data)
        return
    for past in history(run):
        if before:
            problems.append(f"{path}: its first {plural(before, 'step')} read other data, which is not here any more")
        yield past.config, data
        if past.start is None or past.earlier is None:
            return
        path, run = past.start, past.earlier
        try:
            saved = read_checkpoint(path, "cpu")
        except (ValueError, OSError) as err:
            problems.append(_problem(err))
            return
        if run.imported:
            return
        data, before = saved["extra"].get("data", {}), saved["extra"].get("data_changed", 0)
    if run is None or not run.exists:
        problems.append(f"{path} is not in a run folder, so its training data is unknown")


def _problem(err: Exception) -> str:
    """Return an error of reading data as one line; warn of it unless the data is only missing.

    Data that exists but cannot be read may be read a moment later: what needs it twice would differ in silence.
    """
    problem = one_line(error_message(err))
    system_error = next((e for e in (err, err.__cause__) if isinstance(e, OSError)), None)
    if system_error is not None and not isinstance(system_error, FileNotFoundError | NotADirectoryError):
        warnings.warn(f"data of the run cannot be read, so it is unknown what was trained on: {problem}", stacklevel=1)
    return problem


def source_names(config: RunConfig) -> list[str | None]:
    """Return the names of the sources that a run trains on; a splice run has one, which its data determines."""
    if config.task == "splice":
        return [None]
    return [name for name, share in config.train.p_train.items() if share]


def _keys(documents: DocumentSet, indices: Sequence[int] | None = None) -> set[bytes]:
    """Return the content keys of documents, all by default."""
    return {content_key(documents.ids(i)) for i in (range(len(documents.lengths)) if indices is None else indices)}
