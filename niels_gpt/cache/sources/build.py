"""Build the caches of sources by name: choose sources, share a tokenizer, skip what is up to date."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from niels_gpt.cache import formats, remote
from niels_gpt.cache.build_cache import build_pretrain_cache, build_sft_cache
from niels_gpt.cache.formats import CacheError
from niels_gpt.cache.meta import listed_files, read_meta, write_meta
from niels_gpt.cache.sources import defaults
from niels_gpt.cache.sources.texts import (
    BuildSettings,
    budgets_of,
    chats_of,
    forget_files,
    identity_of,
    revision_of,
    selection_of,
    subset_of,
    texts_of,
    training_texts,
)
from niels_gpt.cache.writing.partial_build import OnProgress, remove_published
from niels_gpt.config import DataConfig
from niels_gpt.config.yaml_file import load_config
from niels_gpt.data import embedded
from niels_gpt.data.note_record import record_notes
from niels_gpt.data.note_selection import SelectedNotes, record_skipped
from niels_gpt.data.reading.hub import fixed_revisions
from niels_gpt.data.reading.local import VARIABLE
from niels_gpt.data.registry import Source, is_private, sources
from niels_gpt.system import files
from niels_gpt.system.console import short_number
from niels_gpt.system.urls import is_url, join
from niels_gpt.tokenizer import (
    SPECIAL_TOKENS,
    SubwordTokenizer,
    Tokenizer,
    has_tokenizer,
    load_tokenizer,
    private_pieces,
    train_tokenizer,
    write_foreign,
)

PRETRAIN = ("fineweb_edu", "roam", "wikitext", "gutenberg")
SFT = ("dolly15k", "oasst1", "primer")
OPTIONAL = ("gutenberg",)
"""Sources that may be unavailable: build-all then writes a placeholder instead of failing."""


@dataclass(frozen=True)
class BuildResult:
    """The result of building one cache."""

    name: str
    folder: Path
    state: Literal["built", "up to date", "failed", "not built"]
    meta: dict[str, Any]
    reason: str = ""
    selected: SelectedNotes | None = None
    """Which files of the source were read and skipped; None if it is not a folder."""
    location: str = ""
    """Where the cache is, if not in `folder`: its URL."""


def choose_sources(
    names: list[str] | None,
    only: list[str],
    skip: list[str],
    config: Path | None,
    settings: BuildSettings | None = None,
) -> list[Source]:
    """Sources by name; None: those of build-all and of the config. Raises ValueError for an unknown name.

    settings: its selection of files tells texts from chats in sources of the config; None: that of the config.
    """
    data = load_config(config).data if config else DataConfig()
    if settings is not None:
        errors = cast(Any, settings.errors or "strict")  # checked by BuildSettings
        data = replace(data, notes=settings.notes, encoding_errors=errors)
    known = sources(data)
    for name in (*(names or ()), *only, *skip):
        if name not in known:
            raise ValueError(f"no source {name!r}; known sources: {', '.join(known)}")
    candidates = [*PRETRAIN, *SFT, *data.sources] if names is None else names
    wanted = [name for name in (only or candidates) if name not in skip]
    if not wanted:
        raise ValueError("--only and --skip leave no source to build")
    chosen = [known[name] for name in dict.fromkeys(wanted)]
    for source in chosen:
        path = settings.path_of(source.name) if settings is not None else None
        if path is not None and is_url(path) and source.url(path) is None:
            raise ValueError(
                f"{source.name} cannot be read from {path}: a URL needs a source of your own (data.sources.NAME.path "
                "in --config)"
            )
    return chosen


def folder_of(source: Source, cache_dir: Path) -> Path:
    """The cache folder of a source."""
    return cache_dir / ("sft" if source.kind == "chat" else "pretrain") / source.name


def open_tokenizer(cache_dir: Path) -> SubwordTokenizer:
    """Load the tokenizer that all caches of a folder share. Raises FileNotFoundError if there is none yet."""
    return load_tokenizer(cache_dir / "tokenizer")


def install_tokenizer(given: Path | SubwordTokenizer, cache_dir: Path) -> SubwordTokenizer:
    """Copy a tokenizer into a cache folder. Raises ValueError if it has another one.

    given: a tokenizer, or its path; of ours, the meta.json there is copied, too.
    """
    tokenizer = load_tokenizer(given) if isinstance(given, Path) else given
    target = cache_dir / "tokenizer" / "spm.model"
    if has_tokenizer(target.parent):
        current = load_tokenizer(target.parent)
        if current.sha256 != tokenizer.sha256:
            name, other = (given, "--cache-dir") if isinstance(given, Path) else ("this one", "folder")
            raise ValueError(
                f"{cache_dir} already has another tokenizer (sha256 {current.sha256[:12]}..., {name} has "
                f"{tokenizer.sha256[:12]}...): use another {other}, or remove {cache_dir}"
            )
        return tokenizer
    if not isinstance(tokenizer, Tokenizer):
        write_foreign(tokenizer, target.parent)
        return tokenizer
    target.parent.mkdir(parents=True, exist_ok=True)
    meta: dict[str, Any] = {"format": "niels-gpt tokenizer", "format_version": 1}
    if isinstance(given, Path):
        meta_path = (given / "meta.json") if given.is_dir() else given.with_name("meta.json")
        found = read_meta(meta_path) if meta_path.exists() else {}
        meta = found if found.get("sha256") == tokenizer.sha256 else meta
    meta |= {"sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size}
    meta["special_token_ids"] = tokenizer.special_token_ids()
    write_meta(target.with_name("meta.json"), meta)
    files.write_bytes(target, tokenizer.model)  # last: without it, the tokenizer counts as not installed
    return tokenizer


def check_vocab_size(settings: BuildSettings, given: Path | None) -> None:
    """Raise ValueError if a vocabulary size is asked for that an existing tokenizer does not have.

    `given` is the tokenizer to install; None: the one of the cache folder, if there is one.
    """
    path = given if given is not None else settings.cache_dir / "tokenizer"
    if settings.vocab_size is None or not (has_tokenizer(path) if path.is_dir() else path.is_file()):
        return
    tokenizer = load_tokenizer(path)
    model = path / "spm.model" if path.is_dir() and isinstance(tokenizer, Tokenizer) else path
    has = tokenizer.vocab_size - (len(SPECIAL_TOKENS) if isinstance(tokenizer, Tokenizer) else 0)
    asked = has
    with contextlib.suppress(CacheError):  # the text may have had fewer subwords than were asked for
        asked = read_meta(model.with_name("meta.json")).get("vocab_size_asked", has)
    if settings.vocab_size not in (has, asked):
        remedy = "omit --vocab-size, or use another --cache-dir"
        if given is None:
            remedy += f"; to replace the tokenizer, remove {settings.cache_dir}: all its caches depend on it"
        raise ValueError(f"{model} has {has:,} subwords, but --vocab-size asks for {settings.vocab_size:,}: {remedy}")


def check_lost_tokenizer(cache_dir: Path, chosen: Iterable[Source], given: Path | None) -> None:
    """Raise ValueError if a folder has lost the tokenizer of caches that are not rebuilt now.

    `given` is the tokenizer to install; None: a new one will be trained.
    """
    sha = load_tokenizer(given).sha256 if given is not None else None
    rebuilt = {folder_of(source, cache_dir) for source in chosen}
    others: dict[str, list[str]] = {}
    for folder in formats.cache_folders(cache_dir):
        with contextlib.suppress(CacheError):
            cache_sha = read_meta(folder / "meta.json").get("tokenizer_sha256")
            if folder not in rebuilt and isinstance(cache_sha, str) and cache_sha != sha:
                others.setdefault(cache_sha, []).append(str(folder.relative_to(cache_dir)))
    if others:
        listed = "; ".join(f"{', '.join(names)} with {cache_sha[:12]}..." for cache_sha, names in others.items())
        raise ValueError(
            f"{cache_dir / 'tokenizer' / 'spm.model'} is missing, but other caches were built with it (sha256): "
            f"{listed}: restore it (--tokenizer), use another --cache-dir, or build all of them again"
        )


def train_on(
    chosen: Iterable[Source],
    settings: BuildSettings,
    unreachable: Callable[[Source, Exception], None],
    *,
    out: Path | None = None,
    show: Callable[[str], None] = lambda text: None,
) -> SubwordTokenizer:
    """Train a tokenizer on the first documents of sources, into `out` (default: the one of the cache folder).

    `unreachable` is called for each source that cannot be read, `show` with a line of progress. The tokenizer has no
    pieces that stand in few texts of the user, and in no other (see `private_pieces`). Raises ValueError if no source
    can be read.
    """
    reached = list[Source]()

    def first(items: Iterable[Any]) -> Iterator[Any]:
        return itertools.islice(items, settings.tokenizer_documents)

    def texts() -> Iterator[str]:
        read = size = 0
        for source in chosen:
            try:
                for text in first(training_texts(source, settings)):
                    read, size = read + 1, size + len(text)
                    show(f"reading {source.name}: {read:,} texts, {short_number(size)} characters")
                    yield text
                reached.append(source)
            except (OSError, ValueError) as err:
                unreachable(source, err)
        read_so_far = f"{read:,} texts, {short_number(size)} characters"
        show(f"training a tokenizer of {settings.vocab_size or defaults.VOCAB_SIZE:,} subwords on {read_so_far}")

    def documents(source: Source) -> Iterator[str]:
        if source.kind != "chat":
            return first(texts_of(source, settings).train)
        return ("\n".join(message["content"] for message in chat) for chat in first(chats_of(source, settings)))

    def of_few_notes(trained: Tokenizer) -> Collection[int]:
        own = [s for s in reached if is_private(s.licence) or (s.dataset_id is None and settings.path_of(s.name))]
        if not own:
            return ()
        others = (text for source in reached if source not in own for text in documents(source))
        notes = (text for source in own for text in documents(source))
        return private_pieces(trained, notes, itertools.chain(embedded.public_texts(), others))

    out = out or settings.cache_dir / "tokenizer"
    vocab_size = settings.vocab_size or defaults.VOCAB_SIZE
    return load_tokenizer(
        train_tokenizer(texts(), out, vocab_size=vocab_size, seed=settings.seed, dropped=of_few_notes)
    )


@fixed_revisions()
def build(
    source: Source,
    settings: BuildSettings,
    tokenizer: SubwordTokenizer,
    *,
    force: bool = False,
    on_progress: OnProgress | None = None,
) -> BuildResult:
    """Build the cache of a source, unless nothing it depends on has changed.

    Raises ValueError or OSError if it cannot be built; an older cache is then left unchanged.
    """
    try:
        return _build(source, settings, tokenizer, force=force, on_progress=on_progress)
    finally:
        forget_files(source, settings)


def _build(
    source: Source, settings: BuildSettings, tokenizer: SubwordTokenizer, *, force: bool, on_progress: OnProgress | None
) -> BuildResult:
    folder = folder_of(source, settings.cache_dir)
    selected = selection_of(source, settings)
    if selected is not None:
        selected.check_found("file")
    identity = identity_of(source, settings)
    recorded = {
        "dataset_name": source.name,
        "dataset_config": subset_of(source, settings),
        "revision": None if "files" in identity else revision_of(source, settings),
        "source": identity or None,
        "streaming": source.name == "fineweb_edu" and settings.fineweb_streaming,
    }
    if source.kind == "chat":
        options: dict[str, Any] = {"seed": settings.seed, "val_frac": settings.val_frac}
    else:
        options = {"seed": settings.seed, "shard_bytes": settings.shard_bytes, **budgets_of(source, settings)}
        options["shuffle_buffer"] = 0  # fineweb-edu is shuffled by its loader; the others keep their order
    wanted = {**recorded, **options, "tokenizer_sha256": tokenizer.sha256}
    finished = None if force else _finished_meta(folder, settings)
    if finished is not None and _unchanged(finished, wanted):
        remove_published(folder)
        return BuildResult(source.name, folder, "up to date", finished, selected=selected)
    files.check_output_path(folder.parent, "--cache-dir", folder=True)
    common: dict[str, Any] = {
        "tokenizer": tokenizer,
        "workers": settings.workers,
        "executor": settings.executor,
        "on_progress": on_progress,
        **recorded,
        **options,
    }
    if source.kind == "chat":
        chats = chats_of(source, settings)
        documents = chats.count() if on_progress else None  # one more pass, to estimate the time left
        build_sft_cache(chats, folder, expected_documents=documents, also_dropped=lambda: chats.dropped, **common)
    else:
        texts = texts_of(source, settings)
        expected = options["max_train_tokens"] + options["max_val_tokens"] if recorded["streaming"] else None
        # With budgets the source may be endless; without, one more pass counts it to estimate the time left.
        documents = texts.documents() if on_progress and texts.val is not None else None
        build_pretrain_cache(
            texts.train,
            folder,
            val_texts=texts.val,
            test_texts=texts.test,
            expected_tokens=expected,
            expected_documents=documents,
            also_dropped=None if texts.val is None else texts.dropped,
            **common,
        )
    if selected is not None and not selected.is_embedded:
        record_skipped(settings.cache_dir / "skipped.json", {source.name: selected})
        record_notes(settings.cache_dir, {source.name: selected}, settings.notes)
    meta = read_meta(folder / "meta.json")
    if settings.url is not None:
        remote.publish_cache(folder, location_of(folder, settings))
        remote.remove_staged(folder)
    return BuildResult(source.name, folder, "built", meta, selected=selected)


def write_placeholder(source: Source, settings: BuildSettings, reason: str) -> BuildResult:
    """Write folders and a meta.json that marks the cache as not built; an existing cache is left unchanged."""
    folder = folder_of(source, settings.cache_dir)
    path = folder / "meta.json"
    with contextlib.suppress(CacheError):
        found = read_meta(path)
        if found.get("built") is not False:
            return BuildResult(source.name, folder, "up to date", found, reason)
    for split in formats.SPLITS:
        (folder / split).mkdir(parents=True, exist_ok=True)
    stored = reason
    for path_text in (settings.path_of(source.name), os.environ.get(VARIABLE)):
        stored = stored.replace(str(path_text), "...") if path_text else stored  # no local paths in a cache
    meta = {"format_version": 1, "dataset_name": source.name, "built": False, "reason": stored}
    write_meta(path, meta)
    if settings.url is not None:
        url = location_of(folder, settings)
        if remote.published_meta(url) is None:
            remote.publish_cache(folder, url)
    return BuildResult(source.name, folder, "not built", meta, reason)


def location_of(folder: Path, settings: BuildSettings) -> str:
    """The URL to which the cache of a folder is copied; empty if it stays there."""
    return join(settings.url, folder.relative_to(settings.cache_dir).as_posix()) if settings.url else ""


def _finished_meta(folder: Path, settings: BuildSettings) -> dict[str, Any] | None:
    """The meta of the finished cache of a folder, or of its URL, whose files have the listed sizes; None otherwise."""
    if settings.url is not None:
        return remote.published_meta(location_of(folder, settings))
    try:
        meta = read_meta(folder / "meta.json")
        sizes = {folder / name: entry["bytes"] for name, entry in listed_files(meta, folder).items()}
    except CacheError:
        return None
    return meta if all(path.is_file() and path.stat().st_size == size for path, size in sizes.items()) else None


def _unchanged(meta: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether a finished cache has the same input and settings."""
    if meta.get("built") is False or any(meta.get(key) != value for key, value in wanted.items()):
        return False
    # with neither files nor a revision, a change cannot be detected
    return "files" in (wanted["source"] or {}) or wanted["revision"] is not None
