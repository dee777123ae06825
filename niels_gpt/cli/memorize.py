"""`niels-gpt memorize`: what has a checkpoint learned by heart?"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from niels_gpt.cache.folder import CacheFolder
from niels_gpt.cli.tables import show_table
from niels_gpt.config import RunConfig
from niels_gpt.config.splice import SingleSelectMode, SpliceMultiDocumentLMConfig
from niels_gpt.data.roam import read_text
from niels_gpt.memorization.measure import (
    Document,
    ExtractionSettings,
    Measurement,
    measure,
)
from niels_gpt.memorization.membership import TRAINED, membership
from niels_gpt.memorization.positions import position_map
from niels_gpt.memorization.summary import (
    curve_entry,
    report,
    write_csv,
    write_json,
    write_windows_csv,
)
from niels_gpt.report.html import one_in
from niels_gpt.report.memorization_page import memorization_page
from niels_gpt.runs.checkpoint import load_model
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.loading import (
    LoadedRun,
    check_unchanged,
    is_run,
    load_run,
)
from niels_gpt.splice.coverage import passes
from niels_gpt.system import files
from niels_gpt.system.console import short_number
from niels_gpt.training.tasks.documents import ContentIndex, SourceDocuments, open_documents
from niels_gpt.training.tasks.splice_task import SpliceTask, choose_controls_near, unique_names

DEFAULT_DOCUMENTS = 8
DEFAULT_CONTROLS = 3


class ChosenDocuments(NamedTuple):
    """What is measured, and what is known of its training."""

    documents: list[Document]
    train_tokens: int | None = None
    """Of all documents of a splice run."""
    epochs: np.ndarray | None = None
    """Passes over them after each step of a splice run."""


def run_memorize(
    *,
    target: Path | None,
    run: Path | None,
    checkpoint: Path | None,
    device: str,
    tokenizer: Path | None,
    wanted: Mapping[str, Any],
    encoding_errors: str,
    source: str | None,
    number: int | None,
    controls: int | None,
    select: str,
    texts: Sequence[Path],
    control_texts: Sequence[Path],
    curve: bool,
    out: Path | None,
    top: int,
    as_json: bool,
) -> None:
    if select not in get_args(SingleSelectMode):
        raise ValueError(f"--select must be one of {', '.join(get_args(SingleSelectMode))}, got {select!r}")
    check_encoding(encoding_errors)
    if target is not None:
        if run is not None or checkpoint is not None:
            raise ValueError(f"name one run or checkpoint: {target}, or that of --run and --checkpoint")
        run, checkpoint = (target, None) if is_run(target) else (None, target)
    loaded = load_run(run, checkpoint, device, tokenizer)
    settings = ExtractionSettings.fitting(loaded.model.config.T, **wanted)
    given = read_documents(texts, control_texts, loaded, encoding_errors)
    check_controls(loaded, given)
    if texts:
        chosen = ChosenDocuments([*given, *_held_out(loaded, controls, {document.name for document in given})])
        out = out or home_of(loaded) / "memorisation-texts"  # the report on the run's own documents stays
    else:
        chosen = choose(loaded, source=source, number=number, controls=controls, select=select)
        chosen.documents.extend(given)
    found, written = measure_and_write(loaded, chosen, settings, curve=curve, out=out, top=top)
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
        return
    show(found, written)


def _held_out(loaded: LoadedRun, controls: int | None, taken: set[str]) -> list[Document]:
    """Held-out documents of the run as controls for texts of one's own; none, and a word, where they cannot be had."""
    try:
        chosen = choose(loaded, source=None, number=1, controls=controls, select="first")
    except (ValueError, OSError) as err:
        print(f"no held-out documents as controls: {err}", file=sys.stderr)
        return []
    return [document for document in chosen.documents if document.control and document.name not in taken]


def check_controls(loaded: LoadedRun, documents: Sequence[Document]) -> None:
    """Raise ValueError for a control that the checkpoint was trained on: it would show nothing."""
    controls = {document.name: document.ids for document in documents if document.control}
    where = membership(loaded, controls)[0] if controls else {}
    known = [name for name, status in where.items() if status == TRAINED]
    if known:
        raise ValueError(f"--control {known[0]}: its text is a document that was trained on; take one that was not")


def check_encoding(errors: str) -> None:
    """Raise ValueError for a way to decode that there is not."""
    if errors not in ("strict", "replace"):
        raise ValueError(f"--encoding-errors must be strict or replace, got {errors!r}")


def home_of(loaded: LoadedRun) -> Path:
    """The folder of a checkpoint's run, or the one it lies in."""
    return loaded.home.path if loaded.home else loaded.path.parent


def measure_run(run: RunFolder, *, device: str, settings: ExtractionSettings | None = None) -> dict[str, Any]:
    """Measure the documents of a run at all its checkpoints, write the report into it, and show the table."""
    loaded = load_run(run.path, None, device)
    chosen = choose(loaded, source=None, number=None, controls=None, select="random")
    found, written = measure_and_write(loaded, chosen, settings or ExtractionSettings(), curve=True, out=None, top=20)
    show(found, written)
    return found


