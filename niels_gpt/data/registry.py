"""All sources by name: built-in, from the user's config, and from installed packages.

A package adds a source with an entry point in the group `niels_gpt.sources` that refers to a Source, or to a function
that returns one:

    [project.entry-points."niels_gpt.sources"]
    poems = "my_package:POEMS"
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

from niels_gpt.config import DataConfig, NotesConfig, SourceConfig
from niels_gpt.data import embedded
from niels_gpt.data.byte_split import byte_split_files, hub_dataset, iter_byte_split, select_byte_split
from niels_gpt.data.dolly import DATASET_ID as DOLLY
from niels_gpt.data.dolly import iter_dolly_sft
from niels_gpt.data.fineweb_edu import DATASET_ID as FINEWEB
from niels_gpt.data.fineweb_edu import iter_fineweb_edu
from niels_gpt.data.gutenberg import DATASET_ID as GUTENBERG
from niels_gpt.data.gutenberg import iter_gutenberg
from niels_gpt.data.note_selection import SelectedNotes, select_notes
from niels_gpt.data.oasst1 import DATASET_ID as OASST1
from niels_gpt.data.oasst1 import iter_oasst1_sft
from niels_gpt.data.primer import iter_primer_sft, primer_layout
from niels_gpt.data.reading.hub import MOVED
from niels_gpt.data.reading.local import find_files, find_local
from niels_gpt.data.reading.text_rows import check_take
from niels_gpt.data.roam import iter_roam, list_roam_paths
from niels_gpt.data.source_paths import primer_path, resolve_source_path, roam_path
from niels_gpt.data.split import shuffled
from niels_gpt.data.types import ChatSample, PretrainSample
from niels_gpt.data.url_files import iter_url_files, url_layout
from niels_gpt.data.user_files import iter_user_files, kind_of, select_user_files, user_file_paths, user_layout
from niels_gpt.data.wikitext import CONFIG as WIKITEXT_CONFIG
from niels_gpt.data.wikitext import DATASET_ID as WIKITEXT
from niels_gpt.data.wikitext import iter_wikitext
from niels_gpt.system.files import expand_home
from niels_gpt.system.urls import is_url

GROUP = "niels_gpt.sources"
Sample = PretrainSample | ChatSample


class SourceLocation(NamedTuple):
    """Where a source would be read from now."""

    kind: Literal["local", "embedded", "cache", "hub", "url", "missing"]
    location: str
    """A path, a URL, a Hub id, or a description; for `missing`, the reason."""


@dataclass(frozen=True)
class Source:
    """A source of samples."""

    name: str
    kind: Literal["text", "chat", "auto"]
    licence: str
    open: Callable[..., Iterator[Sample]]
    """Called with split, take, shuffle, seed, path, stats (see `samples`) and the loader's own options."""
    where: Callable[[], SourceLocation]
    dataset_id: str | None = None
    """Id on the Hub."""
    large: bool = False
    """Whether it is too large to read completely; commands then read a part by default."""
    splits: tuple[str, ...] | None = None
    """Names of its splits; None: the dataset decides."""
    decodes: bool = False
    """Whether it reads files that may not be utf-8; the loader then has an option `errors`."""
    subset_option: str | None = None
    """The loader's option that selects a config of the dataset."""
    files: Callable[[str | None, str | Path | None], list[str]] = lambda subset, path: []
    """(subset, path) -> the local files that it would read now; empty if it is not local."""
    select: Callable[[str | Path | None, NotesConfig, str], SelectedNotes | None] | None = None
    """(path, notes, errors) -> which of its files are read and skipped (None: it is not a folder); None: `data.notes`
    does not apply. The loader then has an option `notes`."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Other options that change the samples, such as the field of a row."""
    layout: Callable[[str | Path | None, NotesConfig | None, str], str] = lambda path, notes, errors: ""
    """(path, notes, errors) -> what its rows were recognized as or "": `chats: Alpaca (instruction, input, output)`."""
    url: Callable[[str | Path | None], str | None] = lambda path: None
    """path -> the URL that it is read from, if any; the loader then has an option `executor`."""

    def samples(
        self,
        *,
        subset: str | None = None,
        split: str = "train",
        take: int | None = None,
        shuffle: bool = False,
        seed: int = 42,
        path: str | Path | None = None,
        errors: str | None = None,
        notes: NotesConfig | None = None,
        stats: dict[str, int] | None = None,
        **options: Any,
    ) -> Iterator[Sample]:
        """Yield at most `take` samples, in the order of the dataset unless `shuffle`.

        `notes` selects files where `select` is set. `options` are the loader's own. Raises ValueError for an unknown
        split, DataUnavailable if the rows cannot be read.
        """
        if self.splits is not None and split not in self.splits:
            raise ValueError(f"{self.name} has no split {split!r}; it has {', '.join(self.splits)}")
        if subset is not None:
            if self.subset_option is None:
                raise ValueError(f"{self.name} has no subsets, so {subset!r} cannot be selected")
            options[self.subset_option] = subset
        if errors is not None:
            if not self.decodes:
                raise ValueError(f"{self.name} is always utf-8: --encoding-errors does not apply")
            options["errors"] = errors
        if notes is not None and self.select is not None:
            options["notes"] = notes
        return self.open(split=split, take=take, shuffle=shuffle, seed=seed, path=path, stats=stats, **options)


