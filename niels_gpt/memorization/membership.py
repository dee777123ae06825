"""Was a text among what a checkpoint was trained on?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from niels_gpt.config import RunConfig
from niels_gpt.runs.checkpoint import read_checkpoint
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.loading import LoadedRun
from niels_gpt.system import files
from niels_gpt.training.tasks.documents import (
    DocumentSet,
    content_key,
    open_documents,
    uses_bytes,
)
from niels_gpt.training.tasks.splice_task import SpliceTask

TRAINED, HELD_OUT, UNKNOWN = "trained on", "held out", "not in the run's data"


def membership(loaded: LoadedRun, notes: Mapping[str, np.ndarray]) -> tuple[dict[str, str], str]:
    """(trained on, held out or unknown, for each note; why some are unknown). Notes are compared by content, so it does
    not matter where they lie now. Where the data is not what it was at the training, all are unknown."""
    trained, held_out = set[bytes](), set[bytes]()
    problems: list[str] = []
    history = list(_history(loaded, problems))
    for config, data in history:
        for source in _sources(config):
            try:
                task = SpliceTask(config) if config.task == "splice" else None
                library = task.documents if task else open_documents(config, source)
                now = task.fingerprint() if task else {library.source: library.train.sha256}
                if any(data.get(name) != sha for name, sha in now.items()):
                    raise ValueError(f"{library.path} has changed since the training")
                chosen = task.chosen if task else range(len(library.train.lengths))
                rest = sorted(set(range(len(library.train.lengths))) - set(chosen))
                trained |= _keys(library.train, chosen)
                held_out |= _keys(library.train, rest) | _keys(library.held_out)
            except (ValueError, OSError) as err:
                problems.append(str(err))
    suffix: list[int] = []
    if history and not uses_bytes(history[0][0]):
        suffix = [loaded.tokenizer.special_token_ids()["eot"]]
    where = {}
    for name, ids in notes.items():
        key = content_key(np.append(ids, suffix))
        held = key in held_out and not problems  # what cannot be looked into may hold it
        where[name] = TRAINED if key in trained else HELD_OUT if held else UNKNOWN
    why = "; ".join(problems) or "their text is not among the documents of the run (changed since, or never there)"
    return where, why


def _history(loaded: LoadedRun, problems: list[str]) -> Iterator[tuple[RunConfig, Mapping[str, str]]]:
    """(config, data of the checkpoint) of the checkpoint's run, then of the run its weights came from, and so on."""
    path, run, data = loaded.path, loaded.home, loaded.data
    while True:
        if run is None or not run.exists:
            problems.append(f"{path} lies in no run, so what it was trained on is not known")
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
    """The sources of text of a run; conversations are no notes."""
    if config.task == "splice":
        return [None]
    return [name for name, share in config.train.p_train.items() if share and config.task != "sft"]


def _keys(shelf: DocumentSet, indices: Sequence[int] | None = None) -> set[bytes]:
    """What identifies each document of a shelf."""
    return {content_key(shelf.ids(i)) for i in (range(len(shelf.lengths)) if indices is None else indices)}