def choose(
    loaded: LoadedRun, *, source: str | None, number: int | None, controls: int | None, select: str
) -> ChosenDocuments:
    """The documents of the run: those it was spliced from, or some of what it was trained on; and held-out ones.

    Raises ValueError where they cannot be had, have changed since the training, or were encoded by another tokenizer.
    """
    run = loaded.home
    if run is None:
        raise ValueError(
            f"{loaded.path} lies in no run, so its training documents are unknown: name the run with --run, or texts "
            "of your own with --text"
        )
    config = run.read_config()
    if config.task == "splice":
        return _spliced(loaded, config, source, number, controls)
    library = open_documents(config, source or main_source(config))
    _check_tokenizer(loaded, library)
    check_unchanged({library.source: library.train.sha256}, loaded.data, str(loaded.path))
    # A document needs a token to predict, and text in it; an EOT alone is none.
    usable = np.flatnonzero(library.train.lengths > 2)
    if not len(usable):
        raise ValueError(f"{library.path} has no document of more than two tokens to look into")
    wanted = min(DEFAULT_DOCUMENTS if number is None else number, len(usable))
    picked = SpliceMultiDocumentLMConfig(num_docs=wanted, doc_select_mode=select).select(  # type: ignore[arg-type]
        library.train.lengths[usable]
    )
    train_docs = usable[picked].tolist()
    typical = float(np.median(library.train.lengths[train_docs]))
    wanted = DEFAULT_CONTROLS if controls is None else controls
    held_out = choose_controls_near(library.held_out, wanted, typical, ContentIndex(library.train))
    return ChosenDocuments(_documents(library, train_docs, held_out))


def _spliced(
    loaded: LoadedRun, config: RunConfig, source: str | None, number: int | None, controls: int | None
) -> ChosenDocuments:
    """The documents that a splice run was trained on, the first `number` of them."""
    if controls is not None:
        config = dataclasses.replace(config, splice=dataclasses.replace(config.splice, controls=controls))
    library = open_documents(config)
    if source not in (None, library.source):
        raise ValueError(f"the run was spliced from {library.source}, not from {source}")
    _check_tokenizer(loaded, library)
    task = SpliceTask(config, library)
    check_unchanged(task.fingerprint(), loaded.data, str(loaded.path))
    train = config.train
    seen = passes(task.dataset, train.seed, train.total_steps, train.B, shuffle=config.splice.shuffle)
    found = _documents(task.documents, task.chosen[:number], task.controls)
    return ChosenDocuments(found, int(task.dataset.lengths.sum()), seen)


def main_source(config: RunConfig) -> str:
    """The source to look into: notes if the run has some, else the one with the largest share."""
    if config.task == "sft":
        have = ", ".join(CacheFolder(config.data.token_cache).names("pretrain")) or "none"
        raise ValueError(
            f"a chat run learned from conversations, not from documents: name a pretrain cache with --source ({have}), "
            "or texts of your own with --text"
        )
    shares = {name: share for name, share in config.train.p_train.items() if share}
    return "roam" if "roam" in shares else max(shares, key=lambda name: shares[name])


def _check_tokenizer(loaded: LoadedRun, library: SourceDocuments) -> None:
    if loaded.tokenizer.sha256 != library.tokenizer.sha256:
        raise ValueError(
            f"{library.path} was encoded with another tokenizer than that of {loaded.path}: the numbers would mean "
            "nothing"
        )


def _documents(library: SourceDocuments, trained: Sequence[int], controls: Sequence[int]) -> list[Document]:
    names = unique_names(library.train, trained)
    found = [
        Document(name, library.train.ids(i).astype(np.int64), source=library.source)
        for i, name in zip(trained, names, strict=True)
    ]
    for i, name in zip(controls, unique_names(library.held_out, controls), strict=True):
        name = f"{name} (held out)" if name in names else name
        found.append(Document(name, library.held_out.ids(i).astype(np.int64), control=True, source=library.source))
    return found


def read_documents(
    texts: Sequence[Path], controls: Sequence[Path], loaded: LoadedRun, errors: str = "strict"
) -> list[Document]:
    """Files of text as documents, encoded as the model reads. Raises ValueError or OSError for one that is no text."""
    found = []
    for path, control in [*((path, False) for path in texts), *((path, True) for path in controls)]:
        if not path.is_file():
            raise ValueError(f"no file {path}")
        ids = loaded.encode(read_text(path, errors=errors))
        found.append(Document(str(path), ids, control=control, source="file"))
    return found