def sources(data: DataConfig | None = None) -> dict[str, Source]:
    """Return {name: Source}. Raises ValueError if the config uses the name of another source."""
    found = {source.name: source for source in _built_in()}
    for source in _installed():
        if source.name in found:
            warnings.warn(f"an installed package also defines the source {source.name}; it is ignored", stacklevel=2)
        found.setdefault(source.name, source)
    data = data or DataConfig()
    for name, config in data.sources.items():
        if name in found:
            raise ValueError(f"data.sources.{name}: the name is already used by another source; choose another")
        found[name] = _user_source(name, config, data.notes, data.encoding_errors)
    return found


def get_source(name: str, data: DataConfig | None = None) -> Source:
    """Return the source of that name. Raises ValueError with the known names."""
    found = sources(data)
    if name not in found:
        raise ValueError(f"no source {name!r}; known sources are {', '.join(found)}")
    return found[name]


YOURS = "yours"
"""The licence of a user's own text."""
PACKAGE = "MIT"
"""The licence of the notes and dialogues that come with the package."""


def licence_of(name: str, data: DataConfig) -> str:
    """Return the licence of a source of a config; "" if unknown."""
    if name in data.sources:
        return data.sources[name].licence or YOURS
    if name in ("roam", "primer"):
        return _licence_of_path(resolve_source_path(name, getattr(data, name)))
    if name == "wiki":
        name = "stdlib" if resolve_source_path("wiki", data.wiki) == "embedded" else "wikitext"
    known = sources()
    return known[name].licence if name in known else ""


def is_private(licence: str) -> bool:
    """Whether a text with this licence is, or may be, the user's own: not published by others, as far as is known."""
    return not licence or YOURS in licence.replace(",", " ").split()


def _licence_of_path(path: str) -> str:
    """Return the licence of notes or dialogues."""
    return PACKAGE if path in ("embedded", str(embedded.NOTES), str(embedded.PRIMER)) else YOURS


def source_of_path(
    path: str | Path,
    *,
    field: str = "",
    columns: Mapping[str, str] | None = None,
    name: str = "",
    data: DataConfig | None = None,
) -> Source:
    """Return the source of a file or folder that no config names; `field` and `columns` are those of SourceConfig.

    data: its `notes` and `encoding_errors` select the files that tell texts from chats.
    """
    config, data = SourceConfig(str(path), field=field, columns=dict(columns or {})), data or DataConfig()
    return _user_source(name or Path(path).absolute().name, config, data.notes, data.encoding_errors)


# --- built-in sources --------------------------------------------------------------------------------


