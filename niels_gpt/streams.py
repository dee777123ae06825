"""One byte stream per source and split, cached on disk and verified.

`Inputs` describes what the streams of a source depend on (cheap) and how to read them (slow). A cache entry
`{source}_{split}.bin` is used only if its `.meta.json` is intact and records the same inputs, and the file has the
recorded size and sha256. Otherwise it is rebuilt.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from niels_gpt.chat.transcript import DELIMITER
from niels_gpt.config import ModelConfig, NotesConfig, SourceConfig
from niels_gpt.data import embedded
from niels_gpt.data.byte_split import ByteChunk, byte_chunks, byte_split_files, bytes_between, select_byte_split
from niels_gpt.data.note_groups import split_notes
from niels_gpt.data.note_selection import SelectedNotes, note_text, select_notes
from niels_gpt.data.primer import (
    chat_file_text,
    is_chat_file,
    load_primer_text,
    primer_dialogues,
    split_primer_dialogues,
    transcripts,
)
from niels_gpt.data.reading.local import DataUnavailable, find_files, find_local
from niels_gpt.data.reading.utf8 import utf8_problem
from niels_gpt.data.roam import list_roam_paths, load_texts
from niels_gpt.data.source_paths import display_name
from niels_gpt.data.split import PARTS, cut, split_items
from niels_gpt.data.types import ChatSample, PretrainSample
from niels_gpt.data.user_files import iter_user_files, kind_of, select_user_files, user_file_paths
from niels_gpt.data.wikitext import CONFIG, DATASET_ID, load_wikitext
from niels_gpt.system import files, user_cache
from niels_gpt.system.checked_json import read_checked_json, write_checked_json
from niels_gpt.system.private_files import keep_private, restrict

BytesSources = dict[str, bytes]  # keys: "wiki" | "roam" | "primer"
SPLITS = ("train", "val")


@dataclass(frozen=True)
class StreamBuildConfig:
    """What to build the streams from, and where to cache them."""

    roam_root: str = ".roam-data/"
    """Folder of markdown notes; `embedded`: the notes shipped with the package."""
    primer_path: str = "data/primer.txt"
    """File of dialogues; `embedded`: the dialogues shipped with the package."""
    cache_dir: str = "data/cache/streams"
    """Folder of `{source}_{split}.bin` and `.meta.json`."""
    doc_separator: str = "\n\n"
    """Separator between the documents of wiki and roam."""
    roam_val_frac: float = 0.10
    """Fraction of the notes held out."""
    roam_split: str = "file"
    """How notes are held out: see `split_notes`."""
    primer_val_frac: float = 0.10
    """Fraction of the dialogues held out."""
    seed: int = 42
    """Seed of the splits."""
    delimiter: str = DELIMITER
    """Separator between the dialogues of the primer."""
    force_rebuild: bool = False
    """Rebuild even if the cache is valid."""
    enabled_sources: tuple[str, ...] = ("wiki", "roam", "primer")
    """Sources to build."""
    required_sources: tuple[str, ...] = ("wiki", "roam", "primer")
    """Enabled sources that must be present; the others are skipped with a warning if they cannot be built."""
    wiki: str = "hub"
    """`hub`, `embedded` (docstrings of the Python standard library), or a folder with train and validation files."""
    encoding_errors: str = "strict"
    """How notes, primer and user files are decoded: `strict`, `replace`, or `skip` (files that are not utf-8)."""
    user_sources: Mapping[str, SourceConfig] = field(default_factory=dict, hash=False)
    """Sources from the user's config, by name; a tenth of their documents is held out, or their `split` applies."""
    notes: NotesConfig | None = None
    """Which files of the notes and of user sources are read, and how; None: all notes, unchanged."""


@dataclass(frozen=True)
class Stream:
    """The bytes of one source and split, and the offsets of its documents."""

    data: bytes
    sha256: str
    cached: bool
    """Whether it was read from the cache."""
    names: list[str] | None
    """Document names; None: the documents are numbered rows."""
    starts: list[int]
    """Offset of the first byte of each document."""
    gap: int = 0
    """Size of the separator between documents, in bytes."""
    selected: SelectedNotes | None = None
    """Which files of the source were read and skipped; None: `notes` did not apply."""

    def locate(self, offset: int) -> tuple[str, int]:
        """(document name, offset within the document) for an offset of the stream."""
        i = max(bisect.bisect_right(self.starts, offset) - 1, 0)
        name = f"row {i}" if self.names is None else self.names[i]
        return name, offset - self.starts[i]


