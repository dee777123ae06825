"""Decide whether a text was in the training data of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from niels_gpt.config import RunConfig
from niels_gpt.runs.checkpoint import read_checkpoint
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.loading import LoadedRun
from niels_gpt.system import files
from niels_gpt.training.tasks.documents import DocumentSet, content_key, open_documents, uses_bytes
from niels_gpt.training.tasks.splice_task import SpliceTask

TRAINED, HELD_OUT, UNKNOWN = "trained on", "held out", "not in the run's data"


def membership(loaded: LoadedRun, notes: Mapping[str, np.ndarray]) -> tuple[dict[str, str], str]:
    """Return (note -> TRAINED, HELD_OUT or UNKNOWN; why notes can be unknown).

    Notes are compared by content, not by path. Where the data has changed since the training, no note is known to be
    held out.
    """
    trained, held_out = set[bytes](), set[bytes]()
    problems: list[str] = []
    history = list(_history(loaded, problems))
    for config, data in history:
        for source in _sources(config):
            try:
                task = SpliceTask(config) if config.task == "splice" else None
                documents = task.documents if task else open_documents(config, source)
                current = task.fingerprint() if task else {documents.source: documents.train.sha256}
                if any(data.get(name) != sha for name, sha in current.items()):
                    raise ValueError(f"{documents.path} has changed since the training")
                chosen = task.chosen if task else range(len(documents.train.lengths))
                rest = sorted(set(range(len(documents.train.lengths))) - set(chosen))
                trained |= _keys(documents.train, chosen)
                held_out |= _keys(documents.train, rest) | _keys(documents.held_out)
            except (ValueError, OSError) as err:
                problems.append(str(err))
    suffix: list[int] = []
    if history and not uses_bytes(history[0][0]):
        suffix = [loaded.tokenizer.special_token_ids()["eot"]]
    status = {}
    for name, ids in notes.items():
        key = content_key(np.append(ids, suffix))
        held = key in held_out and not problems  # data that cannot be read may contain it
        status[name] = TRAINED if key in trained else HELD_OUT if held else UNKNOWN
    why = "; ".join(problems) or "their text is not among the run's documents (edited since, or never part of them)"
    return status, why


def _history(loaded: LoadedRun, problems: list[str]) -> Iterator[tuple[RunConfig, Mapping[str, str]]]:
    """Yield (config, data fingerprint) of the checkpoint's run, then of the run its weights came from, and so on."""
    path, run, data = loaded.path, loaded.home, loaded.data
    while True:
        if run is None or not run.exists:
            problems.append(f"{path} is not in a run folder, so its training data is unknown")
            return
        config = run.read_config()
        yield config, data
        if not config.init_from:
            return
        path = files.expand_home(config.init_from)
        run = RunFolder(path.parent.parent)
        try:
            data = read_checkpoint(path, "cpu")["extra"].get("data", {})
        except (ValueError, OSError) as err:
            problems.append(str(err))
            return


def _sources(config: RunConfig) -> list[str | None]:
    """Return the text sources of a run; conversations are not notes."""
    if config.task == "splice":
        return [None]
    return [name for name, share in config.train.p_train.items() if share and config.task != "sft"]


def _keys(documents: DocumentSet, indices: Sequence[int] | None = None) -> set[bytes]:
    """Return the content keys of documents, all by default."""
    return {content_key(documents.ids(i)) for i in (range(len(documents.lengths)) if indices is None else indices)}