def _built_in() -> list[Source]:
    return [
        _hub_source("fineweb_edu", "text", "ODC-By 1.0", iter_fineweb_edu, FINEWEB, large=True, subset_option="name"),
        _hub_source(
            "wikitext", "text", "CC BY-SA 3.0, GFDL", _wikitext, WIKITEXT, WIKITEXT_CONFIG, subset_option="config"
        ),
        _hub_source("gutenberg", "text", "public domain (US)", iter_gutenberg, GUTENBERG, large=True),
        _hub_source("dolly15k", "chat", "CC BY-SA 3.0", iter_dolly_sft, DOLLY),
        _hub_source("oasst1", "chat", "Apache-2.0", _oasst1, OASST1),
        Source(
            "roam",
            "text",
            _licence_of_path(resolve_source_path("roam")),
            _roam,
            lambda: _local_or_embedded("roam"),
            splits=("train",),
            decodes=True,
            files=lambda subset, path: list_roam_paths(str(roam_path(path))),
            select=lambda path, notes, errors: select_notes(roam_path(path), notes, errors=errors),
        ),
        Source(
            "primer",
            "chat",
            _licence_of_path(resolve_source_path("primer")),
            _primer,
            lambda: _local_or_embedded("primer"),
            splits=("train",),
            decodes=True,
            files=lambda subset, path: [str(primer_path(path))],
            layout=lambda path, notes, errors: primer_layout(primer_path(path), errors=errors),
        ),
        Source(
            "stdlib",
            "text",
            "PSF-2.0",
            _stdlib,
            lambda: SourceLocation("embedded", "docstrings of this Python"),
            splits=("train",),
            files=lambda subset, path: [str(file) for file in embedded.stdlib_files()],
        ),
    ]


def _hub_source(
    name: str,
    kind: Literal["text", "chat"],
    licence: str,
    open_: Callable[..., Iterator[Sample]],
    dataset_id: str,
    config: str | None = None,
    **options: Any,
) -> Source:
    """Return a source from the Hub, or from local files with the same rows; `config` is its default subset."""

    def files(subset: str | None, path: str | Path | None) -> list[str]:
        local = find_local(dataset_id, path)
        if local is None:
            return []
        return [name for names in find_files(local, subset or config).values() for name in names]

    def where() -> SourceLocation:
        return _hub_location(dataset_id, config)

    return Source(name, kind, licence, open_, where, dataset_id, files=files, **options)


def _wikitext(*, shuffle: bool, seed: int, **rest: Any) -> Iterator[Sample]:
    if shuffle:
        raise ValueError("wikitext is lines of articles in order, which --shuffle would mix up: omit --shuffle")
    return iter_wikitext(**rest)


def _oasst1(*, take: int | None, shuffle: bool, **rest: Any) -> Iterator[Sample]:
    return itertools.islice(iter_oasst1_sft(shuffle_trees=shuffle, **rest), take)


def _roam(*, path: str | Path | None, **rest: Any) -> Iterator[Sample]:
    return _in_order(iter_roam, roam_path(path), **rest)


def _primer(*, path: str | Path | None, **rest: Any) -> Iterator[Sample]:
    return _in_order(iter_primer_sft, primer_path(path), **rest)


def _in_order(
    load: Callable[..., Iterator[Sample]],
    path: str | Path,
    *,
    split: str,
    take: int | None,
    shuffle: bool,
    seed: int,
    **rest: Any,
) -> Iterator[Sample]:
    """Yield the samples of local files; `shuffle` reads all of them first, as notes and dialogues are few."""
    if not shuffle:
        return load(path, take=take, **rest)
    check_take(take)
    return iter(shuffled(list(load(path, **rest)), seed)[:take])


def _stdlib(*, take: int | None, shuffle: bool, seed: int, path: str | Path | None, **_: Any) -> Iterator[Sample]:
    if path is not None:
        raise ValueError(f"stdlib has no path (it is the source code of this Python), got {path}")
    documents = shuffled(list(embedded.iter_stdlib()), seed) if shuffle else embedded.iter_stdlib()
    for name, text in itertools.islice(documents, take):
        yield PretrainSample(text, "stdlib", {"module": name})


# --- locations ---------------------------------------------------------------------------------------


def _hub_location(dataset_id: str, config: str | None = None) -> SourceLocation:
    try:
        path = find_local(dataset_id)
    except ValueError as err:
        return SourceLocation("missing", str(err))
    if path is not None:
        return SourceLocation("local", str(path))
    cached = _cached(dataset_id, config)
    if cached is not None:
        return SourceLocation("cache", str(cached))
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return SourceLocation("missing", "offline, and neither cached nor in NIELS_GPT_DATA")
    return SourceLocation("hub", dataset_id)


