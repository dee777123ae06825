"""The input of the cache of a source: its texts or chats, how they are split, and what they depend on."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_args

from niels_gpt.cache import formats
from niels_gpt.cache.build_cache import Message
from niels_gpt.cache.formats import CacheError
from niels_gpt.cache.meta import read_meta
from niels_gpt.cache.sources import defaults
from niels_gpt.cache.writing.checks import check_seed, check_shard_bytes
from niels_gpt.config import NotesConfig
from niels_gpt.data import embedded
from niels_gpt.data.note_groups import SplitBy, lines_in_training, shared_lines_text, split_notes
from niels_gpt.data.note_selection import SelectedNotes, read_note, select_notes
from niels_gpt.data.reading.local import find_files, find_local
from niels_gpt.data.reading.url_rows import HashedFile
from niels_gpt.data.registry import Source
from niels_gpt.data.source_paths import roam_path
from niels_gpt.data.split import check_val_frac, split_items
from niels_gpt.data.types import ChatSample, PretrainSample
from niels_gpt.data.url_files import url_hashes
from niels_gpt.data.wikitext import CONFIG as WIKITEXT_CONFIG
from niels_gpt.data.wikitext import DATASET_ID as WIKITEXT
from niels_gpt.system import files
from niels_gpt.system.executors import Executor


@dataclass(frozen=True)
class BuildSettings:
    """The settings of a build; each is an option of the commands."""

    cache_dir: Path
    seed: int = defaults.SEED
    shard_bytes: int = defaults.SHARD_BYTES
    fineweb_id: str | None = None
    fineweb_config: str = defaults.FINEWEB_CONFIG
    fineweb_train_tokens: int = defaults.FINEWEB_TRAIN_TOKENS
    fineweb_val_tokens: int = defaults.FINEWEB_VAL_TOKENS
    fineweb_streaming: bool = True
    shuffle_buffer: int = defaults.FINEWEB_SHUFFLE_BUFFER
    gutenberg_train_tokens: int = defaults.GUTENBERG_TRAIN_TOKENS
    gutenberg_val_tokens: int = defaults.GUTENBERG_VAL_TOKENS
    wikitext_config: str | None = None
    roam: Path | None = None
    primer: Path | None = None
    path: Path | str | None = None
    """Local files of the source, or the URL of a source of the user; only for a build of a single source."""
    roam_val_frac: float = defaults.ROAM_VAL_FRAC
    roam_split: str = "file"
    """How notes are held out: see `split_notes`."""
    val_frac: float = defaults.SFT_VAL_FRAC
    """Held-out fraction of examples, and of the documents of user sources."""
    test: bool = False
    """Whether to build the test split of wikitext too."""
    errors: str | None = None
    notes: NotesConfig = field(default_factory=NotesConfig)
    """Which files of the notes and of user sources are read, and how."""
    vocab_size: int | None = None
    """Subwords of a new tokenizer; None: 16,000. An existing tokenizer must have been trained for this number."""
    tokenizer_documents: int = defaults.TOKENIZER_DOCUMENTS
    workers: int | None = None
    executor: Executor | None = None
    """What encodes; None: `workers` threads."""
    url: str | None = None
    """URL of the folder of caches, to which each finished cache is copied; None: `cache_dir` is the folder."""
    hashed: dict[str, list[HashedFile]] = field(default_factory=dict, repr=False)
    """URL of a source -> its files with their hashes, as long as a build uses them: all reads see the same bytes."""

    @property
    def place(self) -> Path | str:
        """The folder of caches as the user gave it."""
        return self.url or self.cache_dir

    def __post_init__(self) -> None:
        if self.errors not in (None, "strict", "replace", "skip"):
            raise ValueError(f"--encoding-errors must be strict, replace or skip, got {self.errors!r}")
        if self.errors == "strict":
            object.__setattr__(self, "errors", None)  # the default
        if self.roam_split not in get_args(SplitBy):
            raise ValueError(f"--notes-split must be {' or '.join(get_args(SplitBy))}, got {self.roam_split!r}")
        check_seed(self.seed)
        check_shard_bytes(self.shard_bytes)
        check_val_frac(self.val_frac)
        check_val_frac(self.roam_val_frac, "roam_val_frac")

    def path_of(self, name: str) -> Path | str | None:
        """The local path, or URL, set for a source."""
        return self.path or {"roam": self.roam, "primer": self.primer}.get(name)


def training_texts(source: Source, settings: BuildSettings) -> Iterator[str]:
    """The training texts of a source (of chats: all messages)."""
    if source.kind == "chat":
        for example in chats_of(source, settings):
            yield from (message["content"] for message in example)
    else:
        yield from texts_of(source, settings).train


class SplitTexts(NamedTuple):
    """The texts of a pretrain cache, by split."""

    train: Rereadable
    val: Rereadable | None = None
    """None: split by token budget."""
    test: Rereadable | None = None

    def present(self) -> list[Rereadable]:
        """The splits that exist."""
        return [texts for texts in self if texts is not None]

    def documents(self) -> int:
        """Number of documents; see `Rereadable.count`."""
        return sum(texts.count() for texts in self.present())

    def dropped(self) -> dict[str, int]:
        """What the loader dropped, by reason; counted once if two splits are read from the same rows."""
        total: Counter[str] = Counter()
        for dropped in {id(texts.dropped): texts.dropped for texts in self.present()}.values():
            total.update(dropped)
        return dict(sorted(total.items()))


def texts_of(source: Source, settings: BuildSettings) -> SplitTexts:
    """The texts of a source, by split."""
    name = source.name
    if name == "fineweb_edu":
        return SplitTexts(_samples(source, settings, shuffle=True, **_fineweb_options(settings)))
    if name == "gutenberg":
        return SplitTexts(_samples(source, settings))
    if name == "wikitext":
        local = _splits(settings)
        if "" in local:
            raise ValueError(
                f"{local[''][0]} is one file for all splits of wikitext: use a folder with train and validation files"
            )
        test = _samples(source, settings, split="test") if settings.test else None
        return SplitTexts(_samples(source, settings), _samples(source, settings, split="validation"), test)
    if name == "roam":
        train, val = (_notes(paths, settings) for paths in _split_of_notes(settings, settings.roam_split))
        return SplitTexts(train, val)
    if "split" in source.options:
        raise ValueError(
            f"{name} is split by bytes (data.sources.{name}.split), which only byte streams support: train on it with "
            "task bytes, or remove split to build a token cache of its documents"
        )
    documents = _samples(source, settings)
    number = documents.count()  # read twice, not kept in memory: it may be large
    train_rows, val_rows = split_items(range(number), val_frac=settings.val_frac, seed=settings.seed)
    return SplitTexts(_select(documents, train_rows), _select(documents, val_rows))


def _split_of_notes(settings: BuildSettings, by: str) -> tuple[list[str], list[str]]:
    """The paths of the notes to train on and of the held-out ones."""
    errors = settings.errors or "strict"
    selected = select_notes(roam_path(settings.path_of("roam")), settings.notes, errors=errors)
    selected.check_found()
    return split_notes(
        selected.listed,
        lambda path: read_note(path, settings.notes, errors),
        by=by,
        val_frac=settings.roam_val_frac,
        seed=settings.seed,
    )


def shared_lines_of_notes(settings: BuildSettings) -> str:
    """Return a line with how much of the held-out notes stands in those to train on; see `shared_lines_text`."""
    splits = (_split_of_notes(settings, by) for by in (settings.roam_split, "file"))
    shares = [lines_in_training(_notes(val, settings), _notes(train, settings)) for train, val in splits]
    return shared_lines_text(*shares)


def _splits(settings: BuildSettings) -> dict[str, list[str]]:
    """Split -> files of a local copy of wikitext."""
    path = find_local(WIKITEXT, settings.path_of("wikitext"))
    return find_files(path, settings.wikitext_config or WIKITEXT_CONFIG) if path is not None else {}


def _fineweb_options(settings: BuildSettings) -> dict[str, Any]:
    options: dict[str, Any] = {"streaming": settings.fineweb_streaming, "shuffle_buffer_size": settings.shuffle_buffer}
    return options | ({"dataset_id": settings.fineweb_id} if settings.fineweb_id else {})


def budgets_of(source: Source, settings: BuildSettings) -> dict[str, int]:
    """The token budgets of a source; sources without one have no limit."""
    if source.name == "fineweb_edu":
        train, val = settings.fineweb_train_tokens, settings.fineweb_val_tokens
    elif source.name == "gutenberg":
        train, val = settings.gutenberg_train_tokens, settings.gutenberg_val_tokens
    else:
        train = val = formats.NO_LIMIT
    return {"max_train_tokens": train, "max_val_tokens": val}


class Rereadable:
    """An input that can be read several times: each iteration opens it again."""

    def __init__(self, open_: Callable[[dict[str, int]], Iterator[Any]], number: int | None = None) -> None:
        """`open_` gets a dict in which it counts dropped items by reason."""
        self._open = open_
        self.number = number
        """Number of items, if known (a few of them may be dropped)."""
        self.dropped: dict[str, int] = {}
        """What the last iteration dropped, by reason."""

    def __iter__(self) -> Iterator[Any]:
        self.dropped.clear()
        return self._open(self.dropped)

    def count(self) -> int:
        """Number of items; reads all of them if it is unknown, with the log of dropped items disabled."""
        if self.number is None:
            log = logging.getLogger("niels_gpt.data")
            before, log.disabled = log.disabled, True
            try:
                self.number = sum(1 for _ in self)
            finally:
                log.disabled = before
        return self.number


def _samples(source: Source, settings: BuildSettings, **options: Any) -> Rereadable:
    """The texts of one split of a source."""

    def read(dropped: dict[str, int]) -> Iterator[str]:
        samples = _open(source, settings, stats=dropped, **options)
        return (sample.text for sample in samples if isinstance(sample, PretrainSample))

    return Rereadable(read)


def _notes(paths: list[str], settings: BuildSettings) -> Rereadable:
    """The notes of these files, without blank ones."""

    def read(dropped: dict[str, int]) -> Iterator[str]:
        for path in paths:
            text = read_note(path, settings.notes, settings.errors or "strict")
            if text.strip():
                yield text
            else:
                dropped["empty"] = dropped.get("empty", 0) + 1

    return Rereadable(read, len(paths))


def _select(items: Rereadable, numbers: list[int]) -> Rereadable:
    """The items with these numbers, which are sorted."""

    def read(_: dict[str, int]) -> Iterator[str]:
        wanted = iter(numbers)
        number = next(wanted, None)
        for i, item in enumerate(items):
            if i == number:
                yield item
                number = next(wanted, None)

    selected = Rereadable(read, len(numbers))
    selected.dropped = items.dropped
    return selected


def chats_of(source: Source, settings: BuildSettings) -> Rereadable:
    """The conversations of a source."""

    def read(dropped: dict[str, int]) -> Iterator[list[Message]]:
        for sample in _open(source, settings, stats=dropped):
            if isinstance(sample, ChatSample):
                yield [Message(role=message.role, content=message.content) for message in sample.messages]

    return Rereadable(read)


def _open(
    source: Source, settings: BuildSettings, *, split: str = "train", shuffle: bool = False, **options: Any
) -> Any:
    errors = settings.errors if source.decodes else None
    path = settings.path_of(source.name)
    url = source.url(path)
    if url is not None:
        options |= {"executor": settings.executor, "hashed": hashed_files(url, settings)}
    return source.samples(
        subset=subset_of(source, settings),
        split=split,
        shuffle=shuffle,
        seed=settings.seed,
        path=path,
        errors=errors,
        notes=settings.notes,
        **options,
    )


def hashed_files(url: str, settings: BuildSettings) -> list[HashedFile]:
    """The files of a source at a URL with their hashes; computed once until `forget_files`."""
    if url not in settings.hashed:
        settings.hashed[url] = url_hashes(url, settings.executor)
    return settings.hashed[url]


def forget_files(source: Source, settings: BuildSettings) -> None:
    """Hash the files of a source again when they are next needed."""
    settings.hashed.pop(source.url(settings.path_of(source.name)) or "", None)


def subset_of(source: Source, settings: BuildSettings) -> str | None:
    """The dataset config of a source, if it has configs."""
    wikitext = settings.wikitext_config or WIKITEXT_CONFIG
    return {"fineweb_edu": settings.fineweb_config, "wikitext": wikitext}.get(source.name)


def identity_of(source: Source, settings: BuildSettings) -> dict[str, Any]:
    """What a source depends on besides the settings that the builders record: its options and its local files.

    Files are identified by content; a source from the Hub has none.
    """
    identity: dict[str, Any] = dict(source.options)
    if source.name == "fineweb_edu":
        identity |= {"dataset_id": settings.fineweb_id or source.dataset_id, "source_buffer": settings.shuffle_buffer}
    if settings.test:
        identity["test"] = True
    if source.name == "roam":
        identity["val_frac"] = settings.roam_val_frac
        if settings.roam_split != "file":
            identity["split"] = settings.roam_split
    elif source.kind != "chat" and source.dataset_id is None:
        identity["val_frac"] = settings.val_frac
    if settings.errors is not None and source.decodes:
        identity["encoding_errors"] = settings.errors
    if source.select is not None:
        identity |= settings.notes.text_options()
    url = source.url(settings.path_of(source.name))
    if url is not None:
        hashes = [(each.file.url.rpartition("/")[2], each.sha256) for each in hashed_files(url, settings)]
    else:
        hashes = [(Path(path).name, files.sha256_file(path)) for path in _files(source, settings)]
    return identity | _files_identity(hashes)


def _files_identity(hashes: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The number and the hash of files, given (name, sha256) of each; nothing for no files."""
    if not hashes:
        return {}
    digest = hashlib.sha256()
    for name, sha256 in hashes:
        digest.update(f"{name}\0{sha256}\n".encode("utf-8", "surrogateescape"))
    return {"files": len(hashes), "sha256": digest.hexdigest()}