def measure_and_write(
    loaded: LoadedRun, chosen: ChosenDocuments, settings: ExtractionSettings, *, curve: bool, out: Path | None, top: int
) -> tuple[dict[str, Any], Path]:
    """(the report, the folder it was written into)."""
    documents = chosen.documents
    with progress("measuring") as tell:
        measured = measure(loaded.model, documents, loaded.tokenizer, settings, progress=tell)
    entries = curve_of(loaded, chosen, settings) if curve else []
    found = report(
        loaded.model,
        measured,
        loaded.tokenizer,
        title=f"What {loaded.home.path.name if loaded.home else loaded.path.name} has memorised",
        checkpoint=str(loaded.path),
        step=loaded.step,
        checkpoints=entries,
        position_map=position_map(loaded.model, documents, settings),
        passages=top,
        strips=24,
    )
    if chosen.train_tokens is not None:
        found["train_tokens"] = chosen.train_tokens
    folder = out or home_of(loaded) / "memorisation"
    write_all(found, measured, folder)
    return found, folder


def write_all(found: dict[str, Any], measured: Sequence[Measurement], folder: Path) -> None:
    """report.json, documents.csv, windows.csv and report.html."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "report.json", found)
    write_csv(folder / "documents.csv", found)
    write_windows_csv(folder / "windows.csv", measured)
    files.write_text(folder / "report.html", memorization_page(found))


def curve_of(loaded: LoadedRun, chosen: ChosenDocuments, settings: ExtractionSettings) -> list[dict[str, Any]]:
    """The same documents at every checkpoint that the run has kept, without greedy decoding."""
    paths = list(reversed(loaded.home.step_files())) if loaded.home else []
    quick = dataclasses.replace(settings, greedy=0)
    entries = []
    for path in paths:
        model, step = load_model(path, str(loaded.model.device))
        with progress(f"step {step}") as tell:
            measured = measure(model, chosen.documents, loaded.tokenizer, quick, progress=tell)
        entry = curve_entry(step, measured)
        if chosen.epochs is not None:
            entry["epochs"] = float(chosen.epochs[min(step, len(chosen.epochs) - 1)])
        entries.append(entry)
    return entries


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def show(found: dict[str, Any], folder: Path) -> None:
    """The table, the strongest passages, and where the rest is."""
    settings = found["settings"]
    unit = f"{found['unit']}s"
    print(
        f"{found['checkpoint']} after {found['step']:,} updates; windows of {settings['window']} {unit}, "
        f"{settings['prompt']} of them given"
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("document", overflow="fold")
    for name in (unit, "windows", "mean P(z)", "max P(z)", ">= 0.5", "greedy", "longest run", "bits/byte"):
        table.add_column(name, justify="right")
    documents = sorted(found["documents"], key=lambda d: (d["control"], -d["mean_log_p"]))
    for i, d in enumerate(documents):
        if d["control"] and (i == 0 or not documents[i - 1]["control"]):
            table.add_section()
        greedy = d["greedy"]
        table.add_row(
            escape(d["name"]) + (" (control)" if d["control"] else "") + (" (short)" if d["short"] else ""),
            short_number(d["tokens"]),
            f"{d['windows']:,}",
            probability(d["mean_p"]),
            probability(d["max_p"]),
            f"{d['over']['0.5']:,}",
            f"{greedy['exact']:,} of {greedy['starts']:,}",
            f"{d['longest_run']['tokens']:,}",
            f"{d['bits_per_byte']:.3f}",
        )  # fmt: skip
    show_table(table)
    if not any(d["control"] for d in documents):
        print("there are no control documents: what of this is memorised, and what any such text would get, is unknown")
    for passage in [p for p in found["passages"] if not p["control"]][:3]:
        place = f"{passage['document']}, {unit} {passage['start']:,} to {passage['end']:,}"
        print(f"\n{place}: P(z) = {chance_of(passage)}")
        print(f"  given  {_line(passage['prompt'][-90:])}")
        print(f"  says   {_line(passage['suffix'][:90])}")
    if found["positions"] == "rope":
        print("\npositions are relative (RoPE): P(z) does not depend on where in the frame a text lies")
    else:
        show_places(found["position_map"])
    print(f"\nreport: {folder}/report.html, report.json, documents.csv, windows.csv")


def show_places(places: dict[str, Any]) -> None:
    """P(z) of each document at several places of the frame."""
    print("\npositions are learned: the table is for texts at the beginning of the frame; mean P(z) by place:")
    table = Table(box=None, pad_edge=False)
    table.add_column("document", overflow="fold")
    for offset in places["offsets"]:
        table.add_column(f"{offset}", justify="right")
    table.add_column("best of any", justify="right")
    for document in places["documents"]:
        name = escape(document["name"]) + (" (control)" if document["control"] else "")
        best = f"{probability(document['best_p'])} at {document['best_offset']}"
        table.add_row(name, *map(probability, document["mean_p"]), best)
    show_table(table)


def probability(p: float) -> str:
    """0.731, or 3.2e-09."""
    return f"{p:.3f}" if p >= 0.001 else f"{p:.1e}" if p > 0 else "0"


def chance_of(passage: dict[str, Any]) -> str:
    """0.731, or 3.2e-09 (1 in 310 million)."""
    rare = f" ({one_in(passage['log_p'])})" if passage["p"] < 0.5 else ""
    return f"{probability(passage['p'])}{rare}"


def _line(text: str) -> str:
    return repr(text)[1:-1]