Content = tuple[bytes, list[str] | None, list[int]]
"""(bytes of a stream, document names or None for rows, document offsets)."""


@dataclass(frozen=True)
class Inputs:
    """What the streams of a source depend on, and how to read them."""

    describe: dict[str, dict[str, Any]]
    """Per split: the metadata that must match for a cache entry to be valid."""
    read: Callable[[str], Content]
    """Split -> content of the stream."""
    selected: SelectedNotes | None = None
    """Which files are read and skipped."""


def build_wiki_stream(docs: list[str], *, sep: str) -> bytes:
    """The utf-8 bytes of the documents with `sep` between them."""
    return sep.join(docs).encode("utf-8")


def build_roam_stream(docs: list[str], *, sep: str) -> bytes:
    """The utf-8 bytes of the documents with `sep` between them."""
    return sep.join(docs).encode("utf-8")


def build_primer_stream(text: str) -> bytes:
    """The utf-8 bytes of the text, unchanged."""
    return text.encode("utf-8")


def build_wiki_streams(docs_train: list[str], docs_val: list[str]) -> tuple[bytes, bytes]:
    """(train, val) streams of the documents, "\\n\\n" between them."""
    return build_wiki_stream(docs_train, sep="\n\n"), build_wiki_stream(docs_val, sep="\n\n")


def build_roam_streams(docs_train: list[str], docs_val: list[str]) -> tuple[bytes, bytes]:
    """(train, val) streams of the documents, "\\n\\n" between them."""
    return build_roam_stream(docs_train, sep="\n\n"), build_roam_stream(docs_val, sep="\n\n")


def build_primer_streams(text_train: str, text_val: str) -> tuple[bytes, bytes]:
    """(train, val) streams of the texts, unchanged."""
    return build_primer_stream(text_train), build_primer_stream(text_val)


def build_sources(cfg: StreamBuildConfig, *, T: int | None = None) -> tuple[BytesSources, BytesSources]:
    """(sources_train, sources_val): the byte streams of the enabled sources, from the cache where it is valid.

    Raises ValueError that names each required source that is missing, empty or shorter than T + 1 bytes
    (T defaults to ModelConfig().T). Other sources with such a problem are skipped with a warning.
    """
    streams = load_streams(cfg, T=T)
    train, val = ({name: streams[name][split].data for name in streams} for split in SPLITS)
    return train, val


def load_streams(cfg: StreamBuildConfig, *, T: int | None = None) -> dict[str, dict[str, Stream]]:
    """source -> split -> Stream: `build_sources` with hashes and documents, and the test split if there is one."""
    needed = (ModelConfig().T if T is None else T) + 1
    _check_names(cfg)
    folder = Path(cfg.cache_dir)
    loaded: dict[str, dict[str, Stream]] = {}
    problems: list[str] = []
    with files.lock_folder(folder):
        user_cache.mark_used(folder)
        for name in cfg.enabled_sources:
            try:
                with _source_missing_errors():
                    inputs = _INPUTS[name](cfg) if name in _INPUTS else _user_inputs(cfg, name)
                streams = {
                    split: replace(_load_or_build(cfg, name, split, inputs), selected=inputs.selected)
                    for split in inputs.describe
                }
                problem = "; ".join(
                    f"{display_name(name, cfg.wiki)}/{split} has {len(stream.data)} bytes, fewer than T + 1 = {needed}"
                    for split, stream in streams.items()
                    if len(stream.data) < needed
                )
            except _SourceMissing as err:
                is_named = f"data.sources.{name}" in str(err)
                problem = str(err) if is_named else f"{display_name(name, cfg.wiki)}: {err}"
            if not problem:
                loaded[name] = streams
            elif name in cfg.required_sources:
                problems.append(problem)
            else:
                warnings.warn(f"source skipped: {problem}", stacklevel=3)
        restrict((folder, *folder.iterdir()))  # what was created before a private source was read
    if problems:
        short = any("fewer than" in problem for problem in problems)
        remedy = ". Add text, hold out more of it (val_frac, split), or use a smaller T" if short else ""
        raise ValueError("; ".join(problems) + remedy)
    return loaded


