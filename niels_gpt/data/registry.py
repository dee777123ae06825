"""All sources by name: those of the package, of the user's config, and of installed packages.

A package adds a source with an entry point in the group `niels_gpt.sources`, whose object is a Source
(or a function that returns one):

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

from niels_gpt.config import DataConfig, SourceConfig
from niels_gpt.data import embedded
from niels_gpt.data.byte_split import byte_split_files, hub_dataset, iter_byte_split
from niels_gpt.data.dolly import DATASET_ID as DOLLY
from niels_gpt.data.dolly import iter_dolly_sft
from niels_gpt.data.fineweb_edu import DATASET_ID as FINEWEB
from niels_gpt.data.fineweb_edu import iter_fineweb_edu
from niels_gpt.data.gutenberg import DATASET_ID as GUTENBERG
from niels_gpt.data.gutenberg import iter_gutenberg
from niels_gpt.data.oasst1 import DATASET_ID as OASST1
from niels_gpt.data.oasst1 import iter_oasst1_sft
from niels_gpt.data.primer import iter_primer_sft
from niels_gpt.data.reading.local import find_files, find_local
from niels_gpt.data.reading.text_rows import check_take
from niels_gpt.data.roam import iter_roam, list_roam_paths
from niels_gpt.data.source_paths import PRIMER, ROAM, primer_path, roam_path
from niels_gpt.data.split import shuffled
from niels_gpt.data.types import ChatSample, PretrainSample
from niels_gpt.data.user_files import iter_user_files, kind_of, user_file_paths
from niels_gpt.data.wikitext import CONFIG as WIKITEXT_CONFIG
from niels_gpt.data.wikitext import DATASET_ID as WIKITEXT
from niels_gpt.data.wikitext import iter_wikitext
from niels_gpt.system.files import expand_home

GROUP = "niels_gpt.sources"
Sample = PretrainSample | ChatSample


class SourceLocation(NamedTuple):
    """Where a source would come from now."""

    kind: Literal["local", "embedded", "cache", "hub", "missing"]
    place: str


@dataclass(frozen=True)
class Source:
    """A source of samples."""

    name: str
    kind: Literal["text", "chat", "auto"]
    licence: str
    open: Callable[..., Iterator[Sample]]
    """Called with split, take, shuffle, seed, path, stats (see `samples`) and options of its own."""
    where: Callable[[], SourceLocation]
    dataset_id: str | None = None
    """On the Hub."""
    large: bool = False
    """Whether reading all of it is out of the question: commands then look at a part unless told otherwise."""
    splits: tuple[str, ...] | None = None
    """The splits it has; None: the dataset knows."""
    decodes: bool = False
    """Whether it reads files that may not be utf-8, and so has an option `errors`."""
    subset_option: str | None = None
    """The loader's option that chooses a config of the dataset."""
    files: Callable[[str | None, str | Path | None], list[str]] = lambda subset, path: []
    """(subset, path) -> the local files it would read now; none where it comes from elsewhere."""
    options: Mapping[str, str] = field(default_factory=dict)
    """What else decides which samples it gives: the field of a row, say."""

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
        stats: dict[str, int] | None = None,
        **options: Any,
    ) -> Iterator[Sample]:
        """Its samples, at most `take`, in the dataset's order unless `shuffle`; `options` are the loader's own.

        Raises ValueError for a split it has not, DataUnavailable where the rows cannot be had.
        """
        if self.splits is not None and split not in self.splits:
            raise ValueError(f"{self.name} has no split {split!r}; it has {', '.join(self.splits)}")
        if subset is not None:
            if self.subset_option is None:
                raise ValueError(f"{self.name} has no subsets, so there is no {subset!r} to choose")
            options[self.subset_option] = subset
        if errors is not None:
            if not self.decodes:
                raise ValueError(f"{self.name} is a dataset and always utf-8: --encoding-errors does not apply")
            options["errors"] = errors
        return self.open(split=split, take=take, shuffle=shuffle, seed=seed, path=path, stats=stats, **options)