def _cached(dataset_id: str, config: str | None) -> Path | None:
    """Return the folder where `datasets` cached the dataset, or None; does not import `datasets`."""
    home = expand_home(os.environ.get("HF_HOME", "~/.cache/huggingface"))
    root = expand_home(os.environ.get("HF_DATASETS_CACHE", home / "datasets"))
    ids = {dataset_id, MOVED.get(dataset_id, dataset_id)}
    names = {name.replace("/", "___").lower() for name in ids}  # versions of `datasets` differ in upper and lower case
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        cached = folder / config if config else folder
        if folder.name.lower() in names and cached.is_dir():
            return cached
    return None


def _local_or_embedded(name: str) -> SourceLocation:
    path = resolve_source_path(name)
    return SourceLocation("embedded", "shipped with niels-gpt") if path == "embedded" else SourceLocation("local", path)


# --- sources of the user and of other packages -------------------------------------------------------


def _user_source(name: str, config: SourceConfig, notes: NotesConfig, errors: str) -> Source:
    """The source of a config; `notes` and `errors` select the files that tell texts from chats."""

    def config_at(path: str | Path | None) -> SourceConfig:
        return config if path is None else dataclasses.replace(config, path=str(path))

    def open_(*, path: str | Path | None, stats: dict[str, int] | None, **rest: Any) -> Iterator[Sample]:
        if config.split:  # byte splits drop nothing, so there are no stats
            return iter_byte_split(name, config_at(path), **rest)
        if is_url(config_at(path).path):
            return iter_url_files(name, config_at(path), stats=stats, **rest)
        return iter_user_files(name, config_at(path), stats=stats, **rest)

    def where() -> SourceLocation:
        dataset = hub_dataset(config)
        if dataset is not None:
            return _hub_location(dataset[0])
        if is_url(config.path):
            return SourceLocation("url", config.path)
        path = expand_home(config.path)
        if path.exists():
            return SourceLocation("local", str(path))
        return SourceLocation("missing", f"{path} does not exist")

    kind: Any = "text" if config.split else config.kind
    with contextlib.suppress(ValueError, OSError):  # reported when it is read
        if kind == "auto" and where().kind == "url":
            kind = url_layout(name, config, errors=errors).kind
        elif kind == "auto" and where().kind == "local":
            kind = kind_of(name, config, errors=errors, notes=notes)

    def files(subset: str | None, path: str | Path | None) -> list[str]:
        if is_url(config_at(path).path):
            return []
        return byte_split_files(name, config_at(path)) if config.split else user_file_paths(name, config_at(path))

    def select(path: str | Path | None, notes: NotesConfig, errors: str) -> SelectedNotes | None:
        if is_url(config_at(path).path):
            return None
        if not config.split:
            return select_user_files(name, config_at(path), notes, errors=errors)
        return select_byte_split(name, config_at(path), notes)

    def layout(path: str | Path | None, notes: NotesConfig | None, errors: str) -> str:
        if is_url(config_at(path).path):
            return str(url_layout(name, config_at(path), errors=errors))
        return "" if config.split else str(user_layout(name, config_at(path), errors=errors, notes=notes))

    options = {
        "kind": "" if config.kind == "auto" else config.kind,
        "field": config.field,
        "split": ", ".join(map(str, config.split)),
        "columns": ", ".join(f"{role}={column}" for role, column in config.columns.items()),
    }
    return Source(
        name,
        kind,
        config.licence or YOURS,
        open_,
        where,
        decodes=True,
        files=files,
        select=select,
        options={key: value for key, value in options.items() if value},
        layout=layout,
        url=lambda path: config_at(path).path if is_url(config_at(path).path) else None,
    )


def _installed() -> list[Source]:
    """Return the sources of other packages; one that cannot be loaded is skipped with a warning."""
    found = []
    for entry in metadata.entry_points(group=GROUP):
        try:
            source = entry.load()
            source = source() if not isinstance(source, Source) and callable(source) else source
            if not isinstance(source, Source):
                raise TypeError(f"it is a {type(source).__name__}, not a niels_gpt.data.registry.Source")
        except Exception as err:  # the import of another package may raise anything
            warnings.warn(f"source {entry.name} ({entry.value}) cannot be used: {err}", stacklevel=2)
        else:
            found.append(source)
    return found


def describe(source: Source) -> Mapping[str, str | None]:
    """Return a row of `niels-gpt data list`."""
    where = source.where()
    return {
        "name": source.name,
        "kind": source.kind,
        "id": source.dataset_id,
        "licence": source.licence,
        "from": where.kind,
        "place": where.location,
    }