def _check_names(cfg: StreamBuildConfig) -> None:
    for name in (*cfg.enabled_sources, *cfg.required_sources):
        if name not in _INPUTS and name not in cfg.user_sources:
            raise ValueError(f"unknown source {name!r}; known sources: {', '.join([*_INPUTS, *cfg.user_sources])}")
    extra = [name for name in cfg.required_sources if name not in cfg.enabled_sources]
    if extra:
        raise ValueError(f"required_sources must be a subset of enabled_sources; not enabled: {', '.join(extra)}")


def _load_or_build(cfg: StreamBuildConfig, source: str, split: str, inputs: Inputs) -> Stream:
    described = inputs.describe[split]
    bin_path = Path(cfg.cache_dir) / f"{source}_{split}.bin"
    meta_path = bin_path.with_suffix(".meta.json")
    if not cfg.force_rebuild:
        cached = _read_valid(bin_path, meta_path, described)
        if cached is not None:
            return cached
    with _source_missing_errors():
        data, names, starts = inputs.read(split)
    digest = files.sha256_bytes(data)
    # The .bin first: if the process dies between the writes, the new .bin does not match the sha256 in the old meta.
    files.write_bytes(bin_path, data)
    documents = {"names": names, "starts": starts}
    write_checked_json(meta_path, {**described, "bytes": len(data), "sha256": digest, "documents": documents})
    return Stream(data=data, sha256=digest, cached=False, names=names, starts=starts, gap=_gap(described))


def _read_valid(bin_path: Path, meta_path: Path, described: dict[str, Any]) -> Stream | None:
    """The cached stream, or None if anything is missing, differs or is damaged."""
    try:
        meta = read_checked_json(meta_path)
        if any(meta.get(key) != value for key, value in described.items()):
            return None
        if bin_path.stat().st_size != meta["bytes"]:
            return None
        keep_private([bin_path])
        data = bin_path.read_bytes()
        if files.sha256_bytes(data) != meta["sha256"]:
            return None
        names, starts = meta["documents"]["names"], meta["documents"]["starts"]
        if starts != sorted(starts) or any(type(start) is not int or not 0 <= start <= len(data) for start in starts):
            return None
        if not starts or (names is not None and len(names) != len(starts)):
            return None
        return Stream(data, meta["sha256"], True, names, starts, _gap(described))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _gap(described: dict[str, Any]) -> int:
    separator: str = described.get("sep", described.get("delimiter", ""))
    return len(separator.encode("utf-8"))


def _starts(sizes: Iterable[int], *, gap: int) -> list[int]:
    """Offset of each document when documents follow each other with `gap` bytes between them."""
    return list(itertools.accumulate((size + gap for size in sizes), initial=0))[:-1]


def _join(docs: list[str], names: list[str] | None, sep: str) -> Content:
    data = build_roam_stream(docs, sep=sep)
    return data, names, _starts((len(doc.encode("utf-8")) for doc in docs), gap=len(sep.encode("utf-8")))


def _stat(path: str | Path) -> dict[str, Any]:
    keep_private([path])
    status = Path(path).stat()
    return {"path": str(path), "mtime_ns": status.st_mtime_ns, "size": status.st_size}


def _wiki_inputs(cfg: StreamBuildConfig) -> Inputs:
    if cfg.wiki == "embedded":
        return _stdlib_inputs(cfg)
    path = None if cfg.wiki == "hub" else cfg.wiki
    try:
        docs = load_wikitext() if path is None else load_wikitext(path=path)
    except DataUnavailable as err:
        raise DataUnavailable(f"{err}. To train: --wiki FOLDER, or --wiki embedded, which needs no network") from err
    local_path = find_local(DATASET_ID, path)
    local = find_files(local_path, CONFIG) if local_path else {}
    origin = [_stat(file) for names in local.values() for file in names]
    describe = {
        split: {
            "source": "wiki",
            "split": split,
            "n_docs": len(docs[split]),
            "total_chars": sum(map(len, docs[split])),
            "sep": cfg.doc_separator,
            "files": origin,
        }
        for split in SPLITS
    }
    return Inputs(describe, lambda split: _join(docs[split], None, cfg.doc_separator))