def sources(data: DataConfig | None = None) -> dict[str, Source]:
    """name -> Source. Raises ValueError where the config gives a name that is taken."""
    found = {source.name: source for source in _built_in()}
    for source in _installed():
        if source.name in found:
            warnings.warn(f"an installed package has a source {source.name} too; it is left out", stacklevel=2)
        found.setdefault(source.name, source)
    for name, config in (data.sources if data else {}).items():
        if name in found:
            raise ValueError(f"data.sources.{name}: there is a source of that name already; choose another")
        found[name] = _own(name, config)
    return found


def get_source(name: str, data: DataConfig | None = None) -> Source:
    """The source of that name. Raises ValueError that lists the names there are."""
    found = sources(data)
    if name not in found:
        raise ValueError(f"no source {name!r}; there are {', '.join(found)}")
    return found[name]


# --- the package's own -------------------------------------------------------------------------------


def _built_in() -> list[Source]:
    return [
        Source(
            "fineweb_edu",
            "text",
            "ODC-By 1.0",
            iter_fineweb_edu,
            _hub(FINEWEB),
            FINEWEB,
            large=True,
            subset_option="name",
            files=_hub_files(FINEWEB),
        ),
        Source(
            "wikitext",
            "text",
            "CC BY-SA 3.0, GFDL",
            _wikitext,
            _hub(WIKITEXT, WIKITEXT_CONFIG),
            WIKITEXT,
            subset_option="config",
            files=_hub_files(WIKITEXT, WIKITEXT_CONFIG),
        ),
        Source(
            "gutenberg",
            "text",
            "public domain (US)",
            iter_gutenberg,
            _hub(GUTENBERG),
            GUTENBERG,
            large=True,
            files=_hub_files(GUTENBERG),
        ),
        Source("dolly15k", "chat", "CC BY-SA 3.0", iter_dolly_sft, _hub(DOLLY), DOLLY, files=_hub_files(DOLLY)),
        Source("oasst1", "chat", "Apache-2.0", _oasst1, _hub(OASST1), OASST1, files=_hub_files(OASST1)),
        Source(
            "roam",
            "text",
            "yours, or MIT",
            _roam,
            _usual(ROAM),
            splits=("train",),
            decodes=True,
            files=lambda subset, path: list_roam_paths(str(roam_path(path))),
        ),
        Source(
            "primer",
            "chat",
            "yours, or MIT",
            _primer,
            _usual(PRIMER),
            splits=("train",),
            decodes=True,
            files=lambda subset, path: [str(primer_path(path))],
        ),
        Source(
            "stdlib",
            "text",
            "PSF-2.0",
            _stdlib,
            _this_python,
            splits=("train",),
            files=lambda subset, path: [str(file) for file in embedded.stdlib_files()],
        ),
    ]


def _wikitext(*, shuffle: bool, seed: int, **rest: Any) -> Iterator[Sample]:
    if shuffle:
        raise ValueError(
            "wikitext is lines of articles, in order: shuffled they would mean nothing; leave --shuffle out"
        )
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
    """What a loader of local files gives, shuffled if asked for: there are as many as a person writes."""
    if not shuffle:
        return load(path, take=take, **rest)
    check_take(take)
    return iter(shuffled(list(load(path, **rest)), seed)[:take])


def _stdlib(*, take: int | None, shuffle: bool, seed: int, path: str | Path | None, **_: Any) -> Iterator[Sample]:
    if path is not None:
        raise ValueError(f"stdlib has no path: it is the source code of this Python, and not {path}")
    documents = shuffled(embedded.stdlib_documents(), seed) if shuffle else embedded.iter_stdlib()
    for name, text in itertools.islice(documents, take):
        yield PretrainSample(text, "stdlib", {"module": name})


# --- where they are ----------------------------------------------------------------------------------


