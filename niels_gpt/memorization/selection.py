"""Select what to measure: documents that a run was trained on, held-out controls, and files."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from niels_gpt.cache.folder import CacheFolder
from niels_gpt.config import RunConfig
from niels_gpt.config.splice import SpliceMultiDocumentLMConfig
from niels_gpt.data.reading.utf8 import read_text
from niels_gpt.memorization.measure import Document
from niels_gpt.memorization.membership import TRAINED, membership
from niels_gpt.runs.loading import LoadedRun, check_unchanged
from niels_gpt.splice.coverage import passes
from niels_gpt.training.tasks.documents import ContentIndex, SourceDocuments, open_documents
from niels_gpt.training.tasks.splice_task import SpliceTask, choose_controls_near, unique_names

DEFAULT_DOCUMENTS = 8
DEFAULT_CONTROLS = 3


class SelectedDocuments(NamedTuple):
    """Documents to measure, and what is known about their training."""

    documents: list[Document]
    train_tokens: int | None = None
    """Tokens of all training documents of a splice run."""
    epochs: np.ndarray | None = None
    """Epochs over them after each step of a splice run."""


def select_documents(
    loaded: LoadedRun,
    *,
    source: str | None = None,
    number: int | None = None,
    controls: int | None = None,
    mode: str = "random",
    remedy: str = "measure files with --text",
) -> SelectedDocuments:
    """Return training documents of a run (all those of a splice run) and held-out documents as controls.

    None means the defaults: the main source, 8 documents (all of a splice run), 3 controls (those of a splice run).
    remedy: what errors advise if the documents of the run cannot be used.
    Raises ValueError if the documents are not available, have changed since the training, or were encoded with another
    tokenizer.
    """
    run = loaded.home
    if run is None:
        raise ValueError(
            f"{loaded.path} is not in a run folder, so its training documents are unknown: name the run with --run, "
            f"or {remedy}"
        )
    run.check_data(remedy)
    config = run.read_config()
    if config.task == "splice":
        return _spliced_documents(loaded, config, source, number, controls)
    library = open_documents(config, source or main_source(config))
    _check_tokenizer(loaded, library)
    check_unchanged({library.source: library.train.sha256}, loaded.data, str(loaded.path))
    usable = np.flatnonzero(library.train.lengths > 2)  # a token to predict, one before it, and EOT
    if not len(usable):
        raise ValueError(f"{library.path} has no document of more than two tokens to measure")
    number = min(DEFAULT_DOCUMENTS if number is None else number, len(usable))
    picked = SpliceMultiDocumentLMConfig(num_docs=number, doc_select_mode=mode).select(  # type: ignore[arg-type]
        library.train.lengths[usable]
    )
    trained = usable[picked].tolist()
    median = float(np.median(library.train.lengths[trained]))
    controls = DEFAULT_CONTROLS if controls is None else controls
    held_out = choose_controls_near(library.held_out, controls, median, ContentIndex(library.train))
    return SelectedDocuments(_documents(library, trained, held_out))


def held_out_controls(loaded: LoadedRun, number: int | None = None) -> list[Document]:
    """Return held-out documents of a run, as controls for files; of a chat run those of a pretrain cache beside it.

    number: as `controls` of `select_documents`, which says what is raised.
    """
    remedy = "name a file that the model has never seen with --control"
    config, source = loaded.config, None
    if config is not None and config.task == "sft":
        names = CacheFolder(config.data.token_cache).names("pretrain")
        if not names:
            raise ValueError(f"{loaded.path} was trained on conversations, not on documents: {remedy}")
        source = "roam" if "roam" in names else names[0]
    selected = select_documents(loaded, source=source, number=1, controls=number, mode="first", remedy=remedy)
    return [document for document in selected.documents if document.control]


def _spliced_documents(
    loaded: LoadedRun, config: RunConfig, source: str | None, number: int | None, controls: int | None
) -> SelectedDocuments:
    """Return the first `number` documents that a splice run was trained on, and its controls."""
    if controls is not None:
        config = dataclasses.replace(config, splice=dataclasses.replace(config.splice, controls=controls))
    library = open_documents(config)
    if source not in (None, library.source):
        raise ValueError(f"--source {source}: this splice run was trained on {library.source}")
    _check_tokenizer(loaded, library)
    task = SpliceTask(config, library)
    check_unchanged(task.fingerprint(), loaded.data, str(loaded.path))
    train = config.train
    epochs = passes(task.dataset, train.seed, train.total_steps, train.B)
    documents = _documents(task.documents, task.chosen[:number], task.controls)
    return SelectedDocuments(documents, int(task.dataset.lengths.sum()), epochs)


def main_source(config: RunConfig) -> str:
    """Return the source to measure: notes if the run has them, else the one with the largest share."""
    if config.task == "sft":
        available = ", ".join(CacheFolder(config.data.token_cache).names("pretrain")) or "none"
        raise ValueError(
            "a chat run is trained on conversations, not on documents: name a pretrain cache with --source "
            f"({available}), or measure files with --text"
        )
    shares = {name: share for name, share in config.train.p_train.items() if share}
    return "roam" if "roam" in shares else max(shares, key=lambda name: shares[name])


def _check_tokenizer(loaded: LoadedRun, library: SourceDocuments) -> None:
    if loaded.tokenizer.sha256 != library.tokenizer.sha256:
        raise ValueError(
            f"{library.path} was encoded with another tokenizer than that of {loaded.path}: P(z) would be meaningless"
        )


def _documents(library: SourceDocuments, trained: Sequence[int], controls: Sequence[int]) -> list[Document]:
    """Return training documents and controls by index; a control with a training document's name is renamed."""
    names = unique_names(library.train, trained)
    documents = [
        Document(name, library.train.ids(i).astype(np.int64), source=library.source)
        for i, name in zip(trained, names, strict=True)
    ]
    for i, name in zip(controls, unique_names(library.held_out, controls), strict=True):
        name = f"{name} (held out)" if name in names else name
        documents.append(Document(name, library.held_out.ids(i).astype(np.int64), control=True, source=library.source))
    return documents


def read_documents(
    texts: Sequence[Path], controls: Sequence[Path], loaded: LoadedRun, errors: str = "strict"
) -> list[Document]:
    """Read text files as documents, encoded for the model.

    Raises ValueError for a missing file, invalid utf-8 (with `errors` "strict"), and a control that the checkpoint was
    trained on, which would show nothing.
    """
    documents = []
    for path, control in [*((path, False) for path in texts), *((path, True) for path in controls)]:
        if not path.is_file():
            raise ValueError(f"no file {path}")
        ids = loaded.encode(read_text(path, errors=errors))
        documents.append(Document(str(path), ids, control=control, source="file"))
    control_ids = {document.name: document.ids for document in documents if document.control}
    status = membership(loaded, control_ids)[0] if control_ids else {}
    trained = [name for name, known in status.items() if known == TRAINED]
    if trained:
        raise ValueError(f"--control {trained[0]}: the checkpoint was trained on its text; use a file it never saw")
    return documents