def _stdlib_inputs(cfg: StreamBuildConfig) -> Inputs:
    described: dict[str, Any] = {**embedded.stdlib_fingerprint(), "origin": "docstrings of the Python standard library"}
    described |= {"source": "wiki", "sep": cfg.doc_separator, "seed": cfg.seed, "val_frac": STDLIB_VAL_FRAC}
    return _document_inputs(described, embedded.iter_stdlib)


def _document_inputs(described: dict[str, Any], load: Callable[[], Iterable[tuple[str, str]]]) -> Inputs:
    """The streams of named documents that `load` reads; `described` has the separator, seed and held-out fraction."""
    documents: list[tuple[str, str]] = []

    def read(split: str) -> Content:
        if not documents:
            documents.extend(load())
        splits = split_items(documents, val_frac=described["val_frac"], seed=described["seed"])
        chosen = splits[SPLITS.index(split)]
        return _join([text for _, text in chosen], [name for name, _ in chosen], described["sep"])

    return Inputs({split: {**described, "split": split} for split in SPLITS}, read)


STDLIB_VAL_FRAC = 0.05
"""Fraction of the modules of the standard library held out: 19 of 394 in Python 3.11."""


def _roam_inputs(cfg: StreamBuildConfig) -> Inputs:
    root = str(embedded.NOTES) if cfg.roam_root == "embedded" else cfg.roam_root
    selected = None if cfg.notes is None else select_notes(root, cfg.notes, errors=cfg.encoding_errors)
    if selected is None:
        paths = list_roam_paths(root)
        if cfg.encoding_errors == "skip":
            paths = [path for path in paths if utf8_problem(Path(path).read_bytes()) is None]
        if not paths:
            raise FileNotFoundError(f"no .md file under {root}")
    else:
        selected.check_found()
        paths = selected.listed

    def text(path: str) -> str:
        (doc,) = load_texts([path], errors=cfg.encoding_errors)
        return doc if cfg.notes is None else note_text(doc, cfg.notes)

    halves = split_notes(paths, text, by=cfg.roam_split, val_frac=cfg.roam_val_frac, seed=cfg.seed)
    by_split = dict(zip(SPLITS, halves, strict=True))
    if selected is not None:
        read_paths = set(selected.paths)
        by_split = {split: [path for path in part if path in read_paths] for split, part in by_split.items()}
    described = {"source": "roam", "sep": cfg.doc_separator, "seed": cfg.seed, "val_frac": cfg.roam_val_frac}
    described |= {"encoding_errors": cfg.encoding_errors, "notes": _text_options(cfg)}

    def read(split: str) -> Content:
        return _join([text(path) for path in by_split[split]], by_split[split], cfg.doc_separator)

    listed = {split: {"split": split, "files": [_stat(path) for path in by_split[split]]} for split in SPLITS}
    return Inputs({split: {**described, **listed[split]} for split in SPLITS}, read, selected)


def _text_options(cfg: StreamBuildConfig) -> dict[str, Any] | None:
    """The options that change the text of notes, for the metadata; None: the text is unchanged."""
    return None if cfg.notes is None else cfg.notes.text_options() or None


def _primer_inputs(cfg: StreamBuildConfig) -> Inputs:
    path = str(embedded.PRIMER) if cfg.primer_path == "embedded" else cfg.primer_path
    described = {
        "source": "primer",
        **_stat(path),
        "delimiter": cfg.delimiter,
        "seed": cfg.seed,
        "val_frac": cfg.primer_val_frac,
        "encoding_errors": cfg.encoding_errors,
    }
    if is_chat_file(path):
        described["converted"] = True  # a stream of an older version is the file itself

    @functools.cache
    def load() -> str:
        if is_chat_file(path):
            return chat_file_text(path, errors=cfg.encoding_errors, delimiter=cfg.delimiter)
        return load_primer_text(path, errors=cfg.encoding_errors)

    def read(split: str) -> Content:
        text = load()
        splits = split_primer_dialogues(text, val_frac=cfg.primer_val_frac, seed=cfg.seed, delimiter=cfg.delimiter)
        split_text = splits[SPLITS.index(split)]
        blocks = primer_dialogues(split_text, delimiter=cfg.delimiter)
        number = {block: i for i, block in reversed(list(enumerate(primer_dialogues(text, delimiter=cfg.delimiter))))}
        names = [f"dialogue {number[block]}" for block in blocks]
        sizes = (len(block.encode("utf-8")) for block in blocks)
        return build_primer_stream(split_text), names, _starts(sizes, gap=len(cfg.delimiter.encode("utf-8")))

    return Inputs({split: {**described, "split": split} for split in SPLITS}, read)