def _hub(dataset_id: str, config: str | None = None) -> Callable[[], SourceLocation]:
    def where() -> SourceLocation:
        try:
            place = find_local(dataset_id)
        except ValueError as err:
            return SourceLocation("missing", str(err))
        if place is not None:
            return SourceLocation("local", str(place))
        cached = _cached(dataset_id, config)
        if cached is not None:
            return SourceLocation("cache", str(cached))
        if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
            return SourceLocation("missing", "offline, and neither cached nor in NIELS_GPT_DATA")
        return SourceLocation("hub", dataset_id)

    return where


def _hub_files(dataset_id: str, config: str | None = None) -> Callable[[str | None, str | Path | None], list[str]]:
    def files(subset: str | None, path: str | Path | None) -> list[str]:
        place = find_local(dataset_id, path)
        if place is None:
            return []
        return [name for names in find_files(place, subset or config).values() for name in names]

    return files


def _cached(dataset_id: str, config: str | None) -> Path | None:
    """Where `datasets` keeps its copy, if it has one; found without importing it."""
    home = expand_home(os.environ.get("HF_HOME", "~/.cache/huggingface"))
    root = expand_home(os.environ.get("HF_DATASETS_CACHE", home / "datasets"))
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        place = folder / config if config else folder
        # `datasets` has changed its mind about capitals.
        if folder.name.lower() == dataset_id.replace("/", "___").lower() and place.is_dir():
            return place
    return None


def _this_python() -> SourceLocation:
    return SourceLocation("embedded", "docstrings of this Python")


def _usual(path: str) -> Callable[[], SourceLocation]:
    def where() -> SourceLocation:
        return (
            SourceLocation("local", path)
            if Path(path).exists()
            else SourceLocation("embedded", "shipped with niels-gpt")
        )

    return where


# --- the user's, and those of other packages ---------------------------------------------------------


def _own(name: str, config: SourceConfig) -> Source:
    def at(path: str | Path | None) -> SourceConfig:
        return config if path is None else dataclasses.replace(config, path=str(path))

    def open_(*, path: str | Path | None, stats: dict[str, int] | None, **rest: Any) -> Iterator[Sample]:
        if config.split:  # every byte counts: nothing is left out
            return iter_byte_split(name, at(path), **rest)
        return iter_user_files(name, at(path), stats=stats, **rest)

    def where() -> SourceLocation:
        dataset = hub_dataset(config)
        if dataset is not None:
            return _hub(dataset[0])()
        place = expand_home(config.path)
        return (
            SourceLocation("local", str(place))
            if place.exists()
            else SourceLocation("missing", f"{place} does not exist")
        )

    kind: Any = "text" if config.split else config.kind
    if kind == "auto" and where().kind == "local":
        with contextlib.suppress(ValueError, OSError):  # said when it is read
            kind = kind_of(name, config)

    def files(subset: str | None, path: str | Path | None) -> list[str]:
        return byte_split_files(name, at(path)) if config.split else user_file_paths(name, at(path))

    options = {
        key: value
        for key, value in (
            ("kind", config.kind),
            ("field", config.field),
            ("split", ", ".join(map(str, config.split))),
        )
        if value not in ("auto", "")
    }
    return Source(name, kind, config.licence or "yours", open_, where, decodes=True, files=files, options=options)


def _installed() -> list[Source]:
    """The sources of other packages; one that does not load is left out with a warning that names it."""
    found = []
    for entry in metadata.entry_points(group=GROUP):
        try:
            made = entry.load()
            made = made() if not isinstance(made, Source) and callable(made) else made
            if not isinstance(made, Source):
                raise TypeError(f"it is a {type(made).__name__}, not a niels_gpt.data.registry.Source")
        except Exception as err:  # whatever a stranger's import raises
            warnings.warn(f"source {entry.name} ({entry.value}) cannot be used: {err}", stacklevel=2)
        else:
            found.append(made)
    return found


def describe(source: Source) -> Mapping[str, str | None]:
    """A row of `niels-gpt data list`."""
    origin = source.where()
    return {
        "name": source.name,
        "kind": source.kind,
        "id": source.dataset_id,
        "licence": source.licence,
        "from": origin.kind,
        "place": origin.place,
    }