def is_of_package(cache: Path) -> bool:
    """Whether a cache roam/ or primer/ was built from exactly the notes or dialogues of the package."""
    try:
        recorded = read_meta(cache / "meta.json").get("source") or {}
        known = {key: recorded.get(key) for key in ("files", "sha256")}
    except (CacheError, OSError, AttributeError):  # gone or damaged: it proves nothing
        return False
    paths = [str(embedded.PRIMER)] if cache.name == "primer" else select_notes(embedded.NOTES, NotesConfig()).listed
    return known == _files_identity([(Path(path).name, files.sha256_file(path)) for path in paths])


def _files(source: Source, settings: BuildSettings) -> list[str]:
    """The local files that a source is read from."""
    if source.name == "fineweb_edu" and settings.fineweb_id:
        path = find_local(settings.fineweb_id, settings.path)
        by_split = find_files(path, settings.fineweb_config) if path is not None else {}
        return [name for names in by_split.values() for name in names]
    selected = selection_of(source, settings)
    if selected is not None:
        return selected.listed
    return source.files(subset_of(source, settings), settings.path_of(source.name))


def selection_of(source: Source, settings: BuildSettings) -> SelectedNotes | None:
    """Which files of a source are read and skipped; None if it is not a folder of the user."""
    if source.select is None:
        return None
    return source.select(settings.path_of(source.name), settings.notes, settings.errors or "strict")


def selections_of_sources(chosen: Iterable[Source], settings: BuildSettings) -> dict[str, SelectedNotes]:
    """Which files of the user's folders are read and skipped, by source; a folder that cannot be read is left out."""
    found = {}
    for source in chosen:
        with contextlib.suppress(OSError, ValueError):  # reported when it is read
            selected = selection_of(source, settings)
            if selected is not None and not selected.is_embedded:
                found[source.name] = selected
    return found


def revision_of(source: Source, settings: BuildSettings) -> str | None:
    """The Hub commit of a dataset, from its first row."""
    options = _fineweb_options(settings) if source.name == "fineweb_edu" else {}
    sample = next(iter(_open(source, settings, take=1, **options)), None)
    revision: str | None = sample.meta.get("revision") if sample is not None else None
    return revision