def _user_inputs(cfg: StreamBuildConfig, name: str) -> Inputs:
    source = cfg.user_sources[name]
    if source.split:
        return _byte_split_inputs(name, source, cfg.notes)
    chat = kind_of(name, source, errors=cfg.encoding_errors, notes=cfg.notes) == "chat"
    sep = cfg.delimiter if chat else cfg.doc_separator
    selected = None
    if cfg.notes is not None:
        selected = select_user_files(name, source, cfg.notes, errors=cfg.encoding_errors)
    paths = user_file_paths(name, source, cfg.notes) if selected is None else selected.paths
    described = {"source": name, **asdict(source), "files": [_stat(file) for file in paths]}
    described |= {"sep": sep, "seed": cfg.seed, "val_frac": USER_VAL_FRAC, "encoding_errors": cfg.encoding_errors}
    described["notes"] = _text_options(cfg)

    def load() -> Iterator[tuple[str, str]]:
        samples = iter_user_files(name, source, errors=cfg.encoding_errors, notes=cfg.notes)
        if chat:
            chats = (sample for sample in samples if isinstance(sample, ChatSample))
            yield from ((f"row {sample.meta['row']}", text) for sample, text in transcripts(chats, name))
            return
        for sample in samples:
            if isinstance(sample, PretrainSample):
                yield f"row {sample.meta['row']}" if "row" in sample.meta else sample.meta["path"], sample.text

    return replace(_document_inputs(described, load), selected=selected)


def _byte_split_inputs(name: str, source: SourceConfig, notes: NotesConfig | None) -> Inputs:
    """A source that is one sequence of bytes, split at the offsets of `source.split`."""
    described: dict[str, Any] = {"source": name, "path": source.path, "field": source.field, "cut": list(source.split)}
    described["files"] = [_stat(file) for file in byte_split_files(name, source, notes)]
    chunks: list[ByteChunk] = []
    if not described["files"]:  # from the Hub: only a hash of the content shows a change
        chunks = list(byte_chunks(name, source, notes))
        described["pieces"] = files.sha256_bytes("".join(files.sha256_bytes(chunk.data) for chunk in chunks).encode())

    def read(split: str) -> Content:
        if not chunks:
            chunks.extend(byte_chunks(name, source, notes))
        try:
            return bytes_between(chunks, *cut(sum(len(chunk.data) for chunk in chunks), source.split)[split])
        except ValueError as err:
            raise ValueError(f"data.sources.{name}: {err} in {source.path}") from None

    selected = None if notes is None else select_byte_split(name, source, notes)
    return Inputs({split: {**described, "split": split} for split in PARTS[: len(source.split)]}, read, selected)


USER_VAL_FRAC = 0.10
"""Fraction of the documents of a user source that is held out."""


class _SourceMissing(Exception):
    """The input of a source is missing. Errors of its cache files are not of this class."""


@contextlib.contextmanager
def _source_missing_errors() -> Iterator[None]:
    """Raise _SourceMissing for files that the block does not find."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, DataUnavailable) as err:
        reason = f"no file {err.filename}" if err.filename and err.strerror else str(err)
        if isinstance(err, IsADirectoryError):
            reason = f"{err.filename} is a folder, not a file"
        raise _SourceMissing(reason) from err


_INPUTS: dict[str, Callable[[StreamBuildConfig], Inputs]] = {
    "wiki": _wiki_inputs,
    "roam": _roam_inputs,
    "primer": _primer_inputs,
}
