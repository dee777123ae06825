"""How the cache of each source is built: where its text comes from, how it is split, which budgets it has."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from niels_gpt import files
from niels_gpt.cache import defaults, formats
from niels_gpt.cache.build_cache import Message, build_pretrain_cache, build_sft_cache
from niels_gpt.cache.meta import CacheError, read_meta, write_meta
from niels_gpt.cache.partial import OnProgress
from niels_gpt.config import DataConfig
from niels_gpt.data.local import VARIABLE, find_files, find_local
from niels_gpt.data.registry import Source, roam_place, sources
from niels_gpt.data.roam import list_roam_paths, read_text, split_roam_paths
from niels_gpt.data.split import split_items
from niels_gpt.data.types import ChatSample, PretrainSample
from niels_gpt.data.wikitext import CONFIG as WIKITEXT_CONFIG
from niels_gpt.data.wikitext import DATASET_ID as WIKITEXT
from niels_gpt.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

PRETRAIN = ("fineweb_edu", "roam", "wikitext", "gutenberg")
SFT = ("dolly15k", "oasst1", "primer")
OPTIONAL = ("gutenberg",)
"""Where one of these cannot be had, a placeholder says so, and nothing has failed."""


@dataclass(frozen=True)
class Settings:
    """The constants of a build; every one is a flag of the commands."""

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
    path: Path | None = None
    """Local files of the one source that is built."""
    roam_val_frac: float = defaults.ROAM_VAL_FRAC
    val_frac: float = defaults.SFT_VAL_FRAC
    """Held-out share of examples, and of the documents of sources of your own."""
    errors: str | None = None
    vocab_size: int = defaults.VOCAB_SIZE
    tokenizer_documents: int = defaults.TOKENIZER_DOCUMENTS
    workers: int | None = None

    def __post_init__(self) -> None:
        if self.errors not in (None, "strict", "replace"):
            raise ValueError(f"--encoding-errors must be strict or replace, got {self.errors!r}")
        if self.errors == "strict":
            object.__setattr__(self, "errors", None)  # the default
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be in 0..2**63-1, got {self.seed}")

    def place_of(self, name: str) -> Path | None:
        """The local path given for a source."""
        return self.path or {"roam": self.roam, "primer": self.primer}.get(name)


@dataclass(frozen=True)
class Built:
    """What became of a cache."""

    name: str
    folder: Path
    state: Literal["built", "up to date", "failed", "not built"]
    meta: dict[str, Any]
    reason: str = ""


def known_sources(data: DataConfig | None = None) -> dict[str, Source]:
    """The sources a cache can be built of."""
    return sources(data)


def folder_of(source: Source, cache_dir: Path) -> Path:
    """Where the cache of a source lies."""
    return cache_dir / ("sft" if source.kind == "chat" else "pretrain") / source.name


def open_tokenizer(cache_dir: Path) -> Tokenizer:
    """The tokenizer that all caches of a folder share. Raises FileNotFoundError where there is none yet."""
    return load_tokenizer(cache_dir / "tokenizer" / "spm.model")


def install_tokenizer(path: Path, cache_dir: Path) -> Tokenizer:
    """Copy a tokenizer (and its meta.json) into a cache folder. Raises ValueError if another one is there already."""
    tokenizer = load_tokenizer(path)
    target = cache_dir / "tokenizer" / "spm.model"
    if target.exists():
        there = load_tokenizer(target)
        if there.sha256 != tokenizer.sha256:
            raise ValueError(
                f"{cache_dir} has another tokenizer already (sha256 {there.sha256[:12]}..., {path} has "
                f"{tokenizer.sha256[:12]}...): use another --cache-dir, or remove {cache_dir}"
            )
        return tokenizer
    target.parent.mkdir(parents=True, exist_ok=True)
    described = (path / "meta.json") if path.is_dir() else path.with_name("meta.json")
    meta: dict[str, Any] = {"format": "niels-gpt tokenizer", "format_version": 1}
    if described.exists():
        found = read_meta(described)
        meta = found if found.get("sha256") == tokenizer.sha256 else meta
    meta |= {"sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size}
    meta["special_token_ids"] = tokenizer.special_token_ids()
    files.write_bytes(target, tokenizer.model)
    write_meta(target.with_name("meta.json"), meta)
    return tokenizer


def train_on(
    chosen: Iterable[Source], settings: Settings, unreachable: Callable[[Source, Exception], None]
) -> Tokenizer:
    """Train the tokenizer of a cache folder on the first documents of its sources.

    One that cannot be read is passed over, after `unreachable` was told. Raises ValueError where none can.
    """

    def texts() -> Iterator[str]:
        for source in chosen:
            try:
                yield from itertools.islice(training_texts(source, settings), settings.tokenizer_documents)
            except (OSError, ValueError) as err:
                unreachable(source, err)

    train_tokenizer(texts(), settings.cache_dir / "tokenizer", vocab_size=settings.vocab_size, seed=settings.seed)
    return open_tokenizer(settings.cache_dir)


def training_texts(source: Source, settings: Settings) -> Iterator[str]:
    """The texts of a source that its cache is trained on (of chats: all messages)."""
    if source.kind == "chat":
        for example in _chats(source, settings):
            yield from (message["content"] for message in example)
    else:
        train, _ = _texts(source, settings)
        yield from train


def build(
    source: Source,
    settings: Settings,
    tokenizer: Tokenizer,
    *,
    force: bool = False,
    on_progress: OnProgress | None = None,
) -> Built:
    """Build the cache of a source, or leave it as it is if nothing it depends on has changed.

    Raises ValueError or OSError where it cannot be built; an older cache then stays as it was.
    """
    folder = folder_of(source, settings.cache_dir)
    identity = _identity(source, settings)
    recorded = {
        "dataset_name": source.name,
        "dataset_config": _subset(source, settings),
        "revision": None if "files" in identity else _revision(source, settings),
        "source": identity or None,
        "streaming": source.name == "fineweb_edu" and settings.fineweb_streaming,
    }
    if source.kind == "chat":
        options: dict[str, Any] = {"seed": settings.seed, "val_frac": settings.val_frac}
    else:
        options = {"seed": settings.seed, "shard_bytes": settings.shard_bytes, **_budgets(source, settings)}
        options["shuffle_buffer"] = 0  # fineweb-edu comes shuffled; the others keep their order
    if not force and _unchanged(folder, {**recorded, **options, "tokenizer_sha256": tokenizer.sha256}):
        return Built(source.name, folder, "up to date", read_meta(folder / "meta.json"))
    common: dict[str, Any] = {
        "tokenizer": tokenizer,
        "workers": settings.workers,
        "on_progress": on_progress,
        **recorded,
        **options,
    }
    if source.kind == "chat":
        chats = _chats(source, settings)
        build_sft_cache(chats, folder, also_dropped=lambda: chats.dropped, **common)
    else:
        texts, val_texts = _texts(source, settings)
        expected = options["max_train_tokens"] + options["max_val_tokens"] if recorded["streaming"] else None
        numbers = [part.number for part in (texts, val_texts) if part is not None]
        documents = None if None in numbers else sum(number or 0 for number in numbers)
        build_pretrain_cache(
            texts,
            folder,
            val_texts=val_texts,
            expected_tokens=expected,
            expected_documents=documents,
            also_dropped=None if val_texts is None else lambda: _dropped(texts, val_texts),
            **common,
        )
    return Built(source.name, folder, "built", read_meta(folder / "meta.json"))


def write_placeholder(source: Source, settings: Settings, reason: str) -> Built:
    """Folders and a meta.json that says that there is no cache; an existing cache is left alone."""
    folder = folder_of(source, settings.cache_dir)
    path = folder / "meta.json"
    with contextlib.suppress(CacheError):
        found = read_meta(path)
        if found.get("built") is not False:
            return Built(source.name, folder, "up to date", found, reason)
    for split in formats.SPLITS:
        (folder / split).mkdir(parents=True, exist_ok=True)
    stored = reason
    for place in (settings.place_of(source.name), os.environ.get(VARIABLE)):
        stored = stored.replace(str(place), "...") if place else stored  # a cache tells nothing of this machine
    meta = {"format_version": formats.FORMAT_VERSION, "dataset_name": source.name, "built": False, "reason": stored}
    write_meta(path, meta)
    return Built(source.name, folder, "not built", meta, reason)


# --- what a cache is made of -----------------------------------------------------------------------


def _texts(source: Source, settings: Settings) -> tuple[Again, Again | None]:
    """(train, val) texts; val None: by budget."""
    name = source.name
    if name == "fineweb_edu":
        return _samples(source, settings, shuffle=True, **_fineweb_options(settings)), None
    if name == "gutenberg":
        return _samples(source, settings), None
    if name == "wikitext":
        single = _splits(settings).get("")
        if single:
            raise ValueError(
                f"{single[0]} is one file for all splits of wikitext: give a folder with train and validation files"
            )
        return _samples(source, settings), _samples(source, settings, split="validation")
    if name == "roam":
        paths = list_roam_paths(str(roam_place(settings.place_of("roam"))))
        train, val = split_roam_paths(paths, val_frac=settings.roam_val_frac, seed=settings.seed)
        return _notes(train, settings.errors), _notes(val, settings.errors)
    everything = _samples(source, settings)
    number = sum(1 for _ in everything)  # read twice rather than kept: it may be large
    train_rows, val_rows = split_items(range(number), val_frac=settings.val_frac, seed=settings.seed)
    return _chosen(everything, train_rows), _chosen(everything, val_rows)


def _dropped(texts: Again, val_texts: Again) -> dict[str, int]:
    """What the loader left out of both; counted once where both are read from the same rows."""
    counts = [texts.dropped] if texts.dropped is val_texts.dropped else [texts.dropped, val_texts.dropped]
    return {reason: sum(c.get(reason, 0) for c in counts) for reason in sorted({key for c in counts for key in c})}


def _splits(settings: Settings) -> dict[str, list[str]]:
    """Split -> its files, of a local wikitext."""
    place = find_local(WIKITEXT, settings.place_of("wikitext"))
    return find_files(place, settings.wikitext_config or WIKITEXT_CONFIG) if place is not None else {}


def _fineweb_options(settings: Settings) -> dict[str, Any]:
    options: dict[str, Any] = {"streaming": settings.fineweb_streaming, "shuffle_buffer_size": settings.shuffle_buffer}
    return options | ({"dataset_id": settings.fineweb_id} if settings.fineweb_id else {})


def _budgets(source: Source, settings: Settings) -> dict[str, int]:
    if source.name == "fineweb_edu":
        train, val = settings.fineweb_train_tokens, settings.fineweb_val_tokens
    elif source.name == "gutenberg":
        train, val = settings.gutenberg_train_tokens, settings.gutenberg_val_tokens
    else:
        train = val = formats.NO_LIMIT
    return {"max_train_tokens": train, "max_val_tokens": val}


class Again:
    """An input that can be read several times: each iteration opens it anew."""

    def __init__(self, open_: Callable[[dict[str, int]], Iterator[Any]], number: int | None = None) -> None:
        """`open_` is given a dict to count in what it leaves out."""
        self._open = open_
        self.number = number
        """Of items, where it is known (a few of them may be left out)."""
        self.dropped: dict[str, int] = {}
        """What the last reading left out, by reason."""

    def __iter__(self) -> Iterator[Any]:
        self.dropped.clear()
        return self._open(self.dropped)


def _samples(source: Source, settings: Settings, **options: Any) -> Again:
    """The texts of a source."""

    def read(dropped: dict[str, int]) -> Iterator[str]:
        samples = _open(source, settings, stats=dropped, **options)
        return (sample.text for sample in samples if isinstance(sample, PretrainSample))

    return Again(read)


def _notes(paths: list[str], errors: str | None) -> Again:
    """The notes of these files that are not blank."""

    def read(dropped: dict[str, int]) -> Iterator[str]:
        for path in paths:
            text = read_text(path, errors=errors or "strict")
            if text.strip():
                yield text
            else:
                dropped["empty"] = dropped.get("empty", 0) + 1

    return Again(read, len(paths))


def _chosen(items: Again, numbers: list[int]) -> Again:
    """The items of certain numbers, which are sorted."""

    def read(_: dict[str, int]) -> Iterator[str]:
        wanted = iter(numbers)
        number = next(wanted, None)
        for i, item in enumerate(items):
            if i == number:
                yield item
                number = next(wanted, None)

    made = Again(read, len(numbers))
    made.dropped = items.dropped
    return made


def _chats(source: Source, settings: Settings) -> Again:
    """The conversations of a source."""

    def read(dropped: dict[str, int]) -> Iterator[list[Message]]:
        for sample in _open(source, settings, stats=dropped):
            if isinstance(sample, ChatSample):
                yield [Message(role=message.role, content=message.content) for message in sample.messages]

    return Again(read)


def _open(source: Source, settings: Settings, *, split: str = "train", shuffle: bool = False, **options: Any) -> Any:
    errors = settings.errors if source.decodes else None
    return source.samples(
        subset=_subset(source, settings),
        split=split,
        shuffle=shuffle,
        seed=settings.seed,
        path=settings.place_of(source.name),
        errors=errors,
        **options,
    )


def _subset(source: Source, settings: Settings) -> str | None:
    return {"fineweb_edu": settings.fineweb_config, "wikitext": settings.wikitext_config}.get(source.name)


# --- whether it has changed ------------------------------------------------------------------------


def _identity(source: Source, settings: Settings) -> dict[str, Any]:
    """What a source depends on beside the settings that the builders record: options of its own, and the local files it
    is read from, by content (none where it comes from the Hub)."""
    identity: dict[str, Any] = dict(source.options)
    if source.name == "fineweb_edu":
        identity |= {"dataset_id": settings.fineweb_id or source.dataset_id, "source_buffer": settings.shuffle_buffer}
    if source.name == "roam":
        identity["val_frac"] = settings.roam_val_frac
    elif source.kind != "chat" and source.dataset_id is None:
        identity["val_frac"] = settings.val_frac
    if settings.errors is not None and source.decodes:
        identity["encoding_errors"] = settings.errors
    paths = _files(source, settings)
    if paths:
        whole = hashlib.sha256()
        for path in paths:
            whole.update(f"{Path(path).name}\0{files.sha256_file(path)}\n".encode("utf-8", "surrogateescape"))
        identity |= {"files": len(paths), "sha256": whole.hexdigest()}
    return identity


def _files(source: Source, settings: Settings) -> list[str]:
    """The local files a source is read from."""
    if source.name == "fineweb_edu" and settings.fineweb_id:
        place = find_local(settings.fineweb_id, settings.path)
        found = find_files(place, settings.fineweb_config) if place is not None else {}
        return [name for names in found.values() for name in names]
    return source.files(_subset(source, settings), settings.place_of(source.name))


def _revision(source: Source, settings: Settings) -> str | None:
    """The commit of a dataset on the Hub, from its first row."""
    options = _fineweb_options(settings) if source.name == "fineweb_edu" else {}
    sample = next(iter(_open(source, settings, take=1, **options)), None)
    revision: str | None = sample.meta.get("revision") if sample is not None else None
    return revision


def _unchanged(folder: Path, wanted: dict[str, Any]) -> bool:
    """Whether a finished cache lies there that was made of the same, with the same settings."""
    try:
        meta = read_meta(folder / "meta.json")
    except CacheError:
        return False
    if meta.get("built") is False or any(meta.get(key, None) != value for key, value in wanted.items()):
        return False
    if "files" not in (wanted["source"] or {}) and wanted["revision"] is None:
        return False  # nobody can tell
    for name, listed in meta.get("files", {}).items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != listed["bytes"]:
            return False
    return True
